"""A real browser for tests of pages; test files that import this are skipped without one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

CHROMIUM = os.environ.get("MTRAIN_CHROMIUM") or shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

WAIT_MS = 60_000
SIZES = [(1280, "light"), (768, "dark"), (320, "light")]  # width and colour scheme
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class WatchedPage(NamedTuple):
    """An empty page, and what has happened in it so far."""

    page: Any
    errors: list[str]  # of scripts, and on the console
    urls: list[str]  # of requests


def launched() -> Iterator[Any]:
    """Yield a browser."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


def watched_page(browser: Any, width: int, scheme: str) -> WatchedPage:
    """Open a page in a context of its own."""
    size = {"width": width, "height": 800}
    context = browser.new_context(viewport=size, color_scheme=scheme, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    errors, urls = list[str](), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    context.on("request", lambda request: urls.append(request.url))
    return WatchedPage(page, errors, urls)
