"""Parallel text: readers of all formats, the list of dropped pairs, length statistics.

Independent of token ids, batches and models.
"""
