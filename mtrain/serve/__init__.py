"""An HTTP server for trained runs: a web page, and the API of LibreTranslate with additions.

Uses `mtrain.api` alone: it must not know how text is decoded, or what a run folder contains.
"""
