"""The verb `mtrain eval`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.cli import console, options
from mtrain.cli.ranks import joined_process_group
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup

if TYPE_CHECKING:
    from mtrain.decode.translator import Translator
    from mtrain.evaluation.evaluation import TestReport
    from mtrain.evaluation.metrics import TestSet


def evaluate(
    runs: options.EvalArguments,
    output: options.OutputOption = None,
    tests: options.TestsOption = None,
    src: options.TestSrcOption = None,
    refs: options.TestRefsOption = None,
    metrics: options.MetricsOption = None,
    tokenize: options.TokenizeOption = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    comet: options.CometOption = None,
    resamples: options.ResamplesOption = None,
    compare: options.CompareOption = None,
    details: options.DetailsOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    score: Annotated[
        bool, typer.Option("--score", help="Print how likely the model finds each reference.")
    ] = False,
    beam: options.BeamOption = None,
    length_alpha: options.AlphaOption = None,
    early_stop: options.EarlyStopOption = None,
    no_repeat_ngram: options.NoRepeatOption = None,
    checkpoint: options.CheckpointOption = None,
    batch_tokens: options.BatchOption = None,
    device: options.DeviceOption = "auto",
    precision: options.PrecisionOption = "auto",
) -> None:
    """Translate test sets or any text, and score them with intervals.

    With --score: test set, line, score, log-probability and tokens of every reference instead.

    Example: mtrain eval runs/demo --src news.en --ref news.de --compare runs/wide
    """
    refs, others = refs or [], compare or []
    console.check_outputs(output, read=[*others, *refs, *([src] if src else [])])
    _check_text(src, refs, tests)
    searching = {"beam": beam, "early_stop": early_stop, "no_repeat_ngram": no_repeat_ngram}
    if score:
        unused: dict[str, Any] = {"metrics": metrics, "tokenize": tokenize, "comet": comet}
        unused |= {"resamples": resamples, "compare": compare or None, "details": details or None}
        unused |= {"lowercase": lowercase or None, "json": json or None}
        _check_score(searching | unused, runs, refs)
    from mtrain.decode import translator as translating
    from mtrain.decode.options import DecodingOptions
    from mtrain.evaluation import evaluation, fine_tuning
    from mtrain.evaluation.comet import CometModel
    from mtrain.evaluation.metrics import ScoringOptions
    from mtrain.evaluation.report import as_json, as_text
    from mtrain.run.load_model import LoadOptions
    from mtrain.runtime.device import pick_device

    changes = searching | {"length_alpha": length_alpha, "batch_tokens": batch_tokens}
    folders, names = [RunDir(run) for run in runs], _names(tests)
    with joined_process_group("run it again.") as process_group:

        def load(run: RunDir) -> Translator:
            decoding = DecodingOptions.from_config(run.config)
            decoding = replace(decoding, **options.given(changes), with_scores=False)
            load_options = LoadOptions(device, precision, checkpoint, process_group)
            return translating.load(run, decoding, load_options)

        text = _read_text(src, refs, folders[0], process_group)
        if score:
            read = text or evaluation.read_tests(folders[0], names)
            scores = evaluation.reference_scores(load(folders[0]), read)
            console.put(scores, output) if process_group.is_first else list(scores)
            return
        how = options.given({"metrics": _names(metrics), "num_resamples": resamples})
        if comet is not None and process_group.is_first:
            how["comet"] = CometModel(comet, int(pick_device(device).type == "cuda"))
        scoring = ScoringOptions(tokenize, lowercase, **how)
        plan = evaluation.EvaluationPlan(folders, others, names, scoring, details, text)
        is_alone = len(runs) == 1 and not (others or names or text)

        def compare_with_before(known: dict[str, list[str]]) -> list[TestReport]:
            if not is_alone:
                return []
            return fine_tuning.before_and_after(
                folders[0], load, console.warn, scoring, known, process_group
            )

        if not process_group.is_first:  # translate what the first rank translates
            read = text or evaluation.read_tests(folders[0], names)
            known: dict[str, list[str]] = {}
            for run in [*folders, *(RunDir(path) for path in others if path.is_dir())]:
                texts = text or evaluation.read_tests(run, list(read))
                known |= evaluation.translate_tests(run, load(run), texts, console.warn)
            compare_with_before(known)
            return
        reports = evaluation.evaluate_systems(plan, load, console.warn)
        known = {report.results[0].name: report.results[0].hypotheses for report in reports}

        def lines() -> Iterator[str]:
            if json:
                yield from as_json(reports, compare_with_before(known))
            else:
                yield from as_text(reports)
                yield from fine_tuning.as_table(compare_with_before(known))

        console.put(lines(), output)


def _check_text(src: Path | None, refs: list[Path], tests: str | None) -> None:
    """Refuse a text without references, references without a text, and test sets beside it."""
    options.require("--src", {} if src else {"ref": refs or None})
    options.require("--ref", {} if refs else {"src": src})
    options.refuse("--src", {"tests": tests} if src else {})


def _read_text(
    src: Path | None, refs: list[Path], run: RunDir, process_group: ProcessGroup
) -> dict[str, TestSet] | None:
    """Return the text to score; None if it is the run's own, to which new test sets are added."""
    from mtrain.data import prepare
    from mtrain.evaluation import evaluation
    from mtrain.run.logger import Stderr

    if src is not None:
        return evaluation.read_files(src, refs)
    if process_group.is_first:
        prepare.update_tests(run.config, run, Stderr())
    process_group.barrier()
    return None


def _check_score(unused: dict[str, Any], runs: list[Path], refs: list[Path]) -> None:
    """Refuse what has no effect beside `--score`."""
    options.refuse("--score", unused)
    for what, given in (("run", runs), ("`--ref`", refs)):
        if len(given) > 1:
            raise ConfigError(f"`--score` must have one {what}, but has {len(given)} instead.")


def _names(text: str | None) -> list[str] | None:
    return text.split(",") if text is not None else None
