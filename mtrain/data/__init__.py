"""Encode text into shards, and read them as batches from a position that can be saved.

Independent of the model and the training loop.
"""
