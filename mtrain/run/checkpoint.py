"""Weights and checkpoints on disk: written atomically, verified when loaded, averaged.

A checkpoint is a folder `step-NNNNNNNN` with model.safetensors, optimizer.safetensors (with the
random state), progress.json, and checkpoint.json: the format, the SHA-256 of each of the other
files, and the environment. Older ones are left without optimizer.safetensors. Nothing is pickled.
Only the functions that read or write tensors import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from mtrain.config import config_file
from mtrain.errors import RunError, WriteError
from mtrain.io.atomic import remove_dir, sha256, whole_dir, whole_file
from mtrain.io.text_width import count

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "1"
_HEADER = "mtrain"  # the one metadata key of our safetensors files
_OPTIMIZER = "optimizer.safetensors"
_PARTS = ("model.safetensors", _OPTIMIZER, "progress.json")
_MANIFEST = "checkpoint.json"
_NUM_RESUMABLE = 2  # the newest checkpoints: one to resume from, and one in case it is damaged
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in a message of safetensors
Weights = dict[str, "Tensor"]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Line = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]  # printable
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
StepName = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,14})$")]


class Progress(BaseModel):
    """The counters of a training: all that resuming needs besides tensors (progress.json)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: Count = 0  # updates made
    epoch: Count = 0  # with `batch`, the position of the next batch, see `data.batch.Position`
    batch: Count = 0
    # number of distinct `until` values of corpora that have passed; selects the mixture that
    # `batch` counts in
    phase: Count = 0
    elapsed_s: float = 0.0  # spent on training and validation, over all processes
    num_bad_validations: Count = 0  # since the best one
    num_skipped: Count = 0  # updates whose loss or gradient was not finite
    num_skipped_in_a_row: Count = 0
    unlogged_loss: float = 0.0  # sums since the last log line
    unlogged_nll: float = 0.0
    unlogged_tokens: Count = 0
    # `elapsed_s` before each update since the last log line, if the learning rate or the mixture
    # depends on it
    unlogged_began_s: list[float] = []
    loss_scale: Annotated[float, Field(ge=0, le=2**24)] = 0.0  # of float16; 0 if it is not scaled
    growth_tracker: Count = 0  # finite updates in a row at this scale
    bleu_of_step: dict[StepName, float] = {}  # of each validation
    loss_of_step: dict[StepName, float] = {}
    min_bleu: float = Field(default=0.0, exclude=True)  # lower BLEU is noise; not saved

    def note_validation(self, loss: float, bleu: float) -> None:
        """Record the validation of this step, and reset the patience if it is the best."""
        step = str(self.step)
        self.loss_of_step[step], self.bleu_of_step[step] = loss, bleu
        is_best = self.best_steps()[0] == self.step
        self.num_bad_validations = 0 if is_best else self.num_bad_validations + 1

    def best_steps(self) -> list[int]:
        """Return the validated steps, the best first, and the earlier of equal ones."""
        steps = sorted(map(int, self.bleu_of_step))
        return sorted(steps, key=self.quality, reverse=True)

    def quality(self, step: int) -> tuple[float, float]:
        """Return the sort key of the validation of a step."""
        loss = self.loss_of_step.get(str(step), math.inf)
        return self.quality_of(loss, self.bleu_of_step[str(step)])

    def quality_of(self, loss: float, bleu: float) -> tuple[float, float]:
        """Return a sort key of validations, greater for a better one.

        It is the BLEU if that is at least `min_bleu`, else -loss, which is less than any BLEU.
        """
        return (bleu, 0.0) if bleu >= self.min_bleu else (0.0, -loss)


class Checkpoint(NamedTuple):
    """The content of a checkpoint folder; `optimizer` holds the random state, too."""

    weights: Weights
    optimizer: Weights
    progress: Progress


class Environment(NamedTuple):
    """Software, hardware and thread counts, which determine how sums are rounded."""

    mtrain: Line
    torch: Line
    device: Line
    processor: Line
    precision: Line
    num_threads: Annotated[int, Field(ge=1, le=2**16)]
    kernels: Line
    batches: Line  # "whole", or the size from which on they were halved because memory ran out
    num_ranks: Annotated[int, Field(ge=1, le=2**16)]


class FinalWeightsInfo(NamedTuple):
    """The origin of final weights."""

    steps: list[Count]  # of the checkpoints that were averaged
    bleu: float  # on the validation set
    last_step: Count  # at which the training ended


class _CheckpointManifest(BaseModel):
    """The content of checkpoint.json; `sha256` has the digest of each file of the checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: Line
    sha256: dict[str, Sha256]
    environment: Environment | None = None

    @model_validator(mode="after")
    def _has_parts(self) -> _CheckpointManifest:
        if {*self.sha256} not in ({*_PARTS}, {*_PARTS} - {_OPTIMIZER}):
            raise ValueError("the checksums must be those of the parts")
        return self

    def write(self, path: Path) -> None:
        """Write the manifest into a checkpoint folder."""
        tree = self.model_dump(exclude_none=True)
        if self.environment is not None:
            tree["environment"] = self.environment._asdict()
        path.write_text(json.dumps(tree, indent=2), encoding="utf-8")


class _Header(BaseModel):
    """The metadata of a safetensors file of mtrain."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    format: str = "something else"
    tokenizer: str = ""
    origin: FinalWeightsInfo | None = None
    sha256: str | None = None


