"""Measure how many minutes mtrain and its peers train until they reach a validation BLEU.

All train the tiny model of train_speed.py on the same sentences in batches of the same budget. They
take turns: every few hundred updates a system translates the validation text greedily, which is
not timed, and waits for the others. Each point is kept below `--folder`, and a system whose curve
has ended is not trained again. A measurement that was stopped is reported by `--only-report`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import environments
import train_speed
from machine import commit, describe_machine
from peers.job import Job
from report import print_table, say

from mtrain.evaluation import metrics
from mtrain.io.lines import read_lines
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

_FOREVER_S = 1e9


@dataclass(frozen=True)
class Recipe:
    """How a system of train_speed.py trains."""

    system: str
    lr: float
    warmup_steps: int
    decay_steps: int = 0  # 0: inverse square root; mtrain has its own keys
    overrides: tuple[str, ...] = ()  # of mtrain


_LINEAR = "training.schedule=linear"
_MUON = ("training.optimizer=muon", _LINEAR, "training.max_steps=4001", "training.max_grad_norm=0")
_ADAM = (_LINEAR, "training.max_steps=7001", "training.max_grad_norm=0")
RECIPES = {
    "mtrain": Recipe("mtrain", 0.004, 300, overrides=_MUON),
    "mtrain-adam": Recipe("mtrain", 0.004, 1000, overrides=_ADAM),
    "hf": Recipe("hf", 0.002, 1000),
    "hf-best": Recipe("hf-bf16-tuned", 0.004, 1000, 7000),
    "joeynmt": Recipe("joeynmt", 0.002, 1000),
    "eole": Recipe("eole", 0.002, 1000),
}


class Training:
    """A system that trains in a process of its own, a point of its curve at a time."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        recipe = RECIPES[name]
        system = train_speed.SYSTEMS[recipe.system]
        job = replace(make_job(options, recipe), precision=system.precision)
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "job.json"
        path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        worker = f"peers.with_{system.peer or 'mtrain'}"
        self._log = (options.folder / f"{name}.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [environments.python(system.peer), "-m", worker, str(path), "--curve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder.name,
            env=train_speed.environment(recipe.system, options.threads),
        )

    def next_point(self) -> dict[str, Any]:
        """Train until the next point and return it; one without updates is the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def close(self) -> None:
        """End the process, wherever it is."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._folder.cleanup()


@dataclass
class Curve:
    """The points of a system so far: updates, seconds of training, BLEU."""

    name: str
    path: Path
    points: list[tuple[int, float, float]] = field(default_factory=list)
    has_ended: bool = False

    def save(self) -> None:
        """Write the curve to its file."""
        tree = {"points": self.points, "has_ended": self.has_ended}
        self.path.write_text(json.dumps(tree) + "\n", encoding="utf-8")

    def seconds_to(self, level: float) -> float | None:
        """Return the seconds of training after which a BLEU was first reached."""
        return next((seconds for _, seconds, bleu in self.points if bleu >= level), None)


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = {name: options.folder / f"{name}.json" for name in options.systems}
    curves = {name: load(path, options.only_report) for name, path in paths.items()}
    missing = [name for name, curve in curves.items() if not curve.has_ended]
    if options.only_report:
        missing = []
    for name in list(missing):
        if reason := environments.install(train_speed.SYSTEMS[RECIPES[name].system].peer):
            say(f"{name}: not measured: {reason}")
            missing.remove(name)
    if missing:
        train_speed.encode()
        measure([curves[name] for name in missing], options)
    if not options.only_report:
        print(f"{datetime.date.today()}, {describe_machine()}, commit {commit()}")
    print_table(rows([*curves.values()], options.levels), options.markdown)
    if options.picture:
        draw([*curves.values()], options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = list(RECIPES)
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=60, help="of training, at most, for each")
    parser.add_argument("--levels", type=float, nargs="+", default=[30, 35, 38], help="of BLEU")
    parser.add_argument("--every", type=int, default=250, help="updates between two points")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/time_to_quality"))
    parser.add_argument("--only-report", action="store_true", help="what was measured before")
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


