"""Synthetic pairs: what is written, what is dropped, and that an interruption changes nothing."""

import gc
import gzip
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Cli
from fork_server import needs_fork_server, run_in_child
from hostile import TIMES
from ranks import Ranks, ranks
from serving import with_languages
from tasks import Said, Tree, kill_at_call, reverse_task, tiny_tree, train, write, write_config

import mtrain
from mtrain.augmentation import augment as augmenting
from mtrain.augmentation.augment import AugmentRequest
from mtrain.augmentation.new_config import with_corpus
from mtrain.augmentation.options import Mode
from mtrain.augmentation.pair_rules import Candidate, PairRules
from mtrain.augmentation.text import real_text
from mtrain.config import config_file
from mtrain.corpus.formats import OFFLINE
from mtrain.run.run_dir import RunDir

__all__ = ["ranks"]

LINES = [pair.tgt for pair in reverse_task(60, 9)]
ODD = ["", "  ", "ba ce di", "Ba  Ce, DI!", LINES[0], "ba \ufffd", "ba ba ba ba ba ba ba ba ba ba"]
NUM_KILLS = (8, 50)  # in make test and make fuzz
CALLS = ("fsync", "replace", "rmdir", "unlink", "mkdir")  # the calls that change the disk


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return tiny_tree(tmp_path, reverse_task)


@pytest.fixture
def config_path(tmp_path: Path, tree: Tree) -> Path:
    return write_config(tmp_path / "aa-bb.yaml", tree)


@pytest.fixture
def mono(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "mono.bb", [*LINES, *ODD]))


def pairs_in(directory: Path) -> list[Any]:
    paths = sorted(directory.glob("pairs-*.jsonl.gz"))
    return [json.loads(line) for path in paths for line in gzip.open(path, "rt", encoding="utf-8")]


def dropped_in(directory: Path) -> list[Any]:
    with gzip.open(directory / "dropped.jsonl.gz", "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_every_line_is_paired_with_its_back_translation_or_dropped_with_a_reason(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, tmp_path: Path
) -> None:
    done = cli("augment", config_path, "--back", mono, "--using", back_run, "-o", tmp_path / "bt")
    assert done.code == 0, done.err
    lines = mono.read_text("utf-8").split("\n")[:-1]
    pairs, dropped = pairs_in(tmp_path / "bt"), dropped_in(tmp_path / "bt")
    translated = cli("translate", back_run, mono).lines
    for pair in pairs:
        assert pair["file"] == str(mono)
        assert pair["tgt"] == lines[pair["line"] - 1]
        assert pair["src"] == translated[pair["line"] - 1]
    fates = Counter(entry["line"] for entry in [*pairs, *dropped])
    assert fates == Counter(range(1, len(lines) + 1))
    reasons = {entry["line"]: entry["reason"] for entry in dropped}
    odd = [reasons.get(number) for number in range(len(LINES) + 1, len(lines) + 1)]
    assert odd[:2] == ["blank", "blank"]
    assert odd[3:6] == ["repeated", "repeated", "not-utf8"]
    record = json.loads((tmp_path / "bt" / "record.json").read_text("utf-8"))
    assert (record["num_lines"], record["num_pairs"]) == (len(lines), len(pairs))
    assert record["dropped"] == dict(sorted(Counter(reasons.values()).items()))
    assert yaml.safe_load("\n".join(done.lines))["data"]["train"][1] == {
        "synthetic": str(tmp_path / "bt")
    }
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_the_python_function_writes_the_same_files_as_the_command_and_returns_their_counts(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, tmp_path: Path
) -> None:
    command = ["augment", config_path, "--back", mono, "--using", back_run, "--sample"]
    done = cli(*command, "--top-k", "5", "--seed", "2", "--n-best", "2", "-o", tmp_path / "bt")
    assert done.code == 0, done.err
    options = mtrain.AugmentOptions(n_best=2, sampling=mtrain.Sampling(top_k=5), seed=2)
    report = mtrain.augment(config_path, back_run, tmp_path / "same", options, back=mono)
    assert content(report.directory) == content(tmp_path / "bt")
    record = json.loads((report.directory / "record.json").read_text("utf-8"))
    found = {"num_lines": report.num_lines, "num_pairs": report.num_pairs}
    assert record | found | {"dropped": report.dropped} == record
    assert report.config.data.train[1].model_dump() == {"synthetic": str(tmp_path / "same")}


