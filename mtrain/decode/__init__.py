"""Beam search and sampling over any step function, and translation of lines with a trained model.

Knows nothing of training. `beam` and `sampling` know no model, no text and no special id.
"""
