"""A run for other libraries: written, loaded by the library itself, compared, and kept if equal."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from mtrain import __version__
from mtrain.config.sections import Config
from mtrain.data import prepare
from mtrain.data.prepare import ParallelLines
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import ConfigError, RunError
from mtrain.evaluate import metrics
from mtrain.export import ctranslate2, huggingface, parity
from mtrain.export.model_card import Card, ctranslate2_readme, marian_readme
from mtrain.export.parity import Copy, ParityReport
from mtrain.io.atomic import sha256_if_readable, whole_dir, write_lines
from mtrain.model.transformer import num_parameters
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir

Target = Literal["ctranslate2", "huggingface"]
Quantization = Literal["int8", "float16", "bfloat16"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """What to export, and on how many lines of the validation text to check it."""

    target: Target
    quantization: Quantization | None = None
    num_lines: int = 100


class Bleu(NamedTuple):
    """BLEU of the validation text, of the model and of its copy, both by log-probability alone."""

    model: float
    copy: float


@dataclass(frozen=True)
class ExportReport:
    """What became of an export.

    Attributes:
        target: the library.
        version: its version.
        precision: of the weights.
        num_bytes: of all files.
        weights: the SHA-256 of the file that they came from.
        comparison: with the model.
        bleu: of a quantised model; None of an exact one.
    """

    target: Target
    version: str
    precision: str
    num_bytes: int
    weights: str | None
    comparison: ParityReport
    bleu: Bleu | None


_REPORT_FILE = "export.json"
_PACKAGES: dict[Target, str] = {"ctranslate2": "ctranslate2", "huggingface": "transformers"}


def export(run: RunDir, directory: Path, wanted: ExportRequest, say: Say) -> ExportReport:
    """Write a run's model as a folder for another library, and check it with that library.

    Raises:
        ConfigError: if the library is missing, or cannot hold the model or the precision.
        RunError: if the folder is there already, or if the copy does not translate as the model
            does; then there is no folder.
    """
    if directory.exists():
        raise RunError(f"{directory}: must not be there yet, but is; name another folder.")
    return _export(run, directory, wanted, say)


def ensure(run: RunDir, say: Say) -> Path:
    """Return the run's own folder for CTranslate2, written anew if the weights are others.

    Raises:
        ConfigError, RunError: as `export` does.
    """
    directory, wanted = run.path / "ctranslate2", ExportRequest("ctranslate2")
    _require_library(wanted)
    try:
        made_of = json.loads((directory / _REPORT_FILE).read_text("utf-8"))["weights"]
    except (OSError, ValueError, KeyError):
        made_of = None
    if made_of is None or made_of != _weights(run):
        _export(run, directory, wanted, say)
    return directory


def _weights(run: RunDir) -> str | None:
    """Return what tells a run's weights from others; None if there are none."""
    return sha256_if_readable(run.model_path)


def _export(run: RunDir, directory: Path, wanted: ExportRequest, say: Say) -> ExportReport:
    config = run.load_config()
    _require_library(wanted)
    _refuse(config, wanted)
    translator = load(run, loading=LoadOptions("cpu"))
    held_out = _held_out(run, translator)
    lines = ParallelLines(held_out.src[: wanted.num_lines], held_out.tgt[: wanted.num_lines])
    with whole_dir(directory, _REPORT_FILE) as beside:
        say(f"{directory}: writing, then checking on {len(lines.src)} lines")
        _write(translator, config, beside, wanted)
        copy = _load(beside, wanted.target)
        compared = parity.compare(translator, copy, lines)
        if wanted.quantization is None:
            _require_equal(directory, compared)
        bleu = _bleu(translator, copy, held_out, say) if wanted.quantization else None
        report = ExportReport(
            wanted.target,
            importlib.metadata.version(_PACKAGES[wanted.target]),
            wanted.quantization or "float32",
            sum(file.stat().st_size for file in beside.iterdir()),
            _weights(run),
            compared,
            bleu,
        )
        _describe(run, translator, report, lines, beside)
    return report


