"""What an audit finds in Multi30k, if it is installed; each finding was checked by hand."""

import json
from pathlib import Path

from conftest import Cli
from defects import found_lines
from multi30k import FOLDER, needs_multi30k
from tasks import Tree, write_config

pytestmark = needs_multi30k


def named(split: str) -> dict[str, list[str]]:
    return {"src": [f"{FOLDER}/{split}.en"], "tgt": [f"{FOLDER}/{split}.de"]}


def test_exactly_the_known_defects_of_multi30k_are_found_and_all_are_notes(
    cli: Cli, tmp_path: Path
) -> None:
    tree: Tree = {"run_dir": str(tmp_path / "run"), "data": {"src_lang": "en", "tgt_lang": "de"}}
    tree["data"] |= {"train": named("train"), "valid": named("val")}
    tree["data"]["tests"] = {"flickr2016": named("test_2016_flickr")}
    config = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("check", config, "--strict", "--json")
    assert outcome.code == 0, outcome.err
    assert {found["severity"] for found in json.loads(outcome.out)["findings"]} == {"note"}
    assert found_lines(tmp_path / "run" / "check") == {
        "train.held-out": [4750, 15326],
        "train.length-ratio": [16510, 16664],  # their target is "@@"
        "train.repeated-pair": [14215, 16867, 20149],
        "train.repeated-source": [7665, 10161, 14431, 19435, 25831, 28387],
        "train.tab": [7366],
        "valid.source-in-train": [687],
        "valid.target-in-train": [165],
    }
