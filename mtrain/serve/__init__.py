"""A web page and an HTTP interface in front of trained runs: LibreTranslate's, with additions.

A client of `mtrain.api` alone: it must not know how text is decoded, or what a run folder holds.
"""
