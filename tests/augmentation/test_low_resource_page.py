"""The commands of docs/low-resource.md run, on a task that a tiny model has learned."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import Cli
from tasks import REPOSITORY, reverse_task, write

from mtrain.augmentation.pair_rules import FLAGS, RULES
from mtrain.config import config_file
from mtrain.run.run_dir import RunDir

PAGE = (REPOSITORY / "docs" / "low-resource.md").read_text(encoding="utf-8")
CHEAP = ["model.d_model=16", "model.num_heads=1", "model.d_ff=32", "tokenizer.vocab_size=310"]
CHEAP += ["model.num_encoder_layers=1", "model.num_decoder_layers=1", "training.max_steps=1"]
CHEAP += ["decoding.max_extra_tokens=0"]  # what an untrained model translates does not end


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def test_the_commands_of_the_page_run_in_order(
    cli: Cli,
    reverser: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_init: None,
    few_trials: None,
) -> None:
    """Each model trained for one update is replaced by one that has learned to translate.

    Its size is not in the configs, so that `distill` gets one without a model.
    """
    monkeypatch.chdir(tmp_path)
    for seed, (name, count) in enumerate({"pairs": 300, "valid": 9, "test": 9}.items(), start=1):
        pairs = reverse_task(count, seed)
        write(Path(f"{name}.en"), [pair.src for pair in pairs])
        write(Path(f"{name}.de"), [pair.tgt for pair in pairs])
    write(Path("news.de"), [pair.tgt for pair in reverse_task(40, 8)])
    write(Path("news.en"), [pair.src for pair in reverse_task(40, 9)])
    verbs = []
    for verb, *words in commands():
        verbs.append(verb)
        overrides = {"train": CHEAP, "distill": [*CHEAP, "model={}"]}.get(verb, [])
        done = cli(verb, *words, *(part for change in overrides for part in ("--set", change)))
        assert done.code == 0, (verb, words, done.err)
        if verb == "train":
            run = words[words.index("--run") + 1] if "--run" in words else None
            config = config_file.load(Path(words[0]), (), run)
            shutil.rmtree(config.run_dir)
            shutil.copytree(reverser.path, config.run_dir)
            data = config.data
            changed = reverser.config.data.model_copy(
                update={"src_lang": data.src_lang, "tgt_lang": data.tgt_lang}
            )
            copy = RunDir(Path(config.run_dir))
            copy.save_config(reverser.config.model_copy(update={"data": changed}))
    assert {"init", "check", "train", "augment", "eval", "distill"} == set(verbs)
    assert verbs.count("augment") == 5


def test_the_page_lists_every_reason_for_dropping_a_pair() -> None:
    others = {"blank", "not-utf8", "repeated", "low-score", "max-tokens"}
    reasons = {*FLAGS, *RULES, *others} - {"blank-side"}
    table = PAGE.partition("| reason |")[2]
    assert (
        set(re.findall(r"`([a-z][a-z0-9-]+)`", table.partition("\n\n")[0])) - {"check"} == reasons
    )
