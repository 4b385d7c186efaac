"""Write a sentence splitter as MiniSBD reads it: an ONNX graph that follows one rule.

Argos Translate splits text by such a graph, and downloads one if a package has none. The rule: a
sentence ends after a full stop, a question mark or an exclamation mark that a space and a capital
follow, but not after a full stop that ends a word of less than three letters, which is often an
abbreviation. In scripts without capitals the space suffices, in scripts without spaces the mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_NUM_LABELS, _END = 5, 2  # MiniSBD's labels of a character; here 0, or 2 at a sentence's end
_CHARACTERS = {  # of each class but letters, which depend on the language
    "full stop": ".",
    "end": "!?؟।॥։።።",
    "wide end": "。！？｡．",
    "space": " ",
    "closer": "\"'”’»)]}」』）",
    "opener": "“„«‹‘‚([{¿¡「『（",
}
_CLASSES = ["padding", "other", *_CHARACTERS, "small letter", "letter"]
_OFFSETS = range(-3, 3)  # of the characters read, relative to the one that may end a sentence
# A sum of at least 24 ends a sentence: 10 for the space, 10 for a capital or opener after it, and 4
# for an end, or for a full stop after three letters. A wide end suffices alone.
_WEIGHTS = {
    (0, "full stop"): 1,
    (0, "end"): 4,
    (0, "wide end"): 40,
    **{(offset, name): 1 for offset in (-3, -2, -1) for name in ("small letter", "letter")},
    (1, "space"): 10,
    (1, "closer"): -20,
    (1, "wide end"): -20,
    (2, "letter"): 10,
    (2, "opener"): 10,
}
_NEEDED = 24
_INT64, _FLOAT = 7, 1  # numbers of the ONNX format: types of tensors, of attributes


def splitter(characters: Iterable[str], language: str) -> bytes:
    """Return the ONNX file of a splitter; other letters than those in `characters` are unknown."""
    classes = {char: name for name, chars in _CHARACTERS.items() for char in chars}
    for char in characters:
        if char.isalpha():
            classes[char] = "small letter" if char.islower() else "letter"
    ids = {"<PAD>": 0, "<UNK>": 1}
    ids |= {char: _CLASSES.index(name) for char, name in sorted(classes.items())}
    kernel = np.zeros((_NUM_LABELS, len(_CLASSES), len(_OFFSETS)), np.float32)
    for (offset, name), weight in _WEIGHTS.items():
        kernel[_END, _CLASSES.index(name), _OFFSETS.index(offset)] = weight
    bias = np.full(_NUM_LABELS, -1000, np.float32)
    bias[0], bias[_END] = 0, 0.5 - _NEEDED
    vocabulary = {"lang": language, "_unit2id": ids, "_id2unit": _CLASSES, "lower": False}
    vocabulary |= {"lang_replaces_spaces": False, "idx": 0, "cutoff": 0}
    # MiniSBD passes features of each character; the graph must have that input, but ignores it
    settings = {"feat_funcs": ["numeric"], "batch_size": 16}
    metadata = {"lang_code": language, "config": settings, "vocab": vocabulary}
    pads = [-_OFFSETS[0], _OFFSETS[-1]]
    swap = [_ints("perm", [0, 2, 1])]
    nodes = [
        _node("Gather", ["one_hot", "units"], "classes"),
        _node("Transpose", ["classes"], "channels", swap),
        _node("Conv", ["channels", "kernel", "bias"], "scores", [_ints("pads", pads)]),
        _node("Transpose", ["scores"], "labels", swap),
    ]
    tensors = {"one_hot": np.eye(len(_CLASSES), dtype=np.float32), "kernel": kernel, "bias": bias}
    graph = [_message(1, node) for node in nodes]
    graph.append(_message(2, b"splitter"))
    graph += [_message(5, _tensor(name, values)) for name, values in tensors.items()]
    graph.append(_message(11, _value("units", _INT64, ["batch", "length"])))
    graph.append(_message(11, _value("features", _FLOAT, ["batch", "length", "features"])))
    graph.append(_message(12, _value("labels", _FLOAT, ["batch", "length", "labels"])))
    model = [_number(1, 8), _message(2, b"mtrain"), _message(7, b"".join(graph))]
    model.append(_message(8, _number(2, 13)))  # the version of the operators
    for key, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value)
        model.append(_message(14, _message(1, key.encode()) + _message(2, text.encode())))
    return b"".join(model)


# Protocol Buffers, as far as a graph needs them


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _ints(name: str, values: list[int]) -> bytes:
    """Return an attribute of integers."""
    numbers = b"".join(_number(8, value) for value in values)
    return _message(1, name.encode()) + numbers + _number(20, 7)


def _node(kind: str, inputs: list[str], output: str, attributes: Iterable[bytes] = ()) -> bytes:
    content = [_message(1, name.encode()) for name in inputs]
    content += [_message(2, output.encode()), _message(4, kind.encode())]
    return b"".join([*content, *(_message(5, attribute) for attribute in attributes)])


def _tensor(name: str, values: npt.NDArray[np.float32]) -> bytes:
    sizes = b"".join(_number(1, size) for size in values.shape)
    data = _message(9, values.astype("<f4").tobytes())
    return sizes + _number(2, _FLOAT) + _message(8, name.encode()) + data


def _value(name: str, kind: int, sizes: list[str]) -> bytes:
    """Return the name and type of an input or output."""
    shape = b"".join(_message(1, _message(2, size.encode())) for size in sizes)
    tensor_type = _number(1, kind) + _message(2, shape)
    return _message(1, name.encode()) + _message(2, _message(1, tensor_type))