def test_the_length_penalty_divides_the_scores_of_samples(
    cli: Cli, config_path: Path, back_run: Path, tmp_path: Path
) -> None:
    mono = Path(write(tmp_path / "mono.bb", LINES[:9]))
    command = ["augment", config_path, "--back", mono, "--using", back_run, "--sample", "--score"]
    done = cli(*command, "--length-alpha", "0", "-o", tmp_path / "bt")
    assert done.code == 0, done.err
    pairs = pairs_in(tmp_path / "bt")
    assert pairs and all(pair["score"] == pair["log_prob"] for pair in pairs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": mtrain.Sampling(), "beam": 2}, "`--beam` has no effect with `--sample`"),
        (
            {"sampling": mtrain.Sampling(), "length_alpha": 1.0},
            "`--length-alpha` has no effect with `--sample`",
        ),
        ({"seed": 2}, "`--seed` needs `--sample`."),
        ({"keep_best": 0.0}, "`--keep-best` must be from 0.01 to 1, but is 0.0 instead."),
        ({"weight": -1.0}, "`--weight` must be > 0, but is -1.0 instead."),
        ({"beam": 0}, "`beam` must be between 1 and 1000, but is 0 instead."),
    ],
)
def test_invalid_options_of_the_python_function_are_refused(
    config_path: Path, mono: Path, back_run: Path, options: dict[str, Any], said: str
) -> None:
    def call() -> None:
        new = mtrain.AugmentOptions(**options)
        mtrain.augment(config_path, back_run, mono.parent / "bt", new, back=mono)

    with pytest.raises(mtrain.ConfigError, match=re.escape(said)):
        call()
    assert not (mono.parent / ".bt.augmenting").exists()


def test_a_pair_with_a_side_in_a_held_out_set_is_dropped_ignoring_case_and_punctuation(
    cli: Cli, config_path: Path, tree: Tree, back_run: Path, tmp_path: Path
) -> None:
    held_out = Path(tree["data"]["valid"]["tgt"][0]).read_text("utf-8").splitlines()
    held_out += Path(tree["data"]["tests"]["held_out"]["src"][0]).read_text("utf-8").splitlines()
    sources = set(held_out[12:])
    text = [held_out[0].upper(), f"{held_out[1]}.", "ba ce di fo gu ha je"]
    text += [" ".join(reversed(line.split())) for line in sorted(sources)[:3]]  # gives the source
    mono = write(tmp_path / "mono.bb", text)
    done = cli("augment", config_path, "--back", mono, "--using", back_run, "-o", tmp_path / "bt")
    assert done.code == 0, done.err
    reasons = {entry["line"]: entry["reason"] for entry in dropped_in(tmp_path / "bt")}
    assert (reasons[1], reasons[2]) == ("held-out", "held-out")
    assert 3 not in reasons
    assert "held-out" in [reasons.get(line) for line in (4, 5, 6)]
    assert not sources & {pair["src"] for pair in pairs_in(tmp_path / "bt")}


def test_held_out_text_is_found_in_pairs_of_both_directions_if_the_training_text_has_both(
    tree: Tree, tmp_path: Path
) -> None:
    write(tmp_path / "valid.src", ["ba ce di fo gu"])
    write(tmp_path / "valid.tgt", ["ha je ki lo mu"])
    train = tree["data"]["train"]
    tree["data"]["train"] = [train, {"src": train["tgt"], "tgt": train["src"]}]
    data = mtrain.load_config(tree).data
    pair_rules = PairRules(data, real_text(data.train), tmp_path)
    pairs = [Candidate("Ha je ki lo mu.", "na pe ri so tu", 0)]
    assert pair_rules.reasons(pairs, [("", "na pe ri so tu")]) == ["held-out"]


def test_synthetic_pairs_of_either_direction_are_kept_if_the_training_text_has_both(
    tree: Tree, tmp_path: Path
) -> None:
    short, long = ["ba ce di fo gu"] * 9, ["ha je ki lo mu " * 9] * 9
    files = {
        "src": [str(write(tmp_path / "train.short", short))],
        "tgt": [str(write(tmp_path / "train.long", long))],
    }
    tree["data"]["train"] = [{"src": files["tgt"], "tgt": files["src"]}, files]
    data = mtrain.load_config(tree).data
    pair_rules = PairRules(data, real_text(data.train), tmp_path)
    sides = ("na pe ri so tu", "ba ce di fo gu " * 9, "ha je ki lo mu " * 50)
    pairs = [Candidate(*sides[:2], 0), Candidate(*sides[1::-1], 1), Candidate(*sides[::2], 2)]
    assert pair_rules.reasons(pairs, [("", pair.tgt) for pair in pairs]) == [
        None,
        None,
        "length-ratio",
    ]


def test_a_pair_that_exists_or_whose_synthetic_side_has_no_letters_is_dropped_as_repeated(
    tree: Tree, tmp_path: Path
) -> None:
    data = mtrain.load_config(tree).data
    pair_rules = PairRules(data, real_text(data.train), tmp_path)
    known = [("ba ce", ""), ("", "fo gu"), ("ba ce", "fo gu"), ("...", "fo gu")]
    repeated = [
        Candidate("ba ce", "...", 0),
        Candidate("?!", "fo gu", 1),
        Candidate("ba ce", "...", 2),
        Candidate("?!", "fo gu", 2),
        Candidate("Ba ce!", "fo gu", 2),
        Candidate("?!", "fo gu", 3),
    ]
    kept = [
        Candidate("ba ce", "ha je", 0),
        Candidate("ha je", "fo gu", 1),
        Candidate("ba ce", "ha je", 2),
        Candidate("ha je", "fo gu", 2),
        Candidate("...", "ha je", 3),
        Candidate("ha je", "fo gu", 3),
    ]
    assert pair_rules.reasons(repeated, known) == ["repeated"] * len(repeated)
    assert pair_rules.reasons(kept, known) == [None] * len(kept)
    assert pair_rules.reasons(kept + kept, known) == [None] * len(kept) + ["repeated"] * len(kept)


