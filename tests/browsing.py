"""A real browser for tests of pages; test files that import this are skipped without one."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mtrain.exporters import onnx_page

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


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve the files of a folder; yield their URL."""
    handler = functools.partial(_QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def copy_library(directory: Path) -> Path:
    """Copy the JavaScript library into a page's folder, as the command on the page does."""
    copies = [line.split() for line in onnx_page.LIBRARY_COMMAND.splitlines() if "cp " in line]
    roots = os.environ.get("NODE_PATH", "").split(os.pathsep)
    path = directory / "library"
    path.mkdir()
    for _, source, _ in copies:
        name = source.removeprefix("library/npm/node_modules/")
        found = [Path(root, name) for root in roots if root and Path(root, name).is_file()]
        if not found:
            shutil.rmtree(path)
            pytest.skip(f"{name} is in no folder that NODE_PATH names")
        shutil.copy(found[0], path)
    return path
