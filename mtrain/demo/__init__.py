"""Train, evaluate and show a translator on the corpus that ships with mtrain.

Runs the code of `mtrain train`, `eval` and `translate`. Independent of the command line.
"""
