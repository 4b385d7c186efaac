"""Files and terminals: read lines, write files atomically, fit text to a terminal's width.

Knows nothing of what the lines mean.
"""
