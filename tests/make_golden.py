"""Make a golden run: a tiny run folder that every later mtrain must still read, once released.

    python tests/make_golden.py NAME

It trains for seconds and writes tests/golden/NAME: the run folder, and `expected.json` with what it
translates and scores. Add one at every change of a file in the run folder (another
`checkpoint.FORMAT`, a new key in a header, another tokenizer or data file), under a new name, and
never replace an old one: users have such folders. `test_golden.py` reads them all.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks import WORDS, Pair, Tree, train, write_config, write_corpus

from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import EncodedSource, Translator, load
from mtrain.evaluation import evaluation
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = "expected.json"
LINES = ["ba ce di", "tu", "", "fo gu ha", "lo fo", "na\u00efve \u2603 ba", "ri ri ri ri"]


def outputs(run: RunDir) -> dict[str, Any]:
    """Return what a run translates and scores, on a CPU."""
    loading = LoadOptions("cpu")
    options = DecodingOptions.from_config(run.config)
    greedy = load(run, replace(options, beam=1), loading)
    beam = load(run, options, loading)
    results = evaluation.evaluate(run, beam, print)
    return {
        "greedy": translate_lines(greedy, LINES),
        "greedy_scores": _scores(greedy),
        "beam": translate_lines(beam, LINES),
        "beam_scores": _scores(beam),
        "eval": [hypothesis for result in results for hypothesis in result.hypotheses],
        "eval_scores": [score.value for result in results for score in result.scores],
        "reference_scores": [
            float(number)
            for line in evaluation.reference_scores(beam, evaluation.read_tests(run))
            for number in line.split("\t")[1:]
        ],
    }


def _scores(translator: Translator) -> list[float]:
    sources = translator.tokenizer.encode_src([line for line in LINES if line])
    return [best[0].score for best in translator.search([EncodedSource(ids) for ids in sources])]


def files_of(directory: Path) -> list[str]:
    """Return the files of a golden run, but for what is expected of it."""
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.name != EXPECTED)


def _pairs(count: int, seed: int, longest: int = 3) -> list[Pair]:
    """Return pairs of few words, which so small a model learns to copy."""
    rng = random.Random(seed)
    lines = [" ".join(rng.sample(WORDS, rng.randint(1, longest))) for _ in range(count)]
    return [Pair(line, line) for line in lines]


def tree(name: str) -> Tree:
    """Write the corpora into the working folder; return the config."""
    here = Path()
    return {
        "run_dir": name,
        "data": {
            "src_lang": "aa",
            "tgt_lang": "bb",
            "train": write_corpus(here, "train", _pairs(300, 1)),
            "valid": write_corpus(here, "valid", _pairs(8, 2)),
            "tests": {"held_out": write_corpus(here, "test", _pairs(12, 3, longest=5))},
            "max_tokens": 32,
            "clean": ["blank-side"],  # of so few sentences, some stand in two corpora
        },
        "tokenizer": {"vocab_size": 290},
        "model": {
            "d_model": 12,
            "num_heads": 2,
            "d_ff": 24,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "dropout": 0.0,
        },
        "training": {
            "max_steps": 400,
            "batch_tokens": 256,
            "schedule": "linear",
            "lr": 0.01,
            "warmup_steps": 100,
            "label_smoothing": 0.0,
            "device": "cpu",
            "precision": "float32",
            "log_every": 200,
            "validate_every": 400,
            "keep_last": 1,
            "average": 1,
        },
        "decoding": {"beam": 4, "max_extra_tokens": 10},
    }


@contextmanager
def _working_in(directory: str) -> Iterator[None]:
    """Work elsewhere meanwhile: a golden run names its corpora without a folder."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def make(name: str) -> Path:
    """Train a golden run; return its folder, which must be new."""
    with tempfile.TemporaryDirectory() as directory, _working_in(directory):
        run = train(write_config(Path("config.yaml"), tree(name)))
        path = shutil.copytree(run.path, GOLDEN / name, ignore=shutil.ignore_patterns(".lock"))
    expected = {"files": files_of(path), **outputs(RunDir(path))}
    text = json.dumps(expected, indent=1, ensure_ascii=False) + "\n"
    (path / EXPECTED).write_text(text, encoding="utf-8")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(make(sys.argv[1]))
