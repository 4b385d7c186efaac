"""Write a config that fits a corpus, a machine and a time budget.

Knows nothing of the command line; it trains nothing that is kept.
"""
