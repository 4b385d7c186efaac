"""An HTTP server for trained runs: a web page, and the API of LibreTranslate with additions.

Translates through `mtrain.api`; must not depend on the search, or on the content of a run folder.
"""
