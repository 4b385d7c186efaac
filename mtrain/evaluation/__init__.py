"""Scores of translations by sacreBLEU, with signatures, intervals and paired tests.

Independent of training; translates through `decode`.
"""
