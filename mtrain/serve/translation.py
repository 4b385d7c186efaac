"""Translate texts between all languages that the runs connect. Independent of HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtrain.api import Model
from mtrain.decode.formats import Link, Translation
from mtrain.decode.shared_search import SearchLimits
from mtrain.errors import ConfigError
from mtrain.io.lines import ignore
from mtrain.io.text_lines import TextLines
from mtrain.serve.html_text import HtmlText
from mtrain.serve.languages import Detected, LanguageDetector, has_letters

AUTO = "auto"  # a source that is to be detected


@dataclass(frozen=True)
class TranslationRequest:
    """Texts to translate, and how."""

    texts: Sequence[str]
    source: str  # a code of `Translations.sources`, or `auto`
    target: str  # a code of `Translations.targets`
    is_html: bool = False  # whether the texts are HTML
    num_alternatives: int = 0  # the most other translations of each text
    with_details: bool = False  # whether scores and alignments are returned, line by line
    # one for each text; its lines are what the translated lines must begin with
    prefixes: Sequence[str] | None = None


@dataclass(frozen=True)
class TranslatedText:
    """The translation of one text."""

    text: str  # the best translation
    detected: Detected | None = None  # if the source was `auto`
    pivot: str | None = None  # the language in between, if no run translates directly
    alternatives: tuple[str, ...] = ()  # other translations, best first
    lines: tuple[tuple[str, Translation], ...] = ()  # each line and its translation, if asked for


class NoRouteError(Exception):
    """No run, and no two runs, translate between two languages."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__(source, target)
        self.source, self.target = source, target


_Document = HtmlText | TextLines


class Translations:
    """Translates between the languages of models, directly or through one pivot; thread-safe.

    Args:
        models: one for each pair of languages.
        is_ctranslate2: the models search with CTranslate2, which has no alignments, alternatives
            and prefixes.

    Raises:
        ConfigError: if two models have the same pair, or a model has one language.
    """

    def __init__(self, models: Sequence[Model], is_ctranslate2: bool = False) -> None:
        self._models: dict[tuple[str, str], Model] = {}
        for model in models:
            pair = model.config.data.src_lang, model.config.data.tgt_lang
            if pair[0] == pair[1]:  # LibreTranslate's interface returns such texts unchanged
                raise ConfigError(
                    f"{model.run.path}: must translate between two languages, but translates from "
                    f"{pair[0]} to {pair[1]}."
                )
            if pair in self._models:
                raise ConfigError(
                    f"{model.run.path}: must translate another pair of languages than "
                    f"{self._models[pair].run.path}, but both translate from {pair[0]} to "
                    f"{pair[1]}."
                )
            self._models[pair] = model
        self.sources = list(dict.fromkeys(source for source, _ in self._models))
        self.languages = list(dict.fromkeys(code for pair in self._models for code in pair))
        self.has_alignments = self.has_prefixes = not is_ctranslate2
        beam = min(model.options.beam for model in models)
        self.max_alternatives = 0 if is_ctranslate2 else beam - 1
        self.detector = LanguageDetector(self.languages)

    def route(self, source: str, target: str) -> list[Model]:
        """Return the models to translate with, in order; none if the languages are the same.

        Raises:
            NoRouteError: if neither one model nor two connect the languages.
        """
        if source == target:
            return []
        if (source, target) in self._models:
            return [self._models[source, target]]
        for pivot in self.languages:
            if (source, pivot) in self._models and (pivot, target) in self._models:
                return [self._models[source, pivot], self._models[pivot, target]]
        raise NoRouteError(source, target)

    def targets(self, source: str) -> dict[str, str | None]:
        """Return each language that a source can be translated to, with its pivot, if any."""
        targets: dict[str, str | None] = {}
        for target in self.languages:
            try:
                models = self.route(source, target)
            except NoRouteError:
                continue
            targets[target] = models[0].config.data.tgt_lang if len(models) > 1 else None
        return targets

    def translate(
        self, request: TranslationRequest, timeout_s: float, cancel: threading.Event
    ) -> list[TranslatedText]:
        """Translate the texts of a request, all lines of the same languages together.

        Raises:
            NoRouteError: if neither one model nor two connect the languages.
            TimeoutError: after `timeout_s`.
            CancelledError: once `cancel` is set.
        """
        limits = SearchLimits(time.monotonic() + timeout_s, cancel)
        results: dict[int, TranslatedText] = {}
        rows_of: dict[str, list[int]] = {}
        detected: dict[int, Detected] = {}
        for row, text in enumerate(request.texts):
            source = request.source
            if source == AUTO:
                visible = "\n".join(HtmlText(text).lines) if request.is_html else text
                detected[row] = self._detect(visible, request.target)
                source = detected[row].code
                if not has_letters(visible):
                    results[row] = TranslatedText(text)
                    continue
            rows_of.setdefault(source, []).append(row)
        for source, rows in rows_of.items():
            models = self.route(source, request.target)
            results |= zip(rows, self._translate(request, rows, models, limits), strict=True)
        return [
            replace(results[row], detected=detected.get(row)) for row in range(len(request.texts))
        ]

    def needs_source(self, target: str) -> bool:
        """Tell whether `auto` is no source: none that can be translated to it can be detected."""
        codes = [code for code in self.sources if code != target and target in self.targets(code)]
        return bool(codes) and not set(codes) & set(self.detector.detected)

    def _detect(self, text: str, target: str) -> Detected:
        """Return the likeliest language that can be translated to the target, or is it."""
        ranked = self.detector.rank(text, len(self.languages))
        if all(tgt != target for _, tgt in self._models):
            return ranked[0]
        return next((each for each in ranked if target in self.targets(each.code)), ranked[0])

    def _translate(
        self,
        request: TranslationRequest,
        rows: Sequence[int],
        models: Sequence[Model],
        limits: SearchLimits,
    ) -> list[TranslatedText]:
        """Translate some texts of a request by the same models."""
        texts = [request.texts[row] for row in rows]
        if not models:
            return [TranslatedText(text) for text in texts]
        documents: list[_Document] = [
            HtmlText(text, self.has_alignments) if request.is_html else TextLines(text)
            for text in texts
        ]
        lines = [line for document in documents for line in document.lines]
        prefixes = self._prefixes(request, rows, documents)
        with_alignment = self.has_alignments and (request.with_details or request.is_html)
        translated = _through(models, lines, prefixes, request, with_alignment, limits)
        pivot = models[0].config.data.tgt_lang if len(models) > 1 else None
        results, first = [], 0
        for document in documents:
            translations = translated[first : first + len(document.lines)]
            first += len(document.lines)
            text = document.join(translations)
            details = tuple(zip(document.lines, translations, strict=True))
            results.append(
                TranslatedText(
                    text,
                    pivot=pivot,
                    alternatives=_alternatives(document, translations, text, request),
                    lines=details if request.with_details else (),
                )
            )
        return results

    @staticmethod
    def _prefixes(
        request: TranslationRequest, rows: Sequence[int], documents: Sequence[_Document]
    ) -> list[str] | None:
        if request.prefixes is None:
            return None
        prefixes: list[str] = []
        for row, document in zip(rows, documents, strict=True):
            lines = TextLines(request.prefixes[row]).lines
            num_missing = len(document.lines) - len(lines)
            prefixes += lines[: len(document.lines)] + [""] * num_missing
        return prefixes


