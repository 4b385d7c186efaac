"""A run for other libraries: written, loaded by the library itself, compared, and kept if equal."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from mtrain import __version__, comparison, ctranslate2_model, evaluate, marian, prepare
from mtrain import translate as translating
from mtrain.comparison import Comparison, Copy
from mtrain.config import Config
from mtrain.errors import ConfigError, RunError
from mtrain.files import whole_dir, write_lines
from mtrain.model import num_parameters
from mtrain.model_card import Card, ctranslate2_readme, marian_readme
from mtrain.prepare import Lines
from mtrain.rundir import RunDir
from mtrain.translate import Loading, Translator

Target = Literal["ctranslate2", "huggingface"]
Quantization = Literal["int8", "float16", "bfloat16"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What to export, and on how many lines of the validation text to check it."""

    target: Target
    quantization: Quantization | None = None
    num_lines: int = 100


class Bleu(NamedTuple):
    """BLEU of the validation text, of the model and of its copy, both by log-probability alone."""

    model: float
    copy: float


@dataclass(frozen=True)
class Report:
    """What became of an export.

    Attributes:
        target: the library.
        version: its version.
        precision: of the weights.
        num_bytes: of all files.
        comparison: with the model.
        bleu: of a quantised model; None of an exact one.
    """

    target: Target
    version: str
    precision: str
    num_bytes: int
    comparison: Comparison
    bleu: Bleu | None


_PACKAGES: dict[Target, str] = {"ctranslate2": "ctranslate2", "huggingface": "transformers"}


def export(run: RunDir, directory: Path, wanted: Wanted, say: Say) -> Report:
    """Write a run's model as a folder for another library, and check it with that library.

    Raises:
        ConfigError: if the library is missing, or cannot hold the model or the precision.
        RunError: if the folder is there already, or if the copy does not translate as the model
            does; then there is no folder.
    """
    config = run.load_config()
    if directory.exists():
        raise RunError(f"{directory}: must not be there yet, but is; name another folder.")
    _require_library(wanted)
    _refuse(config, wanted)
    translator = translating.load(run, loading=Loading("cpu"))
    lines = _held_out(run, config, translator, wanted.num_lines)
    with whole_dir(directory) as beside:
        say(f"{directory}: writing, then checking on {len(lines.src)} lines")
        _write(translator, config, beside, wanted)
        copy = _load(beside, wanted.target)
        compared = comparison.compare(translator, copy, lines)
        if wanted.quantization is None:
            _require_equal(directory, compared)
        bleu = _bleu(run, translator, copy, say) if wanted.quantization else None
        version = importlib.metadata.version(_PACKAGES[wanted.target])
        num_bytes = sum(file.stat().st_size for file in beside.iterdir())
        precision = wanted.quantization or "float32"
        report = Report(wanted.target, version, precision, num_bytes, compared, bleu)
        _describe(run, translator, report, lines, beside)
    return report


def _require_library(wanted: Wanted) -> None:
    package = _PACKAGES[wanted.target]
    if find_spec(package) is None:
        raise ConfigError(
            f"`mtrain export --to {wanted.target}` must have {package}: pip install "
            f"'mtrain[{wanted.target}]' adds it."
        )


def _refuse(config: Config, wanted: Wanted) -> None:
    if wanted.target == "ctranslate2":
        ctranslate2_model.refuse(config.model)
        return
    marian.refuse(config.model)
    if wanted.quantization == "int8":
        raise ConfigError(
            "`--quantize` must be float16 or bfloat16 with `--to huggingface`, which stores no "
            "other, but is int8 instead."
        )


