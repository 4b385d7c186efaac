"""Export a run for another library, and keep the export if that library translates as mtrain."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, ConfigDict, ValidationError

from mtrain import __version__
from mtrain.config.sections import Config, format_value
from mtrain.data import prepare
from mtrain.data.prepare import ParallelLines
from mtrain.decode import shortlist
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import Warn
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.errors import ConfigError, RunError, require_package
from mtrain.evaluation import evaluation, metrics
from mtrain.evaluation.evaluation import TestResult
from mtrain.exporters import ctranslate2, huggingface, model_card, onnx_page, parity
from mtrain.exporters.ctranslate2 import CTranslate2Translator
from mtrain.exporters.exporter import Archive, ExportedModel, version_of
from mtrain.exporters.parity import LogProbSearcher, ParityReport
from mtrain.exporters.registry import Library, Quantization, exporters
from mtrain.io.atomic import (
    sha256_if_readable,
    sweep,
    temporary_path,
    whole_dir,
    whole_file,
    write_lines,
)
from mtrain.io.table import format_table
from mtrain.io.text_width import count
from mtrain.run.load_model import LoadOptions
from mtrain.run.logger import PythonLog
from mtrain.run.run_dir import RunDir

_REPORT_FILE = "export.json"
_LICENCE = re.compile("[a-z0-9][a-z0-9.-]{0,60}")


@dataclass(frozen=True)
class ExportRequest:
    """The library to export to, and the options of the export."""

    library: Library
    quantization: Quantization | None = None  # the type of the weights; None is float32
    num_lines: int = 100  # of the validation text, to compare on
    licence: str | None = None  # in the model card
    has_scores: bool = True  # whether the model card has scores of the test sets
    has_page: bool = False  # whether a web page that translates is written, too
    has_shortlist: bool = False  # whether a shortlist of the vocabulary is written, too


@dataclass(frozen=True)
class ExportReport:
    """The result of an export, as `export.json` holds it."""

    library: Library
    version: str  # of the library
    precision: str  # of the weights
    num_bytes: int  # of all files but `README.md` and `export.json`
    weights: str | None  # the SHA-256 of the run's `model.safetensors`
    files: dict[str, str | None]  # the SHA-256 of each other file
    parity: ParityReport
    # on the validation text, by name: the run, then each exported model that may translate
    # differently (quantised, only approximated by the library, or with a shortlist). All are
    # searched by log-probability alone; empty if there is no such model
    bleu: dict[str, float]


def export(run: RunDir, directory: Path, request: ExportRequest, warn: Warn) -> ExportReport:
    """Write a run's model as a folder for another library, and check it with that library.

    Progress is logged. Concurrent exports into one run folder take turns.

    Raises:
        ConfigError: if the library is missing, or does not support the model or the precision.
        RunError: if the folder exists, or if the export does not translate as the run does; then
            nothing is written.
    """
    archive = exporters()[request.library].ARCHIVE
    if archive is not None and not (
        directory.suffix == archive.suffix and directory.name.isprintable()
    ):
        raise ConfigError(
            f"`DIR` must be a file name of printable characters that ends in {archive.suffix} with "
            f"`--to {request.library}`, but is {directory} instead."
        )
    with _alone(directory):
        if os.path.lexists(directory):  # also a symbolic link to nothing
            kind = "folder" if archive is None else "file"
            raise RunError(f"{directory}: already exists; choose another {kind}.")
        return _export(run, directory, request, warn)


def load_ctranslate2(run: RunDir, options: DecodingOptions, warn: Warn) -> CTranslate2Translator:
    """Load a run's CTranslate2 export in float32; write it first if it is missing or outdated.

    Any other export in its folder is replaced. Concurrent processes take turns by a lock, unless
    the run folder is not writable.

    Raises:
        ConfigError: if CTranslate2 does not support an option.
        RunError: as `export` does, or if the folder is damaged.
    """
    ctranslate2.check_options(run.config, options)
    _require_library("ctranslate2")
    directory = run.ctranslate2_dir
    with _alone(directory):
        stored = _read_report(directory)
        if (
            stored is None
            or (stored.library, stored.precision) != ("ctranslate2", "float32")
            or stored.weights != sha256_if_readable(run.model_path)
        ):
            if not (run.data_dir / "valid.src").exists():
                raise RunError(
                    f"{run.path}: must have its validation text in data/ for `--engine "
                    "ctranslate2`, whose export is checked on it, but has none; leave `--engine` "
                    "out, or restore data/ from a copy of the run."
                )
            _export(run, directory, ExportRequest("ctranslate2", has_scores=False), warn)
        else:
            _verify(directory, stored)
        try:
            return CTranslate2Translator(run, options, directory)
        except (RuntimeError, ValueError, OSError) as error:
            raise _damaged(directory, f"CTranslate2 cannot load it: {error}") from None


def check_exports(run: RunDir) -> Iterator[str]:
    """Yield for each export in a run folder its name, and whether it has the run's weights.

    Raises:
        RunError: if a file of an export is missing, was added, or differs.
    """
    for path in sorted(run.path.glob(f"[!.]*/{_REPORT_FILE}")):
        stored = _read_report(path.parent)
        if stored is not None:
            _verify(path.parent, stored)
            yield f"{path.parent.name}/ {_state(run, stored)}"
    suffixes = {exporter.ARCHIVE.suffix for exporter in exporters().values() if exporter.ARCHIVE}
    for path in sorted(path for path in run.path.glob("*") if path.suffix in suffixes):
        yield f"{path.name} {_state(run, _verified_archive(path))}"


def _state(run: RunDir, stored: _StoredReport) -> str:
    is_current = stored.weights == sha256_if_readable(run.model_path)
    return "whole" if is_current else "whole, but of other weights"


def _verified_archive(path: Path) -> _StoredReport:
    """Unpack an archive, and compare every file in it with its checksum.

    Raises:
        RunError: if it cannot be unpacked, is no export of mtrain, or if a file is missing, was
            added, or differs.
    """
    with TemporaryDirectory() as directory:
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(directory)
        except Exception as error:  # zipfile has many types for damaged data, some without a text
            why = str(error) or "its data is cut off"
            raise _damaged(path, f"it cannot be unpacked: {why}") from None
        folders = list(Path(directory).iterdir())
        try:
            if len(folders) == 1 and (stored := _read_report(folders[0])) is not None:
                _verify(folders[0], stored)
                return stored
        except RunError as error:
            raise RunError(str(error).replace(str(folders[0]), str(path))) from None
    raise RunError(f"{path}: is not an export of mtrain; move it out of the run folder.")


class _StoredReport(BaseModel):
    """The fields of `export.json` that are read again."""

    model_config = ConfigDict(strict=True)

    library: str
    precision: str
    weights: str | None
    files: dict[str, str]


def _read_report(directory: Path) -> _StoredReport | None:
    """Read `export.json`; None if there is none.

    Raises:
        RunError: if it is damaged.
    """
    path = directory / _REPORT_FILE
    try:
        return _StoredReport.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError):
        raise _damaged(directory, f"{_REPORT_FILE} cannot be read") from None


def _verify(directory: Path, stored: _StoredReport) -> None:
    """Compare every file of an export with its checksum; a page may have its library from npm.

    Raises:
        RunError: if one is missing, was added, or differs.
    """
    files = _checksums(directory)
    of_npm = {f"library/{name}" for name in onnx_page.LIBRARY_FILES if "page.json" in stored.files}
    for name in sorted((files.keys() ^ stored.files.keys()) - of_npm):
        raise _damaged(directory, f"{name} {'is missing' if name in stored.files else 'was added'}")
    for name, expected in stored.files.items():
        if files[name] != expected:
            raise _damaged(directory, f"the checksum of {name} is another")


def _checksums(directory: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each file but the report; None for anything but a plain file."""
    return {
        path.relative_to(directory).as_posix(): None
        if path.is_symlink()
        else sha256_if_readable(path)
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or not path.is_dir()
        if path != directory / _REPORT_FILE
    }


