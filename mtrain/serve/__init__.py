"""An HTTP server for trained runs: a web page, and the API of LibreTranslate with additions.

Translates through `mtrain.api`; independent of models and of the content of a run folder.
"""
