"""Training drops the pairs that the rules of the audit report, and lists every dropped pair."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from defects import Planted, cyrillic, found_lines, plant, write_planted
from multi30k import FOLDER, needs_multi30k
from tasks import REPOSITORY, Pair, Tree, copy_task, prepared, tiny_tree, write_config, write_corpus

from mtrain.audit import features
from mtrain.audit.audit import audit
from mtrain.audit.rules import RULES
from mtrain.audit.scan import PairFilter, scan_corpora
from mtrain.config import config_file
from mtrain.config.sections import CLEAN, Config
from mtrain.corpus import dropped, reader
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir

DEMO = REPOSITORY / "data" / "demo"


def dropped_lines(config: Config, directory: Path, num_pairs: int) -> dict[str, list[int]]:
    """Return the numbers of the lines, from 1, that training drops, by reason."""
    assert scan_corpora(config.data, directory)[-1].reader.num_pairs == num_pairs
    pair_filter = PairFilter(config.data, directory)
    reasons = pair_filter.reasons(0, num_pairs)
    found: dict[str, list[int]] = {}
    for line, reason in enumerate(reasons, start=1):
        if reason is not None:
            found.setdefault(reason, []).append(line)
    return found


def entries(run: RunDir) -> list[dict[str, Any]]:
    raw = gzip.decompress((run.data_dir / "dropped.jsonl.gz").read_bytes())
    return [json.loads(line) for line in raw.splitlines()]


def demo_pairs(split: str, count: int) -> list[Pair]:
    sides = ((DEMO / f"{split}.{side}").read_text("utf-8").split("\n") for side in ("en", "de"))
    return [Pair(*lines) for lines in zip(*sides, strict=True)][:count]


@pytest.fixture(scope="module")
def planted() -> Planted:
    held_out = [*demo_pairs("valid", 40), *demo_pairs("test", 40)]
    text = plant(demo_pairs("train", 3000), held_out, seed=5, times=4)
    bad = text.lines["train.not-utf8"]  # training refuses those
    text.train = [
        Pair("ten dogs", "zehn Hunde") if n in bad else p for n, p in enumerate(text.train, 1)
    ]
    return text


@pytest.fixture(scope="module")
def lists(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    directory = tmp_path_factory.mktemp("planted")
    audit(
        config_file.load(write_planted(directory, planted)), None, directory, lambda num_bytes: None
    )
    return found_lines(directory)


def test_every_value_allowed_in_data_clean_is_an_audit_rule() -> None:
    assert set(CLEAN) <= {rule.name for rule in RULES}


@pytest.mark.parametrize("name", CLEAN)
def test_a_rule_in_data_clean_drops_exactly_the_pairs_that_the_check_lists(
    planted: Planted, lists: dict[str, list[int]], tmp_path: Path, name: str
) -> None:
    path = write_planted(tmp_path, planted)
    config = config_file.load(path, [f"data.clean=[{name}]"])
    expected = {name: lists[f"train.{name}"]}
    if name == "blank-side":
        expected["blank-pair"] = lists["train.blank-pair"]
    if name == "held-out":
        expected["held-out-pair"] = lists["train.held-out-pair"]
    assert len(expected[name]) >= 4
    assert dropped_lines(config, tmp_path, len(planted.train)) == expected


def test_features_that_no_rule_reads_are_not_computed(
    planted: Planted, lists: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("computed in vain")

    for name in ("_CharacterBlock", "_WordBlock", "_keys", "is_mojibake", "_MOJIBAKE"):
        monkeypatch.setattr(features, name, fail)
    monkeypatch.setattr(features.SideClassifier, "learn", fail)
    config = config_file.load(write_planted(tmp_path, planted))
    assert config.data.clean == ["blank-side", "held-out-pair"]
    names = ("blank-pair", "blank-side", "held-out-pair")
    expected = {name: lists[f"train.{name}"] for name in names}
    found = dropped_lines(config, tmp_path, len(planted.train))
    assert {name: found[name] for name in names} == expected


def test_a_pair_that_breaks_several_rules_is_dropped_for_one_reason(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    pairs = copy_task(200, 1)
    pairs[150] = pairs[3]
    tree["data"]["train"] = write_corpus(tmp_path, "train", pairs)
    tree["data"]["valid"] = write_corpus(tmp_path, "valid", [pairs[3]])
    tree["data"]["clean"] = ["repeated-pair", "held-out-pair"]
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    found = dropped_lines(config, tmp_path, 200)
    assert {4, 151} <= set(found["held-out-pair"])
    lines = [line for own in found.values() for line in own]
    assert len(lines) == len(set(lines))


def test_a_source_whose_only_other_target_is_blank_keeps_its_translation(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    pairs = [Pair(f"{pair.src} {number}", pair.tgt) for number, pair in enumerate(copy_task(50, 1))]
    pairs[30], pairs[40] = pairs[3], Pair(pairs[5].src, pairs[6].tgt)
    pairs[3] = Pair(pairs[3].src, " ")
    tree["data"]["train"] = write_corpus(tmp_path, "train", pairs)
    tree["data"]["clean"] = ["blank-side", "repeated-source"]
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    found = dropped_lines(config, tmp_path, 50)
    assert found == {"blank-side": [4], "repeated-source": [41]}


def test_a_source_whose_earlier_pair_another_rule_drops_keeps_its_next_translation(
    tmp_path: Path,
) -> None:
    tree = tiny_tree(tmp_path)
    pairs = [Pair(f"{pair.src} {number}", pair.tgt) for number, pair in enumerate(copy_task(50, 1))]
    pairs[3] = Pair(pairs[3].src, pairs[3].src)
    for number, other in ((30, 3), (40, 3), (45, 5)):
        pairs[number] = Pair(pairs[other].src, f"{pairs[number].tgt} {number}")
    tree["data"]["train"] = write_corpus(tmp_path, "train", pairs)
    tree["data"]["clean"] = ["copied", "repeated-source"]
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    found = dropped_lines(config, tmp_path, 50)
    assert found == {"copied": [4], "repeated-source": [41, 46]}
    check_dir = tmp_path / "check"
    check_dir.mkdir()
    audit(config, None, check_dir, lambda num_bytes: None)
    assert found_lines(check_dir)["train.repeated-source"] == [41, 46]


def test_check_predicts_the_number_of_pairs_that_training_drops_for_each_reason(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path)
    pairs = copy_task(200, 1)
    pairs[7], pairs[9] = Pair("", "ba"), Pair("ba " * 40, "ba")
    tree["data"]["train"] = write_corpus(tmp_path, "train", pairs)
    tree["data"]["valid"] = write_corpus(tmp_path, "valid", [*copy_task(11, 2), pairs[20]])
    tree["data"]["clean"] = ["blank-side", "held-out-pair", "repeated-pair"]
    config = write_config(tmp_path / "config.yaml", tree)
    before = json.loads(cli("check", config, "--json").out)["corpora"][0]["num_dropped"]
    page = " ".join(cli("check", config).out.decode().split())
    assert ", less what exceeds `data.max_tokens`" in page
    assert cli("tokenize", config).code == 0
    after = json.loads(cli("check", config, "--json").out)["corpora"]
    counts = dropped.read_counts(RunDir(tmp_path / "run").data_dir)
    assert after[0]["num_dropped"] == counts == before | {"max-tokens": 1}
    assert min(counts.values()) > 0
    assert after[1]["num_dropped"] == {}
    reasons = [entry["reason"] for entry in entries(RunDir(tmp_path / "run"))]
    assert Counter(reasons) == counts
    why = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    page = " ".join(cli("check", config).out.decode().split())
    assert f"train: 200 pairs; training drops {len(reasons)} ({why})" in page


@pytest.mark.parametrize("reason", ["held-out-pair", "max-tokens"])
def test_check_and_tokenize_refuse_a_corpus_if_every_pair_is_dropped(
    cli: Cli, tmp_path: Path, reason: str
) -> None:
    tree = tiny_tree(tmp_path)
    config = write_config(tmp_path / "config.yaml", tree)
    assert cli("tokenize", config).code == 0  # lengths in tokens need a tokenizer
    key = "`data.clean`" if reason == "held-out-pair" else "`data.max_tokens`"
    change = {"valid": tree["data"]["train"], "clean": [reason]}
    tree["data"] |= change if reason == "held-out-pair" else {"max_tokens": 2}
    outcome = cli("check", write_config(config, tree))
    assert outcome.code == 2
    page = " ".join(outcome.out.decode().split())
    assert (
        "error train: all pairs of train are dropped: 200 (100.0%); training refuses the corpus "
        f"Change the text or {key}; dropped are 200 ({reason} 200)."
    ) in page
    tree["run_dir"] = str(tmp_path / "other")
    said = cli("tokenize", write_config(config, tree)).err
    assert f"but all are dropped: 200 ({reason} 200); change the text or {key}." in said


def test_an_empty_data_clean_drops_only_pairs_over_max_tokens(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    pairs = copy_task(200, 1)
    pairs[7], pairs[9] = Pair("", "ba"), Pair("", "ba " * 40)
    tree["data"]["train"] = write_corpus(tmp_path, "train", pairs)
    tree["data"]["clean"] = []
    run = prepared(config_file.load(write_config(tmp_path / "config.yaml", tree)))
    assert [(entry["line"], entry["reason"]) for entry in entries(run)] == [(10, "max-tokens")]


def test_the_tokenizer_does_not_learn_from_dropped_pairs(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    odd = Pair("ба це", "ба це")
    tree["data"]["train"] = write_corpus(tmp_path, "train", [*copy_task(200, 1), odd])
    tree["data"]["valid"] = write_corpus(tmp_path, "valid", [odd])
    tree["data"]["clean"] = ["held-out-pair"]
    run = prepared(config_file.load(write_config(tmp_path / "config.yaml", tree)))
    assert "б".encode() not in (run.tokenizer_dir / "shared.model").read_bytes()


def test_the_list_of_dropped_pairs_is_byte_identical_between_two_runs(tmp_path: Path) -> None:
    raw = set()
    for name in ("one", "two"):
        tree = tiny_tree(tmp_path)
        tree["data"]["clean"] = ["held-out-pair"]
        tree["run_dir"] = str(tmp_path / name)
        run = prepared(config_file.load(write_config(tmp_path / "config.yaml", tree)))
        raw.add((run.data_dir / "dropped.jsonl.gz").read_bytes())
        assert entries(run)
    assert len(raw) == 1


def test_training_prints_the_dropped_pairs_and_logs_them_once_even_if_resumed(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path)
    tree["data"]["train"] = write_corpus(tmp_path, "train", [*copy_task(200, 1), Pair("", "ba")])
    tree["training"]["max_steps"] = 4
    config = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("train", config)
    assert "pairs    200 for training, dropped 1 (blank-side 1)," in outcome.err.splitlines()
    assert cli("train", config, "--set", "training.max_steps=6").code == 0
    path = RunDir(tmp_path / "run").metrics_path
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert lines[0] == {"step": 0, "num_pairs": 200, "pairs_dropped": {"blank-side": 1}}
    assert sum("pairs_dropped" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("clean", "said"),
    [
        (
            "[copies]",
            "must name rules, but has 'copies' instead; the nearest are copied, mojibake, no-words",
        ),
        (
            "[tab]",
            "must name rules, but has 'tab' instead; the nearest are "
            "length-ratio, held-out-pair, strange-script",
        ),
        (
            "[blank-side, max-tokens]",
            "need not name 'max-tokens': pairs over `data.max_tokens` are always dropped",
        ),
    ],
)
def test_an_unknown_or_needless_value_in_data_clean_is_an_error_with_advice(
    tmp_path: Path, clean: str, said: str
) -> None:
    path = write_config(tmp_path / "config.yaml", tiny_tree(tmp_path))
    with pytest.raises(ConfigError) as error:
        config_file.load(path, [f"data.clean={clean}"])
    assert str(error.value) == f"{path}: `data.clean` {said}."


def test_the_default_data_clean_drops_no_pair_of_the_demo(tmp_path: Path) -> None:
    config = config_file.load(REPOSITORY / "configs" / "demo.yaml")
    assert config.data.clean == ["blank-side", "held-out-pair"]
    assert dropped_lines(config, tmp_path, 20_000) == {}


@needs_multi30k
def test_the_default_data_clean_drops_no_pair_of_multi30k(tmp_path: Path) -> None:
    def named(split: str) -> dict[str, list[str]]:
        return {"src": [f"{FOLDER}/{split}.en"], "tgt": [f"{FOLDER}/{split}.de"]}

    tree: Tree = {"run_dir": str(tmp_path / "run"), "data": {"src_lang": "en", "tgt_lang": "de"}}
    tree["data"] |= {"train": named("train"), "valid": named("val")}
    tree["data"]["tests"] = {"flickr2016": named("test_2016_flickr")}
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    assert dropped_lines(config, tmp_path, 29_000) == {}


@pytest.mark.parametrize("use", [{}, {"until": 0.5}, {"tag": "back"}])
def test_held_out_text_is_found_in_a_corpus_with_its_sides_exchanged(
    tmp_path: Path, use: Tree
) -> None:
    text = Planted(demo_pairs("train", 40), demo_pairs("valid", 12), demo_pairs("test", 12))
    pair, copy = text.test[3], Pair("Halt!", "Halt!")
    text.test.append(copy)
    text.train += [pair, pair._replace(tgt="Ja."), copy]
    tree = config_file.load(write_planted(tmp_path, text)).model_dump()
    train = tree["data"]["train"]
    tree["data"]["train"] = [train, {"src": train["tgt"], "tgt": train["src"], **use}]
    tree["data"]["clean"] = ["held-out-pair", "held-out"]
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    assert dropped_lines(config, tmp_path, 86) == {
        "held-out-pair": [41, 43, 84, 86],
        "held-out": [42, 85],
    }
    (leak,) = [
        found
        for found in audit(config, None, tmp_path, lambda num_bytes: None).findings
        if found.name == "pair-in-train" and found.corpus == "tests.held_out"
    ]
    assert [entry["times"] for entry in leak.examples] == [2, 2]


def mixture(
    directory: Path, text: Planted, clean: str, train: list[tuple[str, list[Pair]]]
) -> Config:
    """Return a config with a mixture of corpora, each a name and the pairs of its files.

    A name that ends in "-reversed" is the corpus of that name with its sides exchanged.
    """
    tree = config_file.load(write_planted(directory, text)).model_dump()
    corpora = [
        write_corpus(directory, name.removesuffix("-reversed"), pairs) for name, pairs in train
    ]
    for (name, _), corpus in zip(train, corpora, strict=True):
        if name.endswith("-reversed"):
            corpus["src"], corpus["tgt"] = corpus["tgt"], corpus["src"]
    tree["data"] |= {"train": corpora, "clean": [clean]}
    return config_file.load(write_config(directory / "config.yaml", tree))


ORDERS = [["a", "a-reversed"], ["a-reversed", "a"], ["a", "b-reversed", "b"]]


@pytest.mark.parametrize("names", ORDERS)
@pytest.mark.parametrize("clean", ["swapped", "length-ratio", "strange-script"])
def test_no_good_pair_of_a_mixture_in_both_directions_is_dropped_or_listed_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], clean: str
) -> None:
    monkeypatch.setattr(reader, "BLOCK_PAIRS", 100)
    pairs = [Pair(src * 2, cyrillic(tgt * 9)) for src, tgt in demo_pairs("train", 310)]
    corpora = {"a": pairs[:300], "b": pairs[300:]}
    text = Planted([], pairs[:12], pairs[12:24])
    train = [(name, corpora[name[0]]) for name in names]
    config = mixture(tmp_path, text, clean, train)
    assert dropped_lines(config, tmp_path, sum(len(corpus) for _, corpus in train)) == {}
    audit(config, None, tmp_path, lambda num_bytes: None)
    assert not [name for name in found_lines(tmp_path) if name.endswith(f".{clean}")]


@pytest.mark.parametrize("first", [0, 500])
def test_a_block_of_swapped_pairs_is_found_also_at_the_start_and_no_pair_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(reader, "BLOCK_PAIRS", 100)
    pairs, places = demo_pairs("train", 1000), range(first, first + 120)
    pairs = [Pair(*pair[::-1]) if row in places else pair for row, pair in enumerate(pairs)]
    text = Planted(pairs, demo_pairs("valid", 12), demo_pairs("test", 12))
    config = config_file.load(write_planted(tmp_path, text), ["data.clean=[swapped]"])
    lines = dropped_lines(config, tmp_path, 1000)["swapped"]
    assert set(lines) <= {place + 1 for place in places} and len(lines) >= 110
    check_dir = tmp_path / "check"
    check_dir.mkdir()
    audit(config, None, check_dir, lambda num_bytes: None)
    assert found_lines(check_dir) == {"train.swapped": lines}
    assert not list(tmp_path.rglob(".*.words"))


@pytest.mark.parametrize("names", ORDERS[:2])
def test_swapped_lines_are_found_in_a_corpus_beside_another_in_both_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setattr(reader, "BLOCK_PAIRS", 100)
    pairs = demo_pairs("train", 700)
    text = Planted([], demo_pairs("valid", 12), demo_pairs("test", 12))
    single = [Pair(*pair[::-1]) if row == 349 else pair for row, pair in enumerate(pairs[:400])]
    train = [(name, pairs[400:]) for name in names] + [("single", single)]
    assert dropped_lines(mixture(tmp_path, text, "swapped", train), tmp_path, 1000) == {
        "swapped": [950]
    }


@pytest.mark.parametrize("names", ORDERS[:2])
def test_a_pair_far_from_the_usual_lengths_of_both_directions_is_dropped(
    tmp_path: Path, names: list[str]
) -> None:
    short, long = "ab " * 10, "abc " * 60
    pairs = [Pair(short, long)] * 30
    pairs[7] = Pair(short, long * 4)
    text = Planted([], demo_pairs("valid", 12), demo_pairs("test", 12))
    config = mixture(tmp_path, text, "length-ratio", [(name, pairs) for name in names])
    assert dropped_lines(config, tmp_path, 60) == {"length-ratio": [8, 38]}
