"""Measure quality against speed: each run, precision, beam and engine, in a table and a picture.

    python benchmarks/frontier.py RUN... [--peers ctranslate2,ctranslate2-int8,hf] [--picture FILE]

All translate the same sentences of a run's first test set on the same number of threads. The
settings are measured by turns, each time in a fresh process; what counts is the median.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import decode_speed
import environments
from decode_speed import BASE, SYSTEMS, Measurement, Task
from environments import NotMeasured
from machine import commit, describe_machine
from report import print_table, say

from mtrain.evaluation import metrics

PRECISIONS = ("float32", "bfloat16", "int8", "float32-shortlist", "int8-shortlist")  # of mtrain
COLOURS = {BASE: "#1b6ca8", "ctranslate2": "#c2571a", "hf": "#5d7052", "eole": "#7a4f9a"}
MARKS = {"float32": "o", "bfloat16": "s", "int8": "^"}
MARKS |= {"float32-shortlist": "D", "int8-shortlist": "v"}


class Setting(NamedTuple):
    """What is measured: a run, an engine in a precision, and a beam."""

    run: str
    engine: str
    precision: str
    beam: int


class Point(NamedTuple):
    """A setting with its BLEU and the sentences a second of each round."""

    setting: Setting
    bleu: float
    speeds: list[float]

    @property
    def speed(self) -> float:
        """The median, in sentences a second."""
        return median(self.speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--peers", default="ctranslate2,ctranslate2-int8", help="other engines")
    parser.add_argument("--beams", default="1,5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="a PNG or SVG")
    options = parser.parse_args()
    tasks = {run.name: read_task(options, run) for run in options.runs}
    engines = [(BASE, precision) for precision in PRECISIONS]
    for name in filter(None, options.peers.split(",")):
        if reason := environments.install(SYSTEMS[name].environment):
            say(f"{name}: not measured: {reason}")
        else:
            engines.append((name, SYSTEMS[name].precision))
    beams = [int(beam) for beam in options.beams.split(",")]
    settings = [
        Setting(run, engine, precision, beam)
        for run, (engine, precision), beam in itertools.product(tasks, engines, beams)
        if beam > 1 or not precision.endswith("shortlist")
    ]
    measured: dict[Setting, list[Measurement]] = {setting: [] for setting in settings}
    for number in range(options.rounds):
        for setting in settings:
            try:
                found = measure(tasks[setting.run], setting)
            except NotMeasured as error:
                say(f"{setting.engine}: {error}")
                continue
            measured[setting].append(found)
            say(f"round {number + 1}: {' '.join(map(str, setting))}: {found.sentences_per_s:,.1f}")
    points = [point_of(tasks[one.run], one, found) for one, found in measured.items() if found]
    print(f"{datetime.date.today()}, {describe_machine()}, commit {commit()}")
    print(f"{options.rounds} rounds of {options.seconds:g} s, {options.threads} thread(s)\n")
    print_table(rows(points), is_markdown=True)
    if options.picture:
        draw(points, options.picture)


def read_task(options: argparse.Namespace, run: Path) -> Task:
    given: dict[str, Any] = {
        "run": run,
        "lines": None,
        "beam": 1,
        "alpha": 0.6,
        "batch": 64,
        "max_tokens": 40,
    }
    given |= {"precision": "float32", "threads": options.threads, "seconds": options.seconds}
    return decode_speed.read_task(argparse.Namespace(**given))


def measure(task: Task, setting: Setting) -> Measurement:
    job = replace(task.job, beam=setting.beam, precision=setting.precision)
    return decode_speed.translate(setting.engine, job, task.vocabulary)


def point_of(task: Task, setting: Setting, found: Sequence[Measurement]) -> Point:
    bleu = metrics.bleu(found[-1].texts, task.lines.tgt, task.tgt_lang)
    return Point(setting, bleu, [each.sentences_per_s for each in found])


def is_best(point: Point, points: Sequence[Point]) -> bool:
    """Tell whether no other setting is both as good and faster, or better and as fast."""
    return not any(
        other.bleu >= point.bleu and other.speed >= point.speed
        for other in points
        if other is not point
    )


def rows(points: Sequence[Point]) -> list[list[str]]:
    """Return the table, the fastest first."""
    found = [["run", "engine", "precision", "beam", "BLEU", "sentences/s", "from, to", "best"]]
    for point in sorted(points, key=lambda each: -each.speed):
        run, engine, precision, beam = point.setting
        ends = f"{min(point.speeds):,.0f}, {max(point.speeds):,.0f}"
        cells = [run, engine.removesuffix("-int8"), precision, str(beam), f"{point.bleu:.2f}"]
        found.append([*cells, f"{point.speed:,.0f}", ends, "yes" if is_best(point, points) else ""])
    return found


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw BLEU over sentences a second, and a line through the best of each engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    by_engine: dict[str, list[Point]] = {}
    for point in points:
        by_engine.setdefault(point.setting.engine.removesuffix("-int8"), []).append(point)
    for engine, own in by_engine.items():
        colour = COLOURS.get(engine, "#444444")
        line = sorted((each for each in own if is_best(each, own)), key=lambda each: each.speed)
        speeds = [each.speed for each in line]
        axes.plot(speeds, [each.bleu for each in line], color=colour, linewidth=1.2, label=engine)
        for each in own:
            _, _, precision, beam = each.setting
            face = colour if beam > 1 else "white"
            axes.plot(each.speed, each.bleu, MARKS[precision], color=colour, markerfacecolor=face)
    for precision, mark in MARKS.items():
        axes.plot([], [], mark, color="#444444", linestyle="", label=precision)
    axes.plot([], [], "o", color="#444444", markerfacecolor="white", label="open: greedy")
    axes.set_xscale("log")
    axes.set_xlabel("sentences a second, one thread, log scale")
    axes.set_ylabel("BLEU")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
