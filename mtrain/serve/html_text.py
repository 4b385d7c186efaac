"""HTML as lines to translate: only text is translated, and each tag stays with its words.

A block's text is one line, whatever inline elements stand in it. Their tags are put around the
target words that are aligned with their source words; where tags do not match, each piece of text
is translated alone. Translations are escaped: they hold no markup that was not in the source.
Reading takes time linear in the length, whatever the markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from mtrain.decode.formats import Translation, word_starts
from mtrain.decode.split_long import SENTENCE_ENDS, WIDE_SENTENCE_ENDS
from mtrain.serve.languages import has_letters

_NAMES = re.compile(r"\w+")
_INLINE = frozenset(
    _NAMES.findall(
        "a abbr acronym b bdi bdo big cite data del dfn em font i img ins label mark nobr q rp rt "
        "ruby s small span strike strong sub sup tt u wbr"
    )
)
_UNTRANSLATED = frozenset(  # left as they are, with all that they contain
    _NAMES.findall(
        "address applet audio canvas code embed iframe kbd math noembed noframes object pre samp "
        "script select style svg template textarea time var video xmp"
    )
)
_INLINE_UNTRANSLATED = frozenset(_NAMES.findall("code kbd samp time var"))  # within a sentence
_RAW = frozenset(_NAMES.findall("iframe noembed noframes script style textarea xmp"))  # no tags
_VOID = frozenset(  # without an end tag
    _NAMES.findall("area base br col embed hr img input link meta param source track wbr")
)
_LISTS = frozenset({"ul", "ol", "menu"})
_BLOCKS = frozenset(
    _NAMES.findall(
        "article aside blockquote body details div dl fieldset figure footer form header main "
        "menu nav ol section table ul"
    )
)
_OPEN_ENDED = {  # elements whose end tag may be left out: the start tags and end tags that end them
    "p": (frozenset({"p"}), _BLOCKS),
    "li": (frozenset({"li"}), _LISTS),
    "option": (frozenset({"option"}), frozenset({"select"})),
    "tr": (frozenset({"tr"}), frozenset({"table"})),
    **dict.fromkeys(("td", "th"), (frozenset({"td", "th", "tr"}), frozenset({"table"}))),
    **dict.fromkeys(("dt", "dd"), (frozenset({"dt", "dd"}), frozenset({"dl"}))),
}
_MARKUP = re.compile(
    r"<(?P<slash>/?)(?P<name>[a-zA-Z][^\s/>]*)"  # a tag up to its attributes
    r"|<!--(?:-?>|.*?--!?>|.*)"  # a comment; without an end, it is the rest of the text
    r"|<[/!?][^>]*>?",  # such as a doctype
    re.DOTALL,
)
_TAG_END = re.compile(r"=\s*(?:\"[^\"]*\"|'[^']*')|>")  # a quoted value may hold a >
_FOREIGN = frozenset({"svg", "math"})  # `/>` ends them, unlike the elements of HTML
_ATTRIBUTE = re.compile(r"([^\s=/>]+)(?:\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s>]*))?")
_LONG_ENTITY = re.compile("&#[0-9]{640,};?")  # of more digits than Python may convert
_SPACES = re.compile(r"[ \t\n\f\r\xa0]+")
_MAX_DEPTH = 20  # of nested elements; deeper ones are not placed by alignment
# that ends words or sentences, in Latin and other scripts
_PUNCTUATION = SENTENCE_ENDS + WIDE_SENTENCE_ENDS + ",:;\"'”’»)]}，、．：；）」』】》،؛፣፤၊"


class _HtmlToken(NamedTuple):
    """A piece of markup: text, a start tag, an end tag, or something else, as it stands."""

    kind: str  # text, start, end, other; skipped: a whole element that is not translated
    raw: str
    name: str = ""


def _tokens(text: str) -> Iterator[_HtmlToken]:
    """Cut HTML into tokens; the raw texts of all of them, joined, are the HTML."""
    at = 0
    while markup := _MARKUP.search(text, at):
        start, is_end = markup.start(), bool(markup["slash"])
        if start > at:
            yield _HtmlToken("text", text[at:start])
        if markup["name"] is None:
            at = markup.end()
            yield _HtmlToken("other", markup[0])
            continue
        at = _end_of_tag(text, markup.end())
        name, raw = markup["name"].lower(), text[start:at]
        if name in _FOREIGN and raw.endswith("/>"):
            yield _HtmlToken("other", raw)
            continue
        yield _HtmlToken("end" if is_end else "start", raw, name)
        if not is_end and name in _RAW:
            closing = re.compile(f"</{name}", re.IGNORECASE).search(text, at)
            end = closing.start() if closing else len(text)
            if end > at:
                yield _HtmlToken("other", text[at:end])
            at = end
    if at < len(text):
        yield _HtmlToken("text", text[at:])


def _end_of_tag(text: str, at: int) -> int:
    for match in _TAG_END.finditer(text, at):
        if match[0] == ">":
            return match.end()
    return len(text)


def _is_untranslated(token: _HtmlToken) -> bool:
    """Tell whether a tag begins an element that is left as it stands."""
    if token.kind != "start" or token.name in _VOID:
        return False
    return token.name in _UNTRANSLATED or _is_marked(token.raw)


def _is_marked(tag: str) -> bool:
    """Tell whether the attributes of a tag say that the element is not to be translated."""
    for name, value in _ATTRIBUTE.findall(tag.lower()):
        words = value.strip("\"'").split()
        if (name == "translate" and words == ["no"]) or (
            name == "class" and "notranslate" in words
        ):
            return True
    return False


def _with_skipped(tokens: Iterator[_HtmlToken]) -> Iterator[_HtmlToken]:
    """Join the tokens of each untranslated element to one of the kind `skipped`.

    An element without an end tag ends before the next one of its kind, or the end of its parent.
    """
    name, depth = "", 0  # of the untranslated element; how many like it or its parent it holds
    raws: list[str] = []
    starts, ends = frozenset[str](), frozenset[str]()  # tags that end it before themselves
    for token in tokens:
        if raws and depth == 0 and token.name in {"start": starts, "end": ends}.get(token.kind, ()):
            yield _HtmlToken("skipped", "".join(raws), name)
            raws = []
        if raws:
            raws.append(token.raw)
            if token.kind == "end" and token.name == name and (depth == 0 or name == "p"):
                yield _HtmlToken("skipped", "".join(raws), name)
                raws = []
            elif token.name in (ends or {name}):
                depth += {"start": 1, "end": -1}[token.kind]
        elif _is_untranslated(token):
            name, raws, depth = token.name, [token.raw], 0
            starts, ends = _OPEN_ENDED.get(name, (frozenset(), frozenset()))
        else:
            yield token
    if raws:
        yield _HtmlToken("skipped", "".join(raws), name)


class _BlockPiece(NamedTuple):
    """Text or a tag within a block."""

    raw: str  # the HTML as in the source
    text: str | None = None  # the unescaped text to translate; None for markup
    is_start: bool = False  # whether a tag opens an element
    is_end: bool = False  # whether a tag closes the innermost open element


@dataclass
class _Block:
    """Text and inline markup between two tags that end a sentence."""

    pieces: list[_BlockPiece] = field(default_factory=list)
    open_elements: list[str] = field(default_factory=list)
    is_whole: bool = True  # whether the text of all pieces is one line

    @property
    def lines(self) -> list[str]:
        """The lines to translate: one, or one for each piece of text."""
        texts = [piece.text for piece in self.pieces if piece.text]
        if not self.is_whole:
            return [text.strip() for text in texts if has_letters(text)]
        whole = _SPACES.sub(" ", "".join(texts)).strip(" ")
        return [whole] if has_letters(whole) else []

    def add_start(self, token: _HtmlToken) -> None:
        self.pieces.append(_BlockPiece(token.raw, is_start=True))
        self.open_elements.append(token.name)
        self.is_whole = self.is_whole and len(self.open_elements) <= _MAX_DEPTH

    def add_end(self, token: _HtmlToken) -> None:
        is_innermost = self.open_elements[-1:] == [token.name]
        if is_innermost:
            self.open_elements.pop()
        else:
            self.is_whole = False  # tags must stay where they are
        self.pieces.append(_BlockPiece(token.raw, is_end=is_innermost))


class HtmlText:
    """The lines of an HTML text.

    If translations have no alignments (`has_alignment`), each piece of text is a line.

    Attributes:
        lines: the text of each block, without entities, line breaks and double spaces.
    """

    def __init__(self, text: str, has_alignment: bool = True) -> None:
        self._parts: list[str | _Block] = []  # markup as it stands, and blocks
        block = _Block()
        for token in _with_skipped(_tokens(text)):
            is_inline = token.kind == "other" or token.name in _INLINE | _INLINE_UNTRANSLATED
            if token.kind == "text":
                unescaped = html.unescape(_LONG_ENTITY.sub("\ufffd", token.raw))
                unescaped = _SPACES.sub(" ", unescaped)
                block.pieces.append(_BlockPiece(token.raw, unescaped))
            elif not is_inline:
                block = self._next_block(block)
                self._parts.append(token.raw)
            elif token.kind == "start" and token.name not in _VOID:
                block.add_start(token)
            elif token.kind == "end" and token.name in _INLINE:
                block.add_end(token)
            else:
                block.pieces.append(_BlockPiece(token.raw))
        self._next_block(block)
        blocks = [part for part in self._parts if isinstance(part, _Block)]
        for block in blocks:
            is_placed = has_alignment or len(block.pieces) == 1
            block.is_whole = block.is_whole and not block.open_elements and is_placed
        self.lines = [line for block in blocks for line in block.lines]

    def _next_block(self, block: _Block) -> _Block:
        if block.pieces:
            self._parts.append(block)
        return _Block()

    def join(self, translations: Sequence[Translation]) -> str:
        """Return the HTML with each line replaced by its translation."""
        remaining = iter(translations)
        return "".join(
            part if isinstance(part, str) else _joined(part, [next(remaining) for _ in part.lines])
            for part in self._parts
        )


def _joined(block: _Block, translations: list[Translation]) -> str:
    if not translations:
        return "".join(piece.raw for piece in block.pieces)
    if block.is_whole:
        return _placed(block, translations[0])
    raws, remaining = [], iter(translations)
    for piece in block.pieces:
        if piece.text and has_letters(piece.text):
            stripped = piece.text.strip()
            before, _, after = piece.text.partition(stripped)
            raws.append(f"{before}{_escaped(next(remaining).text)}{after}")
        else:
            raws.append(piece.raw)
    return "".join(raws)


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


@dataclass
class _TagSpan:
    """Where markup stands in a text, in characters."""

    start: int
    end: int = 0  # `start` if it holds no text
    open_tag: str = ""
    close_tag: str = ""  # empty for markup without an end tag
    is_after_space: bool = False  # in the source, apart from other markup
    is_before_space: bool = False  # likewise
    is_after_markup: bool = False  # whether other markup without text follows that space
    children: list[_TagSpan] = field(default_factory=list)  # the spans within it, in order


def _read_spans(block: _Block) -> tuple[str, _TagSpan]:
    """Return the text of a block as in `lines`, but with outer spaces, and its markup."""
    text, root = "", _TagSpan(0)
    open_spans, since_text, is_after_markup = [root], list[_TagSpan](), False
    for piece in block.pieces:
        if piece.text is not None:
            for span in since_text:
                span.is_before_space = piece.text.startswith(" ")
            since_text, is_after_markup = [], False
            is_double = text.endswith(" ") and piece.text.startswith(" ")
            text += piece.text[is_double:]
        elif piece.is_end:
            span = open_spans.pop()
            span.end, span.close_tag = len(text), piece.raw
            is_after_markup |= span.start == span.end
        else:
            span = _TagSpan(len(text), len(text), piece.raw)
            span.is_after_space, span.is_after_markup = text.endswith(" "), is_after_markup
            is_after_markup |= not piece.is_start
            open_spans[-1].children.append(span)
            since_text.append(span)
            if piece.is_start:
                open_spans.append(span)
    root.end = len(text)
    return text, root


class _Words:
    """The words of a text as alignments number them, and their spans of characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        starts = word_starts(text)
        self.numbers = list(accumulate(starts))  # of each character's word, from 1
        self.firsts = [at for at, is_start in enumerate(starts) if is_start]  # of each word

    def within(self, start: int, end: int) -> range:
        """Return the words, from 0, that have a character other than a space in [start, end)."""
        inner = [at for at in range(start, end) if self.text[at] != " "]
        return range(self.numbers[inner[0]] - 1, self.numbers[inner[-1]]) if inner else range(0)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the span of characters of the words from `first` to `last`."""
        end = self.firsts[last + 1] if last + 1 < len(self.firsts) else len(self.text)
        return self.firsts[first], len(self.text[:end].rstrip(" "))


class _Placement:
    """Puts the markup of a source text around the words of its translation."""

    def __init__(self, source: str, translation: Translation) -> None:
        self._offset = len(source) - len(source.lstrip(" "))
        self._src, self._tgt = _Words(source.strip(" ")), _Words(translation.text)
        self._targets: dict[int, list[int]] = {}
        for link in translation.alignment or ():
            if link.tgt < len(self._tgt.firsts):
                self._targets.setdefault(link.src, []).append(link.tgt)
        # at n: the last target, from 1, of the last aligned word among the first n source words;
        # 0 if none of them is aligned
        self._last_targets = [0]
        for word in range(len(self._src.firsts)):
            targets = self._targets.get(word)
            self._last_targets.append(max(targets) + 1 if targets else self._last_targets[-1])

    def place(self, span: _TagSpan, parent: _TagSpan, is_all: bool) -> _TagSpan:
        """Map a span of the source to the translation, within its placed parent.

        With `is_all` it takes the whole span of its parent.
        """
        start, end = self._bounds(span)
        words = self._src.within(start, end)
        if is_all:
            placed = (parent.start, parent.end)
        elif words:
            placed = self._place_words(words, self._src.text[start:end].rstrip(" "))
        else:
            placed = self._place_point(start, span)
        bounds = [min(max(place, parent.start), parent.end) for place in placed]
        result = _TagSpan(bounds[0], bounds[1], span.open_tag, span.close_tag)
        free_from = result.start
        children = [
            self.place(
                child, result, bool(words) and self._src.within(*self._bounds(child)) == words
            )
            for child in span.children
        ]
        for child in sorted(children, key=lambda each: (each.start, each.end)):
            _move(child, max(child.start, free_from), max(child.end, free_from))
            result.children.append(child)
            free_from = child.end
        return result

    def _bounds(self, span: _TagSpan) -> tuple[int, int]:
        """Return where a span begins and ends in the source without outer spaces."""
        size = len(self._src.text)
        start, end = (min(max(place - self._offset, 0), size) for place in (span.start, span.end))
        return start, end

    def _place_words(self, words: range, text: str) -> tuple[int, int]:
        targets = [target for word in words for target in self._targets.get(word, ())]
        if not targets:  # take the word at the same fraction of the line
            share = (words[0] + 0.5 * len(words)) / max(len(self._src.firsts), 1)
            targets = [min(int(share * len(self._tgt.firsts)), len(self._tgt.firsts) - 1)]
        start, end = self._tgt.span(min(targets), max(targets))
        if text[-1:] not in _PUNCTUATION:
            while end - 1 > start and self._tgt.text[end - 1] in _PUNCTUATION:
                end -= 1
        return start, end

    def _place_point(self, at: int, span: _TagSpan) -> tuple[int, int]:
        """Return where to put markup without words: after the target of the word before it.

        A space between that word and the markup is kept.
        """
        number = self._src.numbers[at - 1] if at > 0 else 0
        if last := self._last_targets[number]:
            end = self._tgt.span(0, last - 1)[1]
            if span.is_after_space and not span.is_before_space and end < len(self._tgt.text):
                end += 1
            elif span.is_after_space and not span.is_after_markup:
                span.open_tag = f" {span.open_tag}"
            return end, end
        is_end = at >= len(self._src.text)
        return (len(self._tgt.text),) * 2 if is_end else (0, 0)


def _move(span: _TagSpan, start: int, end: int) -> None:
    """Move a span to [start, end], and limit all spans within it to that."""
    span.start, span.end = start, max(start, end)
    for child in span.children:
        _move(child, max(child.start, start), min(max(child.end, start), span.end))


def _placed(block: _Block, translation: Translation) -> str:
    source, root = _read_spans(block)
    text = translation.text
    if not any(word_starts(text)):
        tags = "".join(piece.raw for piece in block.pieces if piece.text is None)
        return f"{_escaped(text)}{tags}"
    whole = _TagSpan(0, len(text))
    placed = _Placement(source, translation).place(root, whole, True)
    leading = " " if source.startswith(" ") else ""
    trailing = " " if source.endswith(" ") else ""
    return f"{leading}{_written(text, placed)}{trailing}"


def _written(text: str, span: _TagSpan) -> str:
    parts, at = [span.open_tag], span.start
    for child in span.children:
        parts += [_escaped(text[at : child.start]), _written(text, child)]
        at = child.end
    parts += [_escaped(text[at : span.end]), span.close_tag]
    return "".join(parts)
