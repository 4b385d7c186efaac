"""Settings: one validated tree of sections, read from one YAML file.

Defines how a config names corpora, but opens no corpus; imports no heavy package.
"""
