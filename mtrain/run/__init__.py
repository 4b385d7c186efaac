"""A run folder: paths and locks, the log, checkpoints, and loading a trained model.

Knows nothing of how a model is trained or how translations are searched for.
"""
