"""The verb `mtrain eval`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.cli import console, options
from mtrain.cli.ranks import joined_process_group
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir

if TYPE_CHECKING:
    from mtrain.decode.translator import Translator


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
    precision: options.PrecisionOption = "auto",
) -> None:
    """Translate the test sets and score them, with 95% intervals.

    With --score: test set, line, score, log-probability and tokens of every reference instead.

    Example: mtrain eval runs/demo --compare runs/wide
    """
    console.check_outputs(output, read=compare or [])
    searching = {"beam": beam, "early_stop": early_stop, "no_repeat_ngram": no_repeat_ngram}
    if score:
        unused: dict[str, Any] = {"metrics": metrics, "tokenize": tokenize, "comet": comet}
        unused |= {"resamples": resamples, "compare": compare or None}
        flags = {"lowercase": lowercase, "details": details, "json": json}
        options.refuse("--score", searching | unused | {key: True for key in flags if flags[key]})
        if len(runs) > 1:
            raise ConfigError(f"`--score` must have one run, but has {len(runs)} instead.")
    from mtrain.decode import translator as translating
    from mtrain.decode.options import DecodingOptions
    from mtrain.evaluate import evaluation
    from mtrain.evaluate.comet import CometModel
    from mtrain.evaluate.metrics import ScoringOptions
    from mtrain.evaluate.report import as_json, as_text
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

        if score:
            scores = evaluation.reference_scores(folders[0], load(folders[0]), names)
            if process_group.is_first:
                console.put(scores, output)
            else:
                list(scores)
        elif process_group.is_first:
            given = options.given({"metrics": _names(metrics), "num_resamples": resamples})
            if comet is not None:
                given["comet"] = CometModel(comet, int(pick_device(device).type == "cuda"))
            scoring = ScoringOptions(tokenize, lowercase, **given)
            plan = evaluation.EvaluationPlan(folders, compare or [], names, scoring, details)
            reports = evaluation.evaluate_systems(plan, load, console.warn)
            console.put(as_json(reports) if json else as_text(reports), output)
        else:  # translate what the first rank translates
            known = list(evaluation.read_tests(folders[0], names))
            for run in [*folders, *(RunDir(path) for path in compare or [] if path.is_dir())]:
                texts = evaluation.read_tests(run, known)
                list(evaluation.translate_tests(run, load(run), texts, console.warn))


def _names(text: str | None) -> list[str] | None:
    return text.split(",") if text is not None else None
