"""The audit of corpora: features of lines, rules, duplicates, contamination, reports.

Reads text through `corpus`. Independent of encoded pairs, batches and models.
"""