def _held_out(run: RunDir, config: Config, translator: Translator, count: int) -> Lines:
    """Return the first pairs of the validation text that are neither blank nor too long."""
    valid = prepare.read_valid(run)
    pairs = zip(valid.src, valid.tgt, strict=True)
    kept = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
    src, tgt = translator.tokenizer.src, translator.tokenizer.tgt
    limit = config.data.max_tokens
    short = [
        pair
        for pair, *ids in zip(
            kept, src.encode([a for a, _ in kept]), tgt.encode([b for _, b in kept]), strict=True
        )
        if max(map(len, ids)) < limit
    ][:count]
    if not short:
        raise RunError(f"{run.path}: must have validation text to check an export, but has none.")
    return Lines([src for src, _ in short], [tgt for _, tgt in short])


def _write(translator: Translator, config: Config, directory: Path, wanted: Wanted) -> None:
    model, tokenizer = translator.model, translator.tokenizer
    if wanted.target == "ctranslate2":
        ctranslate2_model.write(model, tokenizer, directory, wanted.quantization)
    else:
        assert wanted.quantization != "int8"
        marian.write(model, tokenizer, config, directory, wanted.quantization)


def _load(directory: Path, target: Target) -> Copy:
    if target == "ctranslate2":
        return ctranslate2_model.CTranslate2Copy(directory)
    return marian.MarianCopy(directory)


def _require_equal(directory: Path, compared: Comparison) -> None:
    if problems := compared.problems():
        raise RunError(f"{directory}: nothing is exported: {'; '.join(problems)}.")


def _bleu(run: RunDir, translator: Translator, copy: Copy, say: Say) -> Bleu:
    """Return the BLEU of both on the whole validation text."""
    valid = prepare.read_valid(run)
    say(f"{run.path}: translating {len(valid.src):,} lines of validation text, twice")
    rows = [row for row, line in enumerate(valid.src) if line.strip()]
    sources = translator.tokenizer.encode_src([valid.src[row] for row in rows])
    limits = [len(ids) - 1 + translator.decoding.max_extra_tokens for ids in sources]
    found = copy.search(sources, translator.decoding.beam, limits)
    theirs = translator.tokenizer.tgt.decode([own.ids for own in found])
    ours = comparison.translate(translator, sources)
    references = [valid.tgt[row] for row in rows]
    return Bleu(evaluate.bleu(ours, references), evaluate.bleu(theirs, references))


def _describe(
    run: RunDir, translator: Translator, report: Report, lines: Lines, directory: Path
) -> None:
    """Write the page and the report beside the model."""
    example = min(lines.src, key=len)
    table = as_text(report)
    card = Card(run, translator.tokenizer, num_parameters(translator.model), example, table)
    if report.target == "ctranslate2":
        page = ctranslate2_readme(card, ctranslate2_model.NUM_POSITIONS)
    else:
        page = marian_readme(card, marian.num_positions(run.load_config()))
    write_lines(directory / "README.md", page)
    write_lines(directory / "export.json", as_json(report))


def as_text(report: Report) -> list[str]:
    """Return the report as a table of lines."""
    found = report.comparison
    rows = [
        ("library", f"{report.target}, {_PACKAGES[report.target]} {report.version}"),
        ("weights", f"{report.precision}, {report.num_bytes / 1e6:,.1f} MB"),
        ("lines with the same source pieces", str(found.encoded)),
        ("lines with the same greedy output", str(found.greedy)),
        (f"lines with the same output, beam {found.beam_width}", str(found.beam)),
        ("lines whose text is the same", str(found.decoded)),
        ("largest difference of a log-probability, references", f"{found.reference:.1e}"),
        ("largest difference of a log-probability, its own beam", f"{found.found:.1e}"),
    ]
    if report.bleu is not None:
        change = report.bleu.copy - report.bleu.model
        rows.append(("validation BLEU, mtrain", f"{report.bleu.model:.2f}"))
        rows.append(("validation BLEU, exported", f"{report.bleu.copy:.2f} ({change:+.2f})"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def as_json(report: Report) -> list[str]:
    """Return the report as lines of one JSON object."""
    tree = {"mtrain": __version__, **asdict(report)}
    return json.dumps(tree, indent=2, ensure_ascii=False).split("\n")