def test_repeating_the_command_changes_nothing_and_other_settings_are_refused(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, tmp_path: Path
) -> None:
    command = ["augment", config_path, "--back", mono, "--using", back_run, "-o", tmp_path / "bt"]
    assert cli(*command).code == 0
    before = content(tmp_path / "bt")
    again = cli(*command)
    assert (again.code, content(tmp_path / "bt")) == (0, before)
    assert f"bt: made already, {len(pairs_in(tmp_path / 'bt'))} pairs" in again.err
    assert cli(*command, "--batch-tokens", "64").code == 0
    other = cli(*command, "--beam", "1")
    assert (other.code, content(tmp_path / "bt")) == (2, before)
    assert other.err == (
        f"mtrain: {tmp_path / 'bt'}: was made with other settings (`decoding`); choose another "
        "folder, or delete it.\n"
    )


@pytest.mark.parametrize("changed", ["precision", "max_tokens", "training_text", None])
def test_pairs_of_another_precision_or_training_text_are_not_those_made_already(
    cli: Cli, config_path: Path, tree: Tree, mono: Path, back_run: Path, changed: str | None
) -> None:
    """A record without these settings, of an older version, stays valid."""
    output = mono.parent / "bt"
    request = request_of(config_path, back_run)
    config = mtrain.load_config(config_path)
    settings = augmenting._settings(request, config, real_text(config.data.train))
    if changed is None:
        for key in ("precision", "max_tokens", "training_text"):
            del settings[key]
    output.mkdir()
    record = {"settings": settings, "num_lines": 1, "num_pairs": 1, "dropped": {}, "shards": {}}
    (output / "record.json").write_text(json.dumps(record), encoding="utf-8")
    command = ["augment", config_path, "--back", mono, "--using", back_run, "-o", output]
    if changed == "precision":
        command += ["--precision", "bfloat16"]
    elif changed == "max_tokens":
        command += ["--set", "data.max_tokens=31"]
    elif changed == "training_text":
        with Path(tree["data"]["train"]["src"][0]).open("a", encoding="utf-8") as stream:
            stream.write("ba\n")
    done = cli(*command)
    if changed is None:
        assert (done.code, done.err) == (0, f"{output}: made already, 1 pair\n")
    else:
        assert done.code == 2
        assert f"was made with other settings (`{changed}`); choose another folder" in done.err


def test_files_in_another_order_and_other_columns_are_other_settings(
    config_path: Path, tree: Tree, mono: Path, back_run: Path, tmp_path: Path
) -> None:
    table = write(tmp_path / "train.tsv", ["ba\tdi\tfo"])
    other = Path(write(tmp_path / "other.bb", LINES[:3]))
    request = replace(request_of(config_path, back_run), texts=[mono, other])

    def settings(columns: list[int], request: AugmentRequest = request) -> Tree:
        tree["data"]["train"] = {"tsv": [table], "columns": columns}
        config = mtrain.load_config(tree)
        return augmenting._settings(request, config, real_text(config.data.train))

    before = settings([1, 2])
    assert before == settings([1, 2])
    reordered = settings([1, 2], replace(request, texts=[other, mono]))
    assert {key for key in before if before[key] != reordered[key]} == {"files"}
    swapped = settings([2, 1])
    assert {key for key in before if before[key] != swapped[key]} == {"corpora"}


