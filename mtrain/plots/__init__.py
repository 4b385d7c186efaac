"""Pictures of a run: learning curves, attention maps, lengths and batches.

`collect` reads the data, `draw` draws it. Independent of the command line.
"""
