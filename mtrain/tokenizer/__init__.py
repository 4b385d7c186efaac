"""Subword tokenizers: SentencePiece models, and segmentations sampled for training.

The only package that knows the special ids. Knows no corpora and no run folders.
"""
