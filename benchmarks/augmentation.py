"""Measure back-translation, diversification and a student on Multi30k, and trainings without.

A command that was stopped continues where it was: finished trainings, corpora and scores stay in
the output folder, and the tables there are written anew after each score.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml
from machine import commit, describe_machine, peak_bytes
from report import say

from mtrain.autoconfig.presets import vocabulary_size
from mtrain.config import config_file

MTRAIN = [sys.executable, "-m", "mtrain"]
TEXT = Path(os.environ.get("MTRAIN_MULTI30K") or "data/multi30k")
NUM_ALL = 29_000  # pairs
NUM_KILLS = 50
Direction = tuple[str, str]
DIRECTIONS: tuple[Direction, ...] = (("en", "de"), ("de", "en"))
MODELS = {  # as in configs/multi30k_tiny.yaml and multi30k_small.yaml
    "tiny": {
        **{"d_model": 128, "num_heads": 4, "d_ff": 256},
        **{"num_encoder_layers": 4, "num_decoder_layers": 4, "dropout": 0.3},
    },
    "small": {
        **{"d_model": 256, "num_heads": 4, "d_ff": 1024},
        **{"num_encoder_layers": 3, "num_decoder_layers": 3, "dropout": 0.3},
    },
}


class Plan(NamedTuple):
    """What is measured, as the command line says."""

    directory: Path
    pairs: list[int]
    seeds: list[int]
    max_steps: int
    num_all: int  # pairs of the whole corpus
    augment: list[str]  # options of the back-translated corpus
    overrides: list[str]  # of the config of every training
    rounds: int  # of back-translation
    skip_all: bool  # leave out what is trained on the whole corpus
    directions: list[Direction]  # that are scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["all", "back", "diversify", "distill", "speed", "kill"])
    parser.add_argument("--out", type=Path, default=Path("runs/augmentation"))
    parser.add_argument("--pairs", default="5000,1000,10000", help="real pairs of the trainings")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--max-steps", type=int, default=6000, help="updates of every training")
    parser.add_argument("--num-all", type=int, default=NUM_ALL, help="pairs that count as all")
    parser.add_argument("--augment", default="--weight 4", help="options of the corpus")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of every training")
    parser.add_argument("--rounds", type=int, default=1, help="of back: by the models of the last")
    parser.add_argument("--skip-all", action="store_true", help="of back: no training on all pairs")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of speed and kill")
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="of both: the demo's")
    parser.add_argument("--beam", type=int, default=5, help="of both")
    names = {"-".join(pair): pair for pair in DIRECTIONS}
    parser.add_argument(
        "--directions", nargs="+", choices=names, default=[*names], help="of back: that are scored"
    )
    given = parser.parse_args()
    plan = Plan(
        directory=given.out,
        pairs=[int(number) for number in given.pairs.split(",")],
        seeds=[int(number) for number in given.seeds.split(",")],
        max_steps=given.max_steps,
        num_all=given.num_all,
        augment=given.augment.split(),
        overrides=given.set,
        rounds=given.rounds,
        skip_all=given.skip_all,
        directions=[names[name] for name in given.directions],
    )
    plan.directory.mkdir(parents=True, exist_ok=True)
    say(f"{describe_machine()}  commit {commit()}  updates {plan.max_steps:,}  {given.augment}")
    if given.what == "speed":
        measure_speed(plan.directory, given.run, given.lines, given.beam)
    if given.what == "kill":
        kill(plan.directory, given.run, given.lines, given.beam)
    if given.what in ("all", "back"):
        for count in plan.pairs:
            back_translate(plan, count)
    if given.what in ("all", "diversify"):
        diversify(plan)
    if given.what in ("all", "distill"):
        distill(plan)


def back_translate(plan: Plan, count: int) -> None:
    """Train on `count` real pairs, on these and the back-translated rest, and on all pairs."""
    for seed in plan.seeds:
        for pair in plan.directions:
            systems = {"real": trained(plan, pair, count, seed)}
            for number in range(1, plan.rounds + 1):
                run = back_translated(plan, pair, count, seed, number)
                systems[f"with back-translation, round {number}"] = run
            if not plan.skip_all:
                systems["all real"] = trained(plan, pair, plan.num_all, seed)
            for system, path in systems.items():
                note(plan, f"{'-'.join(pair)}, {count:,} pairs", system, seed, path)


def back_translated(plan: Plan, pair: Direction, count: int, seed: int, number: int) -> Path:
    """Train on `count` real pairs and on the rest, translated by a model of the round before."""
    if number == 0:
        return trained(plan, pair, count, seed)
    src, tgt = pair
    reverse = back_translated(plan, (tgt, src), count, seed, number - 1)
    base = configured(plan, pair, count, seed)
    corpus = plan.directory / f"{base.name}.bt{number}"
    rest = first_lines(plan, tgt, count, plan.num_all)
    using = ("--back", str(rest), "--using", str(reverse))
    new_config = ("-o", str(corpus), "--write-config", str(config_of(corpus)))
    mtrain("augment", str(config_of(base)), *using, *new_config, *plan.augment)
    mtrain("train", str(config_of(corpus)))
    return Path(yaml.safe_load(config_of(corpus).read_text("utf-8"))["run_dir"])


def diversify(plan: Plan) -> None:
    """Train on all pairs, and on these and what two models of each direction make of them."""
    using = [
        word
        for pair in DIRECTIONS
        for seed in (1, 2)
        for word in ("--using", str(trained(plan, pair, plan.num_all, seed)))
    ]
    for src, tgt in DIRECTIONS:
        corpus = plan.directory / f"{src}-{tgt}.div"
        config = config_of(trained(plan, (src, tgt), plan.num_all, 1))
        new_config = plan.directory / f"{src}-{tgt}.div.yaml"
        mtrain(
            *("augment", str(config), "--again", *using, "-o", str(corpus)),
            *("--write-config", str(new_config)),
        )
        for seed in plan.seeds:
            run = plan.directory / f"{src}-{tgt}.div-{seed}"
            mtrain("train", str(new_config), "--run", str(run), "--set", f"seed={seed}")
            whole = trained(plan, (src, tgt), plan.num_all, seed)
            note(plan, f"{src}-{tgt}, diversification", "all real", seed, whole)
            note(plan, f"{src}-{tgt}, diversification", "with diversification", seed, run)


def distill(plan: Plan) -> None:
    """Train a 6-1 student of the `small` teacher that has the best validation BLEU of all seeds."""
    teachers = [trained(plan, ("en", "de"), plan.num_all, seed, "small") for seed in plan.seeds]
    best = max(teachers, key=validation_bleu)
    run = plan.directory / "en-de.6-1"
    table = mtrain(
        *("distill", str(config_of(best)), "--teacher", str(best)),
        *("--student", "6-1", "--run", str(run)),
    )
    (plan.directory / "distill.txt").write_text(table, encoding="utf-8")
    print(table, end="", flush=True)


def demo_text(directory: Path, num_lines: int) -> Path:
    """Write lines of two sentences of the demo each; hardly any line occurs twice."""
    text = directory / f"demo.{num_lines}.en"
    if not text.is_file():
        rng = random.Random(1)
        sentences = Path("data/demo/train.en").read_text("utf-8").splitlines()
        with text.open("w", encoding="utf-8") as stream:
            for _ in range(num_lines):
                stream.write(" ".join(rng.choices(sentences, k=2)) + "\n")
    return text


def augment_demo(text: Path, run: Path, beam: int, corpus: Path) -> list[str]:
    """Return the words of a command that translates a text for the demo's training."""
    words = ["augment", "configs/demo.yaml", "--forward", str(text), "--using", str(run)]
    return [*words, "--beam", str(beam), "-o", str(corpus)]


