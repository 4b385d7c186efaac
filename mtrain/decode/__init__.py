"""Beam search and sampling over any step function, and translation of lines with a trained model.

Imports nothing of training. `beam` and `sampling` are independent of the model and of text.
"""
