"""The interface as an OpenAPI document, which `/spec` returns and `/docs` shows."""

from __future__ import annotations

from typing import Any

from mtrain import __version__
from mtrain.serve.settings import ServerSettings
from mtrain.serve.translation import AUTO, Translations

Tree = dict[str, Any]

_ERRORS = {
    "400": "The request has a mistake.",
    "403": "The API key is not one of the server's.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests; Retry-After says when to go on.",
    "500": "The server has failed.",
    "503": "The server is busy or shuts down; Retry-After says when to go on.",
}


def openapi(settings: ServerSettings, translations: Translations) -> Tree:
    """Return the document for a server's limits and languages."""
    max_items = {"maxItems": settings.max_texts}
    texts = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT} | max_items]}
    required_texts = {
        "oneOf": [_FULL, {"type": "array", "items": _TEXT, "minItems": 1} | max_items]
    }
    code = {"type": "string", "enum": list(translations.languages)}
    code_or_auto = {"type": "string", "enum": [AUTO, *translations.languages]}
    detected = {"$ref": "#/components/schemas/Detected"}
    request = _object(
        {
            "q": required_texts
            | {"description": f"At most {settings.max_chars:,} characters in all."},
            "source": code_or_auto | {"description": "A language's code, or auto."},
            "target": code | {"description": "A language's code."},
            "format": {"type": "string", "enum": ["text", "html"], "default": "text"} | _NULLABLE,
            "alternatives": {
                "type": "integer",
                **_NULLABLE,
                "minimum": 0,
                "maximum": translations.max_alternatives,
                "default": 0,
            },
            "details": {"type": "boolean", "default": False, "description": "mtrain's addition."}
            | _NULLABLE,
            "prefix": texts
            | {"description": "How the translation begins; mtrain's addition."}
            | _NULLABLE,
            "api_key": _API_KEY,
        },
        ["q", "source", "target"],
    )
    answer = _object(
        {
            "translatedText": _one_or_list({"type": "string"}),
            "detectedLanguage": _one_or_list(detected),
            "alternatives": {"type": "array"},
            "pivot": _one_or_list({"type": "string", "nullable": True}),
            "details": {"type": "array"},
        },
        ["translatedText"],
    )
    language = _object(
        {
            "code": _TEXT,
            "name": _TEXT,
            "targets": {"type": "array", "items": _TEXT},
            "pivots": {"type": "object", "additionalProperties": _TEXT},
        },
        ["code", "name", "targets"],
    )
    detect_request = _object({"q": required_texts, "api_key": _API_KEY}, ["q"])
    health = _object({"status": _TEXT}, ["status"])
    paths = {
        "/translate": _post("Translate", request, answer),
        "/detect": _post("Detect a language", detect_request, {"type": "array", "items": detected}),
        "/languages": _get("List the languages", _json({"type": "array", "items": language})),
        "/frontend/settings": _get("Show limits and defaults", _json({"type": "object"})),
        "/health": _get("Tell whether the server answers", _json(health)),
        "/spec": _get("Show this interface as OpenAPI", _json({"type": "object"})),
        "/metrics": _get("Show counts for Prometheus", {"text/plain": {}}),
    }
    schema = _object({"confidence": {"type": "number"}, "language": _TEXT}, ["language"])
    return {
        "openapi": "3.0.3",
        "info": {"title": "mtrain serve", "version": __version__},
        "servers": [{"url": settings.url_prefix or "/"}],
        "paths": paths,
        "components": {"schemas": {"Detected": schema}},
    }


_TEXT: Tree = {"type": "string"}
_NULLABLE: Tree = {"nullable": True}
_API_KEY: Tree = {"description": "One of the server's keys, if it has any."}
_FULL: Tree = {"type": "string", "minLength": 1}


def _object(properties: Tree, required: list[str]) -> Tree:
    return {"type": "object", "properties": properties, "required": required}


def _one_or_list(schema: Tree) -> Tree:
    return {"oneOf": [schema, {"type": "array", "items": schema}]}


def _json(schema: Tree) -> Tree:
    return {"application/json": {"schema": schema}}


def _ok(content: Tree) -> Tree:
    return {"200": {"description": "ok", "content": content}}


def _get(summary: str, content: Tree) -> Tree:
    return {"get": {"summary": summary, "responses": _ok(content)}}


def _post(summary: str, request: Tree, answer: Tree) -> Tree:
    form_properties = {
        key: value["oneOf"][0] if "oneOf" in value else value
        for key, value in request["properties"].items()
    }
    if "details" in form_properties:
        form_properties["details"] = {"type": "string", "enum": ["true", "false", "1", "0", ""]}
    form = request | {"properties": form_properties}
    body = {
        "required": True,
        "content": _json(request) | {"application/x-www-form-urlencoded": {"schema": form}},
    }
    error = _json(_object({"error": _TEXT}, ["error"]))
    refused = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    responses = _ok(_json(answer)) | refused
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}