def _require_library(wanted: ExportRequest) -> None:
    package = _PACKAGES[wanted.target]
    if find_spec(package) is None:
        raise ConfigError(
            f"`mtrain export --to {wanted.target}` must have {package}: pip install "
            f"'mtrain[{wanted.target}]' adds it."
        )


def _refuse(config: Config, wanted: ExportRequest) -> None:
    if wanted.target == "ctranslate2":
        ctranslate2.refuse(config.model)
        return
    huggingface.refuse(config.model)
    if wanted.quantization == "int8":
        raise ConfigError(
            "`--quantize` must be float16 or bfloat16 with `--to huggingface`, which stores no "
            "other, but is int8 instead."
        )


def _held_out(run: RunDir, translator: Translator) -> ParallelLines:
    """Return the pairs of the validation text that are neither blank nor too long."""
    valid = prepare.read_valid(run)
    limit = run.load_config().data.max_tokens
    src_ids = translator.tokenizer.src.encode(valid.src)
    tgt_ids = translator.tokenizer.tgt.encode(valid.tgt)
    rows = [
        row
        for row, (src, tgt) in enumerate(zip(src_ids, tgt_ids, strict=True))
        if valid.src[row].strip() and valid.tgt[row].strip() and max(len(src), len(tgt)) < limit
    ]
    if not rows:
        raise RunError(f"{run.path}: must have validation text to check an export, but has none.")
    return ParallelLines([valid.src[row] for row in rows], [valid.tgt[row] for row in rows])


def _write(translator: Translator, config: Config, directory: Path, wanted: ExportRequest) -> None:
    model, tokenizer = translator.model, translator.tokenizer
    if wanted.target == "ctranslate2":
        ctranslate2.write(model, tokenizer, config, directory, wanted.quantization)
    else:
        assert wanted.quantization != "int8"
        huggingface.write(model, tokenizer, config, directory, wanted.quantization)


def _load(directory: Path, target: Target) -> Copy:
    if target == "ctranslate2":
        return ctranslate2.CTranslate2Copy(directory)
    return huggingface.MarianCopy(directory)


def _require_equal(directory: Path, compared: ParityReport) -> None:
    if problems := compared.problems():
        raise RunError(f"{directory}: nothing is exported: {'; '.join(problems)}.")


def _bleu(translator: Translator, copy: Copy, lines: ParallelLines, say: Say) -> Bleu:
    """Return the BLEU of both."""
    say(f"translating {len(lines.src):,} lines of validation text with both")
    sources = translator.tokenizer.encode_src(lines.src)
    limits = [translator.max_length(EncodedSource(ids)) for ids in sources]
    found = copy.search(sources, translator.decoding.beam, limits)
    theirs = translator.tokenizer.tgt.decode([own.ids for own in found])
    ours = parity.translate(translator, sources)
    return Bleu(metrics.bleu(ours, lines.tgt), metrics.bleu(theirs, lines.tgt))


def _describe(
    run: RunDir, translator: Translator, report: ExportReport, lines: ParallelLines, directory: Path
) -> None:
    """Write the page and the report beside the model."""
    example = min(lines.src, key=len)
    table = as_text(report)
    card = Card(run, translator.tokenizer, num_parameters(translator.model), example, table)
    config = run.load_config()
    if report.target == "ctranslate2":
        page = ctranslate2_readme(card, ctranslate2.num_positions(config))
    else:
        page = marian_readme(card, huggingface.num_positions(config))
    write_lines(directory / "README.md", page)
    write_lines(directory / _REPORT_FILE, as_json(report))


def as_text(report: ExportReport) -> list[str]:
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


def as_json(report: ExportReport) -> list[str]:
    """Return the report as lines of one JSON object."""
    tree = {"mtrain": __version__, **asdict(report)}
    return json.dumps(tree, indent=2, ensure_ascii=False).split("\n")