@pytest.mark.parametrize("changes", [{"sampling": mtrain.Sampling()}, {"beam": 1}])
def test_samples_and_greedy_translations_are_not_chosen_by_the_mbr_of_the_run(
    config_path: Path, back_run: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    request = request_of(config_path, with_mbr(back_run, tmp_path), **changes)
    options = augmenting._options(request, request.runs[0])
    assert options.mbr is None
    assert options.num_candidates == 1
    assert augmenting._options(
        replace(request, options=mtrain.AugmentOptions()), request.runs[0]
    ).mbr


def test_the_run_that_only_scores_needs_not_fit_the_search_options(
    config_path: Path, reverser: RunDir, back_run: Path, tmp_path: Path
) -> None:
    judge = with_mbr(reverser.path, tmp_path)
    request = request_of(
        config_path, back_run, beam=1, keep_best=0.5, agree_with=judge, batch_tokens=99
    )
    loaded = augmenting._load_judge(request)
    assert loaded is not None
    assert (loaded.options.beam, loaded.options.mbr, loaded.options.batch_tokens) == (3, "chrf", 99)


def test_pairs_that_are_too_long_for_the_run_that_scores_are_dropped(
    config_path: Path, reverser: RunDir, back_run: Path
) -> None:
    request = request_of(config_path, back_run, keep_best=0.5, agree_with=reverser.path)
    judge = augmenting._load_judge(request)
    assert judge is not None
    longest = "ba ce di"
    num_tokens = len(judge.tokenizer.encode_src([longest])[0])
    judge = judge.with_options(replace(judge.options, max_input_tokens=num_tokens))
    sides = product([longest, "ba ce di ba"], repeat=2)
    pairs = [Candidate(src, tgt, row) for row, (src, tgt) in enumerate(sides)]
    (kept,), lost = augmenting._score(judge, pairs, [(4, "blank")], True)
    assert kept.agreement is not None and kept.agreement < 0
    assert kept._replace(agreement=None) == pairs[0]
    assert lost == [(1, "max-tokens"), (2, "max-tokens"), (3, "max-tokens"), (4, "blank")]


def with_mbr(run: Path, directory: Path) -> Path:
    """Return a copy of a run whose config has `decoding.mbr`."""
    copy = RunDir(shutil.copytree(run, directory / "with-mbr"))
    tree = yaml.safe_load(copy.config_path.read_text("utf-8"))
    tree["decoding"] = {"beam": 3, "mbr": "chrf"}
    write_config(copy.config_path, tree)
    return copy.path


def request_of(config_path: Path, back_run: Path, **changes: Any) -> AugmentRequest:
    texts = [config_path.parent / "mono.bb"]
    output = config_path.parent / "bt"
    options = mtrain.AugmentOptions(**changes)
    return AugmentRequest("back", texts, False, [RunDir(back_run)], output, options)


def child(config_path: Path, back_run: Path, kill_at: int) -> None:
    """Augment in small parts, killed at a given disk call; write the number of calls at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    augmenting.PART_LINES = 16
    request = request_of(config_path, back_run, keep_best=0.9)
    num_calls = kill_at_call(CALLS, kill_at)
    augmenting.augment(request, config_file.load(config_path), Said(), lambda _: None)
    Path(f"{request.output}.count").write_text(str(num_calls()), "utf-8")


@needs_fork_server
def test_an_augmentation_killed_at_disk_calls_resumes_to_the_same_files(
    config_path: Path, mono: Path, back_run: Path
) -> None:
    """The process is killed at calls that change the disk, some of them drawn at random."""

    def in_child(kill_at: int) -> int | None:
        return run_in_child(child, config_path, back_run, kill_at)

    output = config_path.parent / "bt"
    assert in_child(0) == 0
    num_calls, whole = int(Path(f"{output}.count").read_text("utf-8")), content(output)
    beside = {path.name for path in output.parent.iterdir()}
    assert num_calls > 40
    moments = random.Random(3).sample(range(1, num_calls + 1), NUM_KILLS[TIMES > 1])
    for moment in [*moments, num_calls]:
        shutil.rmtree(output)
        assert in_child(moment) == -signal.SIGKILL
        while in_child(moment // 2 + 1) == -signal.SIGKILL and moment > 1:
            moment //= 2
        assert in_child(0) == 0
        assert content(output) == whole
        assert {path.name for path in output.parent.iterdir()} == beside


def test_an_interrupted_augmentation_resumes_and_samples_the_same_pairs(
    config_path: Path, mono: Path, back_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augmenting, "PART_LINES", 16)
    config = config_file.load(config_path)
    sampling = mtrain.Sampling(top_k=10)
    request = request_of(config_path, back_run, n_best=2, sampling=sampling, seed=3, score=True)
    augmenting.augment(request, config, Said(), print)
    whole = content(request.output)
    entries = pairs_in(request.output)
    assert max(Counter(pair["line"] for pair in entries).values()) == 2
    assert all(pair["log_prob"] < 0 for pair in entries)
    assert entries == sorted(entries, key=lambda pair: pair["line"])
    shutil.rmtree(request.output)
    judge, num_calls = augmenting._judge, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return judge(*arguments)

    monkeypatch.setattr(augmenting, "_judge", interrupted)
    stopped = Said()
    with pytest.raises(KeyboardInterrupt):
        augmenting.augment(request, config, stopped, print)
    assert stopped.lines[-1] == (
        f"{request.output}: stopped; finished parts are kept, and the same command resumes"
    )
    assert not request.output.exists()
    other = request_of(config_path, back_run)
    with pytest.raises(mtrain.UserError, match=r"\.bt\.augmenting: was made with other settings"):
        augmenting.augment(other, config, Said(), print)
    said = Said()
    smaller = replace(request, options=replace(request.options, batch_tokens=64))
    augmenting.augment(smaller, config, said, print)
    assert f"{request.output}: goes on after 32 lines" in said.lines
    assert content(request.output) == whole


@pytest.mark.parametrize(
    ("before", "now"), [("abc", "def"), ("abc", "abc"), ("abc", OFFLINE), (OFFLINE, "abc")]
)
def test_parts_are_not_resumed_if_the_commit_of_a_hub_corpus_is_known_and_another(
    config_path: Path,
    mono: Path,
    back_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    now: str,
) -> None:
    class Loading(Exception):
        pass

    def load(*arguments: Any) -> Any:
        raise Loading

    request, config = request_of(config_path, back_run), config_file.load(config_path)
    monkeypatch.setattr(augmenting, "_load_engine", load)
    monkeypatch.setattr(augmenting, "revision_of", lambda corpus: {"some/set": before})
    with pytest.raises(Loading):
        augmenting.augment(request, config, Said(), print)
    (request.output.with_name(".bt.augmenting") / "part-00000.json").touch()
    monkeypatch.setattr(augmenting, "revision_of", lambda corpus: {"some/set": now})
    with pytest.raises(mtrain.RunError if {before, now} == {"abc", "def"} else Loading) as error:
        augmenting.augment(request, config, Said(), print)
    assert error.type is Loading or "settings (`revision of some/set`);" in str(error.value)


def test_a_start_that_finished_no_part_does_not_refuse_other_settings(
    config_path: Path, mono: Path, back_run: Path
) -> None:
    request = request_of(config_path, back_run)
    work_dir = request.output.with_name(".bt.augmenting")
    work_dir.mkdir()
    (work_dir / "settings.json").write_text('{"texts": {"other": "0"}}')
    record = augmenting.augment(request, config_file.load(config_path), Said(), print)
    assert list(record["settings"]["texts"]) == [str(mono)]
    assert not work_dir.exists()


def test_at_most_three_parts_of_the_text_are_in_memory_at_a_time(
    config_path: Path, mono: Path, back_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augmenting, "PART_LINES", 4)
    judge, num_held = augmenting._judge, list[int]()

    def counted(*arguments: Any) -> Any:
        held = [each for each in gc.get_objects() if type(each) is augmenting._Translated]
        num_held.append(len(held))
        return judge(*arguments)

    monkeypatch.setattr(augmenting, "_judge", counted)
    request = request_of(config_path, back_run)
    augmenting.augment(request, config_file.load(config_path), Said(), lambda _: None)
    assert len(num_held) > 16
    assert max(num_held) <= 3


def test_keep_best_ranks_by_score_and_agreement_is_the_mean_log_prob_of_the_reverse_model(
    cli: Cli, config_path: Path, mono: Path, reverser: RunDir, back_run: Path, tmp_path: Path
) -> None:
    command = ["augment", config_path, "--back", mono, "--using", back_run, "--score"]
    assert cli(*command, "-o", tmp_path / "all").code == 0
    everything = pairs_in(tmp_path / "all")
    num_kept = round(0.5 * len(everything))
    assert cli(*command, "-o", tmp_path / "half", "--keep-best", "0.5").code == 0
    kept = pairs_in(tmp_path / "half")
    limit = sorted((pair["score"] for pair in everything), reverse=True)[num_kept - 1]
    assert kept == [pair for pair in everything if pair["score"] >= limit]
    lost = [entry for entry in dropped_in(tmp_path / "half") if entry["reason"] == "low-score"]
    assert len(lost) == len(everything) - len(kept) > 10
    judged = [*command, "--keep-best", "0.5", "--agree-with", reverser.path]
    done = cli(*judged, "-o", tmp_path / "agreed")
    assert done.code == 0, done.err
    agreed = pairs_in(tmp_path / "agreed")
    assert len(agreed) == num_kept
    assert cli(*judged, "--keep-best", "1", "-o", tmp_path / "judged").code == 0
    agreements = sorted((pair["agreement"] for pair in pairs_in(tmp_path / "judged")), reverse=True)
    assert sorted((pair["agreement"] for pair in agreed), reverse=True) == agreements[:num_kept]
    model = mtrain.load(reverser.path)
    (pair,) = agreed[:1]
    tokenizer = model.translator.tokenizer
    source = mtrain.decode.translator.EncodedSource(*tokenizer.encode_src([pair["src"]]))
    (log_probs,) = model.translator.score([source], tokenizer.tgt.encode([pair["tgt"]]))
    assert pair["agreement"] == pytest.approx(sum(log_probs) / len(log_probs), abs=1e-3)


def test_again_makes_new_pairs_from_the_training_text_with_models_of_both_directions(
    cli: Cli, config_path: Path, tree: Tree, reverser: RunDir, back_run: Path, tmp_path: Path
) -> None:
    using = ["--using", reverser.path, "--using", back_run]
    noisy = tmp_path / "noisy.yaml"
    write_config(noisy, tree | {"run_dir": str(tmp_path / "noisy")})
    using += ["--using", train(noisy).path]
    done = cli("augment", config_path, "--again", *using, "-o", tmp_path / "div", "--score")
    assert done.code == 0, done.err
    src, tgt = (
        Path(tree["data"]["train"][side][0]).read_text("utf-8").splitlines()
        for side in ("src", "tgt")
    )
    real = set(zip(src, tgt, strict=True))
    made = [(pair["src"], pair["tgt"]) for pair in pairs_in(tmp_path / "div")]
    assert not real & set(made)
    assert len(made) == len(set(made)) > 0
    assert all(source in src or target in tgt for source, target in made)
    reasons = Counter(entry["reason"] for entry in dropped_in(tmp_path / "div"))
    assert reasons["repeated"] > 100  # two of the models reverse as the training text does


def test_if_all_translations_exist_already_another_run_is_proposed(
    cli: Cli, tree: Tree, reverser: RunDir, tmp_path: Path
) -> None:
    (translation,) = mtrain.load(reverser.path).translate(["ba ce di fo"])
    files = {"src": ["ba ce di fo", "Ba ce di fo!"], "tgt": [translation, f"{translation}!"]}
    tree["data"]["train"] = {
        side: [str(write(tmp_path / f"few.{side}", lines))] for side, lines in files.items()
    }
    config = tmp_path / "few.yaml"
    write_config(config, tree)
    done = cli("augment", config, "--again", "--using", reverser.path, "-o", tmp_path / "div")
    assert done.code == 2
    assert done.err.endswith(
        "mtrain: `data.train` must have a pair that can be used, but all are dropped: 2 (repeated "
        "2); change the text or the run that translates it.\n"
    )


@pytest.mark.parametrize(
    ("mode", "is_back"), [("back", True), ("forward", False), ("again", False)]
)
def test_within_one_language_only_back_translates_the_target_side(
    tree: Tree, reverser: RunDir, tmp_path: Path, mode: Mode, is_back: bool
) -> None:
    with_languages(reverser, tmp_path / "same", "aa", "aa")
    tree["data"]["tgt_lang"] = "aa"
    request = AugmentRequest(
        mode, [], False, [RunDir(tmp_path / "same")], tmp_path / "out", mtrain.AugmentOptions()
    )
    assert augmenting._check_directions(request, mtrain.load_config(tree).data) == [is_back]


@pytest.mark.parametrize("mode", ["forward", "again"])
def test_training_text_in_both_directions_needs_runs_of_both_directions(
    tree: Tree, reverser: RunDir, tmp_path: Path, mode: Mode
) -> None:
    train = tree["data"]["train"]
    tree["data"]["train"] = [train, {"src": train["tgt"], "tgt": train["src"]}]
    data = mtrain.load_config(tree).data
    both = RunDir(shutil.copytree(reverser.path, tmp_path / "both"))
    write_config(both.config_path, tree)
    options = mtrain.AugmentOptions()
    request = AugmentRequest(mode, [], True, [both, reverser], tmp_path / "out", options)
    with pytest.raises(mtrain.RunError) as error:
        augmenting._check_directions(request, data)
    assert str(error.value) == (
        f"{reverser.path}: must translate in both directions, as `data.train` has text in both, "
        "but translates aa to bb alone instead; to use this run, leave the reversed corpus out of "
        "`data.train`."
    )
    assert augmenting._check_directions(replace(request, runs=[both]), data) == [False]
    mono = replace(request, with_training_text=False)
    assert augmenting._check_directions(mono, data) == [False, False]


@pytest.mark.parametrize("is_synthetic", [False, True])
def test_again_without_a_real_pair_is_refused(
    cli: Cli, tree: Tree, back_run: Path, tmp_path: Path, is_synthetic: bool
) -> None:
    if is_synthetic:
        (tmp_path / "bt").mkdir()
        (tmp_path / "bt" / "record.json").write_text(
            '{"settings": {}, "num_pairs": 1, "shards": {"pairs-00000.jsonl.gz": {}}}', "utf-8"
        )
        tree["data"]["train"] = [{"synthetic": str(tmp_path / "bt")}]
        tree["training"]["init_from"] = str(back_run)  # else a tokenizer needs real pairs
        del tree["tokenizer"], tree["model"]
    else:
        for paths in tree["data"]["train"].values():
            write(Path(paths[0]), [])
    config_path = write_config(tmp_path / "aa-bb.yaml", tree)
    done = cli("augment", config_path, "--again", "--using", back_run, "-o", tmp_path / "div")
    said = "mtrain: `data.train` must have at least one pair of real text, but has none.\n"
    assert (done.code, done.err) == (2, said)
    assert not [path.name for path in tmp_path.iterdir() if "div" in path.name]


def test_several_models_translate_as_an_ensemble(
    cli: Cli, config_path: Path, reverser: RunDir, tmp_path: Path
) -> None:
    mono = Path(write(tmp_path / "mono.aa", LINES))
    other = tmp_path / "other"
    shutil.copytree(reverser.path, other)
    using = ["--using", reverser.path, "--using", other]
    done = cli("augment", config_path, "--forward", mono, *using, "-o", tmp_path / "fw")
    assert done.code == 0, done.err
    translated = cli("translate", reverser.path, other, mono).lines
    pairs = pairs_in(tmp_path / "fw")
    assert len(pairs) > 30
    for pair in pairs:
        assert (pair["src"], pair["tgt"]) == (
            LINES[pair["line"] - 1],
            translated[pair["line"] - 1],
        )


def test_the_beam_of_the_first_run_of_an_ensemble_limits_the_translations_of_a_line(
    cli: Cli, config_path: Path, reverser: RunDir, tmp_path: Path
) -> None:
    mono = Path(write(tmp_path / "mono.aa", LINES[:9]))
    greedy = tmp_path / "greedy"
    shutil.copytree(reverser.path, greedy)
    text = (greedy / "config.yaml").read_text("utf-8")
    (greedy / "config.yaml").write_text(text.replace("  beam: 2\n", "  beam: 1\n"), "utf-8")
    command = ["augment", config_path, "--forward", mono, "--n-best", "2", "-o", tmp_path / "fw"]
    refused = cli(*command, "--using", greedy, "--using", reverser.path)
    said = "mtrain: `--n-best` must be at most the beam (1), but is 2 instead.\n"
    assert (refused.code, refused.err) == (2, said)
    done = cli(*command, "--using", reverser.path, "--using", greedy)
    assert done.code == 0, done.err
    assert max(Counter(pair["line"] for pair in pairs_in(tmp_path / "fw")).values()) == 2


@needs_fork_server
def test_two_ranks_write_the_same_files_as_one_process(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, tmp_path: Path, ranks: Ranks
) -> None:
    command = ["augment", config_path, "--back", mono, "--using", back_run, "-o"]
    assert cli(*command, tmp_path / "one").code == 0
    ended = ranks.mtrain(2, *command, tmp_path / "two")
    assert ended.codes == [0, 0], ended.err
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert ended.out[1] == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--back", "{mono}", "--using", "{forward}"],
            "{forward}: must translate bb to aa for `--back`, but translates aa to bb instead.",
        ),
        (
            ["--forward", "{mono}", "--using", "{back}"],
            "{back}: must translate aa to bb for `--forward`, but translates bb to aa instead.",
        ),
        (
            ["--again", "--using", "{other}"],
            "{other}: must translate aa to bb or bb to aa for `--again`, but translates en to de "
            "instead.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--keep-best", "1", "--agree-with", "{back}"],
            "{back}: must translate aa to bb for `--agree-with`, but translates bb to aa instead.",
        ),
        (
            ["--back", "{mono}", "--using", "{untrained}"],
            "{untrained}: must be a trained run, but has no model.safetensors.",
        ),
        (
            ["--back", "{mono}", "--using", "{mono}"],
            "{mono}: must be a run folder, but is a file instead.",
        ),
        (
            ["--back", "absent.bb", "--using", "{back}"],
            "absent.bb: cannot be read: No such file or directory.",
        ),
        (
            ["--back", "{mono}", "--back", "/dev/null", "--using", "{back}"],
            "/dev/null: must be a regular file, for it is read several times, but is a pipe or a "
            "device instead; write its text into a file.",
        ),
        (
            ["--back", "{empty}", "--using", "{back}"],
            "{empty}: must have at least one line, but is empty.",
        ),
        (
            ["--back", "{blank}", "--using", "{back}"],
            "`--back` must have a pair that can be used, but all are dropped: 2 (blank 2); change "
            "the text.",
        ),
        (
            ["--back", "{blank}", "--back", "utf16.bb", "--using", "{back}"],
            "`--back` must have a pair that can be used, but all are dropped: 3 (blank 2, not-utf8 "
            "1); change the text.",
        ),
        (
            ["--back", "valid.bb", "--using", "{back}"],
            "`--back` must have a pair that can be used, but all are dropped: 2 (held-out 2); "
            "change the text or the run that translates it.",
        ),
        (
            ["--using", "{back}"],
            "one of `--back`, `--forward` and `--again` must be given, but none is.",
        ),
        (
            ["--back", "{mono}", "--again", "--using", "{back}"],
            "one of `--back`, `--forward` and `--again` must be given, but `--back` and `--again` "
            "are.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--n-best", "3"],
            "`--n-best` must be at most the beam (2), but is 3 instead.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--top-k", "3"],
            "`--top-k` needs `--sample`.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--agree-with", "{forward}"],
            "`--agree-with` needs `--keep-best`.",
        ),
        (
            ["--again", "--using", "{back}", "--keep-best", "1", "--agree-with", "{forward}"],
            "`--agree-with` has no effect with `--again`; leave it out.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--write-config", "{mono}"],
            "{mono}: must be a YAML mapping of keys to values, but is not.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--write-config", "{config}"],
            "{config}: already exists; choose another --write-config, or delete it.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--device", "tpu"],
            "`device` must be auto, cpu, cuda or cuda:N, but is 'tpu' instead.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--until", "1.5"],
            "`--until` must be < 1.0, but is 1.5 instead.",
        ),
        (
            ["--back", "{mono}", "--using", "{back}", "--tag", "a b"],
            "`--tag` must be a letter, then at most 31 letters, digits, '_' and '-', but is 'a b' "
            "instead.",
        ),
    ],
)
def test_a_wrong_option_or_input_is_refused_before_anything_is_translated(
    cli: Cli,
    config_path: Path,
    tree: Tree,
    mono: Path,
    reverser: RunDir,
    back_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(augmenting.translating, "load", None)
    monkeypatch.chdir(tmp_path)
    names = {"mono": "mono.bb", "forward": str(reverser.path), "back": str(back_run)}
    names |= {"config": str(config_path), "empty": "empty.bb", "blank": "blank.bb"}
    names |= {"other": "other", "untrained": "untrained"}
    write(Path("empty.bb"), [])
    Path("utf16.bb").write_bytes(b"\xff\xfeb\n")
    if "all are dropped" in said:
        write(Path("blank.bb"), ["", " "])
        valid = Path(tree["data"]["valid"]["tgt"][0]).read_text("utf-8")
        write(Path("valid.bb"), valid.splitlines()[:2])
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
    if "{other}" in said:
        with_languages(reverser, Path("other"), "en", "de")
    if "{untrained}" in said:
        shutil.copytree(back_run, "untrained")
        Path("untrained/model.safetensors").unlink()
    filled = [argument.format(**names) for argument in arguments]
    done = cli("augment", config_path, *filled, "-o", "out")
    assert (done.code, done.out) == (2, b"")
    *warnings, last = done.err.splitlines()
    is_named = any(line.startswith("mtrain: utf16.bb: line 1: is not") for line in warnings)
    assert is_named == ("utf16.bb" in filled)
    assert last == f"mtrain: {said.format(**names)}"
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.parametrize("name", [".", "/"])
def test_a_path_without_a_folder_name_is_refused_as_the_output(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, name: str
) -> None:
    done = cli("augment", config_path, "--back", mono, "--using", back_run, "-o", name)
    said = f"mtrain: `--output` must name a new folder, but is {name} instead.\n"
    assert (done.code, done.err) == (2, said)


@pytest.mark.parametrize("name", ["text", "run", "judge", "output"])
def test_a_name_that_is_not_utf8_is_refused_before_anything_is_read(name: str) -> None:
    paths = {key: Path(key) for key in ("text", "run", "judge", "output")} | {name: Path("a\udcff")}
    options = mtrain.AugmentOptions(keep_best=0.5, agree_with=paths["judge"])
    runs = [RunDir(paths["run"])]
    with pytest.raises(mtrain.ConfigError) as error:
        AugmentRequest("back", [paths["text"]], False, runs, paths["output"], options)
    assert str(error.value) == "'a\\udcff': must be UTF-8, as a config is, but is not."


def test_an_output_folder_that_augment_did_not_write_is_refused_and_kept(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "bt").mkdir()
    (tmp_path / "bt" / "mine").touch()
    done = cli("augment", config_path, "--back", mono, "--using", back_run, "-o", tmp_path / "bt")
    assert done.code == 2
    assert done.err == (
        f"mtrain: {tmp_path / 'bt'}: exists, but `mtrain augment` did not write it; choose another "
        "folder.\n"
    )
    assert (tmp_path / "bt" / "mine").exists()


def test_the_written_config_trains_on_the_corpus_and_the_synthetic_pairs(
    cli: Cli, config_path: Path, mono: Path, back_run: Path, tmp_path: Path
) -> None:
    command = ["augment", config_path, "--back", mono, "--using", back_run, "-o", tmp_path / "bt"]
    command += ["--tag", "bt", "--weight", "2", "--until", "0.5"]
    command += ["--write-config", tmp_path / "new.yaml"]
    done = cli(*command)
    assert done.code == 0, done.err
    assert cli(*command).code == 0, "the config is there already"
    new, old = config_file.load(tmp_path / "new.yaml"), config_file.load(config_path)
    assert [named.weight for named in new.data.train] == [200.0, 400.0]
    assert new.data.train[1].model_dump() == {
        "synthetic": str(tmp_path / "bt"),
        "tag": "bt",
        "until": 0.5,
        "weight": 400.0,
    }
    assert new.run_dir == f"{old.run_dir}-bt"
    same = {"run_dir": old.run_dir, "data": old.data}
    assert new.model_copy(update=same) == old
    trained = cli("train", tmp_path / "new.yaml")
    assert trained.code == 0, trained.err
    assert re.search(r"step 6: the training goes on with data\.train\[0\] alone", trained.err)


def test_the_written_configs_run_folder_is_beside_one_whose_name_ends_in_a_slash(
    tree: Tree,
) -> None:
    config = mtrain.load_config(tree | {"run_dir": "runs/base/"})
    assert with_corpus(config, Path("fw/"), mtrain.AugmentOptions()).run_dir == "runs/base-fw"


def test_a_tag_that_the_tokenizer_of_init_from_lacks_is_refused(
    cli: Cli, mono: Path, reverser: RunDir, back_run: Path, tmp_path: Path
) -> None:
    command = ["augment", reverser.config_path, "--back", mono, "--using", back_run]
    command += ["--set", f"training.init_from={reverser.path}", "--set", f"run_dir={tmp_path}"]
    command += ["--tag", "bt"]
    done = cli(*command, "-o", tmp_path / "bt")
    assert done.code == 2
    assert done.err == (
        f"mtrain: `data.train[1].tag` must be a tag of the tokenizer of {reverser.path}, which has "
        "none, but is 'bt' instead; a training from the beginning learns it.\n"
    )
