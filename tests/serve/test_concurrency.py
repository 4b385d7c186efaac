"""Concurrent clients, clients that disconnect, and more requests than `max_requests`."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from serving import ANY_PORT, JSON, Client, running, wait_until
from tasks import copy_task

import mtrain
from mtrain.cli.console import log_on_stderr
from mtrain.serve import app
from mtrain.serve.settings import ServerSettings
from mtrain.serve.words import cut_words

BODY = {"q": "ba ce di", "source": "en", "target": "de"}
NUM_LINES = 1000 if "MTRAIN_FUZZ" in os.environ else 250
NUM_CLIENTS = 64


def test_many_concurrent_clients_get_the_translations_of_lines_translated_alone(
    client: Client, pair_models: list[mtrain.Model]
) -> None:
    rng = random.Random(5)
    lines = [pair.src for pair in copy_task(NUM_LINES, 9)]
    alone = {line: pair_models[0].translate([line])[0] for line in lines}
    rng.shuffle(lines)
    details = [rng.random() < 0.3 for _ in lines]

    def ask(line: str, with_details: bool) -> str:
        answer = client.post("/translate", BODY | {"q": line, "details": with_details})
        return str(answer.tree["translatedText"])

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        assert list(clients.map(ask, lines, details)) == [alone[line] for line in lines]


class Blocking:
    """Blocks each translation until `may_end` is set or its client disconnects."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.cancelled = threading.Event()
        self.translate = mtrain.Model.translate

    def __call__(self, model: mtrain.Model, *arguments: object, **options: object) -> object:
        cancel = options["cancel"]
        assert isinstance(cancel, threading.Event)
        self.has_begun.set()
        while not self.may_end.wait(0.01):
            if cancel.is_set():
                self.cancelled.set()
                break
        return self.translate(model, *arguments, **options)  # type: ignore[call-overload]


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> Blocking:
    blocking = Blocking()
    monkeypatch.setattr(
        mtrain.Model, "translate", lambda *arguments, **options: blocking(*arguments, **options)
    )
    return blocking


def open_request(client: Client) -> socket.socket:
    content = json.dumps(BODY).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
    opened = socket.create_connection((client.host, client.port), timeout=30)
    opened.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return opened


def test_a_client_disconnect_cancels_its_translation(
    pair_models: list[mtrain.Model], blocking: Blocking
) -> None:
    with running(pair_models, ServerSettings(port=0, max_requests=1)) as client:
        open_request(client).close()
        assert blocking.has_begun.wait(30)
        assert blocking.cancelled.wait(30)
        blocking.may_end.set()
        # the thread has ended
        wait_until(lambda: client.post("/translate", BODY).status != 503)
        assert client.post("/translate", BODY).tree == {"translatedText": BODY["q"]}


def test_a_client_that_pipelines_cancels_its_translation_by_disconnecting(
    pair_models: list[mtrain.Model], blocking: Blocking
) -> None:
    with running(pair_models) as client, open_request(client) as opened:
        assert blocking.has_begun.wait(30)
        opened.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        opened.close()
        assert blocking.cancelled.wait(30)
        blocking.may_end.set()


def test_a_request_above_max_requests_gets_503_while_the_first_still_runs(
    pair_models: list[mtrain.Model], blocking: Blocking
) -> None:
    settings = ServerSettings(port=0, max_requests=1)
    with running(pair_models, settings) as client, open_request(client) as first:
        assert blocking.has_begun.wait(30)
        answer = client.post("/translate", BODY)
        assert answer.status == 503
        assert answer.tree == {"error": "Server is busy: try again in a second"}
        assert answer.headers["retry-after"] == "1"
        assert client.get("/health").status == 200
        assert "mtrain_http_requests_in_flight 2\n" in client.get("/metrics").body.decode()
        blocking.may_end.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_request_above_the_limit_of_connections_gets_503_until_others_are_closed(
    pair_models: list[mtrain.Model],
) -> None:
    with (
        running(pair_models, ServerSettings(port=0, max_requests=1)) as client,
        ExitStack() as idle,
    ):
        for _ in range(63):
            idle.enter_context(socket.create_connection((client.host, client.port)))
        assert client.get("/health").status == 200
        idle.enter_context(socket.create_connection((client.host, client.port)))
        answer = client.get("/health")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.tree == {"error": "Server is busy: too many connections"}
        idle.close()
        wait_until(lambda: client.get("/health").status != 503)


