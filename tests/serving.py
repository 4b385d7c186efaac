"""A server in a thread, a client of it, and runs of any languages."""

from __future__ import annotations

import functools
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from py3langid.langid import LanguageIdentifier

import mtrain
from mtrain.run.run_dir import RunDir
from mtrain.serve import server as serving
from mtrain.serve.app import Server
from mtrain.serve.settings import ServerSettings
from mtrain.serve.translation import Translations

_read_model = functools.cache(LanguageIdentifier.from_model_file)  # 0.3 s each time
LanguageIdentifier.from_model_file = lambda *names, **options: copy(_read_model(*names, **options))

JSON = "application/json"
ANY_PORT = ServerSettings(port=0)
FORM = "application/x-www-form-urlencoded"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def tree(self) -> Any:
        assert self.headers["content-type"] == JSON
        return json.loads(self.body)


class Client:
    """Sends requests to a server, each by a connection of its own.

    `stop` does what a signal does.
    """

    def __init__(self, url: str, stop: Callable[[], None] = lambda: None) -> None:
        self.url, self.stop = url, stop
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str | bytes] = {},
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def takes_connections(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port)):
                return True
        except ConnectionError:
            return False

    def get(self, path: str) -> Answer:
        return self.send("GET", path)

    def post(self, path: str, tree: object) -> Answer:
        return self.send("POST", path, json.dumps(tree).encode(), {"Content-Type": JSON})

    def post_form(self, path: str, fields: Mapping[str, str]) -> Answer:
        return self.send("POST", path, urlencode(fields).encode(), {"Content-Type": FORM})


def wait_until(condition: Callable[[], bool], patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} seconds"


def with_languages(run: RunDir, directory: Path, src_lang: str, tgt_lang: str) -> Path:
    """Copy a run, as one of other languages."""
    shutil.copytree(run.path, directory)
    path = directory / "config.yaml"
    text = path.read_text(encoding="utf-8")
    assert "src_lang: aa" in text and "tgt_lang: bb" in text
    text = text.replace("src_lang: aa", f"src_lang: {src_lang}")
    path.write_text(text.replace("tgt_lang: bb", f"tgt_lang: {tgt_lang}"), encoding="utf-8")
    return directory


@contextmanager
def running(
    models: Sequence[mtrain.Model], settings: ServerSettings = ANY_PORT
) -> Iterator[Client]:
    """Serve from a thread until the context ends."""
    with serving.listen(settings) as listening:
        server = Server(Translations(models), settings)
        http_server = serving.http_server(server, settings)
        thread = threading.Thread(target=http_server.run, args=[[listening]])
        thread.start()

        def stop() -> None:
            http_server.should_exit = True

        try:
            yield Client(serving.url_of(listening, settings).removesuffix("/"), stop)
        finally:
            stop()
            thread.join(timeout=30)
            server.close()
            assert not thread.is_alive()
