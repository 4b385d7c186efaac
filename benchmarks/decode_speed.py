"""Compare how fast mtrain and other toolkits translate with the same trained model.

Every system decodes the same sentences of a run's first test set, on the same number of threads.
Each measurement is a fresh process. They come in pairs, first mtrain, then the other, so that a
machine that slows down slows both; what counts is the ratio of each pair. benchmarks/README.md
says what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import environments
from environments import NotMeasured
from machine import commit, describe_machine
from peers.decoding import Job
from report import print_table, say, spread

from mtrain.config.sections import ModelConfig
from mtrain.data import prepare
from mtrain.data.prepare import ParallelLines
from mtrain.errors import RunError
from mtrain.evaluation import metrics
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

_MIN_SAME = 0.99  # of greedy outputs, or the weights were not carried over as they are


@dataclass(frozen=True)
class System:
    """A toolkit in one setting; `environment` is None for mtrain, which runs in this one."""

    environment: str | None
    worker: str
    precision: str
    is_trained: bool
    summary: str


BASE = "mtrain"
SYSTEMS = {
    BASE: System(None, "decode_mtrain", "", True, "as it comes, text to text"),
    "hf": System("hf", "decode_hf", "float32", True, "MarianMTModel.generate"),
    "ctranslate2": System(
        "ctranslate2", "decode_ctranslate2", "float32", True, "Translator in float32"
    ),
    "ctranslate2-int8": System(
        "ctranslate2", "decode_ctranslate2", "int8", True, "Translator with int8 products"
    ),
    "marian": System(None, "decode_marian", "float32", True, "pymarian, text to text"),
    "marian-int8": System(None, "decode_marian", "int8", True, "pymarian with intgemm8"),
    "eole": System("eole", "decode_eole", "float32", False, "eole predict, random weights"),
    "joeynmt": System("joeynmt", "decode_joeynmt", "float32", True, "its own search"),
}


@dataclass(frozen=True)
class Task:
    """What is translated, and by which model."""

    test: str
    lines: ParallelLines
    tgt_lang: str
    model: ModelConfig
    vocabulary: Tokenizer
    job: Job


@dataclass(frozen=True)
class Measurement:
    """What a worker printed, and its outputs as text."""

    sentences_per_s: float
    tgt_tokens_per_s: float
    texts: list[str]
    lengths: list[int]  # in tokens, eos included
    max_rss_mib: int
    cores: float
    versions: str


@dataclass(frozen=True)
class Pair:
    """Two measurements, one right after the other."""

    base: Measurement
    other: Measurement

    @property
    def ratio(self) -> float:
        """The speed of the base over that of the other system."""
        return self.base.sentences_per_s / self.other.sentences_per_s


def main() -> None:
    options = parse()
    if options.list:
        list_systems()
        return
    try:
        task = read_task(options)
        greedy = replace(task.job, beam=1, seconds=0.0, precision="float32")
        expected = translate(BASE, greedy, task.vocabulary).texts
    except (RunError, NotMeasured) as error:
        sys.exit(str(error))
    names = [name for name in options.peers if name != BASE]
    pairs: dict[str, list[Pair]] = {}
    checks: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            if reason := environments.install(SYSTEMS[name].environment):
                raise NotMeasured(reason)
            if SYSTEMS[name].is_trained:
                checks[name] = check(name, greedy, task.vocabulary, expected)
            pairs[name] = [measure_pair(options, task, name, n + 1) for n in range(options.pairs)]
        except NotMeasured as error:
            reasons[name] = str(error)
            say(f"{name}: not measured: {error}")
    report(options, task, pairs, checks, reasons)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = [name for name in SYSTEMS if name != BASE]
    parser.add_argument("run", type=Path, nargs="?", help="a trained run folder")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=default)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument(
        "--precision", default="float32", help="of mtrain: bfloat16, int8-shortlist, ..."
    )
    parser.add_argument("--alpha", type=float, default=0.6, help="of the length penalty")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of whole passes, at least")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="sentences; not for mtrain")
    parser.add_argument("--max-tokens", type=int, default=40, help="of an output, eos included")
    parser.add_argument("--lines", type=int, help="take the first ones alone")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--list", action="store_true", help="list the systems and stop")
    options = parser.parse_args()
    for name in options.peers:
        if name not in SYSTEMS:
            parser.error(f"--peers must be of {', '.join(SYSTEMS)}, but has {name!r} instead")
    if options.run is None and not options.list:
        parser.error("a run folder must be named")
    return options


def list_systems() -> None:
    for name, system in SYSTEMS.items():
        print(f"{name:<16} {system.summary:<48} {environments.state(system.environment)}")


def read_task(options: argparse.Namespace) -> Task:
    """Read the first test set of the run and its model's sizes.

    Raises:
        RunError: if the folder is no run, or its model is one that the peers cannot carry.
    """
    run = RunDir(options.run.resolve())
    config = run.config
    if not config.data.tests:
        raise RunError(f"{run.config_path}: `data.tests` must name a test set, but is empty.")
    model = config.model
    for key, wanted in {
        "tie_embeddings": "all",
        "norm": "post",
        "positions": "sinusoidal",
        "activation": "relu",
        "attention_window": None,
    }.items():
        if getattr(model, key) != wanted:
            raise RunError(
                f"{run.config_path}: `model.{key}` must be {wanted}, which is all that the peers' "
                f"copies support, but is {getattr(model, key)} instead."
            )
    test = next(iter(config.data.tests))
    pairs = [pair for pair in zip(*prepare.read_test(run, test), strict=True) if pair[0].strip()]
    lines = ParallelLines(*map(list, zip(*pairs[: options.lines], strict=True)))
    vocabulary = sentencepiece.load(run.tokenizer_dir)
    job = Job(
        run=str(run.path),
        num_encoder_layers=model.num_encoder_layers,
        num_decoder_layers=model.num_decoder_layers,
        d_model=model.d_model,
        d_ff=model.d_ff,
        num_heads=model.num_heads,
        vocab_size=len(vocabulary.tgt),
        lines=lines.src,
        sources=vocabulary.encode_src(lines.src),
        beam=options.beam,
        alpha=options.alpha,
        batch_size=options.batch,
        max_tokens=options.max_tokens,
        lengths=[],
        precision=options.precision,
        threads=options.threads,
        seconds=options.seconds,
    )
    return Task(test, lines, run.config.data.tgt_lang, model, vocabulary, job)


def check(name: str, greedy: Job, vocabulary: Tokenizer, expected: Sequence[str]) -> float:
    """Return the share of lines equal to mtrain's when both search greedily in float32.

    Lines that may not be written to their end are left out.
    """
    texts = translate(name, greedy, vocabulary).texts
    lengths = [len(ids) + 1 for ids in vocabulary.tgt.encode(expected)]
    fits = [row for row, length in enumerate(lengths) if length < greedy.max_tokens]
    share = share_same([texts[row] for row in fits], [expected[row] for row in fits])
    if share < _MIN_SAME:
        say(f"{name}: NOT THE SAME MODEL: only {share:.1%} of its greedy outputs are mtrain's")
    return share


def share_same(texts: Sequence[str], expected: Sequence[str]) -> float:
    return sum(map(str.__eq__, texts, expected)) / len(expected)


def measure_pair(options: argparse.Namespace, task: Task, name: str, number: int) -> Pair:
    base = translate(BASE, task.job, task.vocabulary)  # in the precision that was asked for
    job = replace(task.job, precision=SYSTEMS[name].precision)
    if not SYSTEMS[name].is_trained:
        job = replace(job, lengths=base.lengths)
    pair = Pair(base, translate(name, job, task.vocabulary))
    say(
        f"{name}, pair {number} of {options.pairs}: {BASE} "
        f"{base.sentences_per_s:,.1f}, {name} {pair.other.sentences_per_s:,.1f} sentences/s, "
        f"ratio {pair.ratio:.2f}"
    )
    return pair


def translate(name: str, job: Job, vocabulary: Tokenizer) -> Measurement:
    """Translate with a system in a process of its own, and wait.

    Tokens are the pieces that the tokenizer cuts the output into, and eos, for all alike.

    Raises:
        NotMeasured: if it fails or does not end.
    """
    system = SYSTEMS[name]
    env = environments.variables(system.environment, job.threads)
    patience_s = 900 + 5 * job.seconds
    answer = environments.run_worker(
        system.environment, system.worker, asdict(job), env, patience_s
    )
    outputs = answer["outputs"]
    texts = outputs if system.environment is None else vocabulary.tgt.decode(outputs)
    lengths = [len(ids) + 1 for ids in vocabulary.tgt.encode(texts)]
    seconds = answer["seconds"] or float("inf")
    return Measurement(
        len(texts) / seconds,
        sum(lengths if system.is_trained else job.lengths) / seconds,
        texts,
        lengths,
        answer["max_rss_mib"],
        answer["cores"],
        " ".join(f"{package} {version}" for package, version in answer["versions"].items()),
    )


HEADINGS = [
    "system",
    "sentences/s",
    "target tokens/s",
    f"{BASE} / system",
    "peak memory",
    "cores",
    "BLEU",
    f"same as {BASE}",
    "same when greedy, float32",
    "versions",
]


def report(
    options: argparse.Namespace,
    task: Task,
    pairs: dict[str, list[Pair]],
    checks: dict[str, float],
    reasons: dict[str, str],
) -> None:
    """Print what was measured where, and a row for each system."""
    model = task.model
    print(f"{datetime.date.today()}, {describe_machine()}, commit {commit()}")
    print(
        f"{model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model {model.d_model}, "
        f"d_ff {model.d_ff}, {model.num_heads} heads; {task.job.vocab_size:,} pieces; "
        f"{options.threads} thread(s)"
    )
    print(
        f"{task.test}, {len(task.lines.src):,} sentences; beam {options.beam}, "
        f"length penalty {options.alpha:g}; peers in batches of {options.batch}, at most "
        f"{options.max_tokens} tokens an output"
    )
    print(f"{options.pairs} pair(s) a system, {options.seconds:g} s each after a first pass\n")
    rows = [HEADINGS]
    own = [pair.base for name in pairs for pair in pairs[name]]
    if own:
        rows.append(row(BASE, own, task, "1", ["", ""]))
    for name in options.peers:
        if name in pairs:
            ratio = spread([pair.ratio for pair in pairs[name]], ".2f")
            sameness = say_sameness(pairs[name], checks.get(name))
            rows.append(row(name, [pair.other for pair in pairs[name]], task, ratio, sameness))
        elif name in reasons:
            spanned = [name, f"not measured: {reasons[name]}"]
            rows.append([*spanned, *[""] * (len(HEADINGS) - 2)])
    print_table(rows, options.markdown)


def say_sameness(pairs: list[Pair], greedy: float | None) -> list[str]:
    """Format the shares of outputs equal to mtrain's, in this search and in the greedy one."""
    if greedy is None:
        return ["random weights", ""]
    share = share_same(pairs[-1].other.texts, pairs[-1].base.texts)
    warning = "" if greedy >= _MIN_SAME else ": NOT THE SAME MODEL"
    return [f"{share:.1%}", f"{greedy:.1%}{warning}"]


def row(
    name: str, measured: list[Measurement], task: Task, ratio: str, sameness: list[str]
) -> list[str]:
    last = measured[-1]
    bleu = (
        f"{metrics.bleu(last.texts, task.lines.tgt, task.tgt_lang):.2f}"
        if SYSTEMS[name].is_trained
        else ""
    )
    return [
        name,
        spread([measurement.sentences_per_s for measurement in measured], ",.1f"),
        spread([measurement.tgt_tokens_per_s for measurement in measured], ",.0f"),
        ratio,
        f"{max(measurement.max_rss_mib for measurement in measured):,} MiB",
        spread([measurement.cores for measurement in measured], ".2f"),
        bleu,
        *sameness,
        last.versions,
    ]


if __name__ == "__main__":
    main()