def measure_speed(directory: Path, run: Path, num_lines: int, beam: int) -> None:
    """Print lines a second and peak memory of `translate` and `augment` for the same text."""
    text = demo_text(directory, num_lines)
    corpus = directory / f"speed.{num_lines}"
    shutil.rmtree(corpus, ignore_errors=True)
    target = directory / "speed.de"
    commands = {
        "translate": ["translate", str(run), str(text), "--beam", str(beam), "-o", str(target)],
        "augment": augment_demo(text, run, beam, corpus),
    }
    seconds = {}
    for name, words in commands.items():
        began_s = time.monotonic()
        process = subprocess.Popen([*MTRAIN, *words], stdout=subprocess.DEVNULL)
        peak_mib = peak_bytes(process) / 2**20
        seconds[name] = time.monotonic() - began_s
        rate = num_lines / seconds[name]
        print(f"{name}: {rate:,.0f} lines a second, {peak_mib:,.0f} MiB", flush=True)
    ratio = seconds["translate"] / seconds["augment"]
    print(f"augment makes {ratio:.3f} times as many lines a second as translate")


def kill(directory: Path, run: Path, num_lines: int, beam: int) -> None:
    """Kill `augment` at random moments, and compare its folder with that of an undisturbed run."""
    text = demo_text(directory, num_lines)
    whole, killed = directory / "kill.whole", directory / "kill.killed"
    for corpus in (whole, killed):
        shutil.rmtree(corpus, ignore_errors=True)
    began_s = time.monotonic()
    mtrain(*augment_demo(text, run, beam, whole))
    words = augment_demo(text, run, beam, killed)
    shard_s = (time.monotonic() - began_s) / max(1, len(list(whole.glob("pairs-*"))))
    longest_s = 3 + 1.5 * shard_s  # a start and a shard: most are killed before they finish
    rng, num_kills = random.Random(1), 0
    while num_kills < NUM_KILLS:
        with subprocess.Popen(
            [*MTRAIN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                process.wait(rng.uniform(0, longest_s))
                break  # it came to its end
            except subprocess.TimeoutExpired:
                process.kill()
                num_kills += 1
    mtrain(*words)
    contents = [
        {each.name: each.read_bytes() for each in sorted(folder.iterdir())}
        for folder in (whole, killed)
    ]
    assert contents[0] == contents[1], "kills change the folder"
    print(f"{num_kills} kills, {len(contents[0])} files: the same bytes")


def mtrain(*words: str) -> str:
    """Run a command of mtrain; return what it prints."""
    say(f"mtrain {' '.join(words)}")
    return subprocess.run([*MTRAIN, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def first_lines(plan: Plan, language: str, first: int, last: int) -> Path:
    """Write lines `first` to `last` - 1 of the training text; return the file."""
    path = plan.directory / f"train.{first}-{last}.{language}"
    if not path.is_file():
        with (TEXT / f"train.{language}").open(encoding="utf-8", newline="\n") as stream:
            text = "".join(islice(stream, first, last))
        path.write_text(text, encoding="utf-8")
    return path


def trained(plan: Plan, pair: Direction, count: int, seed: int, model: str = "tiny") -> Path:
    """Train on the first `count` real pairs; return the run folder."""
    run = configured(plan, pair, count, seed, model)
    mtrain("train", str(config_of(run)))
    return run


def configured(plan: Plan, pair: Direction, count: int, seed: int, model: str = "tiny") -> Path:
    """Write the config of such a training beside its run folder; return the run folder."""
    run = plan.directory / f"{'-'.join(pair)}.{count}-{seed}{'' if model == 'tiny' else model}"
    warmup_steps = min(1000, plan.max_steps // 4)
    lr = (0.004 if model == "tiny" else 0.002) * warmup_steps / 1000  # a short warmup takes less
    src, tgt = pair
    tree = {
        "run_dir": str(run),
        "seed": seed,
        "data": {
            "src_lang": src,
            "tgt_lang": tgt,
            "train": corpus_of(*(first_lines(plan, side, 0, count) for side in pair)),
            "valid": corpus_of(*(TEXT / f"val.{side}" for side in pair)),
            "tests": {
                "flickr2016": corpus_of(*(TEXT / f"test_2016_flickr.{side}" for side in pair))
            },
            "clean": ["blank-side", "held-out"],
        },
        "tokenizer": {"kind": "bpe", "vocab_size": vocabulary_size(count)},
        "model": MODELS[model],
        "training": {
            "max_steps": plan.max_steps,
            "batch_tokens": 2048,
            "schedule": "linear",
            "lr": lr,
            "warmup_steps": warmup_steps,
            "validate_every": max(1, plan.max_steps // 4),
            "save_every": max(1, plan.max_steps // 40),
            "patience": 100,
        },
        "decoding": {"beam": 5, "length_alpha": 1.4},
    }
    path = config_of(run)
    config_file.save(config_file.from_tree(tree, str(path), plan.overrides), path, False)
    return run


def config_of(run: Path) -> Path:
    """Return the path of the config of a run."""
    return run.with_name(f"{run.name}.yaml")


def corpus_of(src: Path, tgt: Path) -> dict[str, list[str]]:
    return {"src": [str(src)], "tgt": [str(tgt)]}


def validation_bleu(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return max(float(line["valid_bleu"]) for line in lines if "valid_bleu" in line)


def note(plan: Plan, title: str, system: str, seed: int, run: Path) -> None:
    """Score a run, unless it is scored, and write all tables anew."""
    path = plan.directory / "scores.json"
    scores: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    of_title = scores.setdefault(title, {}).setdefault(system, {})
    if str(seed) not in of_title:
        (report,) = json.loads(mtrain("eval", str(run), "--json")).values()
        of_title[str(seed)] = {each["metric"]: each["value"] for each in report["scores"]}
        path.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    text = "\n".join(tables(scores)) + "\n"
    (plan.directory / "tables.md").write_text(text, encoding="utf-8")
    say(f"{title}: {system}, seed {seed}: {of_title[str(seed)]}")


def tables(scores: dict[str, Any]) -> Iterator[str]:
    """Yield tables of BLEU by system and seed, with means and differences from the first system."""
    for title, systems in scores.items():
        yield f"\n{title}\n"
        seeds = sorted({seed for by_seed in systems.values() for seed in by_seed})
        heads = [*(f"seed {seed}" for seed in seeds), "mean", "beside the first"]
        yield f"| test2016, BLEU | {' | '.join(heads)} |"
        yield f"| --- |{' --: |' * (len(seeds) + 2)}"
        first = next(iter(systems.values()))
        for system, by_seed in systems.items():
            values = [each["BLEU"] for each in by_seed.values()]
            cells = [f"{by_seed[seed]['BLEU']:.2f}" if seed in by_seed else "" for seed in seeds]
            spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            both = [seed for seed in by_seed if seed in first]
            differences = [by_seed[seed]["BLEU"] - first[seed]["BLEU"] for seed in both]
            difference = f"{mean(differences):+.2f}" if differences else ""
            yield f"| {system} | {' | '.join(cells)} | {mean(values):.2f}{spread} | {difference} |"


if __name__ == "__main__":
    main()
