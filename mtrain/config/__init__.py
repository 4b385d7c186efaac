"""Settings: one validated tree of sections, read from one YAML file.

Knows the forms in which a config names corpora, but opens no corpus, and imports nothing heavy.
"""
