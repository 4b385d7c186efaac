"""Export a run for another library, and keep the export if that library translates as mtrain."""

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
from mtrain.export.parity import ExportedModel, ParityReport
from mtrain.io.atomic import sha256_if_readable, whole_dir, write_lines
from mtrain.io.table import format_table
from mtrain.model.transformer import num_parameters
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir

Library = Literal["ctranslate2", "huggingface"]
Quantization = Literal["int8", "float16", "bfloat16"]
Say = Callable[[str], None]

_REPORT_FILE = "export.json"
_PACKAGES: dict[Library, str] = {"ctranslate2": "ctranslate2", "huggingface": "transformers"}


@dataclass(frozen=True)
class ExportRequest:
    """The library, the type of the weights (None: float32), and validation lines to compare."""

    library: Library
    quantization: Quantization | None = None
    num_lines: int = 100


class BleuPair(NamedTuple):
    """Validation BLEU of the run and of its export, both searched by log-probability alone."""

    model: float
    exported: float


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        library: the library.
        version: its version.
        precision: of the weights.
        num_bytes: of all files.
        weights: the SHA-256 of the run's `model.safetensors`.
        parity: how the export compares with the run.
        bleu: of a quantised model; None of an exact one.
    """

    library: Library
    version: str
    precision: str
    num_bytes: int
    weights: str | None
    parity: ParityReport
    bleu: BleuPair | None


def export(run: RunDir, directory: Path, request: ExportRequest, say: Say) -> ExportReport:
    """Write a run's model as a folder for another library, and check it with that library.

    Raises:
        ConfigError: if the library is missing, or does not support the model or the precision.
        RunError: if the folder exists, or if the export does not translate as the run does; then
            nothing is written.
    """
    if directory.exists():
        raise RunError(f"{directory}: must not be there yet, but is; name another folder.")
    return _export(run, directory, request, say)


def ensure(run: RunDir, say: Say) -> Path:
    """Return the CTranslate2 export in the run folder, rewritten if the weights have changed.

    Raises:
        ConfigError, RunError: as `export` does.
    """
    directory, request = run.path / "ctranslate2", ExportRequest("ctranslate2")
    _require_library(request)
    try:
        exported_weights = json.loads((directory / _REPORT_FILE).read_text("utf-8"))["weights"]
    except (OSError, ValueError, KeyError):
        exported_weights = None
    if exported_weights is None or exported_weights != sha256_if_readable(run.model_path):
        _export(run, directory, request, say)
    return directory


def _export(run: RunDir, directory: Path, request: ExportRequest, say: Say) -> ExportReport:
    config = run.config
    _require_library(request)
    if request.library == "ctranslate2":
        ctranslate2.check_supported(config.model)
    else:
        huggingface.check_supported(config.model)
        if request.quantization == "int8":
            raise ConfigError(
                "`--quantize` must be float16 or bfloat16 with `--to huggingface`, which stores "
                "no other, but is int8 instead."
            )
    translator = load(run, loading=LoadOptions("cpu"))
    held_out = _read_held_out(run, translator, config.data.max_tokens)
    lines = ParallelLines(held_out.src[: request.num_lines], held_out.tgt[: request.num_lines])
    with whole_dir(directory, _REPORT_FILE) as partial_dir:
        say(f"{directory}: writing, then checking on {len(lines.src)} lines")
        _write(translator, config, partial_dir, request)
        exported: ExportedModel
        if request.library == "ctranslate2":
            exported = ctranslate2.CTranslate2Model(partial_dir)
        else:
            exported = huggingface.MarianModel(partial_dir)
        compared = parity.compare(translator, exported, lines)
        problems = compared.problems() if request.quantization is None else []
        if problems:
            raise RunError(f"{directory}: nothing is exported: {'; '.join(problems)}.")
        report = ExportReport(
            request.library,
            importlib.metadata.version(_PACKAGES[request.library]),
            request.quantization or "float32",
            sum(file.stat().st_size for file in partial_dir.iterdir()),
            sha256_if_readable(run.model_path),
            compared,
            _bleu(translator, exported, held_out, say) if request.quantization else None,
        )
        table, example = as_text(report), min(lines.src, key=len)
        card = Card(run, translator.tokenizer, num_parameters(translator.model), example, table)
        if request.library == "ctranslate2":
            readme = ctranslate2_readme(card, ctranslate2.num_positions(config))
        else:
            readme = marian_readme(card, huggingface.num_positions(config))
        write_lines(partial_dir / "README.md", readme)
        write_lines(partial_dir / _REPORT_FILE, as_json(report))
    return report


def _require_library(request: ExportRequest) -> None:
    package = _PACKAGES[request.library]
    if find_spec(package) is None:
        raise ConfigError(
            f"`mtrain export --to {request.library}` must have {package}: pip install "
            f"'mtrain[{request.library}]' adds it."
        )


def _read_held_out(run: RunDir, translator: Translator, max_tokens: int) -> ParallelLines:
    """Return the validation pairs that are neither blank nor too long."""
    valid = prepare.read_valid(run)
    src_ids = translator.tokenizer.src.encode(valid.src)
    tgt_ids = translator.tokenizer.tgt.encode(valid.tgt)
    rows = [
        row
        for row, (src, tgt) in enumerate(zip(src_ids, tgt_ids, strict=True))
        if valid.src[row].strip()
        and valid.tgt[row].strip()
        and max(len(src), len(tgt)) < max_tokens
    ]
    if not rows:
        raise RunError(f"{run.path}: must have validation text to check an export, but has none.")
    return ParallelLines([valid.src[row] for row in rows], [valid.tgt[row] for row in rows])


def _write(translator: Translator, config: Config, directory: Path, request: ExportRequest) -> None:
    model, tokenizer = translator.model, translator.tokenizer
    if request.library == "ctranslate2":
        ctranslate2.write(model, tokenizer, config, directory, request.quantization)
    else:
        assert request.quantization != "int8"
        huggingface.write(model, tokenizer, config, directory, request.quantization)


def _bleu(
    translator: Translator, exported: ExportedModel, lines: ParallelLines, say: Say
) -> BleuPair:
    say(f"translating {len(lines.src):,} lines of validation text with both")
    sources = translator.tokenizer.encode_src(lines.src)
    limits = [translator.max_length(EncodedSource(ids)) for ids in sources]
    outputs = exported.search(sources, translator.options.beam, limits)
    theirs = translator.tokenizer.tgt.decode([output.ids for output in outputs])
    ours = parity.translate(translator, sources)
    return BleuPair(metrics.bleu(ours, lines.tgt), metrics.bleu(theirs, lines.tgt))


def as_text(report: ExportReport) -> list[str]:
    """Return the report as a table of lines."""
    parity = report.parity
    rows = [
        ("library", f"{report.library}, {_PACKAGES[report.library]} {report.version}"),
        ("weights", f"{report.precision}, {report.num_bytes / 1e6:,.1f} MB"),
        ("lines with the same source tokens", str(parity.same_source)),
        ("lines with the same greedy output", str(parity.same_greedy)),
        (f"lines with the same output, beam {parity.beam}", str(parity.same_beam)),
        ("lines whose text is the same", str(parity.same_text)),
        ("largest difference of a log-probability, references", f"{parity.reference_diff:.1e}"),
        ("largest difference of a log-probability, its own beam", f"{parity.beam_diff:.1e}"),
    ]
    if report.bleu is not None:
        change = report.bleu.exported - report.bleu.model
        rows.append(("validation BLEU, mtrain", f"{report.bleu.model:.2f}"))
        rows.append(("validation BLEU, exported", f"{report.bleu.exported:.2f} ({change:+.2f})"))
    return format_table(rows, "<<")


def as_json(report: ExportReport) -> list[str]:
    """Return the report as lines of one JSON object."""
    tree = {"mtrain": __version__, **asdict(report)}
    return json.dumps(tree, indent=2, ensure_ascii=False).split("\n")
