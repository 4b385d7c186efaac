"""From text to encoded shards to batches, with a position that can be saved and resumed.

Knows nothing of the model and the training loop.
"""
