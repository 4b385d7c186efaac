"""Hostile requests get one JSON object or a closed connection, and never crash the server."""

from __future__ import annotations

import errno
import json
import re
import resource
import socket
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import Logged
from hostile import cases, tried
from hypothesis import example, given
from hypothesis import strategies as st
from serving import ANY_PORT, FORM, JSON, Client, running, wait_until

import mtrain
from mtrain.serve import middleware, server
from mtrain.serve.settings import ServerSettings
from mtrain.serve.spec import openapi
from mtrain.serve.translation import Translations

MAX_GROWTH = 100 << 20  # bytes of memory
REFUSALS = {400, 403, 404, 405, 413, 429}
GOOD = {"q": "ba ce", "source": "en", "target": "de"}

odd_text = st.text(max_size=30) | st.sampled_from(["", "\0", "\ud800", "<script>", "a" * 20_000])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=8,
)
languages = st.sampled_from(["en", "de", "fr", "auto", "zz", "EN"])


def hold_to_an_answer(client: Client, answer: Any) -> None:
    assert answer.status == 200 or answer.status in REFUSALS, answer
    assert b"Traceback" not in answer.body and b".py" not in answer.body
    if answer.status != 200:
        assert list(answer.tree) == ["error"]
        assert isinstance(answer.tree["error"], str)
        assert len(answer.body) < 500


@cases(150)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "q": values,
            "source": languages | values,
            "target": languages | values,
            "format": st.sampled_from(["text", "html"]) | values,
            "alternatives": st.integers(-1, 4) | values,
            "details": values,
            "prefix": values,
            "api_key": values,
        },
    ),
    st.sampled_from(["/translate", "/detect"]),
)
def test_arbitrary_field_values_get_200_or_a_client_error(
    client: Client, fields: dict[str, Any], path: str
) -> None:
    tried["requests of any fields"] += 1
    hold_to_an_answer(client, client.post(path, fields))


@cases(80)
@given(
    odd_text.filter(bool),
    languages,
    languages,
    st.sampled_from(["text", "html"]),
    st.integers(0, 2),
    st.booleans(),
)
def test_arbitrary_text_gets_200_or_a_client_error(
    client: Client, q: str, source: str, target: str, format_: str, alternatives: int, details: bool
) -> None:
    tried["texts"] += 1
    fields = {"q": q, "source": source, "target": target, "format": format_}
    fields |= {"alternatives": alternatives, "details": details}
    hold_to_an_answer(client, client.post("/translate", fields))


@cases(80)
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "TRACE"]),
    st.text(
        st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=30
    ),
    st.binary(max_size=200),
    st.sampled_from(
        [JSON, FORM, "multipart/form-data; boundary=x", "text/plain; charset=x", "\xff"]
    ),
)
@example("POST", "translate", b"--x\r\nContent-Disposition: form-data; name=q\r\n\r\n", JSON)
@example("POST", "translate", b"q=%ff%00&source=en&target=de", FORM)
@example("POST", "translate", b"&".join([b"q=a"] * 5000), FORM)
@example("POST", "translate", b"--x\r\n" * 2000, "multipart/form-data; boundary=x")
@example("POST", "translate", b"--x", "multipart/form-data")
@example("GET", "../../etc/passwd", b"", JSON)
@example("GET", "page.css/..%2f..%2fapp.py", b"", JSON)
def test_arbitrary_methods_paths_and_bodies_are_answered(
    client: Client, method: str, path: str, body: bytes, media_type: str
) -> None:
    tried["requests of any path and body"] += 1
    answer = client.send(method, f"/{path}", body, {"Content-Type": media_type})
    assert answer.status == 200 or answer.status in REFUSALS, answer
    if answer.body:
        hold_to_an_answer(client, answer)


def exchange(client: Client, sent: bytes, *, closes: bool = True) -> bytes:
    """Send bytes; return what is received until the server closes the connection."""
    with socket.create_connection((client.host, client.port), timeout=60) as opened:
        opened.sendall(sent)
        if closes:
            opened.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := opened.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


@cases(80)
@given(
    st.binary(max_size=200) | st.sampled_from([b"GET ", b"\r\n\r\n", b"A" * 70_000]), st.booleans()
)
def test_malformed_bytes_end_only_their_own_connection(
    client: Client, sent: bytes, is_after_a_head: bool
) -> None:
    tried["connections with any bytes"] += 1
    head = (
        b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        if is_after_a_head
        else b""
    )
    received = exchange(client, head + sent)
    assert received == b"" or re.match(rb"HTTP/1\.1 \d\d\d ", received)
    assert client.get("/health").status == 200