def _damaged(directory: Path, why: str) -> RunError:
    return RunError(
        f"{directory}: must be whole, but is damaged: {why}; delete it, and export it again."
    )


def _check_request(request: ExportRequest, config: Config) -> None:
    """Raise ConfigError if the library is missing, or does not support the request."""
    exporter = exporters()[request.library]
    _require_library(request.library)
    check_supported(request.library, config)
    if request.quantization is not None and not exporter.QUANTIZATIONS:
        others = ", ".join(name for name, other in exporters().items() if other.QUANTIZATIONS)
        raise ConfigError(
            f"`--quantize` must be left out with `--to {request.library}`, which takes no choice; "
            f"it is for {others}."
        )
    if request.quantization not in (None, *exporter.QUANTIZATIONS):
        raise ConfigError(
            f"`--quantize` must be {' or '.join(exporter.QUANTIZATIONS)} with `--to "
            f"{request.library}`, which stores no other, but is {request.quantization} instead."
        )
    for option, is_given, library in (
        ("--page", request.has_page, "onnx"),
        ("--shortlist", request.has_shortlist, "ctranslate2"),
    ):
        if is_given and request.library != library:
            raise ConfigError(
                f"`{option}` has no effect with `--to {request.library}`; leave it out."
            )
    if request.licence is not None and not _LICENCE.fullmatch(request.licence):
        raise ConfigError(
            f"`--license` must be an identifier of the Hugging Face Hub, such as cc-by-4.0, but is "
            f"{request.licence!r} instead."
        )


