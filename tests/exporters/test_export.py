"""Exports translate as the run does, unsupported models are refused, and exports are checked."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from builders import SRC_LINES, model_config, transformer
from conftest import Cli, Logged
from exporting import (
    EXACT,
    EXPORTERS,
    LINES,
    ODD,
    check_exact,
    copied,
    need,
    random_model,
    settings,
    tempted_model,
    translator_of,
)
from fork_server import MtrainProcess
from safetensors.torch import load_file
from tasks import train as train_task
from tasks import write_task

import mtrain
from mtrain.config.corpora import HubCorpus, TsvCorpus
from mtrain.config.sections import DecodingConfig, TokenizerConfig
from mtrain.corpus.reader import FileMark
from mtrain.data.prepare import ParallelLines
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.shortlist import Shortlist
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import ConfigError, RunError
from mtrain.evaluation import evaluation, metrics
from mtrain.exporters import ctranslate2, export, huggingface, model_card, parity
from mtrain.exporters.export import ExportReport, ExportRequest
from mtrain.exporters.exporter import ExportedHypothesis, Ids, OwnCall, Requirement, version_of
from mtrain.exporters.huggingface import MarianModel
from mtrain.exporters.registry import Library, Quantization
from mtrain.io import atomic
from mtrain.model.transformer import Transformer, sinusoids
from mtrain.run import checkpoint
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

LIBRARIES: list[Library] = ["ctranslate2", "huggingface"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    need(request.param)
    return request.param  # type: ignore[no-any-return]


class Exported(NamedTuple):
    directory: Path
    report: ExportReport


@pytest.fixture(scope="module")
def exported(trained: RunDir, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Exports of the copy task, each made on first access."""

    class Made(dict[str, Exported]):
        def __missing__(self, name: str) -> Exported:
            library, _, quantization = name.partition(" ")
            need(library)
            directory = tmp_path_factory.mktemp("exports") / name.replace(" ", "-")
            export_request = ExportRequest(library, quantization or None)  # type: ignore[arg-type]
            report = export.export(trained, directory, export_request, lambda _: None)
            self[name] = Exported(directory, report)
            return self[name]

    return Made()


# A whole export


def test_an_exported_model_has_the_tokens_outputs_and_scores_of_the_run(
    exported: dict[str, Exported], library: Library
) -> None:
    directory, report = exported[library]
    compared = report.parity
    for same in (
        compared.same_source,
        compared.same_greedy,
        compared.same_beam,
        compared.same_text,
    ):
        assert same == (12, 12)  # the whole validation text
    assert compared.reference_diff < EXACT and compared.beam_diff < EXACT
    assert report.bleu == {}
    kept = json.loads((directory / "export.json").read_text("utf-8"))
    assert kept["parity"]["same_greedy"] == [12, 12]
    assert export.as_text(report)[0] in (directory / "README.md").read_text("utf-8")


def test_an_export_folder_has_the_files_that_its_library_reads(
    exported: dict[str, Exported], library: Library
) -> None:
    names = {path.name for path in exported[library].directory.iterdir()}
    both = {"README.md", "export.json", "source.spm", "target.spm", "config.json"}
    special = {
        "ctranslate2": {"model.bin", "shared_vocabulary.json"},
        "huggingface": {
            "model.safetensors",
            "vocab.json",
            "tokenizer_config.json",
            "generation_config.json",
        },
    }
    assert names == both | special[library]
    modes = {path.stat().st_mode for path in exported[library].directory.iterdir()}
    assert len(modes) == 1, "all files have the same permissions"


def test_the_python_example_of_the_model_card_translates_as_the_run_does(
    exported: dict[str, Exported],
    library: Library,
    trained: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = exported[library].directory
    page = (directory / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sacremoses
        variables: dict[str, object] = {}
        exec(code, variables)
    lines = variables["lines"]
    assert isinstance(lines, list)
    translations = translate_lines(load(trained, loading=LoadOptions("cpu")), lines)
    assert capsys.readouterr().out == f"{translations}\n"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ctranslate2 int8", 0.9),
        ("ctranslate2 float16", 0.8),
        ("ctranslate2 bfloat16", 0.8),
        ("huggingface float16", 0.6),
        ("huggingface bfloat16", 0.6),
    ],
)
def test_a_quantised_export_is_smaller_and_reports_the_difference_in_bleu(
    exported: dict[str, Exported], name: str, part: float
) -> None:
    library, _, quantization = name.partition(" ")
    weights = {"ctranslate2": "model.bin", "huggingface": "model.safetensors"}[library]
    size = (exported[name].directory / weights).stat().st_size
    assert size < part * (exported[library].directory / weights).stat().st_size
    report = exported[name].report
    assert report.precision == quantization
    ours, theirs = report.bleu["mtrain"], report.bleu["exported"]
    assert ours > 90 and abs(theirs - ours) < 5
    assert 0 < report.parity.reference_diff < 0.5
    last = export.as_text(report)[-1]
    assert re.match(r"validation BLEU, exported +\d+\.\d\d \([+-]\d+\.\d\d\)$", last)


# A shortlist


def test_a_shortlist_is_written_and_ctranslate2_generates_only_its_tokens(
    trained: RunDir, tmp_path: Path
) -> None:
    need("ctranslate2")
    directory = tmp_path / "out"
    translator = load(trained, loading=LoadOptions("cpu"))
    report = export.export(
        trained, directory, ExportRequest("ctranslate2", has_shortlist=True), lambda _: None
    )
    assert list(report.bleu) == ["mtrain", "use_vmap=True"]
    assert abs(report.bleu["use_vmap=True"] - report.bleu["mtrain"]) < 5
    row = export.as_text(report)[-1]
    assert re.fullmatch(r"validation BLEU, use_vmap=True +\d+\.\d\d \([+-]\d\.\d\d\)", row)
    lines = (directory / "vmap.txt").read_text("utf-8").splitlines()
    assert len(lines) == 1 + len(translator.tokenizer.src)
    keys = [line.split("\t")[0] for line in lines]
    assert keys == ["", *translator.tokenizer.src.pieces_of(range(len(lines) - 1))]
    # a shortlist of one token for all lines; eos is always allowed
    tgt = translator.tokenizer.tgt
    piece = tgt.pieces_of([tgt.encode(["ba"])[0][0]])[0]
    (directory / "vmap.txt").write_text(f"\t{piece}\n", "utf-8")
    model = ctranslate2.load(directory, use_vmap=True)
    (found,) = model.search(model.encode(LINES.src[:1]), 2, [5])
    assert {*tgt.pieces_of(found.ids)} <= {piece, "<unk>"}


def test_pieces_with_a_tab_or_a_line_break_are_left_out_of_a_shortlist(tmp_path: Path) -> None:
    """CTranslate2 reads each tab as the separator of a source token and its targets."""
    lines = [f"{line}\t! x\rx" for line in SRC_LINES]
    config = TokenizerConfig(vocab_size=420)
    tokenizer = sentencepiece.train(config, zip(lines, lines, strict=True), len(lines), seed=1)
    pieces = tokenizer.src.pieces_of(range(len(tokenizer.src)))
    odd = [piece for piece in pieces if re.search("[\t\r]", piece)]
    assert "\t" in "".join(odd) and "\r" in "".join(odd)
    likely_SK = np.array([[pieces.index(piece) for piece in (*odd, "x")]] * len(pieces))
    learned = Shortlist(likely_SK, np.ones(len(pieces), np.bool_), is_shared=True)
    ctranslate2.write_shortlist(learned, tokenizer, tmp_path)
    rows = (tmp_path / "vmap.txt").read_bytes().decode().split("\n")[:-1]
    usual = [piece for piece in pieces if piece not in odd]
    assert rows == ["\t" + " ".join(usual), *(f"{piece}\tx {piece}" for piece in usual)]


