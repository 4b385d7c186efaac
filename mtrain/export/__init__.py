"""Trained models written for other libraries, each checked with that library before it is kept.

Knows nothing of training.
"""
