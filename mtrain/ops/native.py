"""Load the compiled library that this processor can run, and call its functions with tensors.

The libraries are compiled when mtrain is installed (`build`). Without one, the operations use their
plain PyTorch formulas. The environment variable `MTRAIN_NATIVE` overrides the choice:

    0             plain formulas
    avx2, ...     the library for one instruction set of `build.instruction_sets`
    build         a library that is compiled for this process alone, and deleted once loaded
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from mtrain.errors import ConfigError
from mtrain.ops import build
from mtrain.ops.header import signatures
from mtrain.runtime.device import processor_features, processor_has, request_tiles

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}  # the suffixes of C functions
_TENSOR_TYPES = (Tensor, nn.Parameter)
_NO_MEMORY, _BAD_INDEX = 1, 2  # of `status` in `ops.h`; 0 is success


class Library(NamedTuple):
    """The library in use, or the reason why there is none.

    Attributes:
        functions: the C functions, with argument types; None where plain formulas are used.
        instruction_set: the name of the one that the library is compiled for.
        digest: a hash of the file.
        reason: why no library is in use.
    """

    functions: ctypes.CDLL | None
    instruction_set: str = ""
    digest: str = ""
    reason: str = ""


def compiled() -> ctypes.CDLL | None:
    """Return the compiled functions, or None where the plain formulas are used."""
    return library().functions


def name() -> str:
    """Return "plain", or "compiled" and the hash of the library."""
    return "plain" if compiled() is None else f"compiled {library().digest}"


def describe() -> str:
    """Return "compiled for" an instruction set, or "plain" and the reason."""
    loaded = library()
    if loaded.functions is None:
        return f"plain ({loaded.reason})"
    return f"compiled for {loaded.instruction_set}"


def usable_sets() -> list[build.InstructionSet]:
    """Return the instruction sets that this processor can run."""
    features = processor_features()
    if not request_tiles():
        features -= {"amx_tile"}
    return [isa for isa in build.instruction_sets() if features.issuperset(isa.features)]


@functools.cache
def library() -> Library:
    """Return the best library for this processor, or the one that `MTRAIN_NATIVE` selects.

    Raises:
        ConfigError: if `MTRAIN_NATIVE` is not a known value, or this processor cannot run it.
    """
    setting = os.environ.get("MTRAIN_NATIVE", "")
    if setting == "0":
        return Library(None, reason="MTRAIN_NATIVE=0")
    usable = usable_sets()
    if setting == "build":
        return _build_for_this_process(usable[-1])
    if setting:
        names = [isa.name for isa in build.instruction_sets()]
        if setting not in names:
            raise ConfigError(
                f"`MTRAIN_NATIVE` must be 0, build or one of {', '.join(names)}, "
                f"but is {setting!r} instead."
            )
        usable = [isa for isa in usable if isa.name == setting]
        if not usable:
            raise ConfigError(f"`MTRAIN_NATIVE` is {setting}, which this processor cannot run.")
    for isa in reversed(usable):
        path = build.library_path(build.LIB_DIR, isa.name)
        if path.is_file():
            return _load(path, isa.name)
    if any(build.LIB_DIR.glob(f"{setting or '*'}-*.so")):
        hint = f"run python {build.__file__}"
        return Library(None, reason=f"its library was built from other sources; {hint}")
    return Library(None, reason=f"no library for {setting or platform.machine()} is installed")


def _build_for_this_process(isa: build.InstructionSet) -> Library:
    """Compile a library in a private folder, and delete that once it is loaded."""
    print(f"mtrain: compiling for {isa.name} (MTRAIN_NATIVE=build)", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="mtrain-") as folder:  # mode 0700
            build.build(Path(folder), [isa])
            return _load(build.library_path(Path(folder), isa.name), isa.name)
    except (build.BuildError, OSError) as error:
        return Library(None, reason=f"MTRAIN_NATIVE=build: {error}")


def _load(path: Path, instruction_set: str) -> Library:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        functions = ctypes.CDLL(str(path))
        for name, types in signatures().items():
            getattr(functions, name).argtypes = types
    except (OSError, AttributeError) as error:
        return Library(None, reason=str(error))
    return Library(functions, instruction_set, digest)


class Functions:
    """The compiled functions for tensors of one dtype.

    Attributes:
        dtype_name: the suffix of their names.
        k_group_size: values of the inner dimension that one multiply-add takes; the inner
            dimension of a product must be a multiple of it.
    """

    def __init__(self, library: ctypes.CDLL, dtype_name: str) -> None:
        self._library, self.dtype_name = library, dtype_name
        self.k_group_size = 2 if dtype_name == "bf16" else 1

    @functools.cached_property
    def tile_columns(self) -> int:
        """Output columns in one tile of packed weights."""
        return self._number("tile_columns")

    def has_fast_matmul(self) -> bool:
        """Tell whether their matrix products are faster than PyTorch's on this processor."""
        if self.dtype_name == "bf16" and processor_has("amx_tile"):  # which PyTorch uses
            return library().instruction_set == "amx"
        return bool(self._number("fast_matmul"))

    def has_fast_int8(self) -> bool:
        """Tell whether their products of whole numbers are faster than those of floats."""
        return self.dtype_name == "float" and bool(self._number("fast_int8"))

    def _number(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self._library, f"{name}_{self.dtype_name}").value

    def call(
        self,
        name: str,
        tensors: tuple[Tensor | None, ...],
        *numbers: float,
        structures: tuple[ctypes.Structure | ctypes.Array[Any], ...] = (),
    ) -> None:
        """Call a C function with structures, the data pointers of tensors, and numbers.

        Raises:
            MemoryError: if the work space cannot be allocated.
            IndexError: if a target, a token or a slot of the cache is out of range.
            RuntimeError: if a tensor has no data.
        """
        function = getattr(self._library, f"{name}_{self.dtype_name}")
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if 0 in pointers and any(x is not None and not x.data_ptr() and x.numel() for x in tensors):
            raise RuntimeError(f"{name} must be called with tensors that have data in memory.")
        status = function(*structures, *pointers, *numbers)
        if status == _NO_MEMORY:
            raise MemoryError
        if status == _BAD_INDEX:
            raise IndexError(f"index out of range in {name}")