def test_a_shortlist_is_refused_for_transformers(cli: Cli, trained: RunDir, tmp_path: Path) -> None:
    need("huggingface")
    outcome = cli("export", trained.path, tmp_path / "out", "--to", "huggingface", "--shortlist")
    assert outcome.code == 2 and not (tmp_path / "out").exists()
    assert outcome.err == (
        "mtrain: `--shortlist` has no effect with `--to huggingface`; leave it out.\n"
    )


# Variants

VARIANTS: list[dict[str, object]] = [
    {"tie_embeddings": "all"},
    {"tie_embeddings": "decoder", "activation": "gelu", "kind": "bpe"},
    {"tie_embeddings": "decoder", "shared": False},
    {"tie_embeddings": "none"},
    {"tie_embeddings": "none", "shared": False, "activation": "gelu", "num_decoder_layers": 1},
]
OTHER_VARIANTS: list[dict[str, object]] = [
    {"norm": "pre", "tie_embeddings": "all"},
    {"norm": "pre", "activation": "gelu", "kind": "bpe", "shared": False},
    {"positions": "learned", "max_positions": 96, "tie_embeddings": "all"},
    {"positions": "learned", "max_positions": 96, "norm": "pre", "activation": "gelu"},
]


def named(variant: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in variant.items())


