"""The HTTP interface as an ASGI application: routes and their handlers."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router

from mtrain.config.language_names import name_of
from mtrain.decode.formats import as_tree
from mtrain.io.text_width import count
from mtrain.serve import page
from mtrain.serve.fields import Fields, read_fields, read_texts, read_translation
from mtrain.serve.languages import Detected
from mtrain.serve.metrics import Metrics
from mtrain.serve.middleware import CLIENT_GONE, RequestMiddleware
from mtrain.serve.rate_limit import RateLimit
from mtrain.serve.settings import ServerSettings
from mtrain.serve.spec import openapi
from mtrain.serve.translation import (
    AUTO,
    NoRouteError,
    TranslatedText,
    TranslationRequest,
    Translations,
)
from mtrain.serve.words import cut_words, word_probs

logger = logging.getLogger("mtrain")
T = TypeVar("T")

_PAGE_TIMEOUT_MS = 500  # how long LibreTranslate's page waits for more typing
_RETRY_SOON = {"Retry-After": "1"}  # in seconds


class Server:
    """Serves translations over HTTP.

    Attributes:
        app: the ASGI application.
    """

    def __init__(self, translations: Translations, settings: ServerSettings) -> None:
        self._translations, self._settings = translations, settings
        self._metrics, self._rate_limit = Metrics(), RateLimit(settings.requests_per_minute)
        self._threads = ThreadPoolExecutor(settings.max_requests, thread_name_prefix="translate")
        self._num_running = 0
        routes = self._routes()
        paths = {route.path for route in routes if isinstance(route, Route)}
        prefix = settings.url_prefix
        if prefix:
            to_page = Route(prefix, lambda _: RedirectResponse(f"{prefix}/", 308), methods=["GET"])
            routes = [to_page, Mount(prefix, app=Router(routes, redirect_slashes=False))]
        starlette = Starlette(
            routes=routes,
            exception_handlers={
                NoRouteError: _answer_no_route,
                HTTPException: _answer_http_exception,
                Exception: _answer_exception,
            },
        )
        starlette.router.redirect_slashes = False
        self.app = RequestMiddleware(
            starlette, settings, self._metrics, {f"{prefix}{path}" for path in paths}
        )

    def close(self) -> None:
        """Cancel the translations that wait, and end the threads after those that run."""
        self._threads.shutdown(cancel_futures=True)

    def _routes(self) -> list[BaseRoute]:
        no_files = partial(_refuse, "Files translation is disabled on this server.")
        no_suggestions = partial(_refuse, "Suggestions are disabled on this server.")
        routes: list[BaseRoute] = [  # matched in this order: the most frequent ones first
            Route("/translate", self._translate, methods=["POST"]),
            Route("/detect", self._detect, methods=["POST"]),
            Route("/translate_file", no_files, methods=["POST"]),
            Route("/suggest", no_suggestions, methods=["POST"]),
            Route("/languages", partial(_show, _languages_tree(self._translations))),
            Route("/frontend/settings", partial(_show, self._settings_tree())),
            Route("/health", partial(_show, {"status": "ok"})),
            Route("/spec", partial(_show, openapi(self._settings, self._translations))),
            Route("/metrics", self._show_metrics),
        ]
        return routes + (page.routes() if self._settings.with_page else [])

    async def _translate(self, request: Request) -> Response:
        fields = await read_fields(request)
        self._check_client(request, fields)
        texts, is_list = read_texts(fields, self._settings)
        translation_request = read_translation(fields, texts, self._translations)
        timeout_s = self._settings.timeout_s

        def translate(cancel: threading.Event) -> tuple[list[TranslatedText], Response]:
            results = self._translations.translate(translation_request, timeout_s, cancel)
            return results, JSONResponse(_answer_tree(translation_request, results, is_list))

        translated = await self._in_thread(request, translate)
        if translated is None:
            return Response(status_code=CLIENT_GONE)
        results, response = translated
        num_chars = sum(map(len, texts))
        self._metrics.add(len(texts), num_chars)
        request.state.note = f", {count(len(texts), 'text')}, {count(num_chars, 'character')}"
        if self._settings.log_text:
            for text, result in zip(texts, results, strict=True):
                shown = json.dumps([text, result.text], ensure_ascii=False)
                shown = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in shown)
                logger.info("%s", shown)
        return response

    async def _detect(self, request: Request) -> Response:
        fields = await read_fields(request)
        self._check_client(request, fields)
        texts, _ = read_texts(fields, self._settings)
        ranked = self._translations.detector.rank("\n".join(texts))
        return JSONResponse([_detected_tree(language) for language in ranked])

    def _settings_tree(self) -> dict[str, Any]:
        settings, translations = self._settings, self._translations
        source = translations.sources[0]
        target = next((code for code in translations.targets(source) if code != source), source)
        return {
            "charLimit": settings.max_chars,
            "frontendTimeout": _PAGE_TIMEOUT_MS,
            "apiKeys": bool(settings.api_keys),
            "keyRequired": bool(settings.api_keys),
            "suggestions": False,
            "filesTranslation": False,
            "supportedFilesFormat": [],
            "language": {
                "source": {"code": source, "name": name_of(source)},
                "target": {"code": target, "name": name_of(target)},
            },
            "maxTexts": settings.max_texts,
            "maxBody": settings.max_body,
            "maxAlternatives": translations.max_alternatives,
            "detectedLanguages": translations.detector.detected,
        }

    async def _show_metrics(self, request: Request) -> Response:
        text = "".join(f"{line}\n" for line in self._metrics.lines())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _check_client(self, request: Request, fields: Fields) -> None:
        """Raise HTTPException for a client without a key, or with too many requests."""
        client = request.client.host if request.client else ""
        if self._settings.api_keys:
            header = request.headers.get("authorization", "")  # as Latin-1
            scheme, _, bearer = header.encode("latin-1").decode("utf-8", "replace").partition(" ")
            api_key = fields.get("api_key") or (bearer if scheme.lower() == "bearer" else "")
            if not isinstance(api_key, str) or not self._settings.knows(api_key):
                raise HTTPException(403, "Invalid API key")
            client = api_key
        if wait_s := self._rate_limit.seconds_to_wait(client):
            per_minute = self._settings.requests_per_minute
            headers = {"Retry-After": str(wait_s)}
            raise HTTPException(429, f"Slowdown: {per_minute} per 1 minute", headers)

    async def _in_thread(self, request: Request, work: Callable[[threading.Event], T]) -> T | None:
        """Call `work` in a thread; None if the client disconnects, which sets the event of `work`.

        Raises:
            HTTPException: if all threads are busy, none can be started, or it takes too long.
        """
        busy = HTTPException(503, "Server is busy: try again in a second", _RETRY_SOON)
        if self._num_running >= self._settings.max_requests:
            raise busy
        cancel = threading.Event()

        def call_work() -> T | None:
            try:
                return work(cancel)
            except CancelledError:
                return None

        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, call_work)
        except RuntimeError:  # no thread can be started; a running one may still take the work
            cancel.set()
            raise busy from None
        self._num_running += 1
        future.add_done_callback(self._note_end)
        disconnected = asyncio.ensure_future(_wait_until_gone(request))
        try:
            waiting: set[asyncio.Future[Any]] = {future, disconnected}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return future.result() if future.done() else None
        except TimeoutError:
            timeout_s = self._settings.timeout_s
            text = f"Server is busy: the translation took more than {timeout_s:g} seconds"
            raise HTTPException(503, text, _RETRY_SOON) from None
        finally:
            cancel.set()
            disconnected.cancel()

    def _note_end(self, future: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        if not future.cancelled():
            future.exception()  # retrieved here, in case the client has disconnected


def _languages_tree(translations: Translations) -> list[dict[str, Any]]:
    languages = []
    for code in translations.languages:
        targets = translations.targets(code)
        pivots = {target: pivot for target, pivot in targets.items() if pivot}
        entry: dict[str, Any] = {"code": code, "name": name_of(code), "targets": [*targets]}
        languages.append(entry | ({"pivots": pivots} if pivots else {}))
    return languages


def _answer_tree(
    request: TranslationRequest, results: list[TranslatedText], is_list: bool
) -> dict[str, Any]:
    answer: dict[str, Any] = {"translatedText": [result.text for result in results]}
    if request.source == AUTO:
        answer["detectedLanguage"] = [
            _detected_tree(result.detected) for result in results if result.detected
        ]
    if request.num_alternatives:
        answer["alternatives"] = [list(result.alternatives) for result in results]
    if any(result.pivot for result in results):
        answer["pivot"] = [result.pivot for result in results]
    if request.with_details:
        answer["details"] = [_details_tree(result) for result in results]
    return answer if is_list else {key: values[0] for key, values in answer.items()}


def _detected_tree(detected: Detected) -> dict[str, Any]:
    return {"confidence": detected.confidence, "language": detected.code}


def _details_tree(result: TranslatedText) -> list[dict[str, Any]]:
    trees = []
    for line, translation in result.lines:
        words = cut_words(translation.text)
        trees.append(
            {
                "source": line,
                **as_tree(translation),
                "source_words": cut_words(line),
                "words": words,
                "word_probs": word_probs(translation, len(words)),
            }
        )
    return trees


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _show(content: object, request: Request) -> Response:
    return JSONResponse(content)


async def _refuse(text: str, request: Request) -> Response:
    raise HTTPException(403, text)


async def _answer_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, NoRouteError)
    source, target = error.source, error.target
    text = f"{name_of(target)} ({target}) is not available as a target language from "
    return JSONResponse({"error": f"{text}{name_of(source)} ({source})"}, 400)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _answer_exception(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "Internal server error"}, 500)
