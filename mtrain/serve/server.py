"""Listen on a socket, and answer requests until a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mtrain.api import Model
from mtrain.errors import ConfigError
from mtrain.runtime.process_settings import keep_loaded_objects
from mtrain.serve.app import Server
from mtrain.serve.settings import ServerSettings
from mtrain.serve.translation import Translations

logger = logging.getLogger("mtrain")

_GRACE_S = 8  # for the translations that run when a signal ends the server
_ABORT_S = 1.5  # after that, for the answers to be sent
_HEAD_TIMEOUT_S = 20.0  # for the head of a request to arrive
_STALLED_S = 20.0  # in which a client must take `_MIN_TAKEN` bytes of an answer, or all the rest
_MIN_TAKEN = 65_536
_KEEP_ALIVE_S = 5  # idle time after which a connection is closed
_MAX_HEAD_BYTES = 65_536
_MAX_PIPELINED = 8  # requests that wait on a connection for the answer to an earlier one
_MAX_FRAMING = 8  # bytes for each byte of the body, which may come in chunks of one byte
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # asyncio tries again
_FULL_NOTE_S = 60.0  # between two warnings of that


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 with the checks that llhttp leaves to its caller.

    Closes a connection whose request head is late or too large, on which too many requests
    wait, or whose client does not read its answers; and answers a request to upgrade to another
    protocol, which Java's client sends with a body, in HTTP/1.1.
    """

    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None  # while bytes of an answer wait to be sent
    _num_head_bytes = 0  # of the request: head, trailers and what frames the chunks of its body
    _num_body_bytes = 0
    _unanswered: tuple[RequestResponseCycle, ...] = ()  # uvicorn notes only the last of them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, transport.close)
        transport.set_write_buffer_limits(high=0)  # writing is paused while any byte waits

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        if self._num_head_bytes > _MAX_HEAD_BYTES + _MAX_FRAMING * self._num_body_bytes:
            self.send_400_response("The head of the request is too large.")
            return
        has_head = self.cycle is not None and not self.cycle.response_complete
        if has_head and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not has_head and self._timer is None:
            self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.close)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:  # llhttp treats the body as data of that protocol
            method, body = self.parser.get_method(), data[upgrade.args[0] :]
            if method == b"CONNECT":
                raise HttpParserError("CONNECT is for proxies") from None
            head = [b"%s %s HTTP/1.1" % (method, self.url)]
            head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = HttpRequestParser(self)
            self._feed(b"\r\n".join([*head, b"", body]))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise HttpParserError("too many requests wait")  # and the rest is not parsed
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        cycles = (*self._unanswered, self.cycle)
        self._unanswered = tuple(cycle for cycle in cycles if not cycle.response_complete)
        self.flow.resume_reading()  # a paused transport does not notice that the client has gone

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._num_head_bytes = self._num_body_bytes = 0
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _expect_progress(self) -> None:
        """Abort the connection unless its client takes more of the answer in time."""
        most_left = self.transport.get_write_buffer_size() - _MIN_TAKEN

        def check() -> None:
            if self.transport.get_write_buffer_size() > most_left:
                self.transport.abort()
            else:
                self._expect_progress()

        self._stall_timer = self.loop.call_later(_STALLED_S, check)

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(_GRACE_S + _ABORT_S, self.transport.abort)


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        settings.host.encode("idna")  # where this fails, `create_server` leaves its socket open
        listening = socket.create_server(
            (settings.host, settings.port), family=family, backlog=1024
        )
        # connections inherit TCP_NODELAY, which asyncio sets only for sockets that it has made;
        # without it an answer in two writes waits 40 ms for the client's delayed acknowledgement
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, UnicodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "no host name"
        reason = reason.partition(" (while attempting")[0]
        raise ConfigError(
            f"`--host` and `--port` must name an address to listen on, but {settings.host} port "
            f"{settings.port} cannot be used: {reason}."
        ) from None


def serve(models: Sequence[Model], settings: ServerSettings, is_ctranslate2: bool = False) -> None:
    """Answer requests until SIGTERM or SIGINT; then finish those that run, in at most `_GRACE_S`.

    The address is logged once connections are accepted. `models` has one for each pair of
    languages; with `is_ctranslate2` they search with CTranslate2.

    Raises:
        ConfigError: as `Translations` does, or if the address cannot be used.
    """
    translations = Translations(models, is_ctranslate2)
    with listen(settings) as listening:
        server = Server(translations, settings)
        pairs = ", ".join(
            f"{model.config.data.src_lang}-{model.config.data.tgt_lang}" for model in models
        )
        logger.info("%s", f"{url_of(listening, settings)} translates {pairs}; Ctrl-C ends.")
        keep_loaded_objects()
        try:
            http_server(server, settings).run([listening])
        finally:
            server.close()


class _HttpServer(uvicorn.Server):
    """Warns once a minute at most of connections that the system does not let it accept.

    asyncio logs a traceback for each attempt, thousands of them a second.
    """

    _last_warning_s = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note)
        await super().startup(sockets)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _FULL:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last_warning_s > _FULL_NOTE_S:
            self._last_warning_s = time.monotonic()
            logger.warning("%s", f"new connections have to wait: {error.strerror}")


def http_server(server: Server, settings: ServerSettings) -> uvicorn.Server:
    """Return the uvicorn server of the application; a signal ends it."""
    http_server = _HttpServer(
        uvicorn.Config(
            server.app,
            http=_Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=settings.trust_proxy is not None,
            forwarded_allow_ips=settings.trust_proxy or "",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    server.app.connections = http_server.server_state.connections
    return http_server


def url_of(listening: socket.socket, settings: ServerSettings) -> str:
    """Return the URL of the page."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}{settings.url_prefix}/"
