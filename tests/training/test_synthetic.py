"""Training on synthetic corpora: their tag, their `until`, and tokenizers trained without them."""

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from run_folders import timeless, weights
from tasks import Said, Tree, prepared, reverse_task, stop_at, tiny_tree, train, write_config

from mtrain import api
from mtrain.config import config_file
from mtrain.config.corpora import NamedCorpus, SyntheticCorpus
from mtrain.corpus import length_stats, synthetic
from mtrain.corpus.length_stats import CorpusStats
from mtrain.data import encode
from mtrain.data.batch import Position
from mtrain.data.loader import TrainingData
from mtrain.data.prepare import prepare
from mtrain.doctor import replay
from mtrain.errors import ConfigError, DataError
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir
from mtrain.runtime.signals import Stopped
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

ALIEN = "ξψω"


def write_synthetic(directory: Path, pairs: list[Any]) -> str:
    """Write a corpus folder in two shards, without the help of `mtrain augment`."""
    directory.mkdir()
    names = ["pairs-00000.jsonl.gz", "pairs-00001.jsonl.gz"]
    for number, name in enumerate(names):
        with gzip.open(directory / name, "wt", encoding="utf-8") as stream:
            for src, tgt in pairs[number::2]:
                stream.write(json.dumps({"src": src, "tgt": tgt, "file": "a", "line": 1}) + "\n")
    record = {"settings": {}, "num_pairs": len(pairs), "shards": dict.fromkeys(names)}
    (directory / synthetic.RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
    return str(directory)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = tiny_tree(tmp_path, reverse_task)
    pairs = [(f"{pair.src} {ALIEN}", pair.tgt) for pair in reverse_task(300, 7)]
    corpus = {"synthetic": write_synthetic(tmp_path / "bt", pairs), "tag": "bt", "until": 0.5}
    tree["data"]["train"] = [tree["data"]["train"] | {"weight": 1.0}, corpus | {"weight": 1.0}]
    tree["tokenizer"]["vocab_size"] = 290
    return tree


def data_of(run: RunDir, alpha: float = 0.0) -> tuple[TrainingData, Tokenizer]:
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    return TrainingData(run.data_dir, tokenizer, 1, alpha), tokenizer


def sources(data: TrainingData, num_batches: int) -> list[list[int]]:
    found = []
    batches = data.batches(192, Position())
    for _ in range(num_batches):
        batch, _after = next(batches)
        found += [
            row[keep].tolist() for row, keep in zip(batch.src_BS, batch.src_keep_BS, strict=True)
        ]
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_tag_is_put_before_each_source_of_its_corpus_and_no_other(
    tree: Tree, tmp_path: Path, alpha: float
) -> None:
    tree["tokenizer"]["sampling_alpha"] = alpha
    run = prepared(config_file.load(write_config(tmp_path / "config.yaml", tree)))
    data, tokenizer = data_of(run, alpha)
    (tag,) = tokenizer.src.tags.values()
    all_sources = sources(data, 30)
    num_tagged = 0
    for ids in all_sources:
        assert tag not in ids[1:]
        is_synthetic = ALIEN in tokenizer.src.decode([ids])[0]
        assert (ids[0] == tag) == is_synthetic
        num_tagged += is_synthetic
    assert 0.4 < num_tagged / len(all_sources) < 0.6


def test_no_text_is_encoded_to_the_tag_and_decoding_never_generates_it(
    tree: Tree, tmp_path: Path
) -> None:
    run = train(write_config(tmp_path / "config.yaml", tree))
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    ((name, tag),) = tokenizer.src.tags.items()
    piece = tokenizer.src.pieces_of([tag])[0]
    assert (name, piece) == ("bt", "<tag:bt>")
    for text in (piece, f" {piece} ba", f"ba{piece}", "<tag:bt", "bt"):
        for ids in (tokenizer.src.encode([text])[0], tokenizer.src.sample([text], 0.3, 1)[0]):
            assert tag not in ids
    from mtrain.decode import translator as translating
    from mtrain.decode.translator import EncodedSource

    translator = translating.load(run)
    start = translator._start([EncodedSource([5, tokenizer.src.eos])])
    assert tag in start.constraints.never


def test_the_tokenizer_does_not_learn_from_synthetic_pairs_unless_they_are_named_as_jsonl(
    tree: Tree, tmp_path: Path
) -> None:
    run = prepared(config_file.load(write_config(tmp_path / "config.yaml", tree)))
    assert sentencepiece.load(run.tokenizer_dir).src.unknown(ALIEN) == sorted(ALIEN)
    corpus = tree["data"]["train"][1]
    files = [str(path) for path in sorted(Path(corpus.pop("synthetic")).glob("*.gz"))]
    corpus |= {"jsonl": files, "src": "src", "tgt": "tgt"}
    tree["run_dir"] += "-2"
    run = prepared(config_file.load(write_config(tmp_path / "config.yaml", tree)))
    assert sentencepiece.load(run.tokenizer_dir).src.unknown(ALIEN) == []


def test_synthetic_pairs_change_only_the_longest_source_in_the_length_statistics(
    tree: Tree, tmp_path: Path
) -> None:
    """Some targets are twice as long as their sources, and others are copies."""
    pairs = [(pair.src, f"{pair.tgt} {pair.tgt}") for pair in reverse_task(150, 7)]
    pairs += [(pair.src, pair.src) for pair in reverse_task(149, 8)]
    pairs.append((" ".join(pair.src for pair in reverse_task(9, 9)), "ba"))
    corpus = {"synthetic": write_synthetic(tmp_path / "new", pairs), "weight": 1.0}
    real_corpus = tree["data"]["train"][0]

    def usual(name: str, *corpora: Tree) -> CorpusStats:
        changed = tree | {"run_dir": str(tmp_path / name)}
        changed["data"] = tree["data"] | {"train": list(corpora)}
        config = config_file.load(write_config(tmp_path / "config.yaml", changed))
        stats = length_stats.load(prepared(config).data_dir)
        assert stats is not None
        return stats

    real, both = usual("real", real_corpus), usual("both", real_corpus, corpus)
    assert both.longest_src > real.longest_src
    assert both == real._replace(longest_src=both.longest_src)


def test_length_statistics_use_synthetic_pairs_if_there_are_no_real_ones() -> None:
    corpora = [NamedCorpus("data.train", SyntheticCorpus(synthetic="bt"))]
    parts = [encode.PartStats(0, 4, 1, [(2, 4, 3), (5, 5, 1)])]
    assert encode.corpus_stats(parts, corpora) == CorpusStats(5, 1.0, 2.0, 0.25)


def test_a_corpus_is_used_until_its_share_of_the_budget_is_spent(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path / "config.yaml", tree)
    seen: list[bool] = []
    from mtrain.training.gradients import Gradients

    backward = Gradients.backward_update

    def noted(gradients: Gradients, update: Any, scale: float) -> Any:
        (tag,) = sentencepiece.load(tmp_path / "run" / "tokenizer").src.tags.values()
        seen.append(any(bool((part.batch.src_BS == tag).any()) for part in update.micro_batches))
        return backward(gradients, update, scale)

    monkeypatch.setattr(Gradients, "backward_update", noted)
    train(path)
    assert len(seen) == 12
    assert any(seen[:6])
    assert not any(seen[6:])


def test_a_corpus_that_ended_before_the_budget_was_raised_is_said_to_stay_out(
    tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "config.yaml", tree)
    train(path)
    train(path, "training.max_steps=14")
    assert "until    " not in capsys.readouterr().err
    train(path, "training.max_steps=35")
    assert (
        "until    corpora that ended at 0.5 of the budget or before stay out, although 0.4 of it "
        "is spent now"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("step", [5, 6, 7])
def test_training_stopped_near_the_end_of_a_corpus_resumes_identically(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    path = write_config(tmp_path / "config.yaml", tree)
    straight = train(path, run=str(tmp_path / "straight"))
    stop_at(monkeypatch, step, signal.SIGTERM)
    with pytest.raises(Stopped):
        train(path, run=str(tmp_path / "stopped"))
    stopped = train(path, run=str(tmp_path / "stopped"))
    assert weights(stopped) == weights(straight)
    assert timeless(stopped) == timeless(straight)


def test_doctor_replay_reproduces_a_time_limited_training_with_a_corpus_that_ends(
    tree: Tree, tmp_path: Path
) -> None:
    tree["training"] |= {"max_minutes": 1000, "save_every": 4}
    tree["data"]["train"][1]["until"] = 0.75
    config_path = write_config(tmp_path / "config.yaml", tree)
    run, config = train(config_path), config_file.load(config_path)
    steps = checkpoint.steps(run.checkpoints_dir)
    span = replay.Span(8, 12, steps[8], steps[12])
    assert checkpoint.load_progress(steps[8]).phase == 0
    assert checkpoint.load_progress(steps[12]).phase == 1
    assert replay.replay(config, run, span)[0] == []


def wrong(tree: Tree, change: str) -> None:
    data, (real, corpus) = tree["data"], tree["data"]["train"]
    if change == "outside":
        data["train"] = real | {"tag": "bt"}
        del data["train"]["weight"]
    elif change == "all":
        real["until"] = 0.5
    elif change == "valid":
        data["valid"] = {"synthetic": corpus["synthetic"]}
    elif change == "tests":
        data["tests"]["b"] = {"synthetic": corpus["synthetic"]}
    elif change == "alone":
        data["train"] = {"synthetic": corpus["synthetic"]}
    elif change == "until":
        corpus["until"] = 0
    elif change == "tag":
        corpus["tag"] = "<bt>"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("outside", "`data.train.tag` is not a key of the config; did you mean `data.train.tgt`?"),
        (
            "all",
            "`data` must have a corpus of `train` without `until`, for the end of the training, "
            "but all have one instead.",
        ),
        (
            "valid",
            "`data` must have real pairs in `valid`, but has a synthetic corpus instead; `jsonl` "
            "with its files takes them nevertheless.",
        ),
        (
            "tests",
            "`data` must have real pairs in `tests.b`, but has a synthetic corpus instead; `jsonl` "
            "with its files takes them nevertheless.",
        ),
        (
            "alone",
            "`data.train` must have real pairs for the tokenizer, but all are synthetic instead; "
            "`jsonl` with their files takes them nevertheless.",
        ),
        ("until", "`data.train[1].until` must be > 0.0, but is 0 instead."),
        (
            "tag",
            "`data.train[1].tag` must be a letter, then at most 31 letters, digits, '_' and '-', "
            "but is '<bt>' instead.",
        ),
    ],
)
def test_an_invalid_config_of_a_synthetic_corpus_is_an_error(
    tree: Tree, tmp_path: Path, change: str, said: str
) -> None:
    wrong(tree, change)
    path = write_config(tmp_path / "config.yaml", tree)
    with pytest.raises(ConfigError) as error:
        config_file.load(path)
    assert str(error.value) == f"{path}: {said}"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "has no record.json"),
        ("{", "its record.json is damaged"),
        ("[]", "its record.json is damaged"),
        ("[" * 100_000, "its record.json is damaged"),
        ("{}", "has another one"),
        ('{"settings": {}, "num_pairs": 1, "shards": 3}', "has another one"),
    ],
    ids=["none", "cut", "list", "deep", "empty", "number of shards"],
)
def test_an_unfinished_synthetic_corpus_folder_is_refused(
    tree: Tree, tmp_path: Path, damage: str | None, said: str
) -> None:
    directory = Path(tree["data"]["train"][1]["synthetic"])
    (directory / synthetic.RECORD_FILE).unlink()
    if damage is not None:
        (directory / synthetic.RECORD_FILE).write_text(damage, encoding="utf-8")
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    with pytest.raises(DataError) as error:
        prepare(config, RunDir(Path(config.run_dir)), Said())
    assert str(error.value) == (
        f"{directory}: must be a corpus folder that `mtrain augment` has finished, but {said}."
    )
    report = api.check(config)
    (finding,) = [finding for finding in report.findings if finding.name == "unreadable"]
    problem = f"must be a corpus folder that `mtrain augment` has finished, but {said}"
    assert finding.examples == [{"file": str(directory), "problem": problem}]
    assert report.corpora[0].num_pairs == 200  # those of the other corpus


def test_a_tag_that_the_tokenizer_of_the_run_lacks_is_refused(tree: Tree, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", tree)
    config = config_file.load(path)
    run = prepared(config)
    (run.path / "config.yaml").unlink()
    for name in ("config.yaml", "data"):
        (run.path / name).rename(tmp_path / f"old-{name}") if (run.path / name).exists() else None
    corpus = tree["data"]["train"][1]
    corpus["tag"] = "other"
    config = config_file.load(write_config(path, tree))
    with pytest.raises(ConfigError) as error:
        prepare(config, run, Said())
    assert str(error.value) == (
        f"`data.train[1].tag` must be a tag of the tokenizer of {run.path}, which has bt, but is "
        "'other' instead; a training from the beginning learns it."
    )
