"""Weights and training state on disk: saved whole or not at all, checked when loaded, averaged.

Tensors are safetensors, everything else is JSON; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from mtrain.errors import RunError
from mtrain.io.atomic import sha256, whole_dir, whole_file

FORMAT = "1"
_HEADER = "mtrain"  # the one key of a file's metadata
_PARTS = ("model.safetensors", "optimizer.safetensors", "progress.json")
_SEAL = "checkpoint.json"  # the format, and a checksum of every part
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors names one
Weights = dict[str, Tensor]
Count = Annotated[int, Field(ge=0, lt=2**53)]
StepName = Annotated[str, Field(pattern="^[0-9]{1,15}$")]


class Progress(BaseModel):
    """How far a training is: everything that resuming needs besides tensors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: Count = 0
    epoch: Count = 0
    batch: Count = 0
    elapsed_s: float = 0.0
    num_bad_validations: Count = 0
    num_left_out: Count = 0
    num_left_out_in_a_row: Count = 0
    unlogged_loss: float = 0.0
    unlogged_nll: float = 0.0
    unlogged_tokens: Count = 0
    loss_scale: Annotated[float, Field(ge=0, le=2**24)] = 0.0  # none
    num_scaled_well: Count = 0
    bleu_of_step: dict[StepName, float] = {}

    def note_bleu(self, bleu: float) -> None:
        """Remember the validation BLEU of this step, and whether it was the best so far."""
        is_better = bleu > max(self.bleu_of_step.values(), default=-1.0)
        self.num_bad_validations = 0 if is_better else self.num_bad_validations + 1
        self.bleu_of_step[str(self.step)] = bleu

    def best_steps(self) -> list[int]:
        """Return the validated steps, best BLEU first; of equals, the earlier."""
        by_bleu = sorted(self.bleu_of_step.items(), key=lambda item: (-item[1], int(item[0])))
        return [int(step) for step, _ in by_bleu]


class Checkpoint(NamedTuple):
    """A checkpoint as it was loaded."""

    weights: Weights
    optimizer: Weights
    progress: Progress


class Environment(NamedTuple):
    """What decides the last bits of a training: where one differs, sums are rounded otherwise."""

    mtrain: str
    torch: str
    device: str
    processor: str
    precision: str
    threads: int
    kernels: str
    batches: str = "whole"  # or made in halves, for want of memory
    ranks: int = 1


class FinalWeightsInfo(NamedTuple):
    """The checkpoints that final weights are made of, averaged if several, and their BLEU.

    `reached` is the step at which the training had ended; older files do not say it.
    """

    steps: list[Count]
    bleu: float
    reached: Count | None = None


class _Header(BaseModel):
    """What mtrain writes into a file of tensors."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    format: str = "something else"
    tokenizer: str = ""
    origin: FinalWeightsInfo | None = None
    sha256: str | None = None


def save_model(
    path: Path,
    weights: Mapping[str, Tensor],
    tokenizer: str,
    origin: FinalWeightsInfo | None = None,
) -> None:
    """Write weights, with the fingerprint of the tokenizer that they fit, and their origin."""
    header: dict[str, Any] = {"sha256": digest(weights)}
    if origin is not None:
        header["origin"] = origin._asdict()
    with whole_file(path) as beside:
        _write_tensors(beside, weights, tokenizer, header)


def load_final_weights_info(path: Path) -> FinalWeightsInfo | None:
    """Return what final weights are made of; None if they do not say, or cannot be read."""
    try:
        origin = _read_header(path).origin
    except (SafetensorError, OSError):
        return None
    return origin if origin is not None and origin.steps else None


def load_fingerprint(path: Path) -> str | None:
    """Return that of the tokenizer which weights belong to; None if they cannot be read."""
    try:
        return _read_header(path).tokenizer or None
    except (SafetensorError, OSError):
        return None


def load_model(path: Path, tokenizer: str) -> Weights:
    """Read weights and check that they were trained with this tokenizer.

    Raises:
        RunError: if the file is missing, damaged, or made for another tokenizer.
    """
    if not path.is_file():
        raise RunError(f"{path}: is missing; `mtrain train CONFIG` makes it.")
    try:
        header = _read_header(path)
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: must be a whole safetensors file, but is not: {error}.") from None
    if header.format != FORMAT:
        raise RunError(
            f"{path}: must be weights in mtrain's format {FORMAT}, but is {header.format!r} "
            "instead."
        )
    if header.tokenizer != tokenizer:
        raise RunError(
            f"{path}: must belong to the tokenizer beside it, but was trained with another one; "
            "restore the run's own tokenizer folder, or train again."
        )
    return weights


def check_model(path: Path, tokenizer: str) -> Weights:
    """Read final weights as `load_model` does, and check that they are those that were saved.

    Raises:
        RunError: as `load_model`, or if the weights have another checksum.
    """
    weights = load_model(path, tokenizer)
    expected = _read_header(path).sha256  # older files have none
    if expected is not None and expected != digest(weights):
        raise RunError(
            f"{path}: is damaged: its checksum is another; restore it from a copy of the run, or "
            "delete it, and `mtrain train CONFIG` makes it again from the checkpoints."
        )
    return weights


def _read_header(path: Path) -> _Header:
    with safe_open(path, framework="pt") as file:
        try:
            return _Header.model_validate_json((file.metadata() or {}).get(_HEADER, "{}"))
        except ValidationError:
            return _Header()


def save(
    directory: Path,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    progress: Progress,
    tokenizer: str,
    made_with: Environment | None = None,
) -> Path:
    """Write a checkpoint folder, named after its step, whole or not at all.

    Raises:
        WriteError: if the disk does not take it.
    """
    path = directory / _name(progress.step)
    with whole_dir(path) as beside:
        _write_tensors(beside / "model.safetensors", weights, tokenizer)
        _write_tensors(beside / "optimizer.safetensors", optimizer, tokenizer)
        (beside / "progress.json").write_text(progress.model_dump_json(), encoding="utf-8")
        sums = {name: sha256(beside / name) for name in _PARTS}
        seal: dict[str, Any] = {"format": FORMAT, "sha256": sums}
        if made_with is not None:
            seal["made_with"] = made_with._asdict()
        (beside / _SEAL).write_text(json.dumps(seal, indent=2), encoding="utf-8")
    return path


def check(path: Path) -> None:
    """Check that a checkpoint folder is whole: every file is the one that was saved.

    Raises:
        RunError: if a file is missing or is another.
    """
    try:
        seal = json.loads((path / _SEAL).read_bytes())
        sums = {name: str(seal["sha256"][name]) for name in _PARTS}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise RunError(f"{path / _SEAL}: is missing or damaged.") from None
    for name, expected in sums.items():
        try:
            found = sha256(path / name)
        except OSError as error:
            raise RunError(f"{path / name}: cannot be read: {error.strerror}.") from None
        if found != expected:
            raise RunError(f"{path / name}: is damaged: its checksum is another.")


def load_environment(path: Path) -> Environment | None:
    """Return what a whole checkpoint was made with; None if it is too old to say."""
    try:
        return Environment(**json.loads((path / _SEAL).read_bytes())["made_with"])
    except (TypeError, KeyError):
        return None


def newest_whole(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is whole; None if there is none at all.

    Those after it, which are damaged, are renamed, so that nothing takes them for whole.

    Raises:
        RunError: if there are checkpoints, but none is whole; then nothing is changed.
    """
    damaged: list[Path] = []
    for path in reversed(steps(directory).values()):
        try:
            check(path)
        except RunError as error:
            warn(f"{error} The checkpoint before it is taken.")
            damaged.append(path)
            continue
        for other in damaged:
            _set_aside(other)
        return path
    if damaged:
        raise RunError(
            f"{directory}: holds {len(damaged)} checkpoints, but none that is whole; restore one "
            "from a copy, or delete the folder to train from the beginning."
        )
    return None


