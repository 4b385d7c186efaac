"""The files of the web page, with headers that let it load nothing from other servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes() -> list[BaseRoute]:
    """Return a route for each file of the page."""
    directory = Path(__file__).with_name("page_files")
    return [
        Route(path, partial(_show, (directory / name).read_bytes(), media_type), methods=["GET"])
        for path, (name, media_type) in _FILES.items()
    ]


async def _show(content: bytes, media_type: str, request: Request) -> Response:
    return Response(content, media_type=media_type, headers=_HEADERS)
