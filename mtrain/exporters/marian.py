"""Export a model to Marian, and translate with Marian.

The exported weights differ from the run's in two ways that change no probability. Marian's
sinusoids have all sines before all cosines, while mtrain's alternate: the model dimension is
permuted. A target begins with zeros in Marian and with the embedding of <s> in mtrain: that
embedding is subtracted from all target embeddings, which changes all logits of a position by the
same amount, and the biases of the first layer add it again.

The wavelengths of the sinusoids do change the output: 10000^(i / (D/2 - 1)) in Marian, and
10000^(i / (D/2)) in the paper and in mtrain. `write` returns a copy of the model with Marian's
wavelengths, and the export is compared with that copy.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from mtrain.config.config_file import dump_inline
from mtrain.config.sections import Config
from mtrain.errors import RunError
from mtrain.exporters.exporter import (
    BATCH_SIZE,
    LAYER_WEIGHT,
    MASKED_BIAS,
    SOURCE_FILE,
    TARGET_FILE,
    Archive,
    ExportedHypothesis,
    Ids,
    OwnCall,
    Requirement,
    SentencePieceSides,
    agreement,
    ids_of_pieces,
    longest,
    sines_first,
    version_of,
    write_sentencepiece,
)
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.sentencepiece import Tokenizer, Vocabulary

PACKAGE, TITLE, TAG = "pymarian", "Marian", "marian-nmt"
OTHER_PACKAGES: tuple[str, ...] = ()
REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement("model.norm", "post", "Marian, whose targets begin with zeros, not with <s>"),
    Requirement("model.positions", "sinusoidal", "Marian, which decodes with sinusoids only"),
    Requirement("model.activation", "relu", "Marian, whose gelu is x sigmoid(1.702 x)"),
    Requirement("model.attention_window", None, "Marian, which attends to all positions"),
)
QUANTIZATIONS: tuple[str, ...] = ()
ARCHIVE: Archive | None = None
USE = """\
In this folder, with Marian or with `pip install pymarian`:

```sh
echo {line_in_shell} | marian-decoder -c decoder.yml
echo {line_in_shell} | pymarian decode -c decoder.yml
marian-server -c decoder.yml -p 8080
```

```python
import pymarian

translator = pymarian.Translator("-c decoder.yml --quiet")
lines = [{line!r}]
print(translator.translate(lines))
```
"""
NOTES = """\
- Marian's sinusoids have other wavelengths than the paper's, with which this model was trained. The
  comparison below is with the model at Marian's wavelengths; what the change costs is in its last
  lines.
- `decoder.yml` translates on the CPU with one thread (`--cpu-threads N` for more,
  `--cpu-threads 0` for a GPU), and ends an output after 3 times the tokens of its source.
- Marian divides a score by length^alpha, mtrain by ((5 + length) / 6)^alpha, so that their beams
  rank a little differently.