def _set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, whatever else has been damaged before."""
    number, aside = 1, path.with_name(f"damaged-{path.name}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    path.replace(aside)


def load(path: Path, tokenizer: str) -> Checkpoint:
    """Read a checkpoint folder.

    Raises:
        RunError: if a part is missing, damaged, or made for another tokenizer.
    """
    weights = load_model(path / "model.safetensors", tokenizer)
    optimizer = load_model(path / "optimizer.safetensors", tokenizer)
    return Checkpoint(weights, optimizer, load_progress(path))


def load_progress(path: Path) -> Progress:
    """Read how far a training was when it saved a checkpoint.

    Raises:
        RunError: if it is missing or damaged.
    """
    try:
        progress = Progress.model_validate_json((path / "progress.json").read_bytes())
    except OSError as error:
        raise RunError(f"{path}/progress.json: cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "the file"
        raise RunError(f"{path}/progress.json: `{key}`: {problem['msg']}.") from None
    if path.name != _name(progress.step):
        raise RunError(
            f"{path}/progress.json: `step` must be that of its folder, but is {progress.step:,} "
            "instead."
        )
    return progress


def steps(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their step, oldest first."""
    numbers = [path.name.removeprefix("step-") for path in directory.glob("step-*")]
    known = sorted(int(number) for number in numbers if number.isdecimal())
    paths = {step: directory / _name(step) for step in known}  # its own name, and no other
    return {step: path for step, path in paths.items() if path.is_dir() and not path.is_symlink()}


def path_of(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, or would be."""
    return directory / _name(step)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def delete_all_but(directory: Path, kept: Collection[int]) -> None:
    """Delete the checkpoints of all steps but the `kept` ones."""
    for step, path in steps(directory).items():
        if step not in kept:
            shutil.rmtree(path)


def delete_unfinished(directory: Path) -> None:
    """Delete what is left of saves that a kill cut off; nobody else may be saving."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path)


def average(paths: Sequence[Path], tokenizer: str) -> Weights:
    """Return the mean of the weights of several checkpoints, summed in float64."""
    total: Weights = {}
    for path in paths:
        for name, tensor in load_model(path / "model.safetensors", tokenizer).items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of tensors by name, type, shape and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(uint8).numpy().data)
    return digest.hexdigest()


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], tokenizer: str, more: Mapping[str, Any] = {}
) -> None:
    # one key: safetensors writes several in random order, and equal weights are to be equal files
    header = {"format": FORMAT, "tokenizer": tokenizer, **more}
    save_tensors(path, tensors, {_HEADER: json.dumps(header, sort_keys=True)})


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors into a new file, which may be read by whoever may read other new files.

    Raises:
        OSError: if the disk does not take them.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # safetensors would leave the file to its owner alone
    try:
        save_file(whole, path, metadata=metadata)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        why = os.strerror(int(number[1])) if number else str(error)
        raise OSError(int(number[1]) if number else 0, why) from None
    path.chmod(mode)