def save_model(
    path: Path,
    weights: Mapping[str, Tensor],
    tokenizer: str,
    info: FinalWeightsInfo | None = None,
) -> None:
    """Write final weights, with the fingerprint of their tokenizer, a digest and their origin."""
    header: dict[str, Any] = {"sha256": digest(weights)}
    if info is not None:
        header["origin"] = info._asdict()
    with whole_file(path) as beside:
        _write_tensors(beside, weights, tokenizer, header)


def load_final_weights_info(path: Path) -> FinalWeightsInfo | None:
    """Return the origin of final weights; None if it is not stored, or cannot be read."""
    info = _read_header(path).origin
    return info if info is not None and info.steps else None


def load_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the tokenizer of some weights; None if it cannot be read."""
    return _read_header(path).tokenizer or None


def load_model(path: Path, tokenizer: str, verify: bool = False) -> Weights:
    """Read weights; check that they were trained with the tokenizer of this fingerprint.

    `verify` compares the digest of final weights, too.

    Raises:
        RunError: if the file is missing, damaged, or made for another tokenizer.
    """
    header = check_header(path, tokenizer)
    with _reading(path) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if verify and header.sha256 not in (None, digest(weights)):  # None in checkpoints
        raise RunError(
            f"{path}: is damaged: its checksum is another; restore it from a copy of the run, or "
            "delete it, and `mtrain train CONFIG` makes it again from the checkpoints."
        )
    return weights


def check_header(path: Path, tokenizer: str) -> _Header:
    """Return the header of weights; raise RunError unless they belong to this tokenizer."""
    with _reading(path):
        header = _read_header(path)
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
    return header


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open weights; raise RunError if the file is missing, not readable or damaged."""
    if not path.is_file():
        raise RunError(f"{path}: is missing; `mtrain train CONFIG` makes it.")
    if not os.access(path, os.R_OK):  # which safetensors calls missing
        raise RunError(f"{path}: cannot be read: Permission denied.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: must be a whole safetensors file, but is not: {error}.") from None


def _read_header(path: Path) -> _Header:
    """Return the header of a safetensors file; an empty one if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return _Header.model_validate_json((file.metadata() or {}).get(_HEADER, "{}"))
    except (SafetensorError, OSError, ValidationError):
        return _Header()


def save(
    directory: Path,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    progress: Progress,
    tokenizer: str,
    environment: Environment,
) -> Path:
    """Write a checkpoint folder, named after its step, atomically.

    Raises:
        WriteError: if it cannot be written.
    """
    path = path_of(directory, progress.step)
    with whole_dir(path) as beside:
        _write_tensors(beside / "model.safetensors", weights, tokenizer)
        _write_tensors(beside / _OPTIMIZER, optimizer, tokenizer)
        (beside / "progress.json").write_text(progress.model_dump_json(), encoding="utf-8")
        sums = {name: sha256(beside / name) for name in _PARTS}
        manifest = _CheckpointManifest(format=FORMAT, sha256=sums, environment=environment)
        manifest.write(beside / _MANIFEST)
    return path


def _read_manifest(path: Path) -> _CheckpointManifest:
    """Return the manifest of a checkpoint folder; raise RunError unless it is one of ours."""
    try:
        manifest = _CheckpointManifest.model_validate_json((path / _MANIFEST).read_bytes())
    except (OSError, ValidationError):
        raise RunError(f"{path / _MANIFEST}: is missing or damaged.") from None
    if manifest.format != FORMAT:
        raise RunError(
            f"{path / _MANIFEST}: must be in mtrain's format {FORMAT}, but is in "
            f"{manifest.format!r} instead."
        )
    return manifest


def is_resumable(path: Path) -> bool:
    """Return whether a checkpoint has its optimizer state.

    Raises:
        RunError: if its manifest is missing or damaged.
    """
    return _OPTIMIZER in _read_manifest(path).sha256


def check(path: Path) -> None:
    """Check the digest of every file of a checkpoint folder.

    Raises:
        RunError: if a file is missing or differs.
    """
    for name, expected in _read_manifest(path).sha256.items():
        try:
            actual = sha256(path / name)
        except OSError as error:
            raise RunError(f"{path / name}: cannot be read: {error.strerror}.") from None
        if actual != expected:
            raise RunError(f"{path / name}: is damaged: its checksum is another.")


def load_environment(path: Path) -> Environment | None:
    """Return the environment that a whole checkpoint was saved in; None if it is not stored."""
    return _read_manifest(path).environment


def newest_whole(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest whole checkpoint, or None if there are no checkpoints.

    Newer checkpoints, which are damaged, are renamed to `damaged-step-NNNNNNNN`.

    Raises:
        RunError: if there are checkpoints, but none to resume from; then nothing is changed.
    """
    damaged: dict[Path, RunError] = {}
    saved = steps(directory)
    for path in reversed(saved.values()):
        try:
            check(path)
            if not is_resumable(path):
                break
        except RunError as error:
            damaged[path] = error
            continue
        for damaged_path, reason in damaged.items():
            number, renamed = 1, damaged_path.with_name(f"damaged-{damaged_path.name}")
            while renamed.exists():
                number += 1
                renamed = damaged_path.with_name(f"damaged-{damaged_path.name}-{number}")
            damaged_path.replace(renamed)
            warn(
                f"{reason} The checkpoint before it is taken; this one is kept as {renamed.name}, "
                "and may be deleted."
            )
        return path
    for reason in damaged.values():
        warn(str(reason))
    if saved:
        raise RunError(
            f"{directory}: holds {count(len(saved), 'checkpoint')}, but none that is whole, with "
            "the optimizer's state; restore one from a copy, or delete the folder to train from "
            "the beginning."
        )
    return None


