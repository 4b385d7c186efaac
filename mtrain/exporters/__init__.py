"""Export trained models to other libraries; each export is checked with that library.

Knows nothing of training.
"""
