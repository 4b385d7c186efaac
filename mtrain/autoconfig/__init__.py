"""Write a config that fits a corpus, a machine and a time budget.

Independent of the command line. Models that it trains to measure speed are discarded.
"""