def _export(run: RunDir, directory: Path, request: ExportRequest, warn: Warn) -> ExportReport:
    config, exporter = run.config, exporters()[request.library]
    _check_request(request, config)
    weights = sha256_if_readable(run.model_path)  # first: a training may replace the file
    translator = load(run, loading=LoadOptions("cpu"))
    held_out = _read_held_out(run, translator, request.library, warn)
    lines = ParallelLines(held_out.src[: request.num_lines], held_out.tgt[: request.num_lines])
    with _whole(directory, exporter.ARCHIVE) as partial_dir:
        PythonLog().say(f"{directory}: writing, then checking on {count(len(lines.src), 'line')}")
        model, tokenizer = translator.model, translator.tokenizer
        approximated = exporter.write(model, tokenizer, config, partial_dir, request.quantization)
        if request.has_page:
            onnx_page.write(config, partial_dir)
        if request.has_shortlist:
            learned = shortlist.load(run, tokenizer)
            ctranslate2.write_shortlist(learned, tokenizer, partial_dir)
        exported, reference = exporter.load(partial_dir), translator
        if approximated is not None:
            reference = Translator([approximated], tokenizer, translator.options, translator.device)
        compared = parity.compare(reference, exported, lines)
        problems = compared.problems() if request.quantization is None else []
        if problems:
            raise RunError(f"{directory}: nothing is exported: {'; '.join(problems)}.")
        scored, beam = dict[str, ExportedModel](), translator.options.beam
        if exported.quantised is not None:
            scored, beam = {"int8": exported.quantised}, 1
        elif request.quantization is not None or approximated is not None:
            scored["exported"] = exported
        if request.has_shortlist:
            scored["use_vmap=True"] = ctranslate2.load(partial_dir, use_vmap=True)
        report = ExportReport(
            request.library,
            version_of(exporter.PACKAGE),
            request.quantization or f"float32{' and int8' * (exported.quantised is not None)}",
            sum(file.stat().st_size for file in partial_dir.rglob("*") if file.is_file()),
            weights,
            {},
            compared,
            _bleu(run, translator, scored, beam, held_out, warn) if scored else {},
        )
        example = min(lines.src, key=lambda line: (line.startswith("-"), len(line)))
        results = _test_results(run, translator, warn) if request.has_scores else []
        card = model_card.readme(
            run,
            translator,
            exporter,
            directory.name,
            example,
            as_text(report),
            results,
            request.licence,
        )
        (partial_dir / "README.md").write_text(card, encoding="utf-8")
        report.files.update(_checksums(partial_dir))
        write_lines(partial_dir / _REPORT_FILE, as_json(report))
    return report


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """If an export is in a run folder, hold a lock there and delete what killed exports left.

    There is no lock in a folder that is not writable.
    """
    run = RunDir(directory.parent)
    if not (run.config_path.exists() and os.access(run.path, os.W_OK)):
        yield
        return
    with run.exporting():
        sweep(directory)
        yield