def functions_for(*tensors: Tensor, any_threads: bool = False) -> Functions | None:
    """Return the compiled functions for these tensors, or None where the plain formula is used.

    The functions run on one thread: training and translating split their batches over threads.
    They take tensors of one dtype with `has_cpu_memory`. Under `torch.jit.trace`, and in
    forward-mode differentiation with gradients disabled, the result is None: both need PyTorch
    operations.

    Args:
        tensors: the tensors that a function reads.
        any_threads: return functions also where gradients are disabled and PyTorch has several
            threads.
    """
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or not has_cpu_memory(tensor):
            return None
    if not torch.is_grad_enabled():
        if not any_threads and torch.get_num_threads() != 1:
            return None
        if forward_ad._current_level >= 0:
            return None
    if torch._C._get_tracing_state() is not None:
        return None
    return _functions_of(compiled(), dtype)


@functools.cache
def _functions_of(library: ctypes.CDLL | None, dtype: torch.dtype) -> Functions | None:
    dtype_name = _DTYPE_NAMES.get(dtype)
    return None if library is None or dtype_name is None else Functions(library, dtype_name)


def has_cpu_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor has elements in the memory of the CPU.

    Subclasses are excluded: fake and quantised ones report the CPU, but have no such elements.
    """
    return type(tensor) in _TENSOR_TYPES and tensor.is_cpu and tensor.numel() > 0


def is_float_vector(tensor: Tensor | None, size: int) -> bool:
    """Tell whether a tensor is a contiguous float32 vector [size] on the CPU."""
    return (
        tensor is not None
        and tensor.dtype is torch.float32
        and tensor.dim() == 1
        and tensor.numel() == size
        and type(tensor) in _TENSOR_TYPES
        and tensor.is_cpu
        and tensor.is_contiguous()
    )


def check_same_device(*tensors: Tensor) -> None:
    """Raise RuntimeError for tensors on several devices; PyTorch gives wrong products for some."""
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise RuntimeError(
                f"tensors must be on one device, but are on {tensors[0].device} and "
                f"{tensor.device} instead."
            )


def is_bare(module: nn.Module) -> bool:
    """Tell whether calling `module` runs only the `forward` of its class, and no hooks."""
    return not (any(hooks_of(module)) or "forward" in module.__dict__ or has_global_hooks())


def hooks_of(module: nn.Module) -> tuple[object, ...]:
    """Return the dictionaries of a module's hooks themselves, not copies."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def has_global_hooks() -> bool:
    """Tell whether hooks are registered for all modules."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass raise under `create_graph=True`, because its result has no graph.

    PyTorch's `once_differentiable` raises only once that result is differentiated. With `inputs`,
    `torch.autograd.grad` does not do so, because no path leads from the result to the inputs; the
    gradient would lack a term without an error.

    Raises:
        RuntimeError: from the backward pass.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this operation cannot be differentiated twice; `create_graph` must not be set."
            )
        return backward(ctx, *grads)

    return checked


class _NoContext:
    """The context of a forward pass without a backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Discard the tensors."""


def run_compiled(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Return `function.apply(...)`, or its forward pass alone where gradients are disabled."""
    result: Tensor
    if torch.is_grad_enabled():
        result = function.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        result = function.forward(_NoContext(), *arguments)
    return result
