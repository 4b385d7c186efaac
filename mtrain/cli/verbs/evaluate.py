"""The verb `mtrain eval`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mtrain.cli import console, options
from mtrain.cli.ranks import joined_process_group
from mtrain.errors import ConfigError
from mtrain.io.lines import ignore
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup

if TYPE_CHECKING:
    from mtrain.decode.options import DecodingOptions
    from mtrain.decode.translator import Translator
    from mtrain.evaluation.comet import CometModel
    from mtrain.evaluation.evaluation import EvaluationPlan, TestReport
    from mtrain.evaluation.metrics import TestSet
    from mtrain.run.load_model import LoadOptions


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
    ensemble: options.EnsembleOption = False,
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
    shortlist: options.ShortlistOption = None,
    mbr: options.MbrOption = None,
    rerank_with: options.RerankWithOption = None,
    rerank_weight: options.RerankWeightOption = None,
) -> None:
    """Translate test sets or any text, and score them with intervals.

    With --score: test set, line, score, log-probability and tokens of every reference instead.

    Example: mtrain eval runs/demo --src news.en --ref news.de --compare runs/wide
    """
    refs, compared_paths = refs or [], compare or []
    console.check_outputs(output, read=[*compared_paths, *refs, *([src] if src else [])])
    _check_inputs(runs, ensemble, src, refs, tests)
    search_options: dict[str, Any] = {"beam": beam, "early_stop": early_stop}
    search_options |= {"no_repeat_ngram": no_repeat_ngram, "shortlist": shortlist}
    if score:
        unused: dict[str, Any] = {"metrics": metrics, "tokenize": tokenize, "comet": comet}
        unused |= {"resamples": resamples, "compare": compare or None, "details": details or None}
        unused |= {"lowercase": lowercase or None, "json": json or None, "rerank_with": rerank_with}
        _check_score(search_options | unused | {"mbr": mbr}, runs[:1] if ensemble else runs, refs)
    from mtrain.evaluation import evaluation
    from mtrain.evaluation.metrics import ScoringOptions
    from mtrain.run.load_model import LoadOptions

    folders, names = [RunDir(run) for run in runs], _names(tests)
    width = beam or folders[0].config.decoding.beam
    weight = options.weight_of_reverse(rerank_with, rerank_weight, width)
    changes = {"length_alpha": length_alpha, "rerank_weight": weight, "batch_tokens": batch_tokens}
    changes = options.given(search_options | changes) | options.mbr_change(mbr)
    reverse = RunDir(rerank_with) if rerank_with else None
    with joined_process_group("run it again.") as process_group:
        loading = LoadOptions(device, precision, checkpoint, process_group, reverse)
        loader = _SystemLoader(changes, loading, [*runs, *compared_paths])
        text = None if src is None else evaluation.read_files(src, refs)
        if score:
            tests_read = text or _read_tests(process_group, folders[0], names)
            lines = evaluation.reference_scores(loader.load(folders), tests_read)
        else:
            scoring_args: dict[str, Any] = {"metrics": _names(metrics), "num_resamples": resamples}
            scoring_args["comet"] = _comet_model(comet, device, process_group)
            scoring = ScoringOptions(tokenize, lowercase, **options.given(scoring_args))
            search = {"precision": loading.products, "checkpoint": checkpoint} | search_options
            search |= {"length_alpha": length_alpha, "mbr": mbr, "rerank_weight": weight}
            search["rerank_with"] = None if rerank_with is None else str(rerank_with)
            plan = evaluation.EvaluationPlan(
                *(folders, compared_paths, names, scoring, details, text),
                *(options.given(search), ensemble),
            )
            lines = _lines(plan, loader, json, process_group)
        if process_group.is_first:
            console.put(lines, output)
        if process_group.size > 1:  # all ranks go on to the end, even where stdout was closed
            deque(lines, maxlen=0)


class _SystemLoader(NamedTuple):
    """Loads the runs of a system as the command line says."""

    changes: dict[str, Any]  # of the decoding options
    loading: LoadOptions
    named_paths: list[Path]  # the runs that `loading.step` applies to

    def _decoding(self, system: Sequence[RunDir]) -> DecodingOptions:
        from mtrain.decode.options import DecodingOptions

        decoding = DecodingOptions.from_config(system[0].config)
        decoding = replace(decoding, with_scores=False, **self.changes)
        options.check_shortlist(decoding.shortlist, decoding.beam)
        return decoding

    def check(self, system: Sequence[RunDir]) -> None:
        """Check the decoding options and that there are weights, before any run translates."""
        from mtrain.run.load_model import check_weights

        self._decoding(system)
        for run in system:
            check_weights(run, self.loading.step)

    def load(self, system: Sequence[RunDir]) -> Translator:
        """Load the translator of a system."""
        from mtrain.decode import translator

        step = self.loading.step if system[0].path in self.named_paths else None
        return translator.load(system, self._decoding(system), replace(self.loading, step=step))


def _lines(
    plan: EvaluationPlan,
    loader: _SystemLoader,
    is_json: bool,
    process_group: ProcessGroup,
) -> Iterator[str]:
    """Yield the report on the first rank; all ranks translate, the others yield nothing.

    For a single fine-tuned run, evaluated on all its test sets, scores from before the fine-tuning
    are added.
    """
    from mtrain.evaluation import evaluation
    from mtrain.evaluation.report import as_json, as_text, before_and_after_table

    compared: list[TestReport] = []
    warn = console.warn if process_group.is_first else ignore
    read = partial(_read_tests, process_group)
    reports, outputs = evaluation.evaluate_systems(
        plan, loader.load, warn, process_group.is_first, read, loader.check
    )
    yield from [] if is_json else as_text(reports, plan)
    if len(plan.runs) == 1 and not (plan.others or plan.names or plan.text):
        known = {name: of_test[str(plan.runs[0].path)] for name, of_test in outputs.items()}
        compared = evaluation.before_and_after(
            plan.runs[0], loader.load, warn, plan.options, known, process_group
        )
    if process_group.is_first:
        yield from as_json(reports, plan, compared) if is_json else before_and_after_table(compared)


def _comet_model(path: Path | None, device: str, process_group: ProcessGroup) -> CometModel | None:
    """Load the model of --comet on the first rank, which scores."""
    from mtrain.evaluation.comet import CometModel
    from mtrain.runtime.device import pick_device

    if path is None or not process_group.is_first:
        return None
    return CometModel(path, int(pick_device(device).type == "cuda"))


def _check_inputs(
    runs: list[Path], is_ensemble: bool, src: Path | None, refs: list[Path], tests: str | None
) -> None:
    """Refuse an ensemble of one run, a text without references, and test sets beside a text."""
    if is_ensemble and len(runs) == 1:
        raise ConfigError("`--ensemble` must have two runs or more, but has 1 instead.")
    options.require("--src", {} if src else {"ref": refs or None})
    options.require("--ref", {} if refs else {"src": src})
    options.refuse("--src", {"tests": tests} if src else {})


def _read_tests(
    process_group: ProcessGroup, run: RunDir, names: Sequence[str] | None
) -> dict[str, TestSet]:
    """Update the test sets of a run as its config says, and return them."""
    from mtrain.data import prepare
    from mtrain.evaluation import evaluation
    from mtrain.run.logger import Stderr

    if process_group.is_first:
        prepare.update_tests(run.config, run, Stderr())
    process_group.barrier()
    return evaluation.read_tests(run, names)


def _check_score(unused: dict[str, Any], runs: list[Path], refs: list[Path]) -> None:
    """Refuse what has no effect beside `--score`."""
    options.refuse("--score", unused)
    for name, values in (("run", runs), ("`--ref`", refs)):
        if len(values) > 1:
            raise ConfigError(f"`--score` must have one {name}, but has {len(values)} instead.")


def _names(text: str | None) -> list[str] | None:
    return text.split(",") if text is not None else None