@contextmanager
def _whole(path: Path, archive: Archive | None) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success, as it is or packed into a file."""
    if archive is None:
        with whole_dir(path, _REPORT_FILE) as folder:
            yield folder
    else:
        with whole_file(path) as file, temporary_path(path) as directory:
            folder = directory / "package"
            folder.mkdir(parents=True)
            yield folder
            archive.pack(folder, file)


def _require_library(library: Library) -> None:
    exporter = exporters()[library]
    for package in (exporter.PACKAGE, *exporter.OTHER_PACKAGES):
        require_package(package, f"mtrain export --to {library}", f"'mtrain[{library}]'")


def check_supported(library: Library, config: Config) -> None:
    """Raise ConfigError for a model that a library cannot hold; it names the libraries that can."""
    unmet = {
        other: [need for need in exporter.REQUIREMENTS if need.value_in(config) != need.value]
        for other, exporter in exporters().items()
    }
    holders = [f"`--to {other}`" for other, requirements in unmet.items() if not requirements]
    elsewhere = f"; {' or '.join(holders)} supports it" if holders else ""
    for requirement in unmet[library]:
        raise ConfigError(
            f"`{requirement.key}` must be {format_value(requirement.value)} for {requirement.why}, "
            f"but is {format_value(requirement.value_in(config))} instead{elsewhere}."
        )


def _read_held_out(
    run: RunDir, translator: Translator, library: Library, warn: Warn
) -> ParallelLines:
    """Return the validation pairs that are not blank, not too long, and read alike by `library`."""
    valid = prepare.read_valid(run)
    src_ids = translator.tokenizer.src.encode(valid.src)
    tgt_ids = translator.tokenizer.tgt.encode(valid.tgt)
    rows = [
        row
        for row, (src, tgt) in enumerate(zip(src_ids, tgt_ids, strict=True))
        if src  # U+2581 alone is not blank, but has no tokens: some libraries translate it to ""
        and valid.src[row].strip()
        and valid.tgt[row].strip()
        and max(len(src), len(tgt)) < run.config.data.max_tokens
    ]
    if library == "huggingface":
        compared = [row for row in rows if not huggingface.has_language_code(valid.src[row])]
        if num_others := len(rows) - len(compared):
            warn(
                f"{count(num_others, 'line')} of validation text cannot be compared: transformers "
                "reads `>>x<<` at the beginning as a language code"
            )
        rows = compared
    if not rows:
        others = ", or begins with `>>x<<`" if library == "huggingface" else ""
        raise RunError(
            f"{run.path}: must have validation text to check an export, but each line is blank, or "
            f"longer than `data.max_tokens`{others}."
        )
    return ParallelLines([valid.src[row] for row in rows], [valid.tgt[row] for row in rows])


def _test_results(run: RunDir, translator: Translator, warn: Warn) -> list[TestResult]:
    """Score the test sets of a run; on a RunError, report it and return no results."""
    if not run.config.data.tests:
        return []
    try:
        num_lines = sum(len(test.src) for test in evaluation.read_tests(run).values())
        PythonLog().say(f"translating {count(num_lines, 'line')} of test sets for the model card")
        options = replace(translator.options, with_scores=False)
        return evaluation.evaluate(run, translator.with_options(options), lambda _: None)
    except RunError as error:
        warn(f"the model card has no scores: {error}")
        return []


def _bleu(
    run: RunDir,
    translator: Translator,
    exported: dict[str, ExportedModel],
    beam: int,
    lines: ParallelLines,
    warn: Warn,
) -> dict[str, float]:
    """Return the BLEU of the run, then of each exported model, by name."""
    num_lines = count(len(lines.src), "line")
    PythonLog().say(f"translating {num_lines} of validation text with {1 + len(exported)} models")
    tgt_lang = run.config.data.tgt_lang
    if note := metrics.tokenizer_note(tgt_lang):
        warn(note)
    sources = translator.tokenizer.encode_src(lines.src)
    max_extra_tokens = translator.options.max_extra_tokens
    limits = [EncodedSource(ids).max_length(max_extra_tokens) for ids in sources]
    ids_of = {"mtrain": LogProbSearcher(translator, masks_special=False).search(sources, beam)}
    for name, model in exported.items():
        outputs = zip(model.search(sources, beam, limits), limits, strict=True)
        ids_of[name] = [output.ids[:limit] for output, limit in outputs]
    return {
        f"{name}{', greedy' * (beam == 1)}": metrics.bleu(
            translator.tokenizer.tgt.decode(ids), lines.tgt, tgt_lang
        )
        for name, ids in ids_of.items()
    }


def as_text(report: ExportReport) -> list[str]:
    """Return the report as a table of lines."""
    parity = report.parity
    own_call = parity.own_call
    rows = [
        ("library", f"{exporters()[report.library].PACKAGE} {report.version}"),
        ("weights", f"{report.precision}, {report.num_bytes / 1e6:,.1f} MB"),
        ("lines with the same source tokens", str(parity.same_source)),
        ("lines with the same greedy output", str(parity.same_greedy)),
        (f"lines with the same output, beam {parity.beam}", str(parity.same_beam)),
        *[(f"  of the others: {kind}", f"{num:,}") for kind, num in parity.other_beams.items()],
        ("lines whose text is the same", str(parity.same_text)),
        ("largest difference of log-probability, references", f"{parity.reference_diff:.1e}"),
        ("largest difference of log-probability, own beam", f"{parity.beam_diff:.1e}"),
    ]
    notes, notes_at = list[str](), len(rows) + 1  # below the row of the library's own call
    if own_call is not None:
        same = "not compared" if own_call.same is None else str(own_call.same)
        rows.append((f"lines with the same text, {own_call.program}", same))
        notes = [f"  {note}" for note in own_call.notes]
    run_bleu = next(iter(report.bleu.values()), 0.0)
    for index, (name, value) in enumerate(report.bleu.items()):
        difference = f" ({value - run_bleu:+.2f})" if index else ""
        rows.append((f"validation BLEU, {name}", f"{value:.2f}{difference}"))
    lines = format_table(rows, "<<")
    return [*lines[:notes_at], *notes, *lines[notes_at:]]


def as_json(report: ExportReport) -> list[str]:
    """Return the report as lines of one JSON object."""
    tree = {"mtrain": __version__, **asdict(report)}
    return json.dumps(tree, indent=2, ensure_ascii=False).split("\n")
