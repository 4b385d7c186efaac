"""Export a model to ONNX Runtime and transformers.js, and translate with the exported graphs.

ONNX Runtime runs one decoding step and has no search: mtrain's own search calls it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrain.config.sections import Config
from mtrain.data.batch import Batch, keep_first, pad_right
from mtrain.decode.beam import BeamSearch, Constraints, RequestGroup
from mtrain.decode.options import DecodingOptions
from mtrain.errors import RunError
from mtrain.exporters import onnx_graphs, parity
from mtrain.exporters.exporter import (
    Archive,
    ExportedHypothesis,
    ExportedModel,
    Ids,
    OwnCall,
    Requirement,
    SpecialIds,
    agreement,
    in_batches,
    score_by_logits,
)
from mtrain.exporters.huggingface import architecture, special_ids
from mtrain.exporters.tokenizer_json import special_pieces, tokenizer_json
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.sentencepiece import Tokenizer

if TYPE_CHECKING:
    import onnxruntime

PACKAGE, TAG = "onnxruntime", "onnx"
OTHER_PACKAGES: tuple[str, ...] = ("onnx", "tokenizers")
TITLE = "ONNX Runtime and transformers.js"
REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "tokenizer.shared", True, "transformers.js, which has one tokenizer for both languages"
    ),
)
QUANTIZATIONS: tuple[str, ...] = ()  # weights of 8 bits are always beside those of float32
ARCHIVE: Archive | None = None
USE = """\
In JavaScript, after `npm install --ignore-scripts @huggingface/transformers`, with this folder as
`./model`:

```js
import {{ env, pipeline }} from "@huggingface/transformers";

env.allowLocalModels = true;
env.allowRemoteModels = false;
env.localModelPath = ".";
const translate = await pipeline("translation", "model", {{ dtype: "q8" }});
const [translation] = await translate({line!r}, {{ max_new_tokens: {max_length} }});
console.log(translation.translation_text);
```
"""
NOTES = """\
- `dtype: "q8"` is the files of 8 bits, `"fp32"` those of float32. Only greedy search is there.
- A blank line does not give an empty translation: skip such lines.
- Text is split into lines by the caller; one line is one translation.
- The graphs are `onnx/encoder_model.onnx` and `onnx/decoder_model_merged.onnx`, whose cache is
  empty at the first step; those with `_quantized` have weights of 8 bits.
"""
_QUANTISED = "_quantized"
_NAMES = ("encoder_model", "decoder_model_merged")
_PROGRAM, _NODE_PACKAGE = "transformers.js", "@huggingface/transformers"
_NODE_PROGRAM = """\
const { library, directory, dtype, numThreads, lines, maxNewTokens } = JSON.parse(
  require("fs").readFileSync(0, "utf-8"));
