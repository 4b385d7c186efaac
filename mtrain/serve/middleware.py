"""The middleware of all requests: limits of their bodies, common headers, log and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtrain.serve.metrics import Metrics
from mtrain.serve.settings import ServerSettings

logger = logging.getLogger("mtrain")

CLIENT_GONE = 499  # nginx's status for a client that has disconnected; only the log shows it
_BODY_TIMEOUT_S = 20.0
_MIN_CONNECTIONS = 64  # that are served, however few requests are
_OTHER = "other"  # logged instead of a path without a route
_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-headers", b"Authorization, Content-Type"),
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"1728000"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class RequestMiddleware:
    """Reads the body of each request, and counts and logs each answer.

    `paths` are those that are served; others are logged without their name.

    Attributes:
        connections: those that are open; requests beyond a limit of them are refused.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._paths = paths
        self.connections: Collection[object] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        started_s, status = time.monotonic(), 0
        scope["state"] = {}

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        self._metrics.num_in_flight += 1
        try:
            await self._answer(scope, receive, send_noting)
        except asyncio.CancelledError:  # the server ends, and waits no longer
            if status:
                raise
            shutting_down = HTTPException(503, "Server is shutting down", {"Retry-After": "1"})
            await _closing(shutting_down)(scope, receive, send_noting)
        except Exception as error:  # Starlette has answered already
            logger.error("%s", f"{type(error).__name__}: a request failed", exc_info=error)
        finally:
            self._metrics.num_in_flight -= 1
            self._note(scope, status, time.monotonic() - started_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
            return
        if len(self.connections) > max(_MIN_CONNECTIONS, 4 * self._settings.max_requests):
            error = HTTPException(503, "Server is busy: too many connections", {"Retry-After": "1"})
            await _closing(error)(scope, receive, send)
            return
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await self._read_body(Request(scope, receive))
        except TimeoutError:
            await _closing(HTTPException(408, "Request Timeout"))(scope, receive, send)
            return
        except HTTPException as error:
            await _closing(error)(scope, receive, send)
            return
        except ClientDisconnect:
            await Response(status_code=CLIENT_GONE)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    async def _read_body(self, request: Request) -> bytes:
        """Return the body.

        Raises:
            HTTPException: if it is too large.
            ClientDisconnect: if the client has gone.
        """
        limit = self._settings.max_body
        error = HTTPException(413, f"Request is too large: at most {limit} bytes are read")
        length = dict(request.scope["headers"]).get(b"content-length", b"").lstrip(b"0")
        if length.isdigit() and int(length) > limit:
            raise error
        chunks, num_bytes = [], 0
        async for chunk in request.stream():
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise error
        return b"".join(chunks)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else _OTHER
        self._metrics.add_request(path, status, seconds)
        note = scope["state"].get("note", "")  # of the application: how much was translated
        logger.info("%s", f"{scope['method']} {path} {status} {seconds * 1000:.0f} ms{note}")


def _closing(error: HTTPException) -> Response:
    """Return an answer that closes the connection: the rest of the body may still come."""
    headers = {"Connection": "close", **(error.headers or {})}
    return JSONResponse({"error": error.detail}, error.status_code, headers)
