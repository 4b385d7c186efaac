"""The doctor names each kind of damage in a run folder, and changes nothing in the folder."""

import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import yaml
from conftest import Cli, Outcome
from encoded_pairs import EncodedPair, write_pairs
from run_folders import harm, metrics
from safetensors.torch import load_file
from tasks import prepared, reverse_task, stop_at, train, write_task

import mtrain
from mtrain.config import config_file
from mtrain.data import prepare
from mtrain.decode.beam import Hypothesis
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.doctor import doctor, replay
from mtrain.ops import native
from mtrain.run import checkpoint
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.runtime.signals import Stopped
from mtrain.tokenizer import sentencepiece
from mtrain.training import gradients
from mtrain.training import trainer as trainer_module

PARTS = ["config", "tokenizer", "data", "corpora", "checkpoints", "model", "translates", "resume"]
NEWEST, OLDER = "checkpoints/step-00000012", "checkpoints/step-00000008"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("reverse"), reverse_task)


@pytest.fixture(scope="module")
def straight(source: Path) -> RunDir:
    """Twelve updates, with checkpoints at 4, 8 and 12. Tests only read it."""
    return train(source, run=str(source.parent / "straight"))


@pytest.fixture
def run(straight: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the run `straight` that a test may damage."""
    shutil.copytree(straight.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def contents(run: RunDir) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(run.path)): path.read_bytes() if path.is_file() else None
        for path in run.path.rglob("*")
    }


def examined(cli: Cli, run: RunDir, *options: str) -> Outcome:
    """Run `mtrain doctor` on a run; assert that it leaves the run folder unchanged."""
    before = contents(run)
    outcome = cli("doctor", run.path, *options)
    assert contents(run) == before
    return outcome


def verdicts(outcome: Outcome) -> dict[str, str]:
    """Return the worst verdict of each part."""
    order = ["ok", "skipped", "changed", "warn", "FAILED"]
    worst: dict[str, str] = {}
    for line in outcome.lines:
        part, verdict = line.split()[:2]
        worst[part] = max(worst.get(part, "ok"), verdict, key=order.index)
    return worst


def facts(outcome: Outcome, part: str) -> list[str]:
    return [line[22:] for line in outcome.lines if line.split()[0] == part]


def failed(outcome: Outcome) -> list[str]:
    """Return the parts that failed; assert that the exit code agrees."""
    parts = [part for part, verdict in verdicts(outcome).items() if verdict == "FAILED"]
    assert outcome.code == (2 if parts else 0)
    return parts


def rewrite_sums(run: RunDir) -> None:
    """Recompute the checksums of the data folder from its files."""
    (run.data_dir / "checksums.json").unlink()
    prepare._write_checksums(run.data_dir)


def reseal(path: Path) -> None:
    """Recompute the checksums of a checkpoint from its files."""
    seal = json.loads((path / "checkpoint.json").read_text())
    for name in seal["sha256"]:
        seal["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(seal))


def edit_seal(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    seal = json.loads((path / "checkpoint.json").read_text())
    edit(seal)
    (path / "checkpoint.json").write_text(json.dumps(seal))


def tamper(path: Path, part: str, by: float = 1e-6) -> None:
    """Change one number of a checkpoint, and recompute its checksums."""
    if part == "progress.json":
        progress = json.loads((path / part).read_text())
        progress["unlogged_tokens"] += 1
        (path / part).write_text(json.dumps(progress))
    else:
        fingerprint = checkpoint.load_fingerprint(path / part)
        assert fingerprint is not None
        tensors = load_file(path / part)
        name = next(name for name in tensors if tensors[name].dim() == 2)
        tensors[name][1, 1] += by
        checkpoint._write_tensors(path / part, tensors, fingerprint)
    reseal(path)


def test_a_healthy_run_passes_every_check(cli: Cli, run: RunDir) -> None:
    outcome = examined(cli, run)
    assert outcome.code == 0
    num_parameters = sum(weight.numel() for weight in load_file(run.model_path).values())
    assert outcome.lines == [
        "config       ok       reads back, nothing unknown",
        "tokenizer    ok       285 shared subwords; fits the weights",
        "data         ok       200 pairs, all ids within the vocabulary",
        "corpora      ok       6 files as they were tokenized",
        "checkpoints  ok       3 whole, steps 4 to 12",
        f"model        ok       {num_parameters:,} parameters, all finite, format 1",
        "translates   ok       5 validation lines, the same alone and together",
        "resume       ok       steps 9 to 12 made again: the same bytes",
    ]
    assert outcome.err.splitlines() == [
        "resume: makes 4 updates again, steps 9 to 12 (`--no-replay` skips this)"
    ]


def test_a_damaged_shortlist_and_damaged_lines_of_metrics_are_reported(
    cli: Cli, run: RunDir
) -> None:
    from mtrain.decode import shortlist

    shortlist.load(run, sentencepiece.load(run.tokenizer_dir))
    outcome = examined(cli, run, "--no-replay")
    assert facts(outcome, "shortlist") == ["fits the tokenizer"]
    assert facts(outcome, "metrics") == []
    harm(run.shortlist_path, "truncated")
    text = run.metrics_path.read_text()
    run.metrics_path.write_text('{"step": 1, "lo\n' + text)
    outcome = examined(cli, run, "--no-replay")
    assert outcome.code == 2
    assert facts(outcome, "shortlist") == [
        "shortlist.safetensors: must be a file of safetensors, but is not; restore it from a copy "
        "of the run."
    ]
    assert facts(outcome, "metrics") == ["metrics.jsonl: 1 damaged line; plots leave them out"]
    run.metrics_path.write_bytes(b"\xff\n" + text.encode())
    assert "must be UTF-8" in facts(examined(cli, run, "--no-replay"), "metrics")[0]


def test_the_option_no_replay_makes_no_trainer_and_skips_the_resume_check(
    cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "Trainer", None)
    outcome = examined(cli, run, "--no-replay")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines[-1] == "resume       skipped  `--no-replay` was asked for"


def test_without_a_replay_the_doctor_creates_no_lock_file(cli: Cli, run: RunDir) -> None:
    (run.path / ".lock").unlink()
    assert examined(cli, run, "--no-replay").code == 0
    assert not (run.path / ".lock").exists()


# Damage

DATA_FILES = [
    "train-00000.arrow",
    "shards.json",
    "dropped.json",
    "dropped.jsonl.gz",
    "profile.json",
    "corpora.json",
    "valid.src",
    "valid.tgt",
    "tests/held_out.src",
    "tests/held_out.tgt",
]
SEALED = ["model.safetensors", "optimizer.safetensors", "progress.json", "checkpoint.json"]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("tokenizer/shared.model", "tokenizer"),
        *((f"data/{name}", "data") for name in DATA_FILES),
        *((f"{NEWEST}/{name}", "checkpoints") for name in SEALED),
        ("checkpoints/step-00000004/model.safetensors", "checkpoints"),
        ("checkpoints/step-00000008/optimizer.safetensors", "checkpoints"),
        ("model.safetensors", "model"),
    ],
)
def test_a_damaged_file_is_named_and_the_other_parts_are_still_checked(
    cli: Cli, run: RunDir, name: str, part: str, damage: str
) -> None:
    harm(run.path / name, damage)
    outcome = examined(cli, run, "--no-replay")
    assert part in failed(outcome)
    assert list(dict.fromkeys(line.split()[0] for line in outcome.lines)) == PARTS
    said = " ".join(facts(outcome, part))
    folder, _, file = name.rpartition("/")
    assert (folder if file == "checkpoint.json" else name) in said
    if part != "tokenizer":
        assert failed(outcome) == [part]
        assert verdicts(outcome)["translates"] == "ok"


@pytest.mark.parametrize("damage", ["truncated", "missing", "unknown key"])
def test_a_damaged_config_is_named(cli: Cli, run: RunDir, damage: str) -> None:
    if damage == "missing":
        run.config_path.unlink()
    elif damage == "truncated":
        run.config_path.write_text(run.config_path.read_text()[:200])
    else:
        run.config_path.write_text(run.config_path.read_text() + "colour: red\n")
    outcome = examined(cli, run)
    assert failed(outcome) == ["config"]
    assert "config.yaml" in facts(outcome, "config")[0]
    assert verdicts(outcome)["checkpoints"] == verdicts(outcome)["tokenizer"] == "ok"


@pytest.mark.parametrize("content", ["{", "[3]", "null", '{"train-00000.arrow": 3}'])
def test_damaged_checksums_are_named(cli: Cli, run: RunDir, content: str) -> None:
    (run.data_dir / "checksums.json").write_text(content)
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["data"]
    named = "train-00000.arrow" if "arrow" in content else "checksums.json"
    assert facts(outcome, "data") == [
        f"data/{named}: is missing or damaged; restore it from a copy of the run."
    ]


def test_a_folder_that_may_not_be_read_is_named_and_the_other_parts_are_still_checked(
    cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: RunDir) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(run.data_dir))

    monkeypatch.setattr(prepare, "damaged_files", refused)
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["data"]
    assert facts(outcome, "data") == ["data: cannot be read: Permission denied."]
    assert verdicts(outcome)["translates"] == "ok"


def test_a_missing_checksum_file_is_named(cli: Cli, run: RunDir) -> None:
    (run.data_dir / "checksums.json").unlink()
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["data"]
    assert facts(outcome, "data") == [
        "data/checksums.json: is missing or damaged; restore it from a copy of the run."
    ]


ARROW_CUT = ("train-00000.arrow", "truncated")


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    "name", ["train-00000.arrow", "shards.json", "dropped.json", "valid.src", "tests/held_out.tgt"]
)
def test_damaged_data_files_with_matching_checksums_do_not_crash_the_doctor(
    cli: Cli, run: RunDir, name: str, damage: str
) -> None:
    harm(run.data_dir / name, damage)
    rewrite_sums(run)
    outcome = examined(cli, run, "--no-replay")
    parts = failed(outcome)
    is_json = name in ("dropped.json", "shards.json")
    if damage == "missing" or is_json or (name, damage) == ARROW_CUT:
        assert parts == ["data"]
        assert facts(outcome, "data")[0].startswith(f"data/{name}: ")


def test_each_damaged_file_is_reported_on_its_own_line(cli: Cli, run: RunDir) -> None:
    for name in ("data/dropped.json", "data/valid.src", f"{NEWEST}/progress.json"):
        harm(run.path / name, "missing")
    harm(run.path / OLDER / "model.safetensors", "flipped")
    outcome = examined(cli, run)
    assert failed(outcome) == ["data", "checkpoints"]
    assert [fact.split(":")[0] for fact in facts(outcome, "data")] == [
        "data/dropped.json",
        "data/valid.src",
    ]
    assert facts(outcome, "checkpoints") == [
        f"{OLDER}/model.safetensors: is damaged: its checksum is another. Restore step-00000008 "
        "from a copy of the run, or delete it.",
        f"{NEWEST}/progress.json: cannot be read: No such file or directory. Restore "
        "step-00000012 from a copy of the run, or delete it.",
    ]
    assert facts(outcome, "resume") == ["needs whole data"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_or_infinite_weight_is_named(cli: Cli, run: RunDir, value: float) -> None:
    weights = load_file(run.model_path)
    fingerprint = sentencepiece.load(run.tokenizer_dir).fingerprint()
    name = next(name for name in weights if name.endswith("bias"))
    weights[name][0] = value
    checkpoint.save_model(run.model_path, weights, fingerprint)
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["model"]
    assert facts(outcome, "model") == [
        f"model.safetensors: `{name}` must be finite numbers, but is not."
    ]
    assert facts(outcome, "translates")[0].endswith("(by the checkpoint of step 12)")


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_a_nan_value_is_named(cli: Cli, run: RunDir, part: str) -> None:
    tamper(run.path / NEWEST, part, float("nan"))
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["checkpoints"]
    assert f"{NEWEST}/{part}: `" in facts(outcome, "checkpoints")[0]


def test_the_name_of_the_run_is_left_out_only_where_a_path_begins_with_it(
    cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    run.path.rename("r")
    Path("r/tokenizer/shared.model").unlink()
    (line,) = [line for line in cli("doctor", "r", "--no-replay").lines if "FAILED" in line]
    assert line.split()[2] == "tokenizer/shared.model:"


def test_a_tokenizer_that_does_not_match_the_weights_is_reported(
    cli: Cli, source: Path, run: RunDir, tmp_path: Path
) -> None:
    config = config_file.load(source, ["tokenizer.vocab_size=284"], str(tmp_path / "other"))
    shutil.copy(prepared(config).tokenizer_dir / "shared.model", run.tokenizer_dir)
    outcome = examined(cli, run)
    assert "tokenizer" in failed(outcome)
    assert facts(outcome, "tokenizer") == [
        "is not the one that the weights were trained with; restore the folder tokenizer from a "
        "copy of the run."
    ]


def test_final_weights_with_the_fingerprint_of_another_tokenizer_are_reported(
    cli: Cli, run: RunDir
) -> None:
    checkpoint.save_model(run.model_path, load_file(run.model_path), "another")
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["model"]
    assert "must belong to the tokenizer beside it" in facts(outcome, "model")[0]


def test_a_config_whose_model_sizes_do_not_fit_the_weights_is_reported(
    cli: Cli, run: RunDir
) -> None:
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace("d_ff: 32", "d_ff: 48"))
    outcome = examined(cli, run, "--no-replay")
    assert "model" in failed(outcome)
    assert "must have the shape (48, 16)" in facts(outcome, "model")[0]


@pytest.mark.parametrize(
    ("row", "src", "tgt"), [(0, 285, 4), (3, 4, 285), (199, -1, 4), (120, 4, -7)]
)
def test_token_ids_outside_the_vocabulary_are_reported(
    cli: Cli, run: RunDir, row: int, src: int, tgt: int
) -> None:
    pairs = [EncodedPair([5, 6, 3], [5], None, None)] * 200
    pairs[row] = EncodedPair([5, src, 3], [6, 6, tgt], None, None)
    write_pairs(run.data_dir / "train-00000.arrow", pairs, with_text=False)
    rewrite_sums(run)
    outcome = examined(cli, run)
    assert failed(outcome) == ["data"]
    assert facts(outcome, "data") == [
        "data/train-00000.arrow: must be a whole table of pairs of this run's tokenizer, but is "
        "not; restore it from a copy of the run."
    ]
    assert facts(outcome, "resume") == ["needs whole data"]


def test_stored_lengths_that_differ_from_the_number_of_ids_are_reported(
    cli: Cli, run: RunDir
) -> None:
    pairs = [EncodedPair([5, 3], [5], None, None)] * 3
    write_pairs(run.data_dir / "train-00000.arrow", pairs, with_text=False)
    with pyarrow.OSFile(str(run.data_dir / "train-00000.arrow")) as file:
        table = pyarrow.ipc.open_stream(file).read_all()
    lengths = pyarrow.array([2, 2, 7], pyarrow.int32())
    table = table.set_column(table.schema.get_field_index("tgt_length"), "tgt_length", lengths)
    with (
        pyarrow.OSFile(str(run.data_dir / "train-00000.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    rewrite_sums(run)
    assert "must be a whole table of pairs" in facts(examined(cli, run), "data")[0]


def test_a_list_of_dropped_pairs_that_disagrees_with_the_counts_is_reported(
    cli: Cli, run: RunDir
) -> None:
    entry = b'{"file": "train.src", "line": 3, "reason": "blank-side"}\n'
    (run.data_dir / "dropped.jsonl.gz").write_bytes(gzip.compress(entry))
    rewrite_sums(run)
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["data"]
    assert facts(outcome, "data") == [
        "data/dropped.jsonl.gz: must list what dropped.json counts, but does not."
    ]


def test_a_test_set_that_is_new_in_the_config_is_not_damage(cli: Cli, run: RunDir) -> None:
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["data"]["tests"]["news"] = tree["data"]["tests"]["held_out"]
    run.config_path.write_text(yaml.safe_dump(tree), "utf-8")
    outcome = examined(cli, run)
    assert failed(outcome) == []
    assert verdicts(outcome)["resume"] == "ok"
    assert facts(outcome, "data")[0] == "test set news: not copied yet; `mtrain eval` copies it"


@pytest.mark.parametrize("name", ["valid", "tests/held_out"])
def test_source_and_target_texts_with_different_line_counts_are_reported(
    cli: Cli, run: RunDir, name: str
) -> None:
    path = run.data_dir / f"{name}.tgt"
    path.write_text(path.read_text() + "ba\n")
    rewrite_sums(run)
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["data"]
    assert f"data/{name}.src and " in facts(outcome, "data")[0]
    assert "must have the same number of lines" in facts(outcome, "data")[0]


def test_a_checkpoint_in_the_folder_of_another_step_is_reported(cli: Cli, run: RunDir) -> None:
    (run.path / NEWEST).rename(run.checkpoints_dir / "step-00000016")
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["checkpoints"]
    assert (
        "`step` must be that of its folder, but is 12 instead" in facts(outcome, "checkpoints")[0]
    )


@pytest.mark.parametrize("by", [1e-6, 0.01, -0.01])
def test_a_translation_that_changes_in_a_batch_is_reported_unless_the_scores_tie(
    cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    search = Translator.search

    def by_company(self: Translator, sources: list[EncodedSource]) -> list[list[Hypothesis]]:
        hypotheses = search(self, sources)
        if len(sources) > 1:
            hypotheses[1][0] = replace(
                hypotheses[1][0], ids=[7], log_prob=hypotheses[1][0].log_prob + by
            )
        return hypotheses

    monkeypatch.setattr(Translator, "search", by_company)
    outcome = examined(cli, run, "--no-replay")
    if by == 1e-6:
        assert failed(outcome) == []
        return
    assert failed(outcome) == ["translates"]
    assert facts(outcome, "translates") == ["line 2 of 5 differs alone and with the others."]


# Missing or changed files that are no damage


def test_a_copied_run_without_checkpoints_has_no_failed_check(cli: Cli, run: RunDir) -> None:
    shutil.rmtree(run.checkpoints_dir)
    (run.path / ".lock").unlink()
    outcome = examined(cli, run)
    assert failed(outcome) == []
    skipped = {part for part, verdict in verdicts(outcome).items() if verdict != "ok"}
    assert skipped == {"checkpoints", "resume"}
    assert facts(outcome, "checkpoints") == ["none here; translating needs none"]


def test_lines_that_are_translated_in_parts_are_not_searched_whole(cli: Cli, run: RunDir) -> None:
    text = run.config_path.read_text("utf-8")
    assert "max_tokens: 32" in text
    run.config_path.write_text(text.replace("max_tokens: 32", "max_tokens: 2"), encoding="utf-8")
    assert facts(examined(cli, run), "translates") == [
        "5 made-up lines, the same alone and together"
    ]


def test_a_run_with_only_config_tokenizer_and_weights_has_no_failed_check(
    cli: Cli, run: RunDir
) -> None:
    for name in ("data", "checkpoints"):
        shutil.rmtree(run.path / name)
    run.metrics_path.unlink()
    outcome = examined(cli, run)
    assert failed(outcome) == []
    assert [line.split()[1] for line in outcome.lines] == [
        *("ok", "ok", "skipped", "skipped", "skipped", "ok", "ok", "skipped")
    ]
    assert facts(outcome, "translates") == ["5 made-up lines, the same alone and together"]


def test_checkpoints_without_a_data_folder_are_damage(cli: Cli, run: RunDir) -> None:
    shutil.rmtree(run.data_dir)
    outcome = examined(cli, run)
    assert failed(outcome) == ["data"]
    assert "data/checksums.json: is missing" in facts(outcome, "data")[0]


def test_missing_final_weights_are_damage_only_if_the_training_had_finished(
    cli: Cli, source: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.model_path.unlink()
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["model"]
    assert facts(outcome, "model") == [
        "model.safetensors: is missing; `mtrain train CONFIG` makes it."
    ]
    config = run.config_path.read_text("utf-8")
    limits = "max_steps: null", "max_minutes: 0.00001"
    for key, limit in zip(("max_steps", "max_minutes"), limits, strict=True):
        config = re.sub(rf"\b{key}: \S+", limit, config)
    run.config_path.write_text(config, "utf-8")
    assert failed(examined(cli, run, "--no-replay")) == ["model"]
    fresh = prepared(config_file.load(source, run_dir=str(tmp_path / "fresh")))
    outcome = examined(cli, fresh)
    assert failed(outcome) == []
    assert facts(outcome, "model") == ["not made yet; `mtrain train CONFIG` makes it"]
    assert facts(outcome, "translates") == ["there is no model that could"]
    stop_at(monkeypatch, 6)
    with pytest.raises(Stopped):
        train(source, run=str(tmp_path / "half"))
    outcome = examined(cli, RunDir(tmp_path / "half"))
    assert failed(outcome) == []
    assert verdicts(outcome)["model"] == "skipped"
    assert facts(outcome, "translates")[0].endswith("(by the checkpoint of step 6)")
    assert facts(outcome, "resume") == ["steps 5 to 6 made again: the same bytes"]


def test_changed_or_missing_corpora_are_reported_but_are_no_damage(
    cli: Cli, tmp_path: Path
) -> None:
    run = train(write_task(tmp_path), "training.max_steps=1")
    (tmp_path / "train.src").write_bytes((tmp_path / "train.tgt").read_bytes()[::-1])
    outcome = examined(cli, run)
    assert failed(outcome) == []
    changed = f"{tmp_path / 'train.src'}: not the file that was tokenized"
    assert facts(outcome, "corpora") == [changed]
    (tmp_path / "train.src").unlink()
    outcome = examined(cli, run)
    assert facts(outcome, "corpora") == ["5 files as they were tokenized, 1 not here"]
    for path in tmp_path.glob("*.[st]*"):
        path.unlink()
    assert facts(examined(cli, run), "corpora") == ["the files are not here"]
    (run.data_dir / "corpora.json").unlink()
    rewrite_sums(run)
    outcome = examined(cli, run)
    assert facts(outcome, "corpora") == ["the run does not say which files it was made of"]
    assert outcome.code == 0


def test_an_export_in_the_run_folder_is_checked(cli: Cli, run: RunDir) -> None:
    """The export is the one that `mtrain translate --engine ctranslate2` writes."""
    pytest.importorskip("ctranslate2")
    assert cli("export", run.path, run.path / "ctranslate2", "--to", "ctranslate2").code == 0
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == []
    assert facts(outcome, "exports") == ["ctranslate2/ whole"]
    report = run.path / "ctranslate2" / "export.json"
    text = report.read_text("utf-8")
    weights = json.loads(text)["weights"]
    report.write_text(text.replace(weights, "0" * 64), encoding="utf-8")
    outcome = examined(cli, run, "--no-replay")
    assert facts(outcome, "exports") == ["ctranslate2/ whole, but of other weights"]
    harm(run.path / "ctranslate2" / "model.bin", "flipped")
    outcome = examined(cli, run, "--no-replay")
    assert failed(outcome) == ["exports"]
    assert facts(outcome, "exports") == [
        "ctranslate2: must be whole, but is damaged: the checksum of model.bin is another; delete "
        "it, and export it again."
    ]
    report.write_text("{", encoding="utf-8")
    assert failed(examined(cli, run, "--no-replay")) == ["exports"]


def test_a_checkpoint_that_a_training_set_aside_as_damaged_gives_a_warning(
    cli: Cli, run: RunDir
) -> None:
    (run.path / OLDER).rename(run.checkpoints_dir / "damaged-step-00000008")
    outcome = examined(cli, run)
    assert (outcome.code, verdicts(outcome)["checkpoints"]) == (0, "warn")
    assert facts(outcome, "checkpoints") == [
        "damaged-step-00000008: was skipped by a training; look at it or delete it",
        "2 whole, steps 4 to 12",
    ]
    assert facts(outcome, "resume") == ["needs two checkpoints with optimizer state, but has 1"]


def test_a_folder_that_is_not_a_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        outcome = cli("doctor", path)
        assert (outcome.code, outcome.out) == (2, b"")
        assert outcome.err.startswith(f"mtrain: {path}: must be a run folder, but ")


def test_a_run_in_which_another_process_trains_is_refused(cli: Cli, run: RunDir) -> None:
    with run.locked():
        outcomes = [examined(cli, run), examined(cli, run, "--no-replay")]
    for outcome in outcomes:
        assert (outcome.code, outcome.out) == (2, b"")
        assert outcome.err == (
            f"mtrain: {run.path}: another process is training in it; wait until it ends, or "
            "choose another run folder.\n"
        )
    assert examined(cli, run, "--no-replay").code == 0


# Replayed updates


@pytest.mark.parametrize("name", [NEWEST, OLDER])
@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "progress.json"])
def test_a_changed_checkpoint_with_matching_checksums_is_found_by_the_replay(
    cli: Cli, run: RunDir, part: str, name: str
) -> None:
    tamper(run.path / name, part)
    outcome = examined(cli, run)
    assert verdicts(outcome)["checkpoints"] == "ok"
    assert failed(outcome) == ["resume"]
    said = facts(outcome, "resume")[0]
    assert said.startswith("steps 9 to 12 made again differ in ")
    wrong = "metrics.jsonl" if (part, name) == ("progress.json", OLDER) else "step-00000012"
    assert said.endswith(f"restore step-00000008 and {wrong} from a copy of the run.")
    if name == NEWEST:
        named = {"model": "weights", "optimizer": "optimizer", "progress": "progress"}
        assert f"differ in {named[part.partition('.')[0]]};" in said


def test_a_checkpoint_of_another_model_with_matching_checksums_is_named(
    cli: Cli, run: RunDir
) -> None:
    path = run.path / NEWEST / "model.safetensors"
    fingerprint, tensors = checkpoint.load_fingerprint(path), load_file(path)
    assert fingerprint is not None
    name = "encoder.0.feed_forward.inner.weight"
    tensors[name] = tensors[name].repeat(2, 1)
    checkpoint._write_tensors(path, tensors, fingerprint)
    reseal(path.parent)
    outcome = examined(cli, run)
    assert failed(outcome) == ["resume"]
    assert facts(outcome, "resume") == [
        f"{NEWEST}/model.safetensors: `{name}` must have the shape (32, 16) that config.yaml asks "
        "for, but is (64, 16) instead; restore the run's own config.yaml."
    ]


@pytest.mark.parametrize("key", ["loss", "valid_bleu", "lr", "grad_norm"])
def test_changed_metrics_are_found_by_the_replay(cli: Cli, run: RunDir, key: str) -> None:
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    for line in lines:
        if line["step"] == 12 and key in line:
            line[key] += 0.001
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = examined(cli, run)
    assert failed(outcome) == ["resume"]
    assert facts(outcome, "resume") == [
        "steps 9 to 12 made again differ in metrics.jsonl; restore step-00000008 and metrics.jsonl "
        "from a copy of the run."
    ]


def test_missing_or_truncated_metrics_are_not_compared(cli: Cli, run: RunDir) -> None:
    text = run.metrics_path.read_text()
    run.metrics_path.write_text(text[:-5])
    assert facts(examined(cli, run), "resume") == ["steps 9 to 12 made again: the same bytes"]
    run.metrics_path.unlink()
    assert facts(examined(cli, run), "resume") == ["steps 9 to 12 made again: the same bytes"]


@pytest.mark.parametrize(
    "line",
    ['{"changed_config": {}}', '{"changed_config": {}, "step": "twelve"}', "[" * 100_000, "[]"],
)
def test_a_malformed_line_in_the_metrics_is_ignored_by_the_replay(
    cli: Cli, run: RunDir, line: str
) -> None:
    with run.metrics_path.open("a") as stream:
        stream.write(f"{line}\n")
    assert facts(examined(cli, run), "resume") == ["steps 9 to 12 made again: the same bytes"]


@pytest.mark.parametrize(
    "settings",
    [
        ["tokenizer.sampling_alpha=0.3", "training.max_steps=32", "training.validate_every=16"],
        ["training.accumulate=2", "training.log_every=3"],
        ["training.max_steps=10"],
        ["training.save_every=1", "training.keep_last=2", "training.schedule=linear"],
        ["training.precision=bfloat16"],
    ],
)
def test_the_replay_is_bit_identical_for_many_training_settings(
    cli: Cli, source: Path, tmp_path: Path, settings: list[str]
) -> None:
    run = train(source, *settings, run=str(tmp_path / "run"))
    outcome = examined(cli, run)
    assert facts(outcome, "resume")[0].endswith(" made again: the same bytes")
    assert outcome.code == 0


def test_the_replay_uses_the_number_of_threads_of_the_training(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "LEAST_TOKENS", 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    run = train(source, run=str(tmp_path / "run"))
    torch.set_num_threads(before)
    made = checkpoint.load_environment(run.path / NEWEST)
    assert made is not None
    assert made.num_threads == 3
    assert facts(examined(cli, run), "resume") == ["steps 9 to 12 made again: the same bytes"]
    assert torch.get_num_threads() == before
    edit_seal(run.path / NEWEST, lambda seal: seal["environment"].update(num_threads=1))
    assert failed(examined(cli, run)) == ["resume"]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    edit_seal(run.path / NEWEST, lambda seal: seal["environment"].update(num_threads=3))
    tamper(run.path / NEWEST, "model.safetensors", 1.0)
    assert facts(examined(cli, run), "resume") == ["made with num_threads 3, here is 2"]


@pytest.mark.parametrize("name", [NEWEST, OLDER])
@pytest.mark.parametrize(
    ("key", "then", "now"),
    [
        ("mtrain", "0.0", mtrain.__version__),
        ("torch", "1.0", torch.__version__),
        ("batches", "halved from 64 tokens", "whole"),
    ],
)
def test_a_replay_that_differs_is_no_failure_if_the_recorded_environment_differs(
    cli: Cli, run: RunDir, name: str, key: str, then: str, now: str
) -> None:
    edit_seal(run.path / name, lambda seal: seal["environment"].update({key: then}))
    assert facts(examined(cli, run), "resume") == ["steps 9 to 12 made again: the same bytes"]
    here = f"made with {key} {then}, here is {now}"
    tamper(run.path / NEWEST, "model.safetensors", 1e-4)
    outcome = examined(cli, run)
    assert outcome.code == 0
    assert facts(outcome, "resume") == [f"steps 9 to 12 made again: the same to rounding ({here})"]
    tamper(run.path / NEWEST, "model.safetensors", 0.5)
    outcome = examined(cli, run)
    assert (outcome.code, verdicts(outcome)["resume"]) == (0, "skipped")
    assert facts(outcome, "resume") == [here]


def test_plain_kernels_reproduce_the_weights_of_compiled_kernels_to_rounding(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.compiled() is None:
        pytest.skip("there is no compiler here")
    run = train(source, "model.dropout=0.0", run=str(tmp_path / "run"))
    name = native.name()
    assert name.startswith("compiled ")
    monkeypatch.setattr(native, "compiled", lambda: None)
    assert facts(examined(cli, run), "resume") == [
        f"steps 9 to 12 made again: the same to rounding (made with kernels {name}, here is plain)"
    ]


def test_checkpoints_without_a_recorded_environment_still_load(
    cli: Cli, source: Path, run: RunDir
) -> None:
    for path in checkpoint.steps(run.checkpoints_dir).values():
        edit_seal(path, lambda seal: seal.pop("environment"))
    assert facts(examined(cli, run), "resume") == ["steps 9 to 12 made again: the same bytes"]
    tamper(run.path / NEWEST, "model.safetensors", 0.5)
    outcome = examined(cli, run)
    assert outcome.code == 0
    assert facts(outcome, "resume") == ["the checkpoint does not say what it was made with"]
    train(source, "training.max_steps=14", run=str(run.path))
    made = checkpoint.load_environment(run.checkpoints_dir / "step-00000014")
    assert made is not None
    assert (made.torch, made.device, made.precision) == (torch.__version__, "cpu", "float32")


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_threads": value} for value in ("x", 0, -1, 10**12, 1e12, 2.0, True, None, [])),
        *({"num_ranks": value} for value in ("1", 0, 10**12)),
        *({"device": value} for value in (3, None, ["cpu"], "c" * 300, "cpu\x1b[2J", "cpu\n")),
        *({key: {}} for key in ("mtrain", "torch", "processor", "precision", "kernels", "batches")),
        {"of another version": 3},
    ],
    ids=str,
)
def test_a_malformed_environment_record_is_damage(
    cli: Cli, run: RunDir, changes: dict[str, object]
) -> None:
    edit_seal(run.path / NEWEST, lambda seal: seal["environment"].update(changes))
    outcome = examined(cli, run)
    assert (outcome.code, outcome.err.count("Traceback")) == (2, 0)
    assert f"{NEWEST}/checkpoint.json: is missing or damaged" in outcome.out.decode()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt"])
def test_the_replay_of_a_training_limited_by_time_uses_the_logged_times(
    cli: Cli,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
) -> None:
    clock = itertools.accumulate(0.01 * (1 + number % 7) for number in itertools.count())
    budget = [
        "training.max_steps=null",
        "training.max_minutes=0.1",
        f"training.schedule={schedule}",
    ]
    settings = [*budget, "training.validate_every=20", "training.log_every=3"]
    run = RunDir(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.time, "monotonic", lambda: next(clock))
        stop_at(patch, 7)
        with pytest.raises(Stopped):
            train(source, *settings, run=str(run.path))
        train(source, *settings, run=str(run.path))
    first, last = list(checkpoint.steps(run.checkpoints_dir))[-2:]
    assert facts(examined(cli, run), "resume") == [
        f"steps {first + 1} to {last} made again: the same bytes"
    ]
    lines = metrics(run)
    assert all(
        ("updates_began_s" in line) == (schedule != "inverse_sqrt" and "loss" in line)
        for line in lines
    )
    if schedule != "inverse_sqrt":
        assert last - first > 4
        run.metrics_path.unlink()
        assert facts(examined(cli, run), "resume") == [
            "the log does not have the time of each update"
        ]


def test_updates_across_a_change_of_the_config_are_not_replayed(
    cli: Cli, source: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 14)
    shutil.copytree(run.path / OLDER, run.path / "whole")  # before it loses its optimizer state
    with pytest.raises(Stopped):
        train(source, "training.lr=0.02", "training.max_steps=24", run=str(run.path))
    assert facts(examined(cli, run), "resume") == ["steps 13 to 14 made again: the same bytes"]
    shutil.rmtree(run.checkpoints_dir / "step-00000012")
    shutil.rmtree(run.path / OLDER)
    (run.path / "whole").rename(run.path / OLDER)
    assert facts(examined(cli, run), "resume") == ["the config changed at step 12"]


@pytest.mark.parametrize("num_checkpoints", [0, 1])
def test_with_fewer_than_two_checkpoints_nothing_is_replayed(
    cli: Cli, run: RunDir, num_checkpoints: int
) -> None:
    for path in list(checkpoint.steps(run.checkpoints_dir).values())[: 3 - num_checkpoints]:
        shutil.rmtree(path)
    outcome = examined(cli, run)
    assert outcome.code == 0
    assert facts(outcome, "resume") == [
        f"needs two checkpoints with optimizer state, but has {num_checkpoints}"
    ]


def test_a_training_on_another_device_type_is_not_replayed(cli: Cli, run: RunDir) -> None:
    edit_seal(run.path / NEWEST, lambda seal: seal["environment"].update(device="cuda"))
    outcome = examined(cli, run)
    assert outcome.code == 0
    assert facts(outcome, "resume") == ["made on device cuda, here is cpu"]
    tree = yaml.safe_load(run.config_path.read_text())
    tree["training"]["device"] = "cuda:99"
    run.config_path.write_text(yaml.safe_dump(tree))
    outcome = examined(cli, run)
    assert outcome.code == 0
    assert "`training.device` is 'cuda:99', but " in facts(outcome, "resume")[0]


def test_a_full_temporary_folder_is_no_damage(
    cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_tensors", full)
    outcome = examined(cli, run)
    assert outcome.code == 0
    disk = tempfile.gettempdir()
    assert facts(outcome, "resume") == [f"the disk of {disk} takes no checkpoint"]


def test_the_progress_bar_of_the_replay_runs_from_one_checkpoint_to_the_next(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(
        RunLog, "advance", lambda log, spent, *_: shares.append(log._bar_position(spent))
    )
    paths = checkpoint.steps(run.checkpoints_dir)
    replay.replay(run.config, run, replay.Span(8, 12, paths[8], paths[12]))
    assert shares == pytest.approx([0.5, 1.0])


def test_a_finding_is_one_aligned_line() -> None:
    assert doctor.CheckResult("data", "FAILED", "a: b").line() == "data         FAILED   a: b"