def load(path: Path, tokenizer: str) -> Checkpoint:
    """Read a checkpoint folder.

    Raises:
        RunError: if a part is missing, damaged, or made for another tokenizer.
    """
    weights = load_model(path / "model.safetensors", tokenizer)
    optimizer = load_model(path / _OPTIMIZER, tokenizer)
    return Checkpoint(weights, optimizer, load_progress(path))


def load_progress(path: Path) -> Progress:
    """Read the counters of a checkpoint.

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
        reason = f"`{key}` must be {config_file.requirement(problem)}"
        raise RunError(f"{path}/progress.json: {reason}.") from None
    if path != path_of(path.parent, progress.step):
        raise RunError(
            f"{path}/progress.json: `step` must be that of its folder, but is {progress.step:,} "
            "instead."
        )
    return progress


def steps(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their step, oldest first.

    Raises:
        OSError: if the folder may not be read.
    """
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    numbers = [name.removeprefix("step-") for name in names if name.startswith("step-")]
    known = sorted(int(number) for number in numbers if number.isdecimal())
    paths = {step: path_of(directory, step) for step in known}  # `step-1` is none of our names
    return {step: path for step, path in paths.items() if path.is_dir() and not path.is_symlink()}


def path_of(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, or would be."""
    return directory / f"step-{step:08d}"


def prune(
    directory: Path, kept: Collection[int], warn: Callable[[OSError | WriteError], None]
) -> None:
    """Delete checkpoints not in `kept`, and optimizer states but the newest `_NUM_RESUMABLE`."""
    saved = steps(directory)
    resumable = [step for step in saved if step in kept][-_NUM_RESUMABLE:]
    for step, path in saved.items():
        try:
            if step not in kept:
                remove_dir(path)
            elif step not in resumable and (path / _OPTIMIZER).exists():
                _delete_optimizer(path)
        except (OSError, WriteError) as error:
            warn(error)


def _delete_optimizer(path: Path) -> None:
    """Delete the optimizer state of a checkpoint; a damaged checkpoint stays as it is."""
    try:
        manifest = _read_manifest(path)
    except RunError:
        return
    manifest.sha256.pop(_OPTIMIZER, None)
    with whole_file(path / _MANIFEST) as beside:
        manifest.write(beside)
    (path / _OPTIMIZER).unlink()


class AveragedWeights(Mapping[str, "Tensor"]):
    """The mean weights of several checkpoints, summed in float64.

    A tensor is read only when it is accessed, so that memory never holds the whole model.

    Raises:
        RunError: if a file is missing, damaged, or made for another tokenizer.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: str) -> None:
        self._paths = [path / "model.safetensors" for path in paths]
        for path in self._paths:
            check_header(path, tokenizer)
        with _reading(self._paths[0]) as file:
            self._names = set(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        total: Tensor | None = None
        for path in self._paths:
            with _reading(path) as file:
                tensor = file.get_tensor(name).double()
            total = tensor if total is None else total + tensor
        assert total is not None
        return (total / len(self._paths)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: of names, types, shapes and bits."""
    import torch

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], tokenizer: str, extra_header: Mapping[str, Any] = {}
) -> None:
    # one key, because safetensors writes several in random order: equal weights, equal files
    header = {"format": FORMAT, "tokenizer": tokenizer, **extra_header}
    save_tensors(path, tensors, {_HEADER: json.dumps(header, sort_keys=True)})


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors into a new file, with the permissions of any new file.

    Raises:
        OSError: if they cannot be written.
    """
    from safetensors.torch import save_file

    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # safetensors would make it readable by its owner alone
    try:
        save_file(cpu_tensors, path, metadata=metadata)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        why = os.strerror(int(number[1])) if number else str(error)
        raise OSError(int(number[1]) if number else 0, why) from None
    path.chmod(mode)
