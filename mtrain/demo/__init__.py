"""Train, evaluate and show a translator on the corpus that ships with mtrain.

Runs the code of `mtrain train`, `eval` and `translate`. Knows nothing of the command line.
"""
