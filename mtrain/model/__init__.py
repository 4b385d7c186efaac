"""The Transformer of "Attention Is All You Need", and its key-value cache for decoding.

Knows tensors of token ids. Knows nothing of text, training, search and files.
"""