def test_a_translation_that_exceeds_the_timeout_gets_503(pair_models: list[mtrain.Model]) -> None:
    with running(pair_models, ServerSettings(port=0, timeout_s=0.0)) as client:
        answer = client.post("/translate", BODY)
    assert answer.status == 503
    text = "Server is busy: the translation took more than 0 seconds"
    assert answer.tree == {"error": text}
    assert answer.headers["retry-after"] == "1"


def test_a_translation_for_which_no_thread_can_be_started_gets_503_and_keeps_no_place(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(executor: ThreadPoolExecutor) -> None:
        raise RuntimeError("can't start new thread")

    with running(pair_models, ServerSettings(port=0, max_requests=1)) as client:
        monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", fail)
        for _ in range(2):
            answer = client.post("/translate", BODY)
            assert (answer.status, answer.headers.get("retry-after")) == (503, "1")
        monkeypatch.undo()
        assert client.post("/translate", BODY).tree == {"translatedText": BODY["q"]}


def test_details_are_written_in_the_thread_of_the_translation(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered meanwhile."""
    threads = []

    def cut_words_noting(text: str) -> list[str]:
        threads.append(threading.current_thread().name)
        return cut_words(text)

    monkeypatch.setattr(app, "cut_words", cut_words_noting)
    assert client.post("/translate", BODY | {"details": True}).status == 200
    assert threads and all(name.startswith("translate") for name in threads)


def test_an_internal_error_gets_500_without_its_cause_and_is_logged(
    pair_models: list[mtrain.Model],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ValueError("the cause")

    with log_on_stderr(), running(pair_models, ANY_PORT) as client:
        monkeypatch.setattr(mtrain.Model, "translate", fail)
        answer = client.post("/translate", BODY)
        assert (answer.status, answer.tree) == (500, {"error": "Internal server error"})
        monkeypatch.undo()
        assert client.post("/translate", BODY).status == 200
    err = capsys.readouterr().err
    assert "mtrain: ValueError: a request failed\nTraceback (most recent call last):\n" in err
    assert "\nValueError: the cause\n" in err


def test_a_client_that_leaves_while_it_sends_its_body_is_counted_as_499(
    pair_models: list[mtrain.Model],
) -> None:
    with running(pair_models) as client:
        with socket.create_connection((client.host, client.port)) as opened:
            opened.sendall(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nq=")
            wait_until(lambda: b"in_flight 2" in client.get("/metrics").body)
        wait_until(lambda: b'{path="/detect",status=' in client.get("/metrics").body)
        assert b'{path="/detect",status="499"}' in client.get("/metrics").body


def test_requests_are_counted_by_path_and_status(pair_models: list[mtrain.Model]) -> None:
    with running(pair_models, ANY_PORT) as client:
        client.post("/translate", BODY)
        client.post("/translate", BODY | {"q": ["ba", "ce"]})
        client.post("/translate", {})
        client.get('/some"where')
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    assert 'mtrain_http_requests_total{path="/translate",status="200"} 2' in lines
    assert 'mtrain_http_requests_total{path="/translate",status="400"} 1' in lines
    assert 'mtrain_http_requests_total{path="other",status="404"} 1' in lines
    assert 'mtrain_http_request_duration_seconds_bucket{path="/translate",le="+Inf"} 3' in lines
    assert "mtrain_translated_texts_total 3" in lines
    assert "mtrain_translated_characters_total 12" in lines
    assert "mtrain_http_requests_in_flight 1" in lines
