"""Export trained models to other libraries; each export is checked with that library.

Independent of training.
"""
