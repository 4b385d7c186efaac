"""The verb `mtrain eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.cli import console, options
from mtrain.cli.loading import load_options
from mtrain.cli.ranks import load_each
from mtrain.errors import ConfigError
from mtrain.runtime.process_group import ProcessGroup

if TYPE_CHECKING:
    from mtrain.decode.distributed import Load
    from mtrain.decode.translator import Translator
    from mtrain.evaluate.metrics import ScoringOptions
    from mtrain.run.load_model import LoadOptions
    from mtrain.run.run_dir import RunDir


def evaluate(
    runs: options.EvalArguments,
    output: options.OutputOption = None,
    tests: options.TestsOption = None,
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
    precision: options.PrecisionOption = options.Precision.AUTO,
) -> None:
    """Translate the test sets and score them, with 95% intervals.

    With --score: test set, line, score, log-probability and tokens of every reference instead.

    Example: mtrain eval runs/demo --compare runs/wide
    """
    from mtrain.evaluate import evaluation
    from mtrain.evaluate.report import as_json, as_text
    from mtrain.run.run_dir import RunDir

    console.check_outputs(output, read=compare or [])
    folders, names = [RunDir(run) for run in runs], _listed(tests)
    searching = {"beam": beam, "early_stop": early_stop, "no_repeat_ngram": no_repeat_ngram}
    changes = searching | {"length_alpha": length_alpha, "batch_tokens": batch_tokens}
    load = _loader(changes, load_options(device, precision, checkpoint))
    if score:
        scoring: dict[str, Any] = {"metrics": metrics, "tokenize": tokenize, "comet": comet}
        scoring |= {"resamples": resamples, "compare": compare or None}
        flags = {"lowercase": lowercase, "details": details, "json": json}
        options.refuse("--score", searching | scoring | {key: True for key in flags if flags[key]})
        if len(folders) > 1:
            raise ConfigError(f"`--score` must have one run, but has {len(folders)} instead.")
    others = [RunDir(path) for path in compare or [] if path.is_dir()]
    with load_each([*folders, *others], load) as loading:
        if loading is None:
            return
        if score:
            console.put(_reference_scores(folders[0], loading, names), output)
            return
        given = {"metrics": _listed(metrics), "num_resamples": resamples}
        scoring_options = _scoring_options(tokenize, lowercase, given, comet, device)
        plan = evaluation.EvaluationPlan(folders, compare or [], names, scoring_options, details)
        reports = evaluation.evaluate_systems(plan, loading, console.warn)
        console.put(as_json(reports) if json else as_text(reports), output)


def _loader(
    changes: Mapping[str, Any], loading: LoadOptions
) -> Callable[[RunDir, ProcessGroup], Translator]:
    """Return what loads a run, with its own settings of the search but for `changes`."""
    from mtrain.decode import translator as translating

    def load(run: RunDir, process_group: ProcessGroup) -> Translator:
        decoding = run.load_config().decoding.model_copy(update=options.given(changes))
        return translating.load(run, decoding, replace(loading, process_group=process_group))

    return load


def _reference_scores(run: RunDir, load: Load, names: list[str] | None) -> Iterator[str]:
    from mtrain.evaluate.evaluation import reference_scores

    with load(run) as translator:
        yield from reference_scores(run, translator, names)


def _scoring_options(
    tokenize: str | None,
    lowercase: bool,
    given: Mapping[str, Any],
    comet: Path | None,
    device: str,
) -> ScoringOptions:
    from mtrain.evaluate.comet import CometModel
    from mtrain.evaluate.metrics import ScoringOptions
    from mtrain.runtime.device import pick_device

    model = None
    if comet is not None:
        model = CometModel(comet, int(pick_device(device).type == "cuda"))
    return ScoringOptions(tokenize, lowercase, **options.given(given), comet=model)


def _listed(names: str | None) -> list[str] | None:
    return names.split(",") if names is not None else None
