"""A SentencePiece model as the `tokenizer.json` of Hugging Face's tokenizers, with the same ids.

A BPE model becomes merges with byte fallback. A unigram model becomes a unigram model over bytes,
because unigram models have no byte fallback in JavaScript: each byte of a text is a character of
the alphabet of byte-level models, each piece is the bytes of its text, and a byte piece is so
unlikely that it is used only where no other piece fits.
"""

from __future__ import annotations

from typing import Any

from mtrain.exporters.exporter import ids_of_pieces
from mtrain.tokenizer.sentencepiece import Vocabulary

_SPACE = "\u2581"
_UNK_PENALTY = 10.0  # of SentencePiece
_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the tree of a `tokenizer.json` that encodes as `vocabulary` does, with eos.

    Special pieces are not among its added tokens, so that "</s>" in a text is text.
    """
    eos = special_pieces(vocabulary)[3]
    template = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": eos, "type_id": 0}},
    ]
    is_unigram = vocabulary.is_unigram
    decoders: list[dict[str, Any]] = [{"type": "ByteFallback"}]
    if is_unigram:
        decoders = [_replace({"String": _SPACE}, ""), {"type": "ByteLevel", **_BYTE_LEVEL}]
    decoders += [
        _replace({"String": _SPACE}, " "),
        {"type": "Fuse"},
        _replace({"Regex": r"(?<![\s\S]) +"}, ""),
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": " "},
                _replace({"Regex": r"(?<![\s\S]) +"}, " "),
                _replace({"Regex": " {2,}"}, " "),
                _replace({"Regex": f"[ {_SPACE}]+(?![\\s\\S])"}, ""),
                _replace({"String": " "}, _SPACE),
            ],
        },
        "pre_tokenizer": {"type": "ByteLevel", **_BYTE_LEVEL} if is_unigram else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {eos: {"id": eos, "ids": [vocabulary.eos], "tokens": [eos]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _unigram(vocabulary) if is_unigram else _bpe(vocabulary),
    }


def special_pieces(vocabulary: Vocabulary) -> list[str]:
    """Return how the `tokenizer.json` spells the pieces of pad, unk, bos and eos."""
    ids = [vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos]
    mark = _SPACE if vocabulary.is_unigram else ""  # no text in byte-level characters contains it
    return [mark + piece for piece in vocabulary.pieces_of(ids)]


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _text_pieces(vocabulary: Vocabulary) -> dict[str, float]:
    """Return the pieces of text with their scores: no special ones, no tags and no bytes."""
    special = {vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos}
    excluded = special.union(vocabulary.byte_pieces, vocabulary.tags.values())
    ids = [number for number in range(len(vocabulary)) if number not in excluded]
    return dict(zip(vocabulary.pieces_of(ids), vocabulary.scores_of(ids), strict=True))


def _bpe(vocabulary: Vocabulary) -> dict[str, Any]:
    scores = _text_pieces(vocabulary)
    best_first = sorted(scores, key=lambda piece: -scores[piece])
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": vocabulary.pieces_of([vocabulary.unk])[0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": bool(vocabulary.byte_pieces),
        "ignore_merges": False,
        "vocab": ids_of_pieces(vocabulary),
        "merges": [
            [piece[:middle], piece[middle:]]
            for piece in best_first
            for middle in range(len(piece) - 1, 0, -1)
            if piece[:middle] in scores and piece[middle:] in scores
        ],
    }


def _unigram(vocabulary: Vocabulary) -> dict[str, Any]:
    scores, letters = _text_pieces(vocabulary), _byte_letters()
    spelt = {piece: "".join(letters[byte] for byte in piece.encode()) for piece in scores}
    taken, unlikely = set(spelt.values()), min(scores.values()) - _UNK_PENALTY
    vocab, byte_pieces = list[tuple[str, float]](), set(vocabulary.byte_pieces)
    for piece, number in ids_of_pieces(vocabulary).items():
        if piece in scores:
            vocab.append((spelt[piece], scores[piece]))
        elif number in byte_pieces:  # such as <0x0A>
            letter = letters[int(piece[3:5], 16)]  # gets a mark if it is a text piece, too
            vocab.append((_SPACE + letter if letter in taken else letter, unlikely))
        else:
            vocab.append((_SPACE + piece, unlikely))
    return {"type": "Unigram", "unk_id": vocabulary.unk, "vocab": vocab, "byte_fallback": False}


def _byte_letters() -> list[str]:
    """Return the character of each byte in the alphabet of byte-level models."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
