"""Checkpoints are saved whole or not at all, and are loaded bit for bit."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from builders import model_config, transformer
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from mtrain.errors import RunError, WriteError
from mtrain.run import checkpoint
from mtrain.run.checkpoint import Environment, Progress

OURS, OTHER = "fingerprint-of-ours", "fingerprint-of-another"
Tensors = dict[str, Tensor]


def weights(seed: int = 0) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    return {
        "float32": torch.randn(3, 4, generator=rng),
        "float64": torch.randn(5, generator=rng, dtype=torch.float64),
        "bfloat16": torch.randn(2, 2, generator=rng).bfloat16(),
        "transposed": torch.randn(3, 4, generator=rng).T,
        "scalar": torch.tensor(0.1),
        "empty": torch.empty(0, 4),
        "odd": torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45]),
    }


def optimizer() -> Tensors:
    return {"random.torch": torch.arange(16, dtype=torch.uint8), "step": torch.tensor(7)}


def progress(step: int = 7) -> Progress:
    return Progress(
        step=step,
        epoch=2,
        batch=31,
        elapsed_s=0.1 + 0.2,
        num_bad_validations=1,
        bleu_of_step={"3": 12.345678901234567, "7": 11.0},
    )


ENVIRONMENT = Environment("0.2.0", "2.13.0", "cpu", "x86", "float32", 2, "plain", "whole", 1)


def save(directory: Path, step: int = 7, seed: int = 0) -> Path:
    return checkpoint.save(directory, weights(seed), optimizer(), progress(step), OURS, ENVIRONMENT)


def raised(error: Exception) -> None:
    raise error


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        raw, expected_raw = (
            one.contiguous().flatten().view(torch.uint8) for one in (found[name], tensor)
        )
        assert torch.equal(raw, expected_raw), name


def names_in(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


# Save and load


def test_a_checkpoint_is_loaded_bit_for_bit(tmp_path):
    loaded = checkpoint.load(save(tmp_path), OURS)
    assert_same_bits(loaded.weights, weights())
    assert_same_bits(loaded.optimizer, optimizer())
    assert loaded.progress == progress()


def test_weights_are_loaded_bit_for_bit(tmp_path):
    path = tmp_path / "deep" / "model.safetensors"
    checkpoint.save_model(path, weights(), OURS)
    assert_same_bits(checkpoint.load_model(path, OURS), weights())
    assert names_in(tmp_path) == ["deep", "deep/model.safetensors"]


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
def test_weights_of_models_with_and_without_tied_embeddings_are_loaded_bit_for_bit(tie, tmp_path):
    model = transformer(model_config(tie_embeddings=tie))
    named = {name: weight.detach() for name, weight in model.named_parameters()}
    checkpoint.save_model(tmp_path / "model.safetensors", named, OURS)
    assert_same_bits(checkpoint.load_model(tmp_path / "model.safetensors", OURS), named)


def test_a_checkpoint_holds_no_pickle(tmp_path):
    path = save(tmp_path)
    assert names_in(path) == [
        "checkpoint.json",
        "model.safetensors",
        "optimizer.safetensors",
        "progress.json",
    ]
    assert json.loads((path / "progress.json").read_text(encoding="utf-8"))["step"] == 7


def test_a_checkpoint_is_named_after_its_step_and_found_by_it(tmp_path):
    for step in (12, 3, 100):
        save(tmp_path, step)
    found = checkpoint.steps(tmp_path)
    assert list(found) == [3, 12, 100]
    assert all(checkpoint.load(path, OURS).progress.step == step for step, path in found.items())


def test_a_folder_that_may_not_be_read_is_not_one_without_checkpoints(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refused)
    with pytest.raises(PermissionError):
        checkpoint.steps(tmp_path)


def test_a_folder_without_checkpoints_gives_no_steps(tmp_path):
    assert checkpoint.steps(tmp_path) == {}
    assert checkpoint.steps(tmp_path / "absent") == {}


def test_files_and_temporary_folders_are_not_counted_as_checkpoints(tmp_path):
    save(tmp_path, 3)
    (tmp_path / ".step-00000004.0a1b2c3d.tmp").mkdir()  # what a killed save leaves
    (tmp_path / "step-00000005").write_text("a file", encoding="utf-8")
    assert list(checkpoint.steps(tmp_path)) == [3]


def test_a_folder_named_by_a_user_is_neither_counted_nor_pruned(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 4)
    (tmp_path / "step-00000003-good").mkdir()
    checkpoint.prune(tmp_path, [4], raised)
    assert list(checkpoint.steps(tmp_path)) == [4]
    assert names_in(tmp_path)[0] == "step-00000003-good"


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, seed=0)
    path = save(tmp_path, seed=1)
    assert_same_bits(checkpoint.load(path, OURS).weights, weights(1))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


# Damage


def some_model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    checkpoint.save_model(path, weights(), OURS)
    return path


def assert_run_error(path: Path, wanted: str) -> None:
    with pytest.raises(RunError) as caught:
        checkpoint.load_model(path, OURS)
    assert str(caught.value).startswith(f"{path}: ")
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_truncated_weights_file_is_an_error_that_names_it(share, tmp_path):
    path = some_model(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert_run_error(path, "must be a whole safetensors file")


@pytest.mark.parametrize("content", [b"not tensors at all", b"PK\x03\x04" + bytes(200)])
def test_a_weights_file_that_is_not_safetensors_is_an_error_that_names_it(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert_run_error(path, "must be a whole safetensors file")


def test_a_weights_file_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    path = some_model(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert_run_error(path, ": cannot be read: Permission denied.")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "2", "tokenizer": OURS}])
def test_safetensors_of_another_program_are_an_error(metadata, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata=metadata)
    assert_run_error(path, "must be weights in mtrain's format")


def test_a_missing_weights_file_is_an_error_that_says_how_to_make_it(tmp_path):
    assert_run_error(tmp_path / "model.safetensors", "is missing; `mtrain train CONFIG` makes it")


def test_weights_of_another_tokenizer_are_an_error(tmp_path):
    path = some_model(tmp_path)
    with pytest.raises(RunError, match="must belong to the tokenizer beside it") as caught:
        checkpoint.load_model(path, OTHER)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "progress.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "foreign"])
def test_a_checkpoint_with_a_broken_part_is_an_error_that_names_the_part(part, damage, tmp_path):
    path = save(tmp_path)
    if damage == "missing":
        (path / part).unlink()
    else:
        (path / part).write_bytes(b"" if damage == "empty" else b"[1, 2]")
    with pytest.raises(RunError) as caught:
        checkpoint.load(path, OURS)
    assert str(path / part) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["null", "[]", "{}x", '{"step": 7, "wings": 2}', '{"step": 7'])
def test_an_invalid_progress_json_is_an_error(content, tmp_path):
    path = save(tmp_path)
    (path / "progress.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=r"progress\.json"):
        checkpoint.load(path, OURS)


def test_a_progress_json_with_values_of_the_wrong_type_is_an_error(tmp_path):
    path = save(tmp_path)
    (path / "progress.json").write_text('{"step": "seven"}', encoding="utf-8")
    with pytest.raises(RunError, match=r"progress\.json"):
        checkpoint.load(path, OURS)


def test_a_checkpoint_of_another_tokenizer_is_an_error(tmp_path):
    path = save(tmp_path)
    with pytest.raises(RunError, match="tokenizer"):
        checkpoint.load(path, OTHER)


# Interruptions


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_saved_files_get_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        path = save(tmp_path)
        checkpoint.save_model(tmp_path / "model.safetensors", weights(), OURS)
    finally:
        os.umask(before)
    files = [tmp_path / "model.safetensors", *path.iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}
    assert len(files) == 5


class Interrupted(Exception):
    """Raised by the tests in the middle of a save."""


def interrupt_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the given write halfway."""
    calls = []

    def write_half(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
        calls.append(path)
        save_file(tensors, path, metadata=metadata)
        if len(calls) == call:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            raise Interrupted

    monkeypatch.setattr("safetensors.torch.save_file", write_half)


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_save_leaves_nothing_behind(call, tmp_path, monkeypatch):
    interrupt_at(call, monkeypatch)
    with pytest.raises(Interrupted):
        save(tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_save_leaves_the_older_checkpoint_whole(call, tmp_path, monkeypatch):
    path = save(tmp_path)
    before = names_in(tmp_path)
    interrupt_at(call, monkeypatch)
    with pytest.raises(Interrupted):
        save(tmp_path, seed=1)
    assert names_in(tmp_path) == before
    assert_same_bits(checkpoint.load(path, OURS).weights, weights(0))


def test_an_interrupted_save_of_weights_leaves_the_older_file_whole(tmp_path, monkeypatch):
    path = some_model(tmp_path)
    interrupt_at(1, monkeypatch)
    with pytest.raises(Interrupted):
        checkpoint.save_model(path, weights(1), OURS)
    assert names_in(tmp_path) == [path.name]
    assert_same_bits(checkpoint.load_model(path, OURS), weights(0))


def test_a_keyboard_interrupt_during_a_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def cancel(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "model_dump_json", cancel)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path)
    assert names_in(tmp_path) == []


# Pruning


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ([], []),
        ([50], [50]),
        ([50, 10], [10, 50]),
        ([999, 20], [20]),
        (range(99), [10, 20, 30, 40, 50]),
    ],
)
def test_pruning_keeps_only_the_wanted_steps_and_the_optimizer_of_the_newest_two(
    wanted, kept, tmp_path
):
    for step in range(10, 60, 10):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, wanted, raised)
    found = checkpoint.steps(tmp_path)
    assert list(found) == kept
    assert len(list(tmp_path.iterdir())) == len(kept)
    assert [step for step in kept if checkpoint.is_resumable(found[step])] == kept[-2:]
    for step, path in found.items():
        checkpoint.check(path)
        has_optimizer = {"optimizer.safetensors"} if step in kept[-2:] else set()
        names = {"checkpoint.json", "model.safetensors", "progress.json"}
        assert {file.name for file in path.iterdir()} == names | has_optimizer
        assert_same_bits(checkpoint.load_model(path / "model.safetensors", OURS), weights(0))
        assert checkpoint.load_progress(path).step == step
        assert checkpoint.load_environment(path) is not None