def test_a_body_that_is_too_large_gets_413_and_a_closed_connection(client: Client) -> None:
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\n"
    for rest in (
        b"Content-Length: 999999999999\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"a" * 0x10000 + b"\r\n" * 1,
    ):
        chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
        sent = head + rest + (chunk * 8 if b"chunked" in rest else b"")
        received = exchange(client, sent, closes=False)
        assert received.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in received
        error = json.loads(received.partition(b"\r\n\r\n")[2])
        assert error == {"error": "Request is too large: at most 262144 bytes are read"}


def test_a_length_with_thousands_of_leading_zeros_is_read(client: Client) -> None:
    body = json.dumps(GOOD).encode()
    head = b"POST /translate HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += b"Content-Length: %s%d\r\n\r\n" % (b"0" * 5000, len(body))
    assert exchange(client, head + body, closes=False).startswith(b"HTTP/1.1 200 ")


def test_connections_that_cannot_be_accepted_are_logged_in_one_line(
    pair_models: list[mtrain.Model],
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:
    def refuse(listening: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with running(pair_models) as client:
        monkeypatch.setattr(socket.socket, "accept", refuse)
        with socket.create_connection((client.host, client.port)):
            wait_until(lambda: bool(logged.records))
        monkeypatch.undo()
        assert client.get("/health").status == 200
        warned = [
            (record.name, record.getMessage()) for record in logged.records if record.levelno > 20
        ]
    # not later: asyncio accepts again as often as it was refused, and reports a closed socket
    assert warned == [("mtrain", "new connections have to wait: Too many open files")]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 14_000,
        b"GET /" + b"a" * 70_000,
        b"POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1\r\nq\r\n0\r\n" + b"X: a\r\n" * 14_000,
        b"POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1;" + b"a" * 80_000,
    ],
    ids=["value", "headers", "url", "trailers", "chunk-extension"],
)
def test_oversized_headers_urls_and_chunk_metadata_end_the_connection(
    client: Client, sent: bytes
) -> None:
    received = exchange(client, sent, closes=False)
    assert received == b"" or received.startswith(b"HTTP/1.1 400 ")
    assert client.get("/health").status == 200


def test_a_chunked_body_with_one_byte_chunks_is_read(client: Client) -> None:
    body = json.dumps(GOOD | {"q": "ba ce " * 300}).encode()
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += b"Connection: close\r\nContent-Type: application/json\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert exchange(client, head + chunks, closes=False).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /languages HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    received = exchange(client, first * 8 + last, closes=False)
    assert received.count(b"HTTP/1.1 200 OK") == 9
    assert received.endswith(client.get("/languages").body)


def test_a_connection_on_which_more_than_8_requests_wait_is_closed(client: Client) -> None:
    received = exchange(client, b"GET /health HTTP/1.1\r\n\r\n" * 1000, closes=False)
    assert received.count(b"HTTP/1.1 400 ") == 1
    assert received.count(b"HTTP/1.1 200 ") < 100


def test_a_request_to_upgrade_to_http2_is_answered(client: Client) -> None:
    body = json.dumps(GOOD).encode()
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((client.host, client.port), timeout=60) as opened:
        opened.sendall(head + body)
        received = b""
        while b"translatedText" not in received:
            part = opened.recv(65536)
            assert part, received
            received += part


