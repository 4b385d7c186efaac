"""Files and terminals: read lines, write files atomically, fit text to a terminal's width.

Independent of the meaning of the lines.
"""