def make_job(options: argparse.Namespace, recipe: Recipe) -> Job:
    return Job(
        corpus=str(train_speed.CORPUS),
        **train_speed.SIZES["tiny"],
        vocab_size=train_speed.VOCAB_SIZE,
        dropout=0.15,
        label_smoothing=0.1,
        batch_tokens=2048,
        lr=recipe.lr,
        warmup_steps=recipe.warmup_steps,
        adam_betas=(0.9, 0.98),
        max_grad_norm=1.0,
        precision="auto",
        threads=options.threads,
        seconds=_FOREVER_S,
        warm_up_s=0.0,
        overrides=recipe.overrides,
        decay_steps=recipe.decay_steps,
        validate_every=options.every,
    )


def load(path: Path, takes_partial: bool) -> Curve:
    """Return a curve; of one that has not ended the points only if `takes_partial`."""
    tree: dict[str, Any] = {"points": [], "has_ended": False}
    if path.is_file():
        tree = json.loads(path.read_text("utf-8"))
    points = (
        [tuple(point) for point in tree["points"]] if tree["has_ended"] or takes_partial else []
    )
    return Curve(path.stem, path, points, tree["has_ended"])


def measure(curves: list[Curve], options: argparse.Namespace) -> None:
    """Train the systems by turns, until each has reached the highest level or its time is over."""
    detokenize = sentencepiece.load(RunDir(train_speed.CORPUS / "run").tokenizer_dir).tgt.decode
    references = list(read_lines(train_speed.find_multi30k() / "val.de"))
    trainings = {curve.name: Training(curve.name, options) for curve in curves}
    running = curves
    while running:
        for curve in running:
            point = trainings[curve.name].next_point()
            if "updates" in point:
                outputs = point["outputs"]
                texts = outputs if isinstance(outputs[0], str) else detokenize(outputs)
                bleu = metrics.bleu(texts, references, "de")
                updates, seconds = point["updates"], point["seconds"]
                curve.points.append((updates, seconds, round(bleu, 2)))
                say(f"{curve.name}: {updates:,} updates, {seconds:.0f} s, BLEU {bleu:.2f}")
                is_late = seconds >= 60 * options.minutes
                curve.has_ended = is_late or bleu >= max(options.levels)
            else:
                curve.has_ended = "versions" in point  # otherwise it failed: its log says why
                say(f"{curve.name}: {'ended' if curve.has_ended else 'failed'}")
                trainings.pop(curve.name).close()
            curve.save()
            if curve.has_ended and curve.name in trainings:
                trainings.pop(curve.name).close()
        running = [curve for curve in running if curve.name in trainings]


def rows(curves: list[Curve], levels: list[float]) -> list[list[str]]:
    """Return a row for each system: the minutes to each level, and beside the first system's."""
    table = [["system", *(f"minutes to {level:g}" for level in levels), "best BLEU", "updates/s"]]
    base = curves[0]
    for curve in curves:
        cells = [curve.name]
        for level in levels:
            seconds, own = curve.seconds_to(level), base.seconds_to(level)
            last = curve.points[-1][1] if curve.points else 0.0
            factor = (seconds or last) / own if own and curve is not base else 0.0
            ratio = f" ({'' if seconds else 'over '}{factor:.1f}x)" if factor else ""
            reached = f"{seconds / 60:.1f}" if seconds else f"not within {last / 60:.1f}"
            cells.append(reached + ratio if curve.points else "")
        if curve.points:
            updates, seconds, _ = curve.points[-1]
            cells += [f"{max(bleu for *_, bleu in curve.points):.2f}", f"{updates / seconds:.1f}"]
        else:
            cells += ["not measured", ""]
        table.append(cells)
    return table


def draw(curves: list[Curve], options: argparse.Namespace) -> None:
    """Draw BLEU over minutes of training."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        minutes = [seconds / 60 for _, seconds, _ in curve.points]
        axes.plot(minutes, [bleu for *_, bleu in curve.points], ".-", label=curve.name)
    for level in options.levels:
        axes.axhline(level, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"minutes of training, {options.threads} thread(s), log scale")
    axes.set_ylabel("BLEU on the validation set, greedy")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
