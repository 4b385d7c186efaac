"""Synthetic training text from trained models: back-translation, distillation, diversification.

Knows text, models and decoding; must not know the command line.
"""