const { env, pipeline } = require(library);
env.allowLocalModels = true;
env.allowRemoteModels = false;
env.localModelPath = "";
const session_options = { intraOpNumThreads: numThreads };
pipeline("translation", directory, { dtype, session_options }).then(async (translate) => {
  const texts = [];
  for (const line of lines) {
    const [result] = await translate(line, { max_new_tokens: maxNewTokens });
    texts.push(result.translation_text);
  }
  console.log(JSON.stringify({ version: env.version, texts }));
});
"""


MIN_POSITIONS = 4096  # no limit: the graph computes its sinusoids


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: str | None,
) -> None:
    """Write the graphs, in float32 and in 8 bits, and the JSON files that transformers.js reads."""
    import onnx

    (directory / "onnx").mkdir(parents=True)
    graphs = (onnx_graphs.encoder(model), onnx_graphs.decoder(model))
    for name, graph in zip(_NAMES, graphs, strict=True):
        onnx.save(graph, directory / f"onnx/{name}.onnx")
        onnx.save(onnx_graphs.quantised(graph), directory / f"onnx/{name}{_QUANTISED}.onnx")
    tgt, decoding = tokenizer.tgt, config.decoding
    pad, unk, bos, eos = special_pieces(tgt)
    trees = {
        "config": {
            "model_type": "marian",
            "is_encoder_decoder": True,
            **architecture(model, tokenizer),
        },
        "generation_config": {
            "num_beams": 1,
            # with bos and eos; a `max_new_tokens` here would overrule the `max_length` of a caller
            "max_length": config.data.max_tokens + decoding.max_extra_tokens + 2,
            "suppress_tokens": tgt.never_generated,
            **special_ids(tgt),
        },
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "unk_token": unk,
            "bos_token": bos,
            "eos_token": eos,
            "additional_special_tokens": [pad, unk, bos, eos],  # never read from text
            "clean_up_tokenization_spaces": False,  # of " ." and the like
        },
        "tokenizer": tokenizer_json(tgt),
    }
    for name, tree in trees.items():
        text = json.dumps(tree, ensure_ascii=False, indent=None if name == "tokenizer" else 2)
        (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")


class OnnxModel(ExportedModel):
    """An exported folder, loaded by ONNX Runtime on the CPU."""

    masks_special = False  # `search` never chooses <pad>, <s> or a tag; scores include them

    def __init__(self, directory: Path, suffix: str = "") -> None:
        import onnxruntime
        import tokenizers

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._directory = directory
        self.quantised = None if suffix else OnnxModel(directory, _QUANTISED)
        self._encoder, self.decoder = (
            onnxruntime.InferenceSession(directory / f"onnx/{name}{suffix}.onnx", options)
            for name in _NAMES
        )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        tree = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        self._special = {
            self._tokenizer.token_to_id(token) for token in tree["additional_special_tokens"]
        }
        generation = json.loads((directory / "generation_config.json").read_text("utf-8"))
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        self._special_ids = SpecialIds(*(int(generation[name]) for name in names))
        self._never: list[int] = generation["suppress_tokens"]

    def encode(self, lines: Sequence[str]) -> Ids:
        """Return tokens + eos for each line."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(lines))]

    def decode(self, ids: Ids) -> list[str]:
        """Return the text of each list of tokens, without special ones."""
        kept = [[token for token in row if token not in self._special] for row in ids]
        texts: list[str] = self._tokenizer.decode_batch(kept)
        return texts

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        """Return the target of the highest log-probability of each source, by mtrain's search."""
        options = DecodingOptions(beam=beam, length_alpha=0.0, with_scores=True)

        def step(ids_N: Tensor, state: OnnxState) -> Tensor:
            return state.logits(ids_N[:, None])[:, 0]

        def search_rows(rows: list[int]) -> list[ExportedHypothesis]:
            limits_B = np.array([max_lengths[row] for row in rows], np.int64)
            pad, bos, eos = self._special_ids
            constraints = Constraints(bos, eos, self._never, limits_B)
            src = [sources[row] for row in rows]
            state = self.start(pad_right(src, pad), keep_first([len(ids) for ids in src]))
            search = BeamSearch(step, options)
            numbers = search.admit(RequestGroup(state, constraints))
            while search.num_open:
                search.advance()
            best = [search.take_best(number)[0] for number in numbers]
            return [ExportedHypothesis(each.ids, each.log_prob, has_ended=True) for each in best]

        return in_batches([len(ids) for ids in sources], search_rows)

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""

        def logits_of(batch: Batch) -> Tensor:
            return self.start(batch.src_BS, batch.src_keep_BS).logits(batch.tgt_in_BT)

        return score_by_logits(sources, targets, self._special_ids, logits_of)

    def start(self, src_BS: Tensor, src_keep_BS: Tensor) -> OnnxState:
        """Encode sources; return the state of a search, with one row for each source."""
        mask_BS = src_keep_BS.long().numpy()
        feeds = {"input_ids": src_BS.numpy(), "attention_mask": mask_BS}
        (memory_BSD,) = self._encoder.run(None, feeds)
        return OnnxState(self.decoder, memory_BSD, mask_BS)

    def own_call(self, lines: Sequence[str]) -> OwnCall:
        """Compare the pipeline of transformers.js, found by NODE_PATH, with greedy `search`."""
        try:
            version, texts = self.translate(lines, "fp32")
        except LookupError as error:
            return OwnCall(_PROGRAM, None, (str(error),))
        sources = self.encode(lines)
        limits = [max(map(len, sources))] * len(sources)
        ours = self.decode([output.ids for output in self.search(sources, 1, limits)])
        pairs = zip(ours, texts, strict=True)  # invalid UTF-8 is decoded differently
        same = agreement(our == their or parity.REPLACEMENT in our for our, their in pairs)
        return OwnCall(f"{_PROGRAM} {version}", same)

    def translate(
        self, lines: Sequence[str], dtype: Literal["fp32", "q8"]
    ) -> tuple[str, list[str]]:
        """Translate text by transformers.js under node; return its version and the translations.

        Raises:
            LookupError: if node or transformers.js is missing; the message says which.
            RunError: if node fails.
        """
        node, roots = shutil.which("node"), os.environ.get("NODE_PATH", "").split(os.pathsep)
        candidates = [Path(root, _NODE_PACKAGE) for root in roots if root]
        libraries = [str(path.resolve()) for path in candidates if path.is_dir()]
        if node is None:
            raise LookupError("node is not installed")
        if not libraries:
            raise LookupError("it is in no folder that NODE_PATH names")
        request = {
            "library": libraries[0],
            "directory": str(self._directory.resolve()),
            "dtype": dtype,
            "numThreads": torch.get_num_threads(),
            "lines": list(lines),
            "maxNewTokens": max(map(len, self.encode(lines))) + 1,
        }
        completed = subprocess.run(
            [node, "-e", _NODE_PROGRAM],
            input=json.dumps(request),
            capture_output=True,
            encoding="utf-8",
        )
        if completed.returncode:
            raise RunError(f"{_PROGRAM}: must translate, but ends with: {completed.stderr.strip()}")
        answer = json.loads(completed.stdout)
        return answer["version"], answer["texts"]


