"""A run folder: paths and locks, the log, checkpoints, and loading a trained model.

Independent of the training loop and of search.
"""
