"""The Transformer of "Attention Is All You Need", and its key-value cache for decoding.

Takes tensors of token ids. Independent of text, batches, training and files.
"""
