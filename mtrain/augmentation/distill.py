"""Sequence-level distillation (Kim and Rush 2016): a student's config, and its evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtrain.augmentation.new_config import with_corpus
from mtrain.augmentation.options import AugmentOptions, Student
from mtrain.autoconfig.presets import PRESETS
from mtrain.config import config_file, sections
from mtrain.config.sections import Config, ModelConfig
from mtrain.corpus import length_stats
from mtrain.decode import translator as translating
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import Translator
from mtrain.errors import ConfigError
from mtrain.evaluation.evaluation import TestReport, read_tests, report_on
from mtrain.evaluation.metrics import ScoringOptions, TestSet, format_score, tokenizer_note
from mtrain.evaluation.significance import P_LIMIT
from mtrain.io.table import format_table
from mtrain.model.transformer import num_parameters
from mtrain.run import finetune
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir

# Numbers of encoder and decoder layers.
_LAYERS = {"deep-shallow": (6, 1), "6-1": (6, 1), "12-1": (12, 1), "6-2": (6, 2)}
_TINY = next(preset.model for preset in PRESETS if preset.name == "tiny")
_WARM_UP_LINES = 8


def student_model(student: Student, teacher: ModelConfig) -> ModelConfig:
    """Return the model of a student: as wide as its teacher, or tiny."""
    if student == "tiny":
        sizes = ("d_model", "num_heads", "d_ff", "num_encoder_layers", "num_decoder_layers")
        return teacher.model_copy(update={key: getattr(_TINY, key) for key in sizes})
    encoder, decoder = _LAYERS[student]
    update = {"num_encoder_layers": encoder, "num_decoder_layers": decoder}
    return teacher.model_copy(update=update)


def student_config(
    config: Config, teacher: RunDir, student: Student, corpus: Path, run_dir: str
) -> Config:
    """Return the config of a student, trained on the real pairs and the teacher's.

    Dropout rates that are set in `config` apply; all else in `model` comes from the teacher.

    Raises:
        ConfigError: if there is no test set to compare the two on, or a key of `model` contradicts
            the teacher.
    """
    if not config.data.tests:
        raise ConfigError("`data.tests` must name a test set to compare on, but is empty.")
    tree = with_corpus(config, corpus, AugmentOptions()).model_dump(exclude_unset=True)
    model = student_model(student, teacher.config.model)
    tree["model"] = model.model_dump()
    for key in (key for key in ModelConfig.model_fields if key in config.model.model_fields_set):
        value, expected = getattr(config.model, key), getattr(teacher.config.model, key)
        if key in finetune.MAY_DIFFER:
            tree["model"][key] = value
        elif value not in (expected, getattr(model, key)):
            raise ConfigError(
                f"`model.{key}` must be {sections.format_value(expected)}, as in {teacher.path}, "
                f"but is {sections.format_value(value)} instead; `--student` sets the size of the "
                "student."
            )
    for key in ("init_from", "replay"):  # the student is trained from scratch
        tree.get("training", {}).pop(key, None)
    return config_file.from_tree(tree, "the student", run_dir=run_dir)


@dataclass(frozen=True)
class MeasuredSystem:
    """A model with a search, and how fast it translated the test sets."""

    name: str  # teacher or student
    search: str  # "beam 5" or "greedy"
    num_parameters: int  # of all models of an ensemble
    lines_per_s: float


@dataclass(frozen=True)
class DistillReport:
    """A student and its teacher on the student's test sets.

    Attributes:
        run: the run folder of the student.
        corpus: the folder of the teacher's translations.
        systems: teacher and student, each with a beam and greedy.
        tests: by the name of the test set: a result of each system, in their order, and each
            other system compared with the first, the teacher with a beam.
        tgt_lang: the target language, which determines the tokenizer of BLEU.
    """

    run: Path
    corpus: Path
    systems: list[MeasuredSystem]
    tests: dict[str, TestReport]
    tgt_lang: str


def compare(
    teachers: Sequence[RunDir], student: RunDir, corpus: Path, device: str
) -> DistillReport:
    """Translate the student's test sets by teacher and student, with a beam and greedily."""
    tests = read_tests(student)
    systems, outputs = [], {name: dict[str, list[str]]() for name in tests}
    for name, runs in (("teacher", teachers), ("student", [student])):
        for system, translations in _measure(name, runs, tests, device):
            systems.append(system)
            for test, lines in translations.items():
                outputs[test][f"{system.name} {system.search}"] = lines
    tgt_lang = student.config.data.tgt_lang
    options = ScoringOptions().for_language(tgt_lang)
    reports = {name: report_on(name, tests[name], outputs[name], options) for name in tests}
    return DistillReport(student.path, corpus, systems, reports, tgt_lang)


def as_text(report: DistillReport) -> Iterator[str]:
    """Yield the lines of tables of all systems and of their scores, and what the columns mean."""
    table = [["system", "search", "parameters", "sentences/s"]]
    for system in report.systems:
        speed = f"{system.lines_per_s:,.1f}"
        table.append([system.name, system.search, f"{system.num_parameters:,}", speed])
    yield from [*format_table(table, "<<>>"), ""]
    rows = [["test set", "system", "search", "metric", "score", "", "p (bs)", "p (ar)"]]
    for name, of_test in report.tests.items():
        comparison_of = {(test.system, test.metric): test for test in of_test.comparisons}
        for system, result in zip(report.systems, of_test.results, strict=True):
            for score in result.scores:
                test = comparison_of.get((result.system, score.metric))
                interval = format_score(score.metric, score.half_width or 0.0)
                rows.append(
                    [
                        *(name, system.name, system.search, score.metric),
                        *(format_score(score.metric, score.value), f"± {interval}"),
                        *(test.format_p_values() if test else ["", ""]),
                    ]
                )
    yield from format_table(rows, "<<<<>>>>")
    if note := tokenizer_note(report.tgt_lang):
        yield note
    yield "p: chance of such a difference to the teacher's beam if neither is better; bs by"
    yield f"   paired bootstrap, ar by approximate randomisation; * is below {P_LIMIT}"


def _measure(
    name: str, runs: Sequence[RunDir], tests: dict[str, TestSet], device: str
) -> Iterator[tuple[MeasuredSystem, dict[str, list[str]]]]:
    """Translate all test sets with the beam of the first run, then greedily."""
    options = replace(DecodingOptions.from_config(runs[0].config), with_scores=False)
    translator = translating.load(runs, options, LoadOptions(device))
    size = sum(map(num_parameters, translator.ensemble.models))
    stats = length_stats.load(runs[0].data_dir)
    for beam in dict.fromkeys((options.beam, 1)):
        searching: Translator = translator.with_options(replace(options, beam=beam, mbr=None))
        first = next(iter(tests.values())).src[:_WARM_UP_LINES]
        translate_lines(searching, first, stats)
        began_s = time.perf_counter()
        outputs = {key: translate_lines(searching, test.src, stats) for key, test in tests.items()}
        num_lines = sum(len(test.src) for test in tests.values())
        lines_per_s = num_lines / (time.perf_counter() - began_s)
        search = "greedy" if beam == 1 else f"beam {beam}"
        yield MeasuredSystem(name, search, size, lines_per_s), outputs
