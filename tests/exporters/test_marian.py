"""A Marian export computes the run's model with the wavelengths of Marian's sinusoids."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from builders import SRC_LINES, model_config, transformer
from conftest import Cli
from exporting import (
    EXACT,
    EXPORTERS,
    LINES,
    ODD,
    copied,
    need,
    random_model,
    settings,
    tempted_model,
    translator_of,
)
from torch import Tensor

from mtrain.config.sections import TokenizerConfig
from mtrain.decode.translator import EncodedSource
from mtrain.errors import ConfigError
from mtrain.exporters import marian, parity
from mtrain.exporters.exporter import ids_of_pieces, write_sentencepiece
from mtrain.model.transformer import Transformer
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

VARIANTS = [
    {"tie_embeddings": "all"},
    {"tie_embeddings": "decoder", "kind": "bpe"},
    {"tie_embeddings": "decoder", "shared": False},
    {"tie_embeddings": "none", "shared": False, "num_decoder_layers": 1},
]


class Formulas:
    """A model file computed by Marian's formulas."""

    def __init__(self, path: Path) -> None:
        arrays = dict(np.load(path))
        self.settings = yaml.safe_load(bytes(arrays.pop("special:model.yml")).rstrip(b"\0"))
        self.weights = {name: torch.tensor(array).double() for name, array in arrays.items()}

    def log_probs(self, src: list[int], tgt: list[int]) -> Tensor:
        """Return the log-probabilities [T + 1, V] of the tokens of `tgt` (T, no bos) and of eos."""
        memory = self.stack("encoder", self.embedded("encoder", src))
        start = torch.zeros(1, self.settings["dim-emb"])
        states = torch.cat([start, self.table("decoder")[tgt]])
        out = self.stack("decoder", self.placed(states), memory)
        matrix = self.weights.get("decoder_ff_logit_out_Wt", self.table("decoder"))
        return (out @ matrix.T + self.weights["decoder_ff_logit_out_b"]).log_softmax(-1)

    def table(self, side: str) -> Tensor:
        return self.weights.get("Wemb", self.weights.get(f"{side}_Wemb"))  # type: ignore[return-value]

    def embedded(self, side: str, ids: list[int]) -> Tensor:
        return self.placed(self.table(side)[ids])

    def placed(self, states: Tensor) -> Tensor:
        length, width = states.shape
        step = math.log(10_000) / (width / 2 - 1)
        angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(width // 2))
        return math.sqrt(width) * states + torch.cat([angles.sin(), angles.cos()], -1)

    def stack(self, name: str, states: Tensor, memory: Tensor | None = None) -> Tensor:
        for number in itertools.count(1):
            layer = f"{name}_l{number}"
            if f"{layer}_ffn_W1" not in self.weights:
                return states
            causal = memory is not None
            states = self.attended(f"{layer}_self", states, states, causal)
            if memory is not None:
                states = self.attended(f"{layer}_context", states, memory, causal=False)
            inner = self.linear(f"{layer}_ffn", "1", states).relu()
            states = self.normed(
                f"{layer}_ffn_ffn", states + self.linear(f"{layer}_ffn", "2", inner)
            )
        raise AssertionError

    def attended(self, name: str, states: Tensor, memory: Tensor, causal: bool) -> Tensor:
        heads = self.settings["transformer-heads"]
        query, key, value = (
            self.linear(name, kind, over).unflatten(-1, (heads, -1)).transpose(0, 1)
            for kind, over in zip("qkv", (states, memory, memory), strict=True)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        added = self.linear(name, "o", mixed.transpose(0, 1).flatten(1))
        return self.normed(f"{name}_Wo", states + added)

    def linear(self, name: str, kind: str, states: Tensor) -> Tensor:
        return states @ self.weights[f"{name}_W{kind}"] + self.weights[f"{name}_b{kind}"]

    def normed(self, name: str, states: Tensor) -> Tensor:
        scale, bias = self.weights[f"{name}_ln_scale"][0], self.weights[f"{name}_ln_bias"][0]
        return F.layer_norm(states, scale.shape, scale, bias, eps=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_formulas_of_marian_give_the_log_probs_of_the_model_with_the_wavelengths_of_marian(
    variant: dict[str, object], tmp_path: Path
) -> None:
    translator = random_model(**variant)  # type: ignore[arg-type]
    tokenizer = translator.tokenizer
    near = marian.write(translator.model, tokenizer, settings(), tmp_path, None)
    searcher = parity.LogProbSearcher(translator_of(near, tokenizer), masks_special=True)
    model = Formulas(tmp_path / "model.npz")
    sources, targets = tokenizer.encode_src(LINES.src), tokenizer.tgt.encode(LINES.tgt)
    scores = searcher.score(sources, targets)
    others = translator.score([EncodedSource(ids) for ids in sources], targets)
    furthest = 0.0
    for src, tgt, ours, other in zip(sources, targets, scores, others, strict=True):
        log_probs = model.log_probs(src, tgt)
        theirs = log_probs.gather(1, torch.tensor([*tgt, tokenizer.tgt.eos])[:, None])[:, 0]
        assert theirs.tolist() == pytest.approx(ours, abs=EXACT)
        assert log_probs[:, [tokenizer.tgt.pad, tokenizer.tgt.bos]].max() < -5000
        furthest = max(furthest, *(abs(a - b) for a, b in zip(ours, other, strict=True)))
    assert furthest > 10 * EXACT, "the wavelengths make a difference"


def test_the_bias_keeps_padding_bos_and_tags_from_being_generated(tmp_path: Path) -> None:
    translator = tempted_model()
    tgt = translator.tokenizer.tgt
    marian.write(translator.model, translator.tokenizer, settings(), tmp_path, None)
    bias = np.load(tmp_path / "model.npz")["decoder_ff_logit_out_b"][0]
    assert set(np.flatnonzero(bias < -5000)) == {tgt.pad, tgt.bos, tgt.tags["bt"]}


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    for tie, names in {
        "all": {"Wemb"},
        "decoder": {"encoder_Wemb", "decoder_Wemb"},
        "none": {"encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_Wt"},
    }.items():
        translator = random_model(tie_embeddings=tie)
        marian.write(translator.model, translator.tokenizer, settings(), tmp_path, None)
        stored = {
            name for name in np.load(tmp_path / "model.npz") if "Wemb" in name or "Wt" in name
        }
        assert stored == names


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"norm": "pre"}, "`model.norm` must be 'post' for Marian, whose targets begin with zeros"),
        (
            {"activation": "gelu"},
            "`model.activation` must be 'relu' for Marian, whose gelu is x si",
        ),
        ({"positions": "learned", "max_positions": 8}, "Marian, which decodes with sinusoids only"),
        ({"attention_window": 3}, "Marian, which attends to all positions, but is 3 instead"),
    ],
    ids=str,
)
def test_settings_that_marian_does_not_support_are_refused_with_the_reason(
    variant: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        copied(random_model(**variant), "marian", tmp_path)  # type: ignore[arg-type]


def test_quantization_is_refused_and_a_failing_pymarian_is_an_error_without_a_folder(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pymarian that cannot translate."""
    folder = tmp_path / "site" / "pymarian"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    metadata = folder.parent / "pymarian-9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pymarian\nVersion: 9.0\n")
    metadata.with_name("top_level.txt").write_text("pymarian\n")
    (folder / "__main__.py").write_text("raise SystemExit('a line\\nError: no model')")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delitem(sys.modules, "pymarian", raising=False)
    command = ["export", trained.path, tmp_path / "out", "--to", "marian"]
    outcome = cli(*command, "--quantize", "int8")
    assert outcome.err == (
        "mtrain: `--quantize` must be left out with `--to marian`, which takes no choice; it is "
        "for ctranslate2, huggingface, argos.\n"
    )
    outcome = cli(*command)
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.splitlines()[-1] == (
        "mtrain: pymarian cannot decode with the model: Error: no model"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_pymarian_gives_the_outputs_and_scores_of_the_model(
    variant: dict[str, object], tmp_path: Path
) -> None:
    need("marian")
    translator = random_model(**variant)  # type: ignore[arg-type]
    tokenizer = translator.tokenizer
    near = marian.write(translator.model, tokenizer, settings(), tmp_path, None)
    copy = EXPORTERS["marian"].load(tmp_path)
    compared = parity.compare(translator_of(near, tokenizer), copy, LINES)
    assert compared.problems() == []
    assert compared.same_greedy == compared.same_text == (3, 3)
    assert compared.reference_diff < EXACT and compared.beam_diff < 10 * EXACT


def tokenizer_of(ending: str) -> Tokenizer:
    """Train a tokenizer on lines with this ending."""
    lines = [line + ending for line in SRC_LINES]
    config = TokenizerConfig(vocab_size=420)
    return sentencepiece.train(config, zip(lines, lines, strict=True), len(lines), seed=1)


@pytest.fixture(scope="module")
def with_unicode_spaces() -> Tokenizer:
    """A tokenizer with pieces that have a no-break space and an ideographic one."""
    return tokenizer_of("\N{NO-BREAK SPACE}! \N{IDEOGRAPHIC SPACE}x")


def test_pieces_with_unicode_spaces_are_read_from_the_output_of_marian(
    with_unicode_spaces: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Marian that prints its input, and scores whose sum has more than six digits."""
    write_sentencepiece(with_unicode_spaces, tmp_path)
    copy = marian.MarianProgram(tmp_path)

    def run(command: str, options: list[str], lines: Sequence[str] = ()) -> list[str]:
        if "--no-spm-decode" not in options:
            return list(lines)
        if "--n-best" not in options:
            return [f" {line} " for line in lines]
        scores = "-1000.12345 -234.10000 -0.00011"
        return [
            f"{n} ||| {line} ||| WordScores= {scores} ||| F0= -1234.22 ||| -1234.22"
            for n, line in enumerate(lines)
        ]

    monkeypatch.setattr(copy, "_run", run)
    monkeypatch.setattr(marian, "version_of", lambda package: "1.0")
    texts = ["a\N{NO-BREAK SPACE}!", "a \N{IDEOGRAPHIC SPACE}x"]
    sources = copy.encode(texts)
    pieces = "".join("".join(copy.src.pieces_of(ids)) for ids in sources)
    assert "\N{NO-BREAK SPACE}" in pieces and "\N{IDEOGRAPHIC SPACE}" in pieces
    for source, output in zip(sources, copy.search(sources, 1, [9, 9]), strict=True):
        assert output.ids == source[:-1]
        assert output.log_prob == pytest.approx(-1234.22356, abs=1e-9)
    assert copy.own_call(texts).same == (2, 2)


def test_pymarian_translates_into_pieces_with_unicode_spaces(
    with_unicode_spaces: Tokenizer, tmp_path: Path
) -> None:
    need("marian")
    size = len(with_unicode_spaces.tgt)
    model = transformer(model_config(), size, size).float()
    spaces = [
        number
        for number, piece in enumerate(with_unicode_spaces.tgt.pieces_of(range(size)))
        if len(piece.split()) != 1
    ]
    with torch.no_grad():
        model.output.weight[spaces] *= 2
    near = marian.write(model, with_unicode_spaces, settings(), tmp_path, None)
    compared = parity.compare(
        translator_of(near, with_unicode_spaces), EXPORTERS["marian"].load(tmp_path), LINES
    )
    assert compared.problems() == []


@pytest.fixture(scope="module")
def with_odd_pieces() -> Tokenizer:
    """A tokenizer with pieces that have an emoji, DEL and NEL."""
    return tokenizer_of(" \N{GRINNING FACE}x\x7fx\x85x")


def test_the_vocabularies_for_scoring_are_yaml_with_an_emoji_and_control_characters(
    with_odd_pieces: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A surrogate pair, as JSON escapes an emoji, is an error in the YAML reader of Marian."""
    write_sentencepiece(with_odd_pieces, tmp_path)
    copy = marian.MarianProgram(tmp_path)
    expected = ids_of_pieces(copy.src)
    for char in "\N{GRINNING FACE}\x7f\x85":
        assert any(char in piece for piece in expected)

    def run(command: str, options: list[str]) -> list[str]:
        first = options.index("--vocabs") + 1
        for path in options[first : first + 2]:
            assert yaml.safe_load(Path(path).read_text("utf-8")) == expected
        return ["0 ||| WordScores= -1.0 -2.0"]

    monkeypatch.setattr(copy, "_run", run)
    assert copy.score([[5, 3]], [[5]]) == [[-1.0, -2.0]]


def test_a_line_with_other_line_breaks_is_compared_with_the_line_that_marian_reads(
    with_odd_pieces: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Marian that prints its input."""
    write_sentencepiece(with_odd_pieces, tmp_path)
    copy = marian.MarianProgram(tmp_path)
    monkeypatch.setattr(copy, "_run", lambda command, options, lines: list(lines))
    monkeypatch.setattr(marian, "version_of", lambda package: "1.0")
    assert copy.own_call(["x\x85x", "x x"]).same == (2, 2)


def test_odd_text_is_encoded_and_decoded_by_marian_as_by_mtrain(
    trained: RunDir, tmp_path: Path
) -> None:
    need("marian")
    translator = random_model()
    copy = copied(translator, "marian", tmp_path)
    own_call = copy.own_call([*ODD, *SRC_LINES[:4]])
    assert own_call is not None
    assert own_call.same == (9, 9)


def test_a_marian_export_reports_both_bleu_scores_and_the_examples_of_its_readme_translate(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    need("marian")
    directory = tmp_path / "out"
    outcome = cli("export", trained.path, directory, "--to", "marian")
    assert outcome.code == 0, outcome.err
    files = {path.name for path in directory.iterdir()}
    models = {"model.npz", "source.spm", "target.spm", "decoder.yml"}
    assert files == models | {"README.md", "export.json"}
    assert re.fullmatch(r"lines with the same text, pymarian [\d.]+ +12 of 12", outcome.lines[-3])
    report = json.loads((directory / "export.json").read_text("utf-8"))
    ours, theirs = report["bleu"]["mtrain"], report["bleu"]["exported"]
    assert ours > 90 and abs(ours - theirs) < 5
    page = (directory / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (line,) = re.findall(r"lines = \[(.*)\]", code)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True
    )
    assert done.stdout == f"[{line}]\n", done.stderr  # the task is to copy
    (command,) = re.findall(r"^echo .* \| (pymarian decode .*)$", page, flags=re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        input=line[1:-1] + "\n",
        cwd=directory,
        capture_output=True,
        text=True,
    )
    assert done.stdout == line[1:-1] + "\n", done.stderr


def test_the_model_with_the_wavelengths_of_marian_differs_only_in_its_position_tables() -> None:
    model = random_model(tie_embeddings="all").model
    near = marian._with_wavelengths(model, 50)
    assert isinstance(near, Transformer)
    assert near.config.max_positions == 50
    for name, weight in model.state_dict().items():
        assert torch.equal(near.state_dict()[name], weight)
    table = near.state_dict()["src_positions.table.weight"]
    assert torch.equal(table, near.state_dict()["tgt_positions.table.weight"])
    d_model = model.config.d_model
    assert table[3, 0].item() == pytest.approx(math.sin(3))
    assert table[3, -1].item() == pytest.approx(math.cos(3 * 1e-4))
    assert table.shape == (50, d_model)
