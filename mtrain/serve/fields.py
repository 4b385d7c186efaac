"""The fields of a request, from JSON or a form, checked; errors are worded as in LibreTranslate."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from mtrain.serve.languages import find_code
from mtrain.serve.settings import ServerSettings
from mtrain.serve.translation import AUTO, TranslationRequest, Translations

_HALF = re.compile("[\ud800-\udfff]")  # an unpaired surrogate
_MAX_SHOWN = 40  # characters of a value that an error repeats
_MAX_FORM_FIELDS = 50
_FORM = "application/x-www-form-urlencoded"
_ABSENT = (None, "")  # values of an optional field
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}

Fields = Mapping[str, Any]


def invalid(text: str) -> HTTPException:
    """Return the error for a request with a mistake."""
    return HTTPException(400, f"Invalid request: {text}")


async def read_fields(request: Request) -> Fields:
    """Return the fields of the JSON object in a request's body, or of its form and its query.

    Raises:
        HTTPException: if the body is neither JSON nor a form.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        try:
            fields = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise HTTPException(400, "Invalid JSON format") from None
        if not isinstance(fields, dict):
            raise HTTPException(400, "Invalid JSON format")
        return fields
    try:
        pairs = _read_pairs(request.scope["query_string"])  # deep-translator has no form
        if media_type == _FORM:
            pairs += _read_pairs(await request.body())
        else:
            form = await request.form(max_files=1, max_fields=_MAX_FORM_FIELDS)
            items = form.multi_items()
            pairs += [(key, value) for key, value in items if not isinstance(value, UploadFile)]
    except (HTTPException, ValueError, LookupError):  # LookupError: an unknown charset
        raise invalid("the form cannot be read") from None
    keys = [key for key, _ in pairs]
    for key in ("q", "prefix"):
        if keys.count(key) > 1:
            raise invalid(f"a form has one {key}; send a list as JSON")
    return dict(pairs)


def _read_pairs(encoded: bytes) -> list[tuple[str, str]]:
    """Read a URL-encoded form as Starlette does, but unescaped bytes, as of `curl -d`, as UTF-8.

    Raises:
        ValueError: if it has too many fields.
    """
    text = encoded.decode("utf-8", "replace")
    return parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FORM_FIELDS)


def read_texts(fields: Fields, settings: ServerSettings) -> tuple[list[str], bool]:
    """Return the texts of `q`, and whether they came as a list.

    Raises:
        HTTPException: if there is no text, or more than the limits allow.
    """
    q = fields.get("q")
    if not q:
        raise invalid("missing q parameter")
    is_list = isinstance(q, list)
    texts = q if isinstance(q, list) else [q]
    if not all(isinstance(text, str) for text in texts):
        raise invalid("q must be a text or a list of texts")
    if len(texts) > settings.max_texts:
        raise invalid(f"request ({len(texts)}) exceeds text limit ({settings.max_texts})")
    num_chars = sum(map(len, texts))
    if num_chars > settings.max_chars:
        raise invalid(f"request ({num_chars}) exceeds text limit ({settings.max_chars})")
    return [_HALF.sub("\ufffd", text) for text in texts], is_list


def read_translation(
    fields: Fields, texts: Sequence[str], translations: Translations
) -> TranslationRequest:
    """Return the checked request for a translation.

    Raises:
        HTTPException: if a field is missing, or has no valid value.
        NoRouteError: if no run translates between the languages.
    """
    source = _read_language(fields, "source", translations)
    target = _read_language(fields, "target", translations)
    format_ = fields.get("format")
    format_ = "text" if format_ in _ABSENT else format_
    if format_ not in ("text", "html"):
        raise HTTPException(400, f"{_shown(format_)} format is not supported")
    request = TranslationRequest(
        texts,
        source,
        target,
        is_html=format_ == "html",
        num_alternatives=_read_alternatives(fields, translations),
        with_details=_read_details(fields),
        prefixes=_read_prefixes(fields, texts, format_ == "html"),
    )
    if request.prefixes is not None and not translations.has_prefixes:
        raise invalid("prefix is not available with CTranslate2")
    if source != AUTO:
        translations.route(source, target)  # before it waits for a thread
    elif translations.needs_source(target):
        raise invalid("the source language cannot be detected; name it instead of auto")
    return request


def _read_language(fields: Fields, name: str, translations: Translations) -> str:
    value = fields.get(name)
    if not value:
        raise invalid(f"missing {name} parameter")
    if name == "source" and isinstance(value, str) and value.lower() == AUTO:
        return AUTO
    code = find_code(value, translations.languages) if isinstance(value, str) else None
    if code is None:
        raise HTTPException(400, f"{_shown(value)} is not supported")
    return code


def _read_alternatives(fields: Fields, translations: Translations) -> int:
    value = fields.get("alternatives")
    value = 0 if value in _ABSENT else value
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        count = int(value)
    except ValueError:
        raise invalid("alternatives parameter is not a number") from None
    if count > translations.max_alternatives:
        raise invalid(f"alternatives parameter must be <= {translations.max_alternatives}")
    if count < 0:
        raise invalid("alternatives parameter must be >= 0")
    return count


def _read_details(fields: Fields) -> bool:
    value = fields.get("details")
    if not isinstance(value, list | dict | float):
        text = "" if value in _ABSENT else str(value).lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
    raise invalid("details parameter is not true or false")


def _read_prefixes(fields: Fields, texts: Sequence[str], is_html: bool) -> list[str] | None:
    value = fields.get("prefix")
    if value in _ABSENT:
        return None
    prefixes = value if isinstance(value, list) else [value]
    if not all(isinstance(prefix, str) for prefix in prefixes):
        raise invalid("prefix must be a text or a list of texts")
    if is_html:
        raise invalid("prefix is for the text format")
    if len(prefixes) != len(texts):
        raise invalid(f"prefix must be given for each text ({len(texts)}, not {len(prefixes)})")
    for prefix, text in zip(prefixes, texts, strict=True):
        if len(prefix) > len(text) + _MAX_SHOWN or prefix.count("\n") > text.count("\n"):
            raise invalid("prefix must not be longer than its text")
    return [_HALF.sub("\ufffd", prefix) for prefix in prefixes]


def _shown(value: object) -> str:
    if isinstance(value, list | dict):  # it may be nested too deep to be written
        return "a list" if isinstance(value, list) else "an object"
    text = _HALF.sub("\ufffd", value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
