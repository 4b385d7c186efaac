"""Synthetic training text from trained models: back-translation, distillation, diversification.

Imports text, models and decoding, but not the command line.
"""