load = OnnxModel  # the `load` of the `Exporter` protocol


class OnnxState:
    """The source and the key-value cache of a search, one row for each open hypothesis."""

    def __init__(
        self,
        decoder: onnxruntime.InferenceSession,
        memory_BSD: npt.NDArray[Any],
        src_keep_BS: npt.NDArray[Any],
    ) -> None:
        self._decoder = decoder
        self.feeds = {"encoder_hidden_states": memory_BSD, "encoder_attention_mask": src_keep_BS}
        for graph_input in decoder.get_inputs():
            if graph_input.name.startswith("past_key_values."):
                shape = [size if isinstance(size, int) else 0 for size in graph_input.shape]
                shape[0] = len(memory_BSD)
                self.feeds[graph_input.name] = np.zeros(shape, np.float32)

    def logits(self, ids_NT: Tensor) -> Tensor:
        """Return the logits [N, T, V] of the tokens that follow `ids_NT`, and append them."""
        feeds = self.feeds | {"input_ids": ids_NT.numpy()}
        logits_NTV, *present = self._decoder.run(None, feeds)
        names = [output.name for output in self._decoder.get_outputs()[1:]]
        for name, cached in zip(names, present, strict=True):
            self.feeds[name.replace("present.", "past_key_values.")] = cached
        return torch.from_numpy(logits_NTV)

    def reorder(self, rows_N: npt.NDArray[np.int64]) -> None:
        """Keep these rows, in this order; a row may occur once, several times, or not at all."""
        self.feeds = {name: rows[rows_N] for name, rows in self.feeds.items()}

    def admit(self, other: OnnxState) -> None:
        """Raise RuntimeError: a search with ONNX Runtime has one batch."""
        raise RuntimeError("a search with ONNX Runtime must have one batch, but gets a second one.")
