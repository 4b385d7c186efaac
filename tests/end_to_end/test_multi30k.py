"""Sixty updates on Multi30k, if it is present: real text, from files to a score."""

import json
from itertools import islice
from pathlib import Path

import pytest
from conftest import Cli
from multi30k import FOLDER, needs_multi30k
from tasks import Tree, tiny_tree, write, write_config

from mtrain.run.run_dir import RunDir

pytestmark = needs_multi30k
TEST = "test_2016_flickr"


def head(directory: Path, name: str, count: int) -> dict[str, list[str]]:
    """Write the first lines of both sides of a split; return them as a config names them."""
    paths = []
    for side in ("en", "de"):
        with (FOLDER / f"{name}.{side}").open(encoding="utf-8", newline="\n") as stream:
            lines = [line.removesuffix("\n") for line in islice(stream, count)]
        paths.append([write(directory / f"{name}.{side}", lines)])
    return {"src": paths[0], "tgt": paths[1]}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = tiny_tree(tmp_path)
    tree["data"] = {
        "src_lang": "en",
        "tgt_lang": "de",
        "train": head(tmp_path, "train", 2000),
        "valid": head(tmp_path, "val", 20),
        "tests": {"flickr2016": head(tmp_path, TEST, 20)},
        "max_tokens": 80,
    }
    tree["tokenizer"]["vocab_size"] = 1500
    tree["model"] |= {"d_model": 32, "d_ff": 64}
    tree["training"] |= {
        "max_steps": 60,
        "batch_tokens": 512,
        "warmup_steps": 20,
        "log_every": 10,
        "validate_every": 60,
    }
    return tree


def test_the_loss_falls_on_real_text_and_the_run_evaluates(
    cli: Cli, tree: Tree, tmp_path: Path
) -> None:
    outcome = cli("train", write_config(tmp_path / "config.yaml", tree))
    assert outcome.code == 0, outcome.err
    run = RunDir(tmp_path / "run")
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.85 * losses[0]
    outcome = cli("eval", run.path, "--json", "--beam", "1")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)["flickr2016"]
    assert {score["metric"] for score in report["scores"] if score["value"] > 0} >= {"chrF2"}