@pytest.mark.parametrize("variant", VARIANTS + OTHER_VARIANTS, ids=named)
def test_a_variant_has_the_outputs_and_scores_of_mtrain_in_ctranslate2(
    variant: dict[str, object], tmp_path: Path
) -> None:
    need("ctranslate2")
    check_exact(random_model(**variant), "ctranslate2", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_a_variant_has_the_outputs_and_scores_of_mtrain_in_transformers(
    variant: dict[str, object], tmp_path: Path
) -> None:
    need("huggingface")
    check_exact(random_model(**variant), "huggingface", tmp_path)  # type: ignore[arg-type]


def test_in_float64_the_log_probs_of_transformers_equal_those_of_mtrain(tmp_path: Path) -> None:
    need("huggingface")
    translator = random_model(tie_embeddings="none")
    copy = copied(translator, "huggingface", tmp_path)
    assert isinstance(copy, MarianModel)
    copy.model.double()
    for stack in (copy.model.model.encoder, copy.model.model.decoder):
        table = stack.embed_positions.weight
        d_model = table.shape[1]
        order = [*range(0, d_model, 2), *range(1, d_model, 2)]
        exact = sinusoids(len(table), d_model)[:, order]
        assert (table - exact).abs().max() < 1e-4  # those of transformers are rounded to float32
        table.data.copy_(exact)
    translator.model.double()
    sources = translator.tokenizer.encode_src(LINES.src)
    targets = translator.tokenizer.tgt.encode(LINES.tgt)
    scores = translator.score([EncodedSource(ids) for ids in sources], targets)
    for ours, theirs in zip(scores, copy.score(sources, targets), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-10, rel=0)


@pytest.mark.parametrize(
    ("library", "variant", "words"),
    [
        (
            "ctranslate2",
            {"attention_window": 3},
            "`model.attention_window` must be null for CTranslate2",
        ),
        (
            "huggingface",
            {"attention_window": 3},  # which neither library supports
            "MarianMTModel, which attends to all positions, but is 3 instead",
        ),
        (
            "huggingface",
            {"norm": "pre"},
            "has no pre-norm layers, but is 'pre' instead; `--to ctranslate2` or ",
        ),
        (
            "huggingface",
            {"positions": "learned", "max_positions": 8},
            "which forgets any other table when it is saved again, but is 'learned' instead",
        ),
    ],
)
def test_a_variant_that_a_library_does_not_support_is_refused_with_the_reason(
    library: Library, variant: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        copied(random_model(**variant), library, tmp_path)  # type: ignore[arg-type]


def test_a_refusal_names_the_libraries_that_support_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = settings().model_copy(update={"model": model_config(norm="pre")})
    with pytest.raises(
        ConfigError, match=r"instead; `--to ctranslate2` or `--to argos`.* supports it\.$"
    ):
        export.check_supported("huggingface", held)
    refused = (Requirement("model.norm", "post", "all"),)
    for exporter in EXPORTERS.values():
        monkeypatch.setattr(exporter, "REQUIREMENTS", refused)
    with pytest.raises(ConfigError, match=r"but is 'pre' instead\.$"):
        export.check_supported("huggingface", held)


def test_the_documented_table_of_supported_models_matches_the_exporters() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text("utf-8")
    table = page.partition("## Which models\n\n")[2].partition("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert header[1:] == [f"`{library}`" for library in EXPORTERS]
    said = {}
    for key, *cells in rows:
        name, *values = [span.partition(": ")[::2] for span in re.findall("`([^`]+)`", key)]
        said[name[0]] = True
        for (library, exporter), cell in zip(EXPORTERS.items(), cells, strict=True):
            wanted = {each.key: each.value for each in exporter.REQUIREMENTS}
            texts = [name[1], *(value for value, _ in values)]
            held = name[0] not in wanted or str(wanted[name[0]]).lower() in (
                [text.strip() for text in texts]
            )
            assert cell.startswith("yes" if held else "no: "), (key, library)
    assert {each.key for exporter in EXPORTERS.values() for each in exporter.REQUIREMENTS} <= set(
        said
    )


def test_transformers_saves_no_position_table_of_a_marian_model(tmp_path: Path) -> None:
    need("huggingface")
    copy = copied(random_model(tie_embeddings="all"), "huggingface", tmp_path)
    assert isinstance(copy, MarianModel)
    copy.model.model.encoder.embed_positions.weight.data.zero_()
    copy.model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert not [name for name in again if "positions" in name]


# Limits, and odd text


def long_pair(translator: Translator, num_pieces: int) -> tuple[Ids, Ids]:
    pieces = translator.tokenizer.encode_src([" ".join(SRC_LINES)])[0]
    eos = translator.tokenizer.src.eos
    return [[*pieces[: num_pieces - 1], eos]], translator.tokenizer.tgt.encode(LINES.tgt[:1])


@pytest.mark.parametrize(
    "variant",
    [{"tie_embeddings": "all"}, {"positions": "learned", "max_positions": 40}],
    ids=named,
)
def test_a_source_longer_than_the_default_limit_of_ctranslate2_is_not_truncated(
    variant: dict[str, object], tmp_path: Path
) -> None:
    """CTranslate2 truncates after 1,024 tokens by default; the learned table has 40 positions."""
    need("ctranslate2")
    translator = random_model(**variant)  # type: ignore[arg-type]
    copy = copied(translator, "ctranslate2", tmp_path)
    sources, targets = long_pair(translator, 1100)
    searcher = parity.LogProbSearcher(translator, copy.masks_special)
    assert searcher.score(sources, targets)[0] == pytest.approx(
        copy.score(sources, targets)[0], abs=EXACT
    )
    cut = [[*sources[0][:1023], sources[0][-1]]]
    apart = zip(searcher.score(cut, targets)[0], searcher.score(sources, targets)[0], strict=True)
    assert max(abs(a - b) for a, b in apart) > 2 * EXACT
    (hypothesis,) = copy.search(sources, 1, [3])
    assert hypothesis.ids == searcher.search(sources, 1)[0][: len(hypothesis.ids)]


def test_the_exported_model_takes_a_source_of_the_maximum_length_of_the_config(
    library: Library, tmp_path: Path
) -> None:
    max_tokens = {"ctranslate2": 4200, "huggingface": 1100}[library]
    translator = random_model(tie_embeddings="all")
    tokenizer, config = translator.tokenizer, settings()
    data = config.data.model_copy(update={"max_tokens": max_tokens})
    config = config.model_copy(update={"data": data})
    EXPORTERS[library].write(translator.model, tokenizer, config, tmp_path, None)
    copy = EXPORTERS[library].load(tmp_path)
    sources = [[*[tokenizer.src.unk] * (max_tokens - 1), tokenizer.src.eos]]
    (hypothesis,) = copy.search(sources, 1, [2])
    assert hypothesis.ids


def test_a_source_longer_than_the_position_table_is_an_error(
    exported: dict[str, Exported], library: Library
) -> None:
    directory = exported[library].directory
    length = {"ctranslate2": 4096, "huggingface": 1024}[library]
    copy = EXPORTERS[library].load(directory)
    (pieces,) = copy.encode(["ba " * 10])
    sources = [[*(pieces[0] for _ in range(length)), pieces[-1]]]
    with pytest.raises((RuntimeError, IndexError)):
        copy.search(sources, 1, [2])


def test_padding_bos_and_tags_are_never_generated(library: Library, tmp_path: Path) -> None:
    translator = tempted_model()
    tgt = translator.tokenizer.tgt
    copy = copied(translator, library, tmp_path)
    sources = translator.tokenizer.encode_src(LINES.src)
    for beam in (1, 3):
        for hypothesis in copy.search(sources, beam, [4] * len(sources)):
            assert hypothesis.ids
            assert not {tgt.pad, tgt.bos, tgt.tags["bt"]} & set(hypothesis.ids)
    assert parity.compare(translator, copy, LINES).problems() == []


def test_odd_text_is_encoded_and_decoded_as_by_mtrain(
    exported: dict[str, Exported], library: Library, trained: RunDir
) -> None:
    directory = exported[library].directory
    copy = EXPORTERS[library].load(directory)
    tokenizer = load(trained, loading=LoadOptions("cpu")).tokenizer
    assert copy.encode(ODD) == tokenizer.encode_src(ODD)
    ids = tokenizer.tgt.encode(ODD)
    texts = zip(copy.decode(ids), tokenizer.tgt.decode(ids), strict=True)
    assert [a for a, b in texts if a.strip() != b.replace("▁", " ").strip()] == []


def test_a_caller_can_override_the_limit_of_output_length_in_transformers(
    exported: dict[str, Exported],
    capfd: pytest.CaptureFixture[str],
    logged: Logged,
) -> None:
    need("huggingface")
    import transformers

    copy = EXPORTERS["huggingface"].load(exported["huggingface"].directory)
    assert isinstance(copy, MarianModel)
    batch = copy._tokenizer(["ba ce di fo gu"], return_tensors="pt")
    eos = copy.model.generation_config.eos_token_id
    copy.model.generation_config.forced_eos_token_id = None
    transformers.utils.logging.enable_propagation()
    try:
        cut = copy.model.generate(**batch, max_new_tokens=2)
        copy.model.generation_config.suppress_tokens.append(eos)  # to run into the limit
        longest = copy.model.generate(**batch)
    finally:
        transformers.utils.logging.disable_propagation()
    said = "".join(logged.messages) + capfd.readouterr().err
    assert "max_new_tokens" not in said and "max_length" not in said, said
    assert cut.shape == (1, 3)
    assert longest.shape[1] - 1 == copy.model.generation_config.max_new_tokens


def test_ctranslate2_translates_an_empty_source_to_an_empty_output(
    exported: dict[str, Exported],
) -> None:
    copy = EXPORTERS["ctranslate2"].load(exported["ctranslate2"].directory)
    assert copy._translator.translate_batch([[]])[0].hypotheses == [[]]


# The check


@pytest.mark.parametrize(
    "name",
    [
        "src_embedding.weight",
        "encoder.0.self_attention.queries_keys_values.weight",
        "decoder.0.cross_attention.source_keys_values.weight",
        "decoder.0.feed_forward.outer.bias",
        "decoder.0.residual_2.norm.weight",
    ],
)
def test_noise_in_one_weight_tensor_fails_the_export_and_leaves_no_folder(
    cli: Cli,
    trained: RunDir,
    library: Library,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Transformer, "state_dict", altered(Transformer.state_dict, name))
    outcome = cli("export", trained.path, tmp_path / "out", "--to", library)
    assert (outcome.code, outcome.out) == (2, b"")
    *_, last = outcome.err.splitlines()
    assert last.startswith(f"mtrain: {tmp_path / 'out'}: nothing is exported: ")
    assert "differences of log-probability must be at most 0.0003, but are " in last
    assert list(tmp_path.iterdir()) == []


def altered(state_dict: object, name: str) -> object:
    """Return a `state_dict` method that adds a little noise to one of the tensors."""

    def handed_out(model: Transformer) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = dict(state_dict(model))  # type: ignore[operator]
        noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(1))
        weights[name] = weights[name] + 0.05 * noise  # not constant: a norm would remove that
        return weights

    return handed_out


class Mirror:
    """The model itself in the role of its export."""

    masks_special = False

    def __init__(self, translator: Translator) -> None:
        self._own = parity.LogProbSearcher(translator, self.masks_special)
        self._tokenizer = translator.tokenizer

    def encode(self, lines: Sequence[str]) -> Ids:
        return self._tokenizer.encode_src(lines)

    def decode(self, ids: Ids) -> list[str]:
        return self._tokenizer.tgt.decode(ids)

    def search(self, sources: Ids, beam: int, max_lengths: list[int]) -> list[ExportedHypothesis]:
        ids = self._own.search(sources, beam)
        sums = [sum(token_scores) for token_scores in self.score(sources, ids)]
        return [ExportedHypothesis(row, total, True) for row, total in zip(ids, sums, strict=True)]

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        return self._own.score(sources, targets)

    def own_call(self, lines: Sequence[str]) -> OwnCall | None:
        return None


@pytest.fixture(scope="module")
def translator() -> Translator:
    return random_model(tie_embeddings="all")


@pytest.fixture(scope="module")
def writer() -> Translator:
    """A model that generates no byte tokens, whose bytes could be invalid UTF-8."""
    translator = random_model(tie_embeddings="all")
    with torch.no_grad():
        translator.model.tgt_embedding.weight[translator.tokenizer.tgt.byte_pieces] = 0
    return translator


def test_a_model_compared_with_itself_has_no_problems(translator: Translator) -> None:
    compared = parity.compare(translator, Mirror(translator), LINES)
    assert compared.problems() == []
    assert compared.same_beam == (3, 3)
    assert compared.reference_diff == compared.beam_diff == 0


def problems_of(translator: Translator, copy: Mirror) -> str:
    return "; ".join(parity.compare(translator, copy, LINES).problems())


def test_each_kind_of_difference_between_model_and_export_is_reported(
    translator: Translator, writer: Translator
) -> None:
    class OtherPieces(Mirror):
        def encode(self, lines: Sequence[str]) -> Ids:
            return [[ids[0], *ids] for ids in super().encode(lines)]

    class OtherText(Mirror):
        def decode(self, ids: Ids) -> list[str]:
            return [text + "." for text in super().decode(ids)]

    class OtherChoice(Mirror):
        def search(
            self, sources: Ids, beam: int, max_lengths: list[int]
        ) -> list[ExportedHypothesis]:
            hypotheses = super().search(sources, beam, max_lengths)
            return (
                [hypothesis._replace(ids=[*hypothesis.ids[:1], 7]) for hypothesis in hypotheses]
                if beam == 1
                else hypotheses
            )

    class OtherSums(Mirror):
        def search(
            self, sources: Ids, beam: int, max_lengths: list[int]
        ) -> list[ExportedHypothesis]:
            hypotheses = super().search(sources, beam, max_lengths)
            return [
                hypothesis._replace(log_prob=hypothesis.log_prob + 0.01)
                for hypothesis in hypotheses
            ]

    class NoNumbers(Mirror):
        def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
            return [[float("nan")] * len(row) for row in super().score(sources, targets)]

    assert problems_of(translator, OtherPieces(translator)) == (
        "the source tokens must be the same on all lines, but only 0 of 3 lines agree"
    )
    assert "the text of an output" in problems_of(writer, OtherText(writer))
    assert "greedy output must be the same on all lines" in problems_of(
        translator, OtherChoice(translator)
    )
    assert re.fullmatch(
        r"differences of log-probability of beam output must be at most 0\.00\d+, but are 0\.01",
        problems_of(translator, OtherSums(translator)),
    )
    assert "must be at most 0.0003, but are inf" in problems_of(translator, NoNumbers(translator))


def test_rounding_may_add_up_over_the_tokens_of_a_long_output(translator: Translator) -> None:
    class Rounding(Mirror):
        def __init__(self, error: float) -> None:
            super().__init__(translator)
            self._error = error  # of each token

        def search(
            self, sources: Ids, beam: int, max_lengths: list[int]
        ) -> list[ExportedHypothesis]:
            short, *others = super().search(sources, beam, max_lengths)
            if beam == 1:
                return [short, *others]
            ids = [(hypothesis.ids * 400)[:400] for hypothesis in others]
            sums = [sum(scores) + 401 * self._error for scores in self.score(sources[1:], ids)]
            long = [
                ExportedHypothesis(row, total, True) for row, total in zip(ids, sums, strict=True)
            ]
            return [short, *long]

    assert problems_of(translator, Rounding(2e-5)) == ""
    assert problems_of(translator, Rounding(1e-3)) == (
        "differences of log-probability of beam output must be at most 0.12, but are 0.4"
    )


def test_different_outputs_of_beam_search_are_counted_by_cause(translator: Translator) -> None:
    searcher = parity.LogProbSearcher(translator, masks_special=False)
    sources = translator.tokenizer.encode_src(LINES.src)
    ours = searcher.search(sources, 3)
    limits = [1000] * 3

    def kinds(theirs: Ids, ours: Ids = ours, has_ended: bool = True) -> dict[str, int]:
        hypotheses = [ExportedHypothesis(ids, 0.0, has_ended) for ids in theirs]
        return parity._other_beams(searcher, sources, ours, hypotheses, limits)

    assert kinds(ours) == {}
    worse = [[*ids, 5, 5, 5] for ids in ours]
    assert kinds([worse[0], *ours[1:]]) == {"likelier in mtrain": 1}
    assert kinds(ours, worse) == {"likelier in the export": 3}
    assert kinds(worse, has_ended=False) == {"end at a limit of length": 3}
    limits[0] = len(worse[0])
    assert kinds(worse) == {"likelier in mtrain": 2, "end at a limit of length": 1}


def test_outputs_are_scored_up_to_the_length_that_the_run_allows(
    trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Longer(Mirror):
        def search(
            self, sources: Ids, beam: int, max_lengths: list[int]
        ) -> list[ExportedHypothesis]:
            rows = zip(super().search(sources, beam, max_lengths), max_lengths, strict=True)
            return [each._replace(ids=(each.ids * 99)[: limit + 9]) for each, limit in rows]

    run = load(trained, loading=LoadOptions("cpu"))
    held_out = export._read_held_out(trained, run, "ctranslate2", print)
    decoded = []
    monkeypatch.setattr("mtrain.evaluation.metrics.bleu", lambda texts, *_: decoded.append(texts))
    export._bleu(trained, run, {"exported": Longer(run)}, 1, held_out, print)
    sources = run.tokenizer.encode_src(held_out.src)
    limits = [EncodedSource(ids).max_length(run.options.max_extra_tokens) for ids in sources]
    lengths = [len(ids) for ids in run.tokenizer.tgt.encode(decoded[1])]
    assert all(length <= limit for length, limit in zip(lengths, limits, strict=True))


def test_a_different_greedy_output_of_equal_probability_counts_as_the_same(
    translator: Translator,
) -> None:
    """Two tokens have the same embedding, so that rounding decides which one is generated."""
    model = transformer(
        translator.model.config, len(translator.tokenizer.src), len(translator.tokenizer.tgt)
    ).float()
    first = parity.LogProbSearcher(translator, False).search(
        translator.tokenizer.encode_src(LINES.src), 1
    )[0][0]
    twin = first + 1
    with torch.no_grad():
        model.tgt_embedding.weight[twin] = model.tgt_embedding.weight[first]
    same = translator_of(model, translator.tokenizer)

    class Twins(Mirror):
        def search(
            self, sources: Ids, beam: int, max_lengths: list[int]
        ) -> list[ExportedHypothesis]:
            swap = {first: twin, twin: first}
            hypotheses = super().search(sources, beam, max_lengths)
            swapped = [
                [swap.get(piece, piece) for piece in hypothesis.ids] for hypothesis in hypotheses
            ]
            return [
                hypothesis._replace(ids=ids)
                for hypothesis, ids in zip(hypotheses, swapped, strict=True)
            ]

    compared = parity.compare(same, Twins(same), LINES)
    assert compared.same_greedy == (3, 3)
    assert compared.same_beam.num_same < 3
    assert sum(compared.other_beams.values()) == 3 - compared.same_beam.num_same
    searcher, sources = parity.LogProbSearcher(same, False), same.tokenizer.encode_src(LINES.src)
    ours, theirs = searcher.search(sources, 3), Twins(same).search(sources, 3, [1000] * 3)
    kinds = parity._other_beams(searcher, sources, ours, theirs, [1000] * 3)
    assert kinds == {"as likely": 3 - compared.same_beam.num_same}


def test_a_search_with_masked_tokens_has_the_scores_of_the_masked_model() -> None:
    translator = tempted_model()
    translator.model.pack_weights()
    searcher = parity.LogProbSearcher(translator, masks_special=True)
    searcher.translator.options = replace(searcher.translator.options, beam=2, with_scores=True)
    sources = translator.tokenizer.encode_src(LINES.src)
    best = [best[0] for best in searcher.translator.search([*map(EncodedSource, sources)])]
    scores = searcher.score(sources, [hypothesis.ids for hypothesis in best])
    assert [each.log_prob for each in best] == pytest.approx([*map(sum, scores)], abs=0.01)


# The command


def test_the_export_command_prints_the_table(cli: Cli, trained: RunDir, tmp_path: Path) -> None:
    need("ctranslate2")
    directory = tmp_path / "new" / "out"
    outcome = cli("export", trained.path, directory, "--to", "ctranslate2", "--check-lines", "5")
    assert outcome.code == 0, outcome.err
    assert re.fullmatch(r"library +ctranslate2 [\d.]+", outcome.lines[0])
    assert outcome.lines[2].endswith("5 of 5")
    assert outcome.err.splitlines() == [
        f"{directory}: writing, then checking on 5 lines",
        "translating 40 lines of test sets for the model card",
    ]
    assert [path.name for path in directory.parent.iterdir()] == ["out"]


def test_an_existing_folder_is_refused_and_keeps_its_files(
    cli: Cli, trained: RunDir, tmp_path: Path, library: Library
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    outcome = cli("export", trained.path, tmp_path, "--to", library)
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (f"mtrain: {tmp_path}: already exists; choose another folder.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    link = tmp_path / "link"
    link.symlink_to("nothing")
    outcome = cli("export", trained.path, link, "--to", library)
    assert outcome.err == (f"mtrain: {link}: already exists; choose another folder.\n")


def test_a_missing_library_gives_a_one_line_error(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, exporter in EXPORTERS.items():
        package = exporter.PACKAGE
        monkeypatch.setitem(sys.modules, package, None)
        name = "out" if exporter.ARCHIVE is None else f"out{exporter.ARCHIVE.suffix}"
        outcome = cli("export", trained.path, tmp_path / name, "--to", library)
        assert outcome.code == 2
        assert outcome.err == (
            f"mtrain: `mtrain export --to {library}` must have {package}: pip install "
            f"'mtrain[{library}]' adds it.\n"
        )


def test_a_library_whose_wheel_has_another_name_is_exported_to(
    trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As onnxruntime-gpu, which is imported as onnxruntime."""
    need("ctranslate2")
    metadata = tmp_path / "ctranslate2_gpu-9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: ctranslate2-gpu\nVersion: 9.0\n")
    version, wheels = importlib.metadata.version, {"ctranslate2": ["ctranslate2-gpu"]}

    def of_wheel(name: str) -> str:
        if name == "ctranslate2":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", of_wheel)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: wheels)
    monkeypatch.syspath_prepend(tmp_path)
    export_request = ExportRequest("ctranslate2", num_lines=2, has_scores=False)
    report = export.export(trained, tmp_path / "out", export_request, print)
    assert report.version == "9.0"


def test_the_version_of_a_wheel_that_lists_no_modules_is_that_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_library").mkdir()
    metadata = tmp_path / "odd_library-9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: odd-library\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("odd_library") == "9.0"


def test_int8_is_refused_for_transformers(cli: Cli, trained: RunDir, tmp_path: Path) -> None:
    need("huggingface")
    arguments = ["--to", "huggingface", "--quantize", "int8"]
    outcome = cli("export", trained.path, tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(
        "mtrain: `--quantize` must be float16 or bfloat16 with `--to huggingface`"
    )


def test_a_run_without_usable_validation_text_is_refused(
    trained: RunDir, tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mtrain.data.prepare.read_valid", lambda _: ParallelLines(["", "ba " * 99], ["x", "y"])
    )
    with pytest.raises(RunError, match="must have validation text to check an export"):
        export.export(trained, tmp_path / "out", ExportRequest(library), lambda _: None)


def test_validation_lines_that_transformers_reads_differently_are_not_compared(
    trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("huggingface")
    lines = ParallelLines(["ba ce", ">>de<< ba", ">> no code", "ba >>de<<"], ["ba"] * 4)
    monkeypatch.setattr("mtrain.data.prepare.read_valid", lambda _: lines)
    said: list[str] = []
    export_request = ExportRequest("huggingface", has_scores=False)
    report = export.export(trained, tmp_path / "out", export_request, said.append)
    assert report.parity.same_source == (3, 3)
    assert said[0] == (
        "1 line of validation text cannot be compared: transformers reads `>>x<<` at the "
        "beginning as a language code"
    )


def test_a_validation_line_without_tokens_is_not_compared(
    trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("ctranslate2")
    lines = ParallelLines(["ba ce", "\u2581", "\u2581\u2581 \u2581"], ["ba"] * 3)
    monkeypatch.setattr("mtrain.data.prepare.read_valid", lambda _: lines)
    request = ExportRequest("ctranslate2", has_scores=False)
    report = export.export(trained, tmp_path / "out", request, lambda _: None)
    assert report.parity.same_source == (1, 1)


def test_a_run_whose_validation_lines_all_begin_with_language_codes_is_refused_with_the_reason(
    trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("huggingface")
    lines = ParallelLines([">>de<< ba", ""], ["ba", "ce"])
    monkeypatch.setattr("mtrain.data.prepare.read_valid", lambda _: lines)
    with pytest.raises(RunError) as error:
        export.export(trained, tmp_path / "out", ExportRequest("huggingface"), print)
    assert str(error.value) == (
        f"{trained.path}: must have validation text to check an export, but each line is blank, or "
        "longer than `data.max_tokens`, or begins with `>>x<<`."
    )


# mtrain translate --engine ctranslate2


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the trained run, to write into."""
    need("ctranslate2")
    for name in ("config.yaml", "model.safetensors"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_bytes((trained.path / name).read_bytes())
    for name in ("tokenizer", "data"):
        (tmp_path / "run" / name).symlink_to(trained.path / name)
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize(
    ("library", "decoding"),
    [("huggingface", {"beam": 1}), ("ctranslate2", {"mbr": "bleu"})],
    ids=["greedy", "mbr"],
)
def test_a_run_is_exported_whatever_search_its_config_sets(
    run: RunDir, tmp_path: Path, library: Library, decoding: dict[str, object]
) -> None:
    need(library)
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["decoding"] |= decoding
    run.config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    compared = export.export(
        RunDir(run.path), tmp_path / "out", ExportRequest(library), lambda _: None
    ).parity
    assert compared.same_greedy == (12, 12)
    assert compared.beam_diff < EXACT


TEXT = "ba ce di\n\n  \nfo gu ha je ki lo\n" + "na pe. " * 40 + "\nA new word!\n"


def test_the_ctranslate2_engine_translates_short_lines_as_mtrain_does(
    cli: Cli, run: RunDir
) -> None:
    ours = cli("translate", run.path, stdin=TEXT.encode())
    other = cli("translate", run.path, "--engine", "ctranslate2", stdin=TEXT.encode())
    assert (ours.code, other.code) == (0, 0), other.err
    assert other.lines[:4] == ours.lines[:4]
    assert len(other.lines) == len(ours.lines) == 6
    assert other.lines[1:3] == ["", ""]


def test_the_ctranslate2_engine_exports_once_and_again_after_the_weights_change(
    cli: Cli, run: RunDir
) -> None:
    said = []
    for beam in ("1", "2", "2"):
        if len(said) == 2:  # slightly different weights
            weights = load(run, loading=LoadOptions("cpu"))
            checkpoint.save_model(
                run.model_path,
                {name: 1.0001 * weight for name, weight in weights.model.named_parameters()},
                weights.tokenizer.fingerprint(),
            )
        options = ["--engine", "ctranslate2", "--device", "cpu", "--beam", beam]
        outcome = cli("translate", run.path, *options, stdin=b"ba ce di\n")
        assert (outcome.code, outcome.lines) == (0, ["ba ce di"]), outcome.err
        said.append("writing, then checking" in outcome.err)
    assert said == [True, False, True]
    assert not list(run.path.glob(".*.tmp"))


def test_an_export_has_the_checksum_of_the_weights_that_it_was_made_from(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training may replace the weights during an export."""
    need("ctranslate2")

    def load_and_replace(run: RunDir, **options: Any) -> Translator:
        translator = load(run, **options)
        run.model_path.write_bytes(b"of a training")
        return translator

    expected = atomic.sha256(run.model_path)
    monkeypatch.setattr(export, "load", load_and_replace)
    request = ExportRequest("ctranslate2", num_lines=1, has_scores=False)
    assert export.export(run, tmp_path / "out", request, print).weights == expected


def test_one_long_line_does_not_raise_the_length_limit_of_other_batches(tmp_path: Path) -> None:
    need("ctranslate2")
    copy: Any = copied(random_model(), "ctranslate2", tmp_path)
    library, limits = copy._translator, []

    class Recorder:
        def translate_batch(self, tokens: list[list[str]], **options: Any) -> Any:
            limits.append(options["max_decoding_length"])
            return library.translate_batch(tokens, **options)

    copy._translator = Recorder()
    copy.search(copy.encode(["a"] * 32 + ["b " * 100]), 1, [3] * 32 + [200])
    assert limits == [4, 201]


@pytest.mark.parametrize(
    ("library", "quantization"), [("ctranslate2", "int8"), ("huggingface", None)]
)
def test_the_ctranslate2_engine_replaces_a_quantised_export_and_one_for_another_library(
    cli: Cli, run: RunDir, library: Library, quantization: Quantization | None
) -> None:
    need(library)
    folder = run.path / "ctranslate2"
    export.export(run, folder, ExportRequest(library, quantization, 2, has_scores=False), print)
    outcome = cli("translate", run.path, "--engine", "ctranslate2", stdin=b"ba ce di\n")
    assert (outcome.code, outcome.lines) == (0, ["ba ce di"]), outcome.err
    report = json.loads((folder / "export.json").read_text("utf-8"))
    assert (report["library"], report["precision"]) == ("ctranslate2", "float32")
    assert (folder / "model.bin").is_file() and not (folder / "model.safetensors").exists()


def cut_model(folder: Path) -> str:
    with (folder / "model.bin").open("r+b") as file:
        file.truncate(1000)
    return "the checksum of model.bin is another"


def link_vocabulary(folder: Path) -> str:
    path = folder / "source.spm"
    path.rename(folder.parent / "elsewhere.spm")
    path.symlink_to(folder.parent / "elsewhere.spm")
    return "the checksum of source.spm is another"


def drop_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is missing"


def add_vocabulary(folder: Path) -> str:
    (folder / "source_vocabulary.json").write_text("[]", encoding="utf-8")
    return "source_vocabulary.json was added"


def other_weights(folder: Path) -> str:
    """Replace the weights, and write their checksum into export.json."""
    (folder / "model.bin").write_bytes(b"no weights")
    path = folder / "export.json"
    tree = json.loads(path.read_text("utf-8"))
    tree["files"]["model.bin"] = hashlib.sha256(b"no weights").hexdigest()
    path.write_text(json.dumps(tree), encoding="utf-8")
    return "CTranslate2 cannot load it: "


def report_of(text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "export.json").write_text(text, encoding="utf-8")
        return "export.json cannot be read"

    return write


REPORTS = ["", "[]", "3", "null", "[" * 100_000, "{", '{"weights": 3, "files": {}}', "\x00"]
REPORTS += [
    '{"weights": "00"}',
    '{"weights": "00", "files": []}',
    '{"weights": "00", "files": {"a": 1}}',
]


@pytest.mark.parametrize(
    "damage",
    [cut_model, link_vocabulary, drop_config, add_vocabulary, other_weights]
    + [pytest.param(report_of(text), id=f"export.json-{text[:40]}") for text in REPORTS],
)
def test_a_damaged_export_in_a_run_gives_a_one_line_error(
    cli: Cli, run: RunDir, exported_once: Path, damage: Callable[[Path], str]
) -> None:
    folder = run.path / "ctranslate2"
    shutil.copytree(exported_once, folder)
    why = damage(folder)
    outcome = cli("translate", run.path, "--engine", "ctranslate2", stdin=b"ba\n")
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith(f"mtrain: {folder}: must be whole, but is damaged: {why}")
    assert outcome.err.endswith("; delete it, and export it again.\n")
    assert outcome.err.count("\n") == 1


@pytest.fixture(scope="module")
def exported_once(trained: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that a run with these weights accepts as its own."""
    need("ctranslate2")
    folder = tmp_path_factory.mktemp("once") / "ctranslate2"
    export.export(trained, folder, ExportRequest("ctranslate2", num_lines=2), print)
    return folder


@pytest.mark.parametrize("level", [logging.NOTSET, logging.CRITICAL])
@pytest.mark.parametrize("has_bars", [False, True])
def test_logging_and_progress_bars_of_transformers_are_restored_after_an_error(
    level: int, has_bars: bool
) -> None:
    need("huggingface")
    from transformers.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )

    try:
        if not has_bars:
            disable_progress_bar()
        logging.disable(level)
        with contextlib.suppress(ZeroDivisionError), huggingface._quiet():
            assert not is_progress_bar_enabled()
            assert logging.root.manager.disable == max(level, logging.WARNING)
            raise ZeroDivisionError
        assert logging.root.manager.disable == level
        assert is_progress_bar_enabled() == has_bars
    finally:
        logging.disable(logging.NOTSET)
        enable_progress_bar()


def test_only_one_of_several_concurrent_processes_exports_a_run(run: RunDir) -> None:
    """One process writes the folder, and the others use it."""
    command = ["translate", run.path, "--engine", "ctranslate2"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(MtrainProcess(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE))
            for _ in range(3)
        ]
        told = []
        for process in processes:
            assert process.stdin and process.stdout and process.stderr
            process.stdin.write(b"ba ce di\n")
            process.stdin.close()
        told = [(process.stdout.read(), process.stderr.read()) for process in processes]
        assert [process.wait() for process in processes] == [0, 0, 0], told
    assert [out for out, _ in told] == [b"ba ce di\n"] * 3
    assert sum(b"writing, then checking" in err for _, err in told) == 1


def test_an_export_in_a_read_only_folder_is_used(
    cli: Cli, run: RunDir, exported_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(exported_once, run.path / "ctranslate2")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    outcome = cli("translate", run.path, "--engine", "ctranslate2", stdin=b"ba ce di\n")
    assert (outcome.code, outcome.lines) == (0, ["ba ce di"]), outcome.err
    assert not list(run.path.glob(".*"))


def test_the_ctranslate2_engine_deletes_what_a_killed_export_left(
    cli: Cli, run: RunDir, exported_once: Path
) -> None:
    shutil.copytree(exported_once, run.path / "ctranslate2")
    (run.path / ".ctranslate2.0123abcd.tmp").mkdir()
    outcome = cli("translate", run.path, "--engine", "ctranslate2", stdin=b"ba ce di\n")
    assert (outcome.code, outcome.lines) == (0, ["ba ce di"]), outcome.err
    assert not list(run.path.glob(".*.tmp"))


def test_what_a_killed_export_left_is_not_checked_as_an_export(tmp_path: Path) -> None:
    leftover = tmp_path / ".out.0123abcd.tmp"
    leftover.mkdir()
    (leftover / "export.json").write_text("{", encoding="utf-8")  # cut off by a power cut
    assert list(export.check_exports(RunDir(tmp_path))) == []


def test_an_export_into_a_run_folder_is_alone_and_deletes_what_a_killed_one_left(
    trained: RunDir, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--engine ctranslate2` holds the same lock when it deletes temporary folders."""
    leftover = run.path / ".out.0123abcd.tmp"
    leftover.mkdir()
    calls = []

    def check(*given: object) -> None:
        with (
            pytest.raises(RunError, match="busy"),
            atomic.only_process(run.path / ".exporting.lock", "busy"),
        ):
            pass
        calls.append(leftover.exists())

    monkeypatch.setattr(export, "_export", check)
    for each in (run, trained):  # into its own folder, and into that of another run
        export.export(each, run.path / "out", ExportRequest("ctranslate2"), print)
    assert calls == [False, False]


def test_the_ctranslate2_engine_says_that_it_needs_the_validation_text(
    cli: Cli, run: RunDir
) -> None:
    run.data_dir.unlink()  # a symbolic link
    outcome = cli("translate", run.path, "--engine", "ctranslate2", stdin=b"ba\n")
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (
        f"mtrain: {run.path}: must have its validation text in data/ for `--engine ctranslate2`, "
        "whose export is checked on it, but has none; leave `--engine` out, or restore data/ from "
        "a copy of the run.\n"
    )
    assert cli("translate", run.path, stdin=b"ba\n").code == 0


def test_the_ctranslate2_engine_does_not_replace_a_folder_that_is_not_an_export(
    cli: Cli, run: RunDir
) -> None:
    notes = run.path / "ctranslate2" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("precious", encoding="utf-8")
    outcome = cli("translate", run.path, "--engine", "ctranslate2", stdin=b"ba\n")
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (
        f"mtrain: {notes.parent}: cannot be replaced: it holds files, but no export.json; move it "
        "away.\n"
    )
    assert notes.read_text("utf-8") == "precious"


@pytest.mark.parametrize(
    "options",
    [
        ["--early-stop"],
        ["--n-best", "2"],
        ["--format", "tsv"],
        ["--alignments", "links"],
        ["--prefix", "prefixes"],
        ["--sample"],
        ["--checkpoint", "5"],
        ["--batch-tokens", "100"],
        ["--device", "cuda"],
        ["--precision", "bfloat16"],
    ],
    ids=lambda options: options[0],
)
def test_options_that_the_ctranslate2_engine_does_not_support_are_refused(
    cli: Cli, run: RunDir, options: list[str]
) -> None:
    outcome = cli("translate", run.path, "--engine", "ctranslate2", *options, stdin=b"ba\n")
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (
        f"mtrain: `{options[0]}` has no effect with `--engine ctranslate2`; leave it out.\n"
    )


def test_the_ctranslate2_engine_repeats_no_ngram_that_the_options_forbid(
    cli: Cli, run: RunDir
) -> None:
    config = run.config_path.read_text("utf-8")
    run.config_path.write_text(config.replace("no_repeat_ngram: 0", "no_repeat_ngram: 3"))
    text, arguments = b"ba ba ba ba ba ba\n", ("translate", run.path, "--beam", "1")
    for options in ([], ["--no-repeat-ngram", "1"], ["--no-repeat-ngram", "0"]):
        ours = cli(*arguments, *options, stdin=text)
        other = cli(*arguments, "--engine", "ctranslate2", *options, stdin=text)
        assert (ours.code, other.code) == (0, 0), other.err
        assert other.lines == ours.lines
        assert (other.lines == [text.decode().strip()]) == ("0" in options)


def test_the_ctranslate2_engine_refuses_an_ensemble_and_unsupported_settings(
    cli: Cli, run: RunDir
) -> None:
    engine = ["--engine", "ctranslate2"]
    outcome = cli("translate", run.path, run.path, *engine, stdin=b"ba\n")
    assert outcome.err == ("mtrain: `--engine ctranslate2` must have one run, but has 2 instead.\n")
    outcome = cli("translate", run.path, *engine, "--max-input-tokens", "9999", stdin=b"ba\n")
    assert "`--max-input-tokens` must be at most 4090 for `--engine ctranslate2`" in outcome.err
    options = replace(DecodingOptions.from_config(run.config), max_input_tokens=None)
    with pytest.raises(ConfigError, match=r"`--max-input-tokens` must be at most 4090 .* None"):
        ctranslate2.check_options(run.config, options)
    config = run.config_path.read_text("utf-8")
    run.config_path.write_text(config.replace("early_stop: false", "early_stop: true"))
    assert cli("translate", run.path, *engine, "--exact-stop", stdin=b"ba\n").code == 0
    outcome = cli("translate", run.path, *engine, stdin=b"ba\n")
    assert outcome.err == (
        "mtrain: `decoding.early_stop` must be off for `--engine ctranslate2`, but is True "
        "instead.\n"
    )


# The model card


def test_the_model_card_states_languages_data_and_sizes(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    need("huggingface")
    corpus = tmp_path_factory.mktemp("card")
    config_path = write_task(corpus)
    (corpus / "train.src").write_text(
        (corpus / "train.src").read_text("utf-8").replace("\n", "\n", 1) + "\n" + "ba " * 90 + "\n",
        encoding="utf-8",
    )
    with (corpus / "train.tgt").open("a", encoding="utf-8") as stream:
        stream.write("ba\nba\n")
    run = train_task(config_path, "training.max_steps=1")
    was = hashlib.sha256((corpus / "valid.src").read_bytes()).hexdigest()
    (corpus / "valid.src").unlink()
    export.export(
        run, tmp_path / "out", ExportRequest("huggingface", "bfloat16", 2), lambda _: None
    )
    page = (tmp_path / "out" / "README.md").read_text("utf-8")
    _, front, rest = page.split("---\n", 2)
    assert yaml.safe_load(front)["language"] == ["aa", "bb"]
    assert yaml.safe_load(front)["pipeline_tag"] == "translation"
    digest = hashlib.sha256((corpus / "train.tgt").read_bytes()).hexdigest()
    assert f"| training | train.tgt | `{digest}` |" in rest
    assert f"| validation | valid.src | `{was}` |" in rest  # the checksum at tokenization
    assert "200 training pairs were kept, 2 dropped" in rest
    assert "1 encoder and 1 decoder layers, width 16" in rest
    assert "mtrain" in rest


def card_with(run: RunDir, library: Library = "huggingface", **data: object) -> str:
    """Return the model card of a run with other settings of its data."""
    run = RunDir(run.path)
    config = run.config
    run.__dict__["config"] = config.model_copy(update={"data": config.data.model_copy(update=data)})
    return model_card.readme(run, load(run), EXPORTERS[library], "out", "ba", [])


def test_language_codes_are_quoted_in_the_shell_commands_of_the_card_of_a_package(
    noisy: RunDir,
) -> None:
    card = card_with(noisy, "argos", src_lang="my dialect", tgt_lang="b'")
    commands = [
        shlex.split(line) for line in card.splitlines() if "--from" in line or "--load" in line
    ]
    assert commands == [
        ["argos-translate", "--from-lang", "my dialect", "--to-lang", "b'", "ba"],
        ["libretranslate", "--load-only", "my dialect,b'"],
    ]


def test_the_language_code_no_is_not_read_as_a_yaml_boolean(noisy: RunDir) -> None:
    card = card_with(noisy, src_lang="no", tgt_lang="x-klingon")
    tree, _ = yaml.safe_load_all(card.split("# no to")[0])
    assert (tree["language"], tree["language_bcp47"]) == (["no"], ["x-klingon"])


@pytest.mark.parametrize(
    ("codes", "languages", "others"),
    [
        (("en", "deu"), ["en", "deu"], None),
        (("zh-Hant", "pt_BR"), ["zh", "pt"], ["zh-Hant", "pt_BR"]),
        (("EN", "x-klingon"), ["en"], ["EN", "x-klingon"]),
        (("en-GB", "en-US"), ["en"], ["en-GB", "en-US"]),
    ],
)
def test_the_card_has_iso_639_codes_as_language_and_the_configured_codes_as_language_bcp47(
    trained: RunDir, codes: tuple[str, str], languages: list[str], others: list[str] | None
) -> None:
    """The hub refuses a card with any other `language`."""
    card = card_with(trained, src_lang=codes[0], tgt_lang=codes[1])
    tree = yaml.safe_load(card.split("---\n")[1])
    assert (tree["language"], tree.get("language_bcp47")) == (languages, others)


def test_the_model_card_lists_tsv_and_hub_corpora_and_reads_no_file(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("a secret", "utf-8")
    corpus = TsvCorpus(tsv=[str(path)])
    assert list(model_card._files(corpus, {})) == [("train.tsv", "not known")]
    marks = {str(path): FileMark(1, 2, "abc")}
    assert list(model_card._files(corpus, marks)) == [("train.tsv", "`abc`")]
    hub = HubCorpus(hub="wmt/wmt14", split="train", src="de", tgt="en")
    assert list(model_card._files(hub, {})) == [("wmt/wmt14, train", "of the hub")]


def test_a_pipe_or_newline_in_a_file_name_does_not_break_the_table_of_the_card(
    trained: RunDir,
) -> None:
    rows = card_with(trained, valid=TsvCorpus(tsv=["a|b\nc.tsv"])).splitlines()
    assert "| validation | a\\|b c.tsv | not known |" in rows


@pytest.mark.parametrize("library", EXPORTERS)
def test_huggingface_hub_parses_the_card_with_its_scores_and_licence(
    cli: Cli, trained: RunDir, tmp_path: Path, library: Library
) -> None:
    """`huggingface_hub.ModelCard` parses the card as it does before an upload."""
    need(library)
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    archive = EXPORTERS[library].ARCHIVE
    directory = tmp_path / ("out" if archive is None else f"out{archive.suffix}")
    outcome = cli("export", trained.path, directory, "--to", library, "--license", "cc-by-4.0")
    assert outcome.code == 0, outcome.err
    if archive is not None:
        shutil.unpack_archive(directory, tmp_path / "files", "zip")
        (directory,) = (tmp_path / "files").iterdir()
    card = hub.ModelCard.load(directory / "README.md", ignore_metadata_errors=False)
    assert (card.data.license, card.data.library_name) == ("cc-by-4.0", EXPORTERS[library].PACKAGE)
    assert card.data.language == ["aa", "bb"]
    assert card.data.metrics == ["bleu", "chrf"]
    assert card.data.model_name == "run"
    (result,) = mtrain.evaluate(trained.path)
    found = card.data.eval_results
    assert [(each.metric_type, each.metric_name) for each in found] == [
        ("bleu", "BLEU"),
        ("chrf", "chrF2"),
    ]
    for each, score in zip(found, result.scores, strict=True):
        assert (each.task_type, each.dataset_name, each.dataset_type) == (
            "translation",
            "held_out",
            "text",
        )
        assert each.metric_value == pytest.approx(score.value, abs=1e-4)
        assert each.metric_args["signature"] == score.signature
        low, high = each.metric_args["interval_95"]
        assert (low + high) / 2 == pytest.approx(score.mean, abs=1e-4)
        assert high - low == pytest.approx(2 * score.half_width, abs=1e-3)
        assert each.dataset_args["lines"] == len(result.lines.src)
        text = "".join(f"{line}\n" for line in (*result.lines.src, *result.lines.refs[0]))
        assert each.dataset_args["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        text = f"{score.metric} {score.format()}"
        assert f"| held_out | {len(result.lines.src)} | {text} | `nrefs:1\\|" in card.text
    assert "published under `cc-by-4.0`" in card.text
    again = hub.ModelCardData(**card.data.to_dict())
    assert again.to_dict() == card.data.to_dict()


def test_a_card_without_a_licence_or_test_sets_says_so(trained: RunDir) -> None:
    card = card_with(trained, tests={})
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "unknown"
    assert "Not stated. Whoever publishes this model names one" in card
    assert "No test set was scored." in card
    assert "model-index" not in card


def test_the_example_of_the_card_does_not_begin_with_a_dash_if_a_line_does_not(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program on a command line would read it as an option."""
    for number, sources in enumerate((["-ba!", "ba ce di", "fo gu ha je"], ["-ba ce", "-ba!"])):
        lines = ParallelLines(sources, sources)
        monkeypatch.setattr(export, "_read_held_out", lambda *_, lines=lines: lines)
        directory, request = tmp_path / f"{number}", ExportRequest("ctranslate2", has_scores=False)
        export.export(run, directory, request, print)
        card = (directory / "README.md").read_text("utf-8")
        assert f"lines = ['{('ba ce di', '-ba!')[number]}']" in card


@pytest.mark.parametrize(
    ("decoding", "words"),
    [
        ({"beam": 4, "batch_tokens": 100}, "a beam of 4 and a length exponent of 0.6, before"),
        (
            {"mbr": "chrf", "no_repeat_ngram": 3, "retry_flagged": False},
            "a length exponent of 0.6, and with `no_repeat_ngram: 3`, `retry_flagged: false`, "
            "`mbr: chrf`, before",
        ),
    ],
    ids=["default", "others"],
)
def test_the_card_names_the_decoding_options_that_are_not_the_default(
    decoding: dict[str, object], words: str
) -> None:
    lines = metrics.TestSet(["a"], [["b"]])
    config = settings().model_copy(update={"decoding": DecodingConfig.model_validate(decoding)})
    result = evaluation.TestResult("held_out", "run", lines, ["b"], [])
    assert words in next(model_card._scores(config, [result]))


def test_a_card_names_data_sets_of_the_hub(trained: RunDir) -> None:
    hub = HubCorpus(hub="wmt/wmt14", split="train", src="de", tgt="en")
    tree = yaml.safe_load(card_with(trained, train=hub).split("---\n")[1])
    assert tree["datasets"] == ["wmt/wmt14"]


def test_a_card_names_a_data_set_whose_path_cannot_be_looked_up(trained: RunDir) -> None:
    hub = HubCorpus(hub="x" * 256, split="train", src="de", tgt="en")  # no name of a file
    assert f"| training | {hub.hub}, train | of the hub |" in card_with(trained, train=hub)


def test_an_invalid_licence_is_refused_and_missing_scores_are_reported(
    cli: Cli, run: RunDir, tmp_path: Path
) -> None:
    command = ["export", run.path, tmp_path / "out", "--to", "ctranslate2"]
    outcome = cli(*command, "--license", "My own")
    assert outcome.err == (
        "mtrain: `--license` must be an identifier of the Hugging Face Hub, such as cc-by-4.0, but "
        "is 'My own' instead.\n"
    )
    data = run.data_dir.resolve()
    run.data_dir.unlink()
    shutil.copytree(data, run.data_dir)
    shutil.rmtree(run.data_dir / "tests")
    outcome = cli(*command)
    assert outcome.code == 0
    assert "the model card has no scores: " in outcome.err
    assert "No test set was scored." in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_an_export_report_has_the_bleu_scores_as_text_and_as_json(
    exported: dict[str, Exported],
) -> None:
    report = exported["ctranslate2"].report
    bleu = {"mtrain": 40.0, "exported": 39.5}
    worse = replace(report, bleu=bleu)
    assert export.as_text(worse)[-1].endswith("39.50 (-0.50)")
    assert json.loads("\n".join(export.as_json(worse)))["bleu"] == bleu


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_table_fits_80_columns(exported: dict[str, Exported], name: Library) -> None:
    report = exported["ctranslate2"].report
    note = "without argostranslate, which pip install 'mtrain[argos]' adds"
    parity = replace(
        report.parity,
        other_beams={"end at a limit of length": 1_000, "likelier in the export": 1_000},
        own_call=OwnCall("transformers.js 10.10.10", None, (note,)),
    )
    large = replace(report, library=name, version="10.10.10", num_bytes=10**9, parity=parity)
    wide = replace(large, precision="float32 and int8", bleu={"mtrain, greedy": 40.0})
    lines = export.as_text(wide)
    assert max(map(len, lines)) <= 80
    assert lines[10:13] == [
        "lines with the same text, transformers.js 10.10.10  not compared",
        f"  {note}",
        "validation BLEU, mtrain, greedy                     40.00",
    ]
