"""Scores of translations by sacreBLEU, with signatures, intervals and paired tests.

Knows nothing of training; translates through `decode`.
"""