def test_a_connect_request_is_refused_with_400(client: Client) -> None:
    received = exchange(client, b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")


def test_slow_senders_are_timed_out(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server, "_HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 0.3)
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
    with running(pair_models, ANY_PORT) as client:
        assert exchange(client, b"", closes=False) == b""
        assert exchange(client, head, closes=False) == b""
        received = exchange(client, head + b"\r\nq=", closes=False)
        assert received.startswith(b"HTTP/1.1 408 ")
        first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        received = exchange(client, first + head, closes=False)
        assert received.count(b"HTTP/1.1 200 OK") == 1
        assert client.post("/translate", GOOD).status == 200


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system keep few of the bytes that a server sends."""
    listen = server.listen

    def listen_with_small_buffers(settings: ServerSettings) -> socket.socket:
        listening = listen(settings)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(server, "listen", listen_with_small_buffers)


def connect_with_a_small_buffer(client: Client) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.settimeout(60)
    opened.connect((client.host, client.port))
    return opened


def wait_until_in_flight(client: Client, count: int) -> None:
    wait_until(lambda: f"in_flight {count}".encode() in client.get("/metrics").body)


def request_without_reading(client: Client) -> socket.socket:
    """Send requests; return once the server cannot send all answers."""
    opened = connect_with_a_small_buffer(client)
    opened.sendall(b"GET /page.js HTTP/1.1\r\nHost: x\r\n\r\n" * 9)
    wait_until_in_flight(client, 2)
    return opened


def test_a_client_that_does_not_read_its_answers_is_disconnected(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch, small_buffers: None
) -> None:
    monkeypatch.setattr(server, "_STALLED_S", 0.3)
    with running(pair_models) as client, request_without_reading(client):
        wait_until_in_flight(client, 1)


def test_a_client_that_takes_enough_of_its_answers_in_time_gets_all_of_them(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch, small_buffers: None
) -> None:
    monkeypatch.setattr(server, "_STALLED_S", 0.05)
    monkeypatch.setattr(server, "_MIN_TAKEN", 0)
    with running(pair_models) as client, request_without_reading(client) as opened:
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 9 or not received.endswith(b"start();\n"):
            part = opened.recv(65536)
            assert part
            received += part
            time.sleep(0.001)


def test_a_client_that_does_not_read_its_answers_does_not_keep_the_server_from_ending(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch, small_buffers: None
) -> None:
    """The answer to a translation that is cancelled cannot be sent."""
    has_begun = threading.Event()

    def wait(*arguments: object, cancel: threading.Event, **options: object) -> None:
        has_begun.set()
        assert cancel.wait(30)
        raise CancelledError

    monkeypatch.setattr(mtrain.Model, "translate", wait)
    monkeypatch.setattr(server, "_GRACE_S", 0)
    body = json.dumps(GOOD).encode()
    head = b"POST /translate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d"
    sent = b"GET /page.js HTTP/1.1\r\n\r\n" + head % len(body) + b"\r\n\r\n" + body
    with running(pair_models) as client:
        opened = connect_with_a_small_buffer(client)
        opened.sendall(sent)
        assert has_begun.wait(30)
    opened.close()  # after the server has ended


def test_error_messages_shorten_long_values(client: Client) -> None:
    answer = client.post("/translate", GOOD | {"target": "z" * 5000})
    assert answer.tree == {"error": f"{'z' * 40}... is not supported"}
    answer = client.post("/translate", GOOD | {"format": {"a": ["b"] * 5000}})
    assert len(answer.tree["error"]) < 100


@pytest.mark.parametrize("name", ["source", "target", "format", "details"])
def test_values_nested_to_any_depth_get_400(client: Client, name: str) -> None:
    rest = json.dumps({key: value for key, value in GOOD.items() if key != name})[:-1]
    for depth in range(900, 1000):
        body = f'{rest}, "{name}": {"[" * depth}{"]" * depth}}}'.encode()
        assert client.send("POST", "/translate", body, {"Content-Type": JSON}).status == 400


def test_memory_grows_by_less_than_100_mib_over_200_rounds_of_requests(client: Client) -> None:
    def ask(number: int) -> None:
        client.post("/translate", GOOD | {"q": f"ba {number}", "target": f"x{number}"})
        client.send("POST", f"/{number}", urlencode({"q": "a" * 100_000}).encode())
        exchange(client, b"POST /translate HTTP/1.1\r\n")

    def memory() -> int:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    for number in range(20):
        ask(number)
    before = memory()
    for number in range(200):
        ask(number)
    assert memory() - before < MAX_GROWTH


def test_each_path_and_method_of_the_openapi_specification_exists(
    client: Client, pair_models: list[mtrain.Model]
) -> None:
    spec = client.get("/spec").tree
    assert spec == openapi(ANY_PORT, Translations(pair_models))
    assert spec["openapi"].startswith("3.")
    for path, methods in spec["paths"].items():
        for method in methods:
            assert client.send(method.upper(), path).status != 404
            wrong = "POST" if method == "get" else "GET"
            assert client.send(wrong, path).status == 405