def test_a_checkpoint_that_cannot_be_deleted_stays_whole_and_others_are_deleted(
    tmp_path, monkeypatch
):
    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-00000010" or target.name == "checkpoint.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return replace(path, target)

    for step in range(10, 60, 10):
        save(tmp_path, step)
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", refuse)
    errors = []
    checkpoint.prune(tmp_path, [30, 40, 50], errors.append)
    assert [type(error) for error in errors] == [PermissionError, WriteError]
    assert list(checkpoint.steps(tmp_path)) == [10, 30, 40, 50]
    for path in checkpoint.steps(tmp_path).values():
        checkpoint.check(path)
        assert checkpoint.is_resumable(path)


def test_training_does_not_resume_from_a_checkpoint_without_optimizer_state(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, [10, 20, 30], raised)
    for step in (30, 20):
        assert checkpoint.newest_whole(tmp_path, str).name == f"step-000000{step}"
        (checkpoint.path_of(tmp_path, step) / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    with pytest.raises(RunError) as error:
        checkpoint.newest_whole(tmp_path, said.append)
    damaged = checkpoint.path_of(tmp_path, 20) / "model.safetensors"
    assert said == [f"{damaged}: is damaged: its checksum is another."]
    assert str(error.value) == (
        f"{tmp_path}: holds 2 checkpoints, but none that is whole, with the optimizer's state; "
        "restore one from a copy, or delete the folder to train from the beginning."
    )
    assert list(checkpoint.steps(tmp_path)) == [10, 20]


def test_a_manifest_of_another_format_or_without_a_checksum_is_refused(tmp_path):
    path = save(tmp_path) / "checkpoint.json"
    manifest = json.loads(path.read_bytes())
    path.write_text(json.dumps(manifest | {"format": "9"}), encoding="utf-8")
    with pytest.raises(RunError, match="must be in mtrain's format 1, but is in '9' instead"):
        checkpoint.check(path.parent)
    for name in manifest["sha256"]:
        others = {other: digest for other, digest in manifest["sha256"].items() if other != name}
        path.write_text(json.dumps(manifest | {"sha256": others}), encoding="utf-8")
        if name == "optimizer.safetensors":
            checkpoint.check(path.parent)
            continue
        with pytest.raises(RunError, match="is missing or damaged"):
            checkpoint.check(path.parent)


def test_one_damaged_checkpoint_is_counted_in_the_singular(tmp_path):
    (save(tmp_path, 10) / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="holds 1 checkpoint, but none that is whole"):
        checkpoint.newest_whole(tmp_path, str)


# Averages


def test_an_average_is_the_mean_of_the_weights(tmp_path):
    paths = []
    for step in range(1, 4):
        rng = torch.Generator().manual_seed(step)
        tensors = {"a": torch.randn(4, 3, generator=rng), "b": torch.randn(5, generator=rng)}
        paths.append(
            checkpoint.save(tmp_path, tensors, optimizer(), progress(step), OURS, ENVIRONMENT)
        )
    mean = checkpoint.AveragedWeights(paths, OURS)
    for name in ("a", "b"):
        stacked = torch.stack([checkpoint.load(path, OURS).weights[name] for path in paths])
        assert mean[name].dtype == torch.float32
        assert torch.equal(mean[name], stacked.double().mean(0).float())


def test_averaging_does_not_lose_a_small_weight_between_large_ones(tmp_path):
    paths = [
        checkpoint.save(
            tmp_path, {"w": torch.tensor([value])}, {}, progress(step), OURS, ENVIRONMENT
        )
        for step, value in enumerate([1e8, 1.0, -1e8])
    ]
    mean = checkpoint.AveragedWeights(paths, OURS)
    assert mean["w"].item() == pytest.approx(1 / 3, rel=1e-6)


def test_the_average_of_one_checkpoint_equals_it(tmp_path):
    tensors = {"w": torch.randn(7, generator=torch.Generator().manual_seed(1))}
    path = checkpoint.save(tmp_path, tensors, {}, progress(), OURS, ENVIRONMENT)
    assert_same_bits(checkpoint.AveragedWeights([path], OURS), tensors)


def test_averaging_checkpoints_of_different_tokenizers_is_an_error(tmp_path):
    tensors = {"w": torch.zeros(2)}
    ours = checkpoint.save(tmp_path, tensors, {}, progress(1), OURS, ENVIRONMENT)
    others = checkpoint.save(tmp_path, tensors, {}, progress(2), OTHER, ENVIRONMENT)
    with pytest.raises(RunError, match="tokenizer"):
        checkpoint.AveragedWeights([ours, others], OURS)


# Progress


def test_a_step_with_leading_zeros_is_refused():
    with pytest.raises(ValidationError, match="bleu_of_step"):
        Progress.model_validate_json('{"step": 7, "bleu_of_step": {"007": 3.0}}')


def test_best_steps_are_sorted_by_bleu_and_then_by_the_earlier_step():
    done = Progress()
    for step, bleu in [(10, 3.0), (20, 7.0), (100, 7.0), (30, 5.0)]:
        done.step = step
        done.note_validation(1.0, bleu)
    assert done.best_steps() == [20, 100, 30, 10]


def test_steps_are_ranked_by_loss_until_bleu_reaches_min_bleu():
    done, best = Progress(min_bleu=3.0), []
    validations = [(9.0, 0.5), (8.0, 2.9), (7.0, 0.1), (7.5, 2.9), (7.8, 3.0), (6.0, 2.9), (8, 3.1)]
    for step, (loss, bleu) in enumerate(validations, start=1):
        done.step = step
        done.note_validation(loss, bleu)
        best.append((done.best_steps()[0], done.num_bad_validations))
    assert best == [(1, 0), (2, 0), (3, 0), (3, 1), (5, 0), (5, 1), (7, 0)]
    assert done.best_steps() == [7, 5, 6, 3, 4, 2, 1]


def test_validations_count_as_bad_until_one_is_better_than_all_before():
    done, bad = Progress(), []
    for step, bleu in enumerate([3.0, 4.0, 4.0, 3.5, 5.0, 4.9]):
        done.step = step
        done.note_validation(1.0, bleu)
        bad.append(done.num_bad_validations)
    assert bad == [0, 0, 1, 2, 0, 1]