def _alternatives(
    document: _Document, lines: Sequence[Translation], best: str, request: TranslationRequest
) -> tuple[str, ...]:
    """Return other translations of a document: the second best of each line, and so on.

    Empty translations are left out, as by LibreTranslate.
    """
    texts = [best]
    ranked = [(line, *(other for other in line.alternatives if other.text)) for line in lines]
    for rank in range(request.num_alternatives):
        text = document.join([best_first[: rank + 2][-1] for best_first in ranked])
        if text not in texts:
            texts.append(text)
    return tuple(texts[1:])


def _through(
    models: Sequence[Model],
    lines: list[str],
    prefixes: list[str] | None,
    request: TranslationRequest,
    with_alignment: bool,
    limits: SearchLimits,
) -> list[Translation]:
    """Translate lines by each model in turn; only the last one has prefixes and alternatives."""
    translations: list[Translation] = []
    for model in models:
        is_last = model is models[-1]
        num_best = 1 + request.num_alternatives if is_last else 1
        options = replace(model.options, num_best=num_best, with_alignment=with_alignment)
        texts = [translation.text for translation in translations] if translations else lines
        previous = translations
        if with_alignment or num_best > 1 or request.with_details:
            translations = model.translate(
                texts,
                options,
                details=True,
                prefixes=prefixes if is_last else None,
                timeout_s=limits.seconds_left(),
                cancel=limits.cancel,
                on_warning=ignore,
            )
        else:
            translated = model.translate(
                texts,
                options,
                prefixes=prefixes if is_last else None,
                timeout_s=limits.seconds_left(),
                cancel=limits.cancel,
                on_warning=ignore,
            )
            translations = [Translation(text) for text in translated]
        if previous:
            translations = [
                _linked(first, second) for first, second in zip(previous, translations, strict=True)
            ]
    return translations


def _linked(first: Translation, second: Translation) -> Translation:
    """Return the second translation, aligned with the source of the first, with both's flags."""
    flags = tuple(sorted({*first.flags, *second.flags}))
    if second.alignment is None:
        return replace(second, flags=flags)
    sources: dict[int, list[int]] = {}
    for link in first.alignment or ():
        sources.setdefault(link.tgt, []).append(link.src)
    links: list[Link] = [
        link._replace(src=src) for link in second.alignment for src in sources.get(link.src, ())
    ]
    alternatives = tuple(_linked(first, other) for other in second.alternatives)
    return replace(
        second, flags=flags, alignment=tuple(dict.fromkeys(links)), alternatives=alternatives
    )
