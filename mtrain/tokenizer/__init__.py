"""Subword tokenizers: SentencePiece models, and segmentations sampled for training.

The only package that defines the special ids. Independent of corpora and run folders.
"""
