"""Parallel text in all its forms: readers, the list of dropped pairs, length statistics.

Knows nothing of token ids, batches and models.
"""
