"""Write a sentence splitter as MiniSBD reads it: an ONNX graph that follows one rule.

Argos Translate splits text by such a graph, and downloads one if a package has none. The rule: a
sentence ends after a full stop, a question mark or an exclamation mark that a space and a capital
follow, but not after a full stop that ends a word of less than three letters, which is often an
abbreviation. In scripts without capitals the space suffices, in scripts without spaces the mark. In
Korean one letter, a syllable, is enough before a full stop. Combining marks count as letters.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable

import numpy as np

from mtrain.decode.split_long import SENTENCE_ENDS, WIDE_SENTENCE_ENDS

_NUM_LABELS, _END = 5, 2  # MiniSBD's labels of a character; here 0, or 2 at a sentence's end
_CHARACTERS = {  # of each class but letters, which depend on the language
    "full stop": ".",
    "end": SENTENCE_ENDS.replace(".", ""),
    "wide end": WIDE_SENTENCE_ENDS + "．",
    "space": " ",
    "closer": "\"'”’»)]}」』）",
    "opener": "“„«‹‘‚([{¿¡「『（",
}
_CLASSES = ["padding", "other", *_CHARACTERS, "small letter", "letter", "syllable"]
_OFFSETS = range(-3, 3)  # of the characters read, relative to the one that may end a sentence
# A sum of at least 24 ends a sentence: 10 for the space, 10 for a capital or opener after it, and 4
# for an end, or for a full stop after three letters or a Korean syllable, which are at most 3
# without it. A wide end suffices alone.
_WEIGHTS = {
    (0, "full stop"): 1,
    (0, "end"): 4,
    (0, "wide end"): 40,
    **{(offset, name): 1 for offset in (-3, -2, -1) for name in ("small letter", "letter")},
    (-1, "syllable"): 3,
    (1, "space"): 10,
    (1, "closer"): -20,
    (1, "wide end"): -20,
    (2, "letter"): 10,
    (2, "syllable"): 10,
    (2, "opener"): 10,
}
_NEEDED = 24


def splitter(characters: Iterable[str], language: str) -> bytes:
    """Return the ONNX file of a splitter; other letters than those in `characters` are unknown."""
    from onnx import TensorProto, helper, numpy_helper

    classes = {char: name for name, chars in _CHARACTERS.items() for char in chars}
    for char in characters:
        if "\uac00" <= char <= "\ud7a3":
            classes[char] = "syllable"
        elif unicodedata.category(char)[0] in "LM":
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
    metadata = {
        "lang_code": language,
        "config": json.dumps(settings),
        "vocab": json.dumps(vocabulary),
    }
    nodes = [
        helper.make_node("Gather", ["one_hot", "units"], ["classes"]),
        helper.make_node("Transpose", ["classes"], ["channels"], perm=[0, 2, 1]),
        helper.make_node(
            "Conv", ["channels", "kernel", "bias"], ["scores"], pads=[-_OFFSETS[0], _OFFSETS[-1]]
        ),
        helper.make_node("Transpose", ["scores"], ["labels"], perm=[0, 2, 1]),
    ]
    tensors = {"one_hot": np.eye(len(_CLASSES), dtype=np.float32), "kernel": kernel, "bias": bias}
    number, real, axes = TensorProto.INT64, TensorProto.FLOAT, ["batch", "length"]
    units = helper.make_tensor_value_info("units", number, axes)
    features = helper.make_tensor_value_info("features", real, [*axes, "features"])
    labels = helper.make_tensor_value_info("labels", real, [*axes, "labels"])
    weights = [numpy_helper.from_array(values, name) for name, values in tensors.items()]
    graph = helper.make_graph(nodes, "splitter", [units, features], [labels], weights)
    operators = [helper.make_opsetid("", 13)]
    model = helper.make_model(graph, producer_name="mtrain", ir_version=8, opset_imports=operators)
    helper.set_model_props(model, metadata)
    content: bytes = model.SerializeToString()
    return content
