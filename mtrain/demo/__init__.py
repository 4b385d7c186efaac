"""Train, evaluate and show a translator on the corpus that ships with mtrain.

Uses the interface in `api` as any program would.
"""
