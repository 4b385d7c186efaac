"""Files and terminals: lines in, whole files out, text fitted to a terminal's width.

Knows nothing of what the lines mean.
"""
