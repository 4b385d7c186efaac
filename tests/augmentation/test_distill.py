"""A student is as wide as its teacher, learns from its translations, and is compared with it."""

import gzip
import json
from pathlib import Path

import pytest
import yaml
from conftest import Cli
from tasks import Tree, reverse_task, tiny_tree, write, write_config

import mtrain
from mtrain.augmentation import augment as augmenting
from mtrain.augmentation.augment import AugmentRequest
from mtrain.augmentation.distill import Student, student_config, student_model
from mtrain.autoconfig.presets import PRESETS
from mtrain.config import config_file
from mtrain.config.sections import ModelConfig
from mtrain.run.run_dir import RunDir

SYSTEMS = ["teacher", "teacher", "student", "student"]
FEW = ["--set", "training.max_steps=4"]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a config without a model: a student is as wide as its teacher."""
    tree = tiny_tree(tmp_path, reverse_task, num_train=80)
    del tree["model"]
    return tree


@pytest.mark.parametrize(
    ("student", "layers"),
    [("deep-shallow", (6, 1)), ("6-1", (6, 1)), ("12-1", (12, 1)), ("6-2", (6, 2))],
)
def test_a_student_differs_from_its_teacher_only_in_its_numbers_of_layers(
    student: Student, layers: tuple[int, int]
) -> None:
    teacher = ModelConfig(d_model=256, d_ff=1024, num_encoder_layers=3, num_decoder_layers=3)
    model = student_model(student, teacher)
    assert (model.num_encoder_layers, model.num_decoder_layers) == layers
    update = {"num_encoder_layers": 3, "num_decoder_layers": 3}
    assert model.model_copy(update=update) == teacher


def test_the_tiny_student_has_the_sizes_of_the_tiny_preset() -> None:
    teacher = ModelConfig(d_model=512, num_heads=8, d_ff=2048, dropout=0.1)
    assert student_model("tiny", teacher) == PRESETS[0].model.model_copy(update={"dropout": 0.1})


def test_a_student_has_the_dropout_rates_of_its_config_and_other_keys_must_fit_the_teacher(
    tree: Tree, reverser: RunDir
) -> None:
    tree["model"] = {"dropout": 0.45, "activation_dropout": 0.2}
    request = reverser, "6-1", Path("pairs"), "student"
    model = student_config(mtrain.load_config(tree), *request).model
    teacher = reverser.config.model
    free = {"dropout": 0.45, "activation_dropout": 0.2}
    assert model == student_model("6-1", teacher).model_copy(update=free)
    del tree["model"]["dropout"]
    assert student_config(mtrain.load_config(tree), *request).model.dropout == teacher.dropout
    tree["training"]["init_from"] = "deleted"  # a fine-tuned run does not need it any more
    assert (
        student_config(config_file.from_tree(tree, "config"), *request).training.init_from is None
    )
    del tree["training"]["init_from"]
    for key, expected, value in (
        ("num_decoder_layers", teacher.num_decoder_layers, 4),
        ("attention_window", "null", 9),
    ):
        tree["model"] = {key: value}
        with pytest.raises(mtrain.ConfigError) as error:
            student_config(mtrain.load_config(tree), *request)
        assert str(error.value) == (
            f"`model.{key}` must be {expected}, as in {reverser.path}, but is {value} instead; "
            "`--student` sets the size of the student."
        )


def test_distill_trains_on_the_teachers_translations_and_compares_student_and_teacher(
    cli: Cli, tree: Tree, reverser: RunDir, tmp_path: Path, few_trials: None
) -> None:
    config_path = write_config(tmp_path / "aa-bb.yaml", tree)
    mono = write(tmp_path / "mono.aa", [pair.src for pair in reverse_task(30, 8)])
    command = ["distill", config_path, "--teacher", reverser.path, "--student", "6-2", *FEW]
    command += ["--mono", mono, "--run", tmp_path / "student"]
    done = cli(*command)
    assert done.code == 0, done.err
    run = RunDir(tmp_path / "student")
    model = run.config.model
    sizes = model.d_model, model.num_encoder_layers, model.num_decoder_layers
    assert sizes == (reverser.config.model.d_model, 6, 2)
    corpora = [named.model_dump() for named in run.config.data.train]
    assert corpora == [tree["data"]["train"], {"synthetic": f"{run.path}-pairs"}]
    shard = Path(f"{run.path}-pairs") / "pairs-00000.jsonl.gz"
    with gzip.open(shard, "rt", encoding="utf-8") as stream:
        files = {json.loads(line)["file"] for line in stream}
    assert files == {tree["data"]["train"]["src"][0], mono}
    assert max(map(len, done.lines)) <= 80
    assert [line.split()[0] for line in done.lines[:5]] == ["system", *SYSTEMS]
    assert done.lines[5] == ""
    assert done.lines[-2].endswith(" if neither is better; bs by")
    head, *rows = [line.split() for line in done.lines[6:-2]]
    assert head[:2] == ["test", "set"]
    assert [row[1] for row in rows] == ["teacher"] * 4 + ["student"] * 4
    searches = [" ".join(row[2:-4]) for row in rows if row[1] == "student"]
    assert [text.split()[0] for text in searches] == ["beam", "beam", "greedy", "greedy"]
    evaluated = yaml.safe_load("\n".join(cli("eval", reverser.path, "--json").lines))
    (bleu,) = (own for own in evaluated["held_out"]["scores"] if own["metric"] == "BLEU")
    assert f"BLEU {bleu['value']:.2f}" in " ".join(rows[0])
    again = cli(*command)
    assert again.code == 0
    assert "made already" in again.err
    assert "finished at step 4" in again.err


def test_a_teacher_of_the_other_direction_and_a_config_without_tests_are_refused(
    cli: Cli, tree: Tree, reverser: RunDir, back_run: Path, tmp_path: Path
) -> None:
    config_path = write_config(tmp_path / "aa-bb.yaml", tree)
    done = cli("distill", config_path, "--teacher", back_run)
    assert (done.code, done.err) == (
        2,
        f"mtrain: {back_run}: must translate aa to bb for `--teacher`, but translates bb to aa "
        "instead.\n",
    )
    write_config(config_path, tree | {"data": tree["data"] | {"tests": {}}})
    done = cli("distill", config_path, "--teacher", reverser.path)
    assert (done.code, done.err) == (
        2,
        "mtrain: `data.tests` must name a test set to compare on, but is empty.\n",
    )
    assert not (tmp_path / "run-deep-shallow").exists()


def test_an_error_of_the_translations_names_no_option_of_augment(
    cli: Cli, tree: Tree, reverser: RunDir, tmp_path: Path
) -> None:
    tree["data"]["train"] = tree["data"]["valid"]  # all is held out
    command = ["distill", write_config(tmp_path / "aa-bb.yaml", tree), "--run", tmp_path / "run"]
    command += ["--teacher", reverser.path, "--beam", "1"]
    done = cli(*command)
    assert done.code == 2
    assert "mtrain: `data.train` must have a pair that can be used, but all are dropped" in done.err
    (tmp_path / "run-pairs").mkdir()
    (tmp_path / "run-pairs" / "file").touch()
    done = cli(*command)
    assert done.code == 2
    assert done.err.endswith("did not write it; choose another folder.\n")


def test_the_run_folder_of_another_training_is_refused_before_anything_is_translated(
    cli: Cli, tree: Tree, reverser: RunDir, noisy: RunDir, tmp_path: Path
) -> None:
    config_path = write_config(tmp_path / "aa-bb.yaml", tree)
    done = cli("distill", config_path, "--teacher", reverser.path, "--run", noisy.path)
    assert (done.code, done.err) == (
        2,
        f"mtrain: {noisy.path}: was tokenized with another `data` section; choose another --run, "
        "or delete this run folder.\n",
    )
    assert not list(noisy.path.parent.glob("*pairs*"))


def test_a_file_in_place_of_the_run_folder_is_refused_before_anything_is_translated(
    tree: Tree, reverser: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augmenting, "augment", None)
    (tmp_path / "student").touch()
    with pytest.raises(mtrain.RunError, match=r"student: must be a run folder, but is a file"):
        mtrain.distill(tree, reverser.path, run_dir=str(tmp_path / "student"))


def test_a_device_that_the_student_cannot_be_trained_on_is_refused_before_anything_is_translated(
    tree: Tree, reverser: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augmenting, "augment", None)
    tree["training"]["device"] = "tpu"
    with pytest.raises(mtrain.ConfigError, match=r"^`training\.device` must be auto, cpu, "):
        mtrain.distill(tree, reverser.path)


@pytest.mark.parametrize("is_default", [True, False])
def test_the_students_folders_are_beside_a_run_folder_whose_name_ends_in_a_slash(
    tree: Tree, reverser: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_default: bool
) -> None:
    outputs = list[str]()

    def stop(request: AugmentRequest, *_: object) -> None:
        outputs.append(str(request.output))
        raise mtrain.DataError("nothing is translated")

    monkeypatch.setattr(augmenting, "augment", stop)
    config = mtrain.load_config(tree | {"run_dir": f"{tmp_path}/base/"})
    run_dir = None if is_default else f"{tmp_path}/base-6-1/"
    with pytest.raises(mtrain.DataError, match="nothing is translated"):
        mtrain.distill(config, reverser.path, student="6-1", run_dir=run_dir)
    assert outputs == [f"{tmp_path}/base-6-1-pairs"]
