"""Fine-tuning with `training.init_from`: what is taken from the base run, and what is refused."""

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Cli
from fork_server import needs_fork_server
from ranks import NUM_TRIALS, Ranks, ranks, with_closed_stdout, with_few_trials
from run_folders import step_lines
from tasks import Tree, prepared, reverse_task, stop_at, tiny_tree, write_config, write_corpus

import mtrain
from mtrain.data.batch import MicroBatchSplit, Position
from mtrain.data.loader import TrainingData, read_ids
from mtrain.data.prepare import damaged_files
from mtrain.decode.pipeline import translate_lines
from mtrain.evaluation import significance
from mtrain.exporters import huggingface, model_card
from mtrain.run import checkpoint
from mtrain.run.logger import RunLog
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.training.trainer import Stopped, Trainer

__all__ = ["ranks"]


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take half a second less for each table of scores before and after fine-tuning."""
    monkeypatch.setattr(significance, "NUM_TRIALS", NUM_TRIALS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run that others are fine-tuned from. Tests only read it."""
    tree = tiny_tree(tmp_path_factory.mktemp("base"))
    tree["tokenizer"] |= {"vocab_size": 290, "kind": "bpe"}
    tree["model"] |= {"d_ff": 48}
    return RunDir(mtrain.train(tree))


def tuned(base: RunDir, directory: Path) -> Tree:
    """Return a fine-tuning config on other text, without its own model and tokenizer sections."""
    tree = tiny_tree(directory, reverse_task)
    del tree["tokenizer"], tree["model"]
    tree["training"]["init_from"] = str(base.path)
    return tree


def lines(run: RunDir) -> list[Tree]:
    return [json.loads(line) for line in run.metrics_path.read_text("utf-8").splitlines()]


def test_fine_tuning_begins_with_the_weights_tokenizer_and_model_sizes_of_the_base_run(
    base: RunDir, tmp_path: Path
) -> None:
    config = mtrain.load_config(tuned(base, tmp_path))
    assert (config.model, config.tokenizer) == (
        base.config.model,
        base.config.tokenizer,
    )
    assert "compile" not in config.training.model_fields_set  # an explicit one is reported
    run = prepared(config)
    model = (run.tokenizer_dir / "shared.model").read_bytes()
    assert model == (base.tokenizer_dir / "shared.model").read_bytes()
    with RunLog(run.metrics_path) as log:
        trainer = Trainer(config, run, log)
        trainer.resume()
        trainer.resume()  # logs init_from only once
    theirs = checkpoint.load_model(base.model_path, trainer.fingerprint)
    assert checkpoint.digest(dict(trainer.model.named_parameters())) == checkpoint.digest(theirs)
    assert lines(run) == [
        {
            "step": 0,
            "init_from": str(base.path),
            "init_weights_sha256": checkpoint.digest(theirs),
        }
    ]