- A source of more than {num_positions:,} tokens gives an empty line.
- Marian writes `<unk>` and line breaks only with `--allow-unk` and `--allow-special`.
"""
MIN_POSITIONS = 1024
_MAX_LENGTH_FACTOR = 3  # of an output to its source; Marian's default
_MODULES = {  # of a layer, by their names in mtrain; a weight is split by rows among several
    "self_attention.queries_keys_values": ["self_?q", "self_?k", "self_?v"],
    "self_attention.output": ["self_?o"],
    "cross_attention.queries": ["context_?q"],
    "cross_attention.source_keys_values": ["context_?k", "context_?v"],
    "cross_attention.output": ["context_?o"],
    "feed_forward.inner": ["ffn_?1"],
    "feed_forward.outer": ["ffn_?2"],
}
_NORMS = {"encoder": ["self_Wo", "ffn_ffn"], "decoder": ["self_Wo", "context_Wo", "ffn_ffn"]}


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: str | None,
) -> Transformer:
    """Write a model and its SentencePiece models; return the model that Marian computes."""
    tgt, sizes = tokenizer.tgt, model.config
    arrays: dict[str, Any] = {name: weight.numpy() for name, weight in _weights(model, tgt).items()}
    settings = {
        "type": "transformer",
        "dim-vocabs": [len(tokenizer.src), len(tgt)],
        "dim-emb": sizes.d_model,
        "enc-depth": sizes.num_encoder_layers,
        "dec-depth": sizes.num_decoder_layers,
        "transformer-heads": sizes.num_heads,
        "transformer-dim-ffn": sizes.d_ff,
        "transformer-ffn-activation": sizes.activation,
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-decoder-autoreg": "self-attention",
        "tied-embeddings": sizes.tie_embeddings == "decoder",
        "tied-embeddings-all": sizes.tie_embeddings == "all",
        "layer-normalization": False,
        "version": "v1.12.0",
    }
    text = yaml.safe_dump(settings).encode() + b"\0"
    arrays["special:model.yml"] = np.frombuffer(text, np.int8)
    np.savez(directory / "model.npz", **arrays)
    write_sentencepiece(tokenizer, directory)
    decoder = {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": [SOURCE_FILE, TARGET_FILE],
        "beam-size": config.decoding.beam,
        "normalize": config.decoding.length_alpha,
        "max-length": longest(config, MIN_POSITIONS),
        "max-length-factor": _MAX_LENGTH_FACTOR,
        "mini-batch": BATCH_SIZE,
        "maxi-batch": 100,
        "maxi-batch-sort": "src",
        "cpu-threads": 1,
    }
    (directory / "decoder.yml").write_text(yaml.safe_dump(decoder, sort_keys=False))
    return _with_wavelengths(model, longest(config, MIN_POSITIONS))


def _with_wavelengths(model: Transformer, count: int) -> Transformer:
    """Return a copy of a model with `count` positions, which are Marian's sinusoids."""
    d_model = model.config.d_model
    changed = {"positions": "learned", "max_positions": count}
    other = Transformer(
        model.config.model_copy(update=changed),
        model.src_embedding.num_embeddings,
        model.tgt_embedding.num_embeddings,
    )
    exponents_K = torch.arange(d_model // 2, dtype=torch.float64) / (d_model / 2 - 1)
    angles_TK = torch.arange(count, dtype=torch.float64)[:, None] / 10_000.0**exponents_K
    table_TD = torch.stack([angles_TK.sin(), angles_TK.cos()], -1).flatten(1).float()
    tables = {f"{side}_positions.table.weight": table_TD for side in ("src", "tgt")}
    other.load_state_dict(model.state_dict() | tables)
    return other.eval()


def _weights(model: Transformer, tgt: Vocabulary) -> dict[str, Tensor]:
    """Return a model's weights by Marian's names; a tied embedding is stored once."""
    d_model, tie = model.config.d_model, model.config.tie_embeddings
    state = {name: weight.double() for name, weight in sines_first(model).items()}
    start_D = state["tgt_embedding.weight"][tgt.bos].clone()
    state["tgt_embedding.weight"] = state["tgt_embedding.weight"] - start_D
    if tie != "none":
        state["output.weight"] = state["tgt_embedding.weight"]
    shifted = ["decoder"]
    if tie == "all":
        state["src_embedding.weight"] = state["tgt_embedding.weight"]
        shifted.append("encoder")
    for stack in shifted:
        name = f"{stack}.0.self_attention."
        added_D = math.sqrt(d_model) * start_D
        state[f"{name}queries_keys_values.bias"] += (
            state[f"{name}queries_keys_values.weight"] @ added_D
        )
        state[f"{name}output.bias"] += added_D
    weights: dict[str, Tensor] = {}
    for name, weight in state.items():
        if not (match := LAYER_WEIGHT.fullmatch(name)):
            continue
        stack, index, module, kind = match.groups()
        prefix = f"{stack}_l{int(index) + 1}"
        if module in _MODULES:
            names = _MODULES[module]
            for short, rows in zip(names, weight.chunk(len(names)), strict=True):
                full = f"{prefix}_{short.replace('?', 'Wb'[kind == 'bias'])}"
                weights[full] = rows.T if kind == "weight" else rows[None]
        else:  # residual_1.norm and the like
            short = _NORMS[stack][int(module[len("residual_")]) - 1]
            suffix = "scale" if kind == "weight" else "bias"
            weights[f"{prefix}_{short}_ln_{suffix}"] = weight[None]
    if tie == "all":
        weights["Wemb"] = state["tgt_embedding.weight"]
    else:
        weights["encoder_Wemb"] = state["src_embedding.weight"]
        weights["decoder_Wemb"] = state["tgt_embedding.weight"]
    if tie == "none":
        weights["decoder_ff_logit_out_Wt"] = state["output.weight"]
    bias = torch.zeros(1, len(state["output.weight"]))
    bias[0, tgt.never_generated] = MASKED_BIAS
    weights["decoder_ff_logit_out_b"] = bias
    return {name: weight.float().contiguous() for name, weight in weights.items()}


class MarianProgram(SentencePieceSides):
    """An exported folder, run by Marian on the CPU; each call starts a process."""

    masks_special = True  # by the bias of the output projection

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / SOURCE_FILE, directory / TARGET_FILE)
        self._directory = directory

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        """Return the target of the highest log-probability of each source."""
        lengths = zip(max_lengths, sources, strict=True)
        factor = max((limit + 1) / len(ids) for limit, ids in lengths)
        options = ["--beam-size", str(beam), "--max-length-factor", str(math.ceil(factor))]
        options += ["--n-best", "--word-scores", "--no-spm-encode", "--no-spm-decode"]
        options += ["--normalize", "0", "--allow-unk", "--allow-special"]
        best: dict[int, ExportedHypothesis] = {}
        lines = [" ".join(self.src.pieces_of(ids[:-1])) for ids in sources]
        for output in self._translate(lines, options):
            head, word_scores, _, _ = output.rsplit(" ||| ", 3)
            number, _, pieces = head.partition(" |||")
            if int(number) not in best:  # the first output of a line is the best one
                ids = self._ids_of(pieces)
                # their sum is printed too, but with six significant digits
                log_probs = [float(score) for score in word_scores.partition("=")[2].split()]
                has_ended = len(log_probs) > len(ids)
                best[int(number)] = ExportedHypothesis(ids, sum(log_probs), has_ended)
        return [best[number] for number in range(len(sources))]

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """Return the log-probability of each token of a given target, and of its eos."""
        sides = {"src": (self.src, [ids[:-1] for ids in sources]), "tgt": (self.tgt, targets)}
        max_length = max(len(ids) for ids in (*sources, *targets)) + 1
        with TemporaryDirectory() as directory:
            for name, (vocabulary, rows) in sides.items():
                text = "".join(f"{' '.join(vocabulary.pieces_of(ids))}\n" for ids in rows)
                Path(directory, name).write_text(text, "utf-8")
                pieces = dump_inline(ids_of_pieces(vocabulary))
                Path(directory, f"{name}.yml").write_text(pieces, "utf-8")
            options = ["--model", "model.npz"]
            options += ["--train-sets", *(f"{directory}/{name}" for name in sides)]
            options += ["--vocabs", *(f"{directory}/{name}.yml" for name in sides)]
            options += ["--word-scores", "--max-length", str(max_length)]
            outputs = self._run("score", options)
        return [[float(score) for score in line.partition("=")[2].split()] for line in outputs]

    def own_call(self, lines: Sequence[str]) -> OwnCall:
        """Compare translations of text that Marian tokenizes with translations of pieces."""
        lines = [" ".join(line.splitlines()) for line in lines]
        pieces = [" ".join(self.src.pieces_of(ids[:-1])) for ids in self.encode(lines)]
        outputs = self._translate(pieces, ["--no-spm-encode", "--no-spm-decode"])
        ids = [self._ids_of(line) for line in outputs]
        expected_texts = self.tgt.decode(ids)
        texts = self._translate(lines, [])
        pairs = zip(texts, expected_texts, strict=True)
        same = agreement(text == expected for text, expected in pairs)
        return OwnCall(f"{PACKAGE} {version_of(PACKAGE)}", same)

    def _ids_of(self, pieces: str) -> list[int]:
        """Return the ids of pieces between spaces; a piece may have any other Unicode space."""
        return [self.id_of[piece] for piece in pieces.split(" ") if piece]

    def _translate(self, lines: Sequence[str], options: list[str]) -> list[str]:
        """Translate lines with Marian by `decoder.yml` and `options`; return its output lines."""
        return self._run("decode", ["--config", "decoder.yml", *options], lines)

    def _run(self, command: str, options: list[str], lines: Sequence[str] = ()) -> list[str]:
        """Run a command of pymarian with `lines` as its input; return its output lines.

        Raises:
            RunError: if it fails.
        """
        threads = str(torch.get_num_threads())
        completed = subprocess.run(
            [sys.executable, "-m", PACKAGE, command, *options, "--quiet", "--cpu-threads", threads],
            input="".join(f"{line}\n" for line in lines).encode(),
            capture_output=True,
            cwd=self._directory,
        )
        if completed.returncode:
            messages = completed.stderr.decode(errors="replace").splitlines()
            why = next((line for line in messages if "Error" in line), "no error message")
            raise RunError(f"{PACKAGE} cannot {command} with the model: {why}")
        return completed.stdout.decode().split("\n")[:-1]


load = MarianProgram  # the `load` of the `Exporter` protocol
