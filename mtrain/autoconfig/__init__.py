"""Write a config that fits a corpus, a machine and a time budget.

Knows nothing of the command line; models that it trains to measure speed are discarded.
"""