def test_fine_tuning_with_a_tiny_lr_keeps_translations_and_the_model_card_names_the_base(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    path = write_config(tmp_path / "config.yaml", tuned(base, tmp_path))
    outcome = cli("train", path, "--set", "training.lr=1e-9", "--set", "model.dropout=0.0")
    assert outcome.code == 0, outcome.err
    assert f"weights  those of {base.model_path}\n" in outcome.err
    assert f"tokenizer: bpe, 290 shared subwords, those of {base.path}\n" in outcome.err
    run = RunDir(tmp_path / "run")
    assert run.config.model == base.config.model.model_copy(update={"dropout": 0.0})
    some = ["ba ce", "di fo gu"]
    ours, theirs = mtrain.load(run.path).translator, mtrain.load(base.path).translator
    assert translate_lines(ours, some) == translate_lines(theirs, some)
    wanted = f"- Fine-tuned: the training began with the weights of `{base.path}`."
    assert f"\n{wanted}\n" in model_card.readme(run, ours, huggingface, "out", "ba", [])
    assert "Fine-tuned" not in model_card.readme(base, theirs, huggingface, "out", "ba", [])
    assert cli("doctor", run.path).code == 0


def test_fine_tuning_resumes_identically_after_the_base_run_is_deleted(
    base: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    tree = tuned(other, tmp_path)
    straight = mtrain.train(tree | {"run_dir": str(tmp_path / "straight")})
    stop_at(monkeypatch, 6)
    with pytest.raises(Stopped):
        mtrain.train(tree)
    shutil.rmtree(other.path)
    stopped = mtrain.train(tree)
    assert (stopped / "model.safetensors").read_bytes() == (
        straight / "model.safetensors"
    ).read_bytes()
    assert sum("init_from" in line for line in lines(RunDir(stopped))) == 1


def test_base_weights_that_change_before_the_first_checkpoint_are_logged_again(
    base: RunDir, tmp_path: Path
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    config = mtrain.load_config(tuned(other, tmp_path))
    run, fingerprint = prepared(config), sentencepiece.load(other.tokenizer_dir).fingerprint()
    with RunLog(run.metrics_path) as log:
        Trainer(config, run, log).resume()
        weights = checkpoint.load_model(other.model_path, fingerprint)
        changed = {name: tensor + 1 for name, tensor in weights.items()}
        checkpoint.save_model(other.model_path, changed, fingerprint)
        for _ in range(2):
            Trainer(config, run, log).resume()
    found = [line["init_weights_sha256"] for line in lines(run) if "init_from" in line]
    assert found == [checkpoint.digest(weights), checkpoint.digest(changed)]


@pytest.mark.parametrize(
    ("key", "wanted", "given"),
    [  # as YAML has them
        ("model.d_model", "16", "32"),
        ("model.d_ff", "48", "256"),  # an explicit value is refused even if it is the default
        ("model.norm", "'post'", "'pre'"),
        ("model.num_encoder_layers", "1", "2"),
        ("model.attention_window", "null", "5"),
        ("tokenizer.kind", "'bpe'", "'unigram'"),
        ("tokenizer.vocab_size", "290", "null"),
        ("tokenizer.byte_fallback", "true", "false"),
        ("tokenizer.max_training_lines", "500000", "10"),
    ],
)
def test_a_key_that_contradicts_the_base_run_is_named(
    base: RunDir, tmp_path: Path, key: str, wanted: str, given: str
) -> None:
    with pytest.raises(mtrain.ConfigError) as error:
        mtrain.load_config(tuned(base, tmp_path), [f"{key}={given}"])
    said = f"config: `{key}` must be {wanted}, as in {base.path}, but is {given} instead."
    assert str(error.value) == said


def test_an_invalid_base_run_is_named_in_the_error(base: RunDir, tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", tuned(base, tmp_path))
    for init_from, said in (
        ("absent", "`training.init_from`: absent: must be a run folder, but does not exist."),
        (tmp_path / "run", "`training.init_from` must be another run than `run_dir`, but is the "),
    ):
        with pytest.raises(mtrain.ConfigError) as error:
            mtrain.load_config(path, [f"training.init_from={init_from}"])
        assert str(error.value).startswith(f"{path}: {said}")


def test_changing_init_from_of_a_started_run_is_refused(base: RunDir, tmp_path: Path) -> None:
    tree = tuned(base, tmp_path)
    mtrain.train(tree)
    for now in (None, str(shutil.copytree(base.path, tmp_path / "copy"))):
        tree["training"]["init_from"] = now
        with pytest.raises(mtrain.RunError) as error:
            mtrain.train(tree)
        assert str(error.value) == (
            f"{tmp_path / 'run'}: `training.init_from` must stay {base.path}, but is "
            f"{now or 'null'} now; choose another --run, or delete this run folder."
        )


def test_a_base_run_without_weights_is_refused_before_the_run_folder_is_made(
    base: RunDir, tmp_path: Path
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    other.model_path.unlink()
    with pytest.raises(mtrain.RunError) as error:
        mtrain.train(tuned(other, tmp_path))
    assert str(error.value) == (
        f"`training.init_from`: {other.model_path}: is missing; `mtrain train CONFIG` makes it."
    )
    assert not (tmp_path / "run").exists()


def test_base_weights_that_are_missing_or_of_another_tokenizer_are_refused(
    base: RunDir, tmp_path: Path
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    config = mtrain.load_config(tuned(other, tmp_path))
    prepared(config)
    weights = checkpoint.load_model(
        other.model_path, sentencepiece.load(other.tokenizer_dir).fingerprint()
    )
    checkpoint.save_model(other.model_path, weights, "another")
    with pytest.raises(mtrain.RunError) as error:
        mtrain.train(config)
    assert str(error.value) == (
        f"{other.model_path}: must belong to the tokenizer that {tmp_path / 'run'} was tokenized "
        "with, but was trained with another one since; choose another --run."
    )
    other.model_path.unlink()
    with pytest.raises(mtrain.RunError, match=r"is missing; `mtrain train CONFIG` makes it"):
        mtrain.train(config)


def replaying(base: RunDir, directory: Path, share: float = 0.25) -> Tree:
    tree = tuned(base, directory)
    tree["training"]["replay"] = share
    return tree


def pairs_of(run: RunDir) -> set[tuple[bytes, bytes]]:
    """Return the encoded pairs that the corpora of a run have."""
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    return {
        (src.tobytes(), tgt.tobytes())
        for block in read_ids(run.data_dir, tokenizer)
        for src, tgt in zip(*block, strict=True)
    }


def test_replayed_pairs_have_their_share_of_each_epoch(base: RunDir, tmp_path: Path) -> None:
    run, alone = (
        prepared(mtrain.load_config(tree))
        for tree in (replaying(base, tmp_path), tuned(base, tmp_path / "alone"))
    )
    theirs, ours = pairs_of(base), pairs_of(alone)
    assert pairs_of(run) == ours | theirs
    data = TrainingData(run.data_dir, sentencepiece.load(run.tokenizer_dir), seed=1)
    assert [share.name for share in data.shares] == ["data.train", "training.replay: data.train"]
    assert data.shares[1].num_in_epoch == round(0.25 * len(data))
    num_replayed = num_pairs = 0
    for batch, after in data.batches(256, Position(0, 0)):
        num_pairs += len(batch.src_BS)
        for src_S, tgt_T in zip(batch.src_BS, batch.tgt_out_BT, strict=True):
            src, tgt = (row[row != 0].numpy().astype("int32") for row in (src_S, tgt_T))
            num_replayed += (src.tobytes(), tgt[:-1].tobytes()) in theirs - ours
        if after.epoch == 1:
            break
    assert num_pairs == len(data)
    assert num_replayed == data.shares[1].num_in_epoch
    assert not damaged_files(run)


def test_replayed_pairs_keep_their_share_when_corpora_of_either_run_end(
    base: RunDir, tmp_path: Path
) -> None:
    """The `until` of a corpus of the base run was a share of the base run's budget."""

    def mixed(tree: Tree, directory: Path) -> Tree:
        directory.mkdir()
        corpora = [write_corpus(directory, name, reverse_task(90, 5)) for name in ("a", "b")]
        tree["data"]["train"] = [
            corpora[0] | {"weight": 1.0},
            corpora[1] | {"weight": 4.0, "until": 0.5},
        ]
        return tree

    other = prepared(mtrain.load_config(mixed(tuned(base, tmp_path / "other"), tmp_path / "texts")))
    tree = mixed(replaying(other, tmp_path / "new", 0.2), tmp_path / "more")
    run = prepared(mtrain.load_config(tree))
    data = TrainingData(run.data_dir, sentencepiece.load(run.tokenizer_dir), seed=1)
    assert data.ends == [0.5]
    for phase, own_shares in ((0, [0.16, 0.64]), (1, [0.8])):
        data.enter(phase)
        counts = [share.num_in_epoch for share in data.shares]
        shares = [*own_shares, 0.04, 0.16]
        assert counts == pytest.approx([share * len(data) for share in shares], abs=1)


def test_two_ranks_get_the_batches_of_one_process_with_replay(base: RunDir, tmp_path: Path) -> None:
    run = prepared(mtrain.load_config(replaying(base, tmp_path)))
    tokenizer = sentencepiece.load(run.tokenizer_dir)
    whole = TrainingData(run.data_dir, tokenizer, seed=1).updates(
        128, Position(0, 0), MicroBatchSplit(2)
    )
    parts = [
        TrainingData(run.data_dir, tokenizer, seed=1).updates(
            128, Position(0, 0), MicroBatchSplit(2, rank, 2)
        )
        for rank in range(2)
    ]
    for update, *of_ranks in islice(zip(whole, *parts, strict=False), 20):
        found = [micro.batch for rank in of_ranks for micro in rank.micro_batches]
        expected = [micro.batch for micro in update.micro_batches]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.src_BS, other.src_BS)


@needs_fork_server
def test_training_with_replay_on_two_ranks_equals_one_process_up_to_rounding(
    base: RunDir, tmp_path: Path, ranks: Ranks
) -> None:
    """A different `training.replay` gives different losses."""
    path = write_config(tmp_path / "config.yaml", replaying(base, tmp_path))
    settings = ["training.max_steps=8", "training.log_every=1", "training.precision=float32"]
    settings += ["model.dropout=0.0"]
    alone, other, run = (RunDir(tmp_path / name) for name in ("alone", "other", "run"))
    mtrain.train(mtrain.load_config(path, settings, alone.path))
    mtrain.train(mtrain.load_config(path, [*settings, "training.replay=0.5"], other.path))
    options = [part for setting in settings for part in ("--set", setting)]
    ended = ranks.mtrain(2, "train", path, "--run", run.path, *options)
    assert ended.codes == [0, 0], ended.err
    losses = [[line["loss"] for line in step_lines(each)] for each in (alone, run, other)]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != pytest.approx(losses[0], rel=1e-2)


def test_training_with_replay_resumes_identically_after_the_base_run_is_deleted(
    cli: Cli, base: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    tree = replaying(other, tmp_path)
    straight = mtrain.train(tree | {"run_dir": str(tmp_path / "straight")})
    path = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("tokenize", path)
    count = len(TrainingData(base.data_dir, sentencepiece.load(base.tokenizer_dir), seed=1))
    assert f"replay: {count} training pairs of {other.path} are 25.0% of an epoch" in outcome.err
    stop_at(monkeypatch, 6)
    with pytest.raises(Stopped):
        mtrain.train(tree)
    shutil.rmtree(other.path)
    stopped = mtrain.train(tree)
    assert (stopped / "model.safetensors").read_bytes() == (
        straight / "model.safetensors"
    ).read_bytes()
    plain = mtrain.train(tuned(base, tmp_path / "plain"))
    assert (plain / "model.safetensors").read_bytes() != (
        straight / "model.safetensors"
    ).read_bytes()
    tree["training"]["replay"] = 0.5
    with pytest.raises(mtrain.RunError) as error:
        mtrain.train(tree | {"training": tree["training"] | {"init_from": str(other.path)}})
    assert str(error.value) == (
        f"{stopped}: `training.replay` must stay 0.25, but is 0.5 now; choose another --run, or "
        "delete this run folder."
    )


def test_invalid_replay_settings_are_errors(base: RunDir, tmp_path: Path) -> None:
    with pytest.raises(mtrain.ConfigError) as error:
        mtrain.load_config(tiny_tree(tmp_path), ["training.replay=0.2"])
    assert str(error.value) == (
        "config: `training` must name the run to replay in `init_from`, but it is null and "
        "`replay` is 0.2."
    )
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    config = replaying(other, tmp_path)
    for override, said in (
        (
            "data.max_tokens=31",
            f"`data.max_tokens` must be >= 32 to replay {other.path}, but",
        ),
        ("tokenizer.sampling_alpha=0.1", "`tokenizer.sampling_alpha` must be 0 to replay "),
    ):
        with pytest.raises(mtrain.ConfigError) as error:
            mtrain.train(mtrain.load_config(config, [override]))
        assert str(error.value).startswith(said)
    spoiled = RunDir(shutil.copytree(base.path, tmp_path / "spoiled"))
    shutil.rmtree(spoiled.data_dir)
    with pytest.raises(mtrain.RunError, match="must have its encoded training pairs, but has no"):
        mtrain.train(replaying(spoiled, tmp_path))


def test_test_sets_that_occur_in_replayed_pairs_are_named(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    tree = replaying(base, tmp_path)
    tree["data"]["tests"] = {"leak": base.config.data.train.model_dump()}
    outcome = cli("tokenize", write_config(tmp_path / "config.yaml", tree))
    assert outcome.code == 0, outcome.err
    assert "leak: " in outcome.err
    assert "occur in the training pairs; its scores will be too high" in outcome.err


def test_the_test_sets_of_both_runs_are_scored_before_and_after_fine_tuning(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    """Test sets with the same content are scored once; `train` and `eval` print the same table."""
    tree = tuned(base, tmp_path)
    tree["data"]["tests"] = {
        "same": base.config.data.tests["held_out"].model_dump(),
        "fresh": tree["data"]["tests"]["held_out"],
    }
    path = write_config(tmp_path / "config.yaml", tree)
    outcome = cli("train", path)
    assert outcome.code == 0, outcome.err
    run = RunDir(tmp_path / "run")
    lines = outcome.err.splitlines()
    title = f"test sets before (with {base.path}) and after (with {run.path}):"
    table = lines[lines.index(title) :]
    evaluated = cli("eval", run.path)
    assert evaluated.lines[-len(table) :] == table
    assert [line.split()[:1] + line.split()[2:3] for line in table[2:]] == [
        ["same", "BLEU"],
        ["same", "chrF2"],
        ["fresh", "BLEU"],
        ["fresh", "chrF2"],
    ]
    compared = cli("eval", base.path, "--compare", run.path, "--src", *sides(tree, "fresh"))
    before, after = (line.split() for line in compared.lines[1:3])
    cells = table[4].split()
    assert cells[3:5] == [before[0], after[0]]
    assert cells[5:] == [after[-4], after[-3], after[-2]]
    assert "test sets before" not in cli("train", path).err
    assert "test sets before" not in cli("eval", base.path).out.decode()
    assert "test sets before" not in cli("eval", run.path, "--tests", "same").out.decode()


def copied_as_tuned(run: RunDir, other: RunDir, directory: Path, **data: object) -> RunDir:
    """Copy a run as one that was fine-tuned from another, with some other keys of `data`."""
    copy = RunDir(shutil.copytree(run.path, directory / "run"))
    tree = yaml.safe_load(copy.config_path.read_text("utf-8"))
    tree["training"]["init_from"] = str(other.path)
    tree["data"] |= data
    write_config(copy.config_path, tree)
    return copy


def test_the_scores_before_fine_tuning_are_of_final_weights_also_with_a_checkpoint(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    shutil.rmtree(other.checkpoints_dir)
    run = copied_as_tuned(base, other, tmp_path)
    step = min(checkpoint.steps(run.checkpoints_dir))
    outcome = cli("eval", run.path, "--checkpoint", str(step), "--beam", "1", "--json")
    assert outcome.code == 0, outcome.err
    scores = json.loads(outcome.out)["held_out"]["before_and_after"]["scores"]
    final = json.loads(cli("eval", other.path, "--beam", "1", "--json").out)["held_out"]["scores"]
    assert scores[:2] == final
    assert scores[2]["system"] == str(run.path)


def test_a_base_run_without_the_text_of_its_test_sets_is_scored_on_those_of_the_tuned_run(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    shutil.rmtree(other.data_dir)
    run = copied_as_tuned(base, other, tmp_path)
    outcome = cli("eval", run.path, "--beam", "1", "--json")
    assert outcome.code == 0, outcome.err
    assert "`training.init_from`: its test sets are left out: " in outcome.err
    held_out = json.loads(outcome.out)["held_out"]
    before, after = held_out["before_and_after"]["scores"][::2]
    assert (before["system"], after["system"]) == (str(other.path), str(run.path))
    assert before["value"] == after["value"] == held_out["scores"][0]["value"]


def test_the_test_sets_of_a_base_run_are_scored_by_the_tokenizer_of_its_own_target_language(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    thai = {"tgt_lang": "th", "tests": {"thai": base.config.data.valid.model_dump()}}
    run = copied_as_tuned(base, base, tmp_path, **thai)
    outcome = cli("eval", run.path, "--beam", "1", "--json")
    assert outcome.code == 0, outcome.err
    trees = {name: tree["before_and_after"] for name, tree in json.loads(outcome.out).items()}
    bleu_of = {name: tree["scores"][0] for name, tree in trees.items()}
    assert "|tok:char|" in bleu_of["thai"]["signature"]
    alone = json.loads(cli("eval", base.path, "--beam", "1", "--json").out)["held_out"]
    assert bleu_of["held_out"] == alone["scores"][0]


@needs_fork_server
def test_json_output_and_two_ranks_have_the_scores_before_and_after_fine_tuning(
    cli: Cli, base: RunDir, tmp_path: Path, ranks: Ranks
) -> None:
    """`--json` has the scores of the table, and the base run's test set as an additional one."""
    path = write_config(tmp_path / "config.yaml", tuned(base, tmp_path))
    assert cli("train", path, "--set", "training.max_steps=120").code == 0
    run = tmp_path / "run"
    text, as_json = cli("eval", run), cli("eval", run, "--json")
    trees = json.loads(as_json.out)
    other = f"held_out of {base.path}"
    assert list(trees) == ["held_out", other]
    assert list(trees[other]) == ["num_lines", "before_and_after"]
    for name, tree in trees.items():
        scores = tree["before_and_after"]["scores"]
        assert [score["system"] for score in scores] == [str(base.path)] * 2 + [str(run)] * 2
        (row,) = (row for row in text.lines if row.startswith(f"{name}  ") and "BLEU  " in row)
        cells = row.removeprefix(name).split()
        assert cells[0] == str(tree["num_lines"])
        assert cells[2:4] == [f"{scores[index]['value']:.2f}" for index in (0, 2)]
        (bleu, _) = tree["before_and_after"]["comparisons"]
        assert [cell.rstrip("*") for cell in cells[-2:]] == [
            f"{bleu[key]:.4f}" for key in ("p_bootstrap", "p_randomization")
        ]
    assert scores[2]["value"] > 0
    assert trees["held_out"]["scores"] == trees["held_out"]["before_and_after"]["scores"][2:]
    for option, alone in (([], text), (["--json"], as_json)):
        ended = ranks(2, with_few_trials, ["eval", str(run), *option])
        assert ended.codes == [0, 0], ended.err
        assert ended.out == [alone.out.decode(), ""]
    processes = ranks.start(2, with_closed_stdout, ["eval", str(run)])
    assert ranks.ended(processes, patience_s=60).codes == [0, 0]
    shutil.move(base.path, tmp_path / "moved")
    try:
        ended = ranks(2, with_few_trials, ["eval", str(run)])
    finally:
        shutil.move(tmp_path / "moved", base.path)
    assert ended.codes == [0, 0], ended.err
    assert sum("`training.init_from`: no scores of before: " in line for line in ended.said) == 1


def sides(tree: Tree, name: str) -> list[str]:
    corpus = tree["data"]["tests"][name]
    return [corpus["src"][0], "--ref", corpus["tgt"][0]]


def test_a_test_set_with_the_same_name_in_both_runs_is_labelled_with_the_base_run(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    outcome = cli("train", write_config(tmp_path / "config.yaml", tuned(base, tmp_path)))
    assert outcome.code == 0, outcome.err
    table = [line for line in outcome.err.splitlines() if "BLEU  " in line]
    assert [line.split("  ")[0] for line in table] == ["held_out", f"held_out of {base.path}"]


def test_a_run_without_its_base_run_is_scored_alone_with_a_warning(
    cli: Cli, base: RunDir, tmp_path: Path
) -> None:
    other = RunDir(shutil.copytree(base.path, tmp_path / "other"))
    run = mtrain.train(tuned(other, tmp_path))
    shutil.rmtree(other.path)
    outcome = cli("eval", run)
    assert outcome.code == 0, outcome.err
    assert "test sets before" not in outcome.out.decode()
    assert (
        f"mtrain: `training.init_from`: no scores of before: {other.path}: must be a run folder, "
        "but does not exist.\n"
    ) in outcome.err
