"""Compile the C files with the machine's compiler, once, and call their functions with tensors.

Without a compiler there is no library, and the operations use their plain PyTorch formulas.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CSRC = Path(__file__).with_name("csrc")
_SOURCES = tuple(
    _CSRC / f"{name}.c"
    for name in ("layer_norm", "attention", "linear", "cross_entropy", "decode_linear")
)
_HEADERS = (_CSRC / "vec.h", _CSRC / "gemm.h")
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}  # the suffixes of C functions
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_MACHINE_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())


class AttentionShape(ctypes.Structure):
    """`attention_shape` of `attention.c`: sizes, strides in elements, scale and dropout."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("b", "h", "t", "s", "k")),
        *(
            (f"{name}_strides", ctypes.c_int64 * 3)
            for name in ("q", "k", "v", "out", "grad_q", "grad_k", "grad_v")
        ),
        ("keep_strides", ctypes.c_int64 * 4),
        ("scale", ctypes.c_float),
        ("dropout_scale", ctypes.c_float),
        ("cut", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
    )


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the library, compiled or from the cache; None without a compiler or if disabled."""
    if not is_enabled():
        return None
    for folder in (_cache_dir, _process_dir):
        try:
            library = _load(folder())
        except (OSError, RuntimeError):  # no home; not writable; mounted without execution
            continue
        if library is not None or not any(map(shutil.which, _COMPILERS)):
            return library  # a compiler that failed may have found no space in the folder
    return None


def is_enabled() -> bool:
    """Tell whether compiled functions may be used: `MTRAIN_NATIVE=0` turns them off."""
    return os.environ.get("MTRAIN_NATIVE") != "0"


def name() -> str:
    """Return "plain", or "compiled" and the hash of the library."""
    library = compiled()
    if library is None:
        return "plain"
    return "compiled " + Path(library._name).stem.rpartition("-")[2]


def describe() -> str:
    """Return "compiled", or "plain" and the reason, for the header of a training."""
    if compiled() is not None:
        return "compiled"
    return f"plain ({'no C compiler was found' if is_enabled() else 'MTRAIN_NATIVE=0'})"


class Functions(NamedTuple):
    """The compiled functions for tensors of one dtype."""

    library: ctypes.CDLL
    dtype_name: str

    def has_fast_matmul(self) -> bool:
        """Tell whether their matrix products are faster than PyTorch's on this processor."""
        return bool(ctypes.c_int64.in_dll(self.library, f"fast_matmul_{self.dtype_name}").value)

    def k_group_size(self) -> int:
        """Return the values that one multiply-add takes; inner sizes are multiples of it."""
        return 2 if self.dtype_name == "bf16" else 1

    def tile_columns(self) -> int:
        """Return the number of output columns in one tile of packed weights."""
        return ctypes.c_int64.in_dll(self.library, "tile_columns").value

    def call(
        self,
        name: str,
        tensors: tuple[Tensor | None, ...],
        *numbers: float,
        shape: AttentionShape | None = None,
    ) -> None:
        """Call a C function with the data pointers of `tensors`, which it takes as contiguous.

        Raises:
            MemoryError: if it cannot allocate its work space.
        """
        function = getattr(self.library, f"{name}_{self.dtype_name}")
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        shapes = () if shape is None else (shape,)
        if function(*shapes, *pointers, *numbers):
            raise MemoryError


def functions_for(*tensors: Tensor, is_training: bool = False) -> Functions | None:
    """Return the compiled functions for these tensors, or None where the plain formula is used.

    The functions run on one thread: training and translating split their batches over threads.
    """
    first, *others = tensors
    dtype_name = _DTYPE_NAMES.get(first.dtype)
    if dtype_name is None or not first.is_cpu or not first.numel():
        return None
    if not (is_training or torch.is_grad_enabled() or torch.get_num_threads() == 1):
        return None
    if others and any(tensor.dtype != first.dtype for tensor in others):
        return None
    library = compiled()
    return None if library is None else Functions(library, dtype_name)


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


def _load(folder: Path) -> ctypes.CDLL | None:
    """Load the library from `folder`, compiling it if it is missing; None if no compiler can.

    Its name ends in a hash of its content: loading a truncated file would kill the process.
    """
    prefix = f"kernels-{_fingerprint()}-"
    for built in folder.glob(f"{prefix}*.so"):
        if built.name == f"{prefix}{_hash(built.read_bytes())}.so":
            return _typed(ctypes.CDLL(str(built)))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as build_dir:
        output = Path(build_dir) / "kernels.so"
        if not any(
            _compile(compiler, flags, output) for compiler in _COMPILERS for flags in _MACHINE_FLAGS
        ):
            return None
        built = output.replace(folder / f"{prefix}{_hash(output.read_bytes())}.so")
    return _typed(ctypes.CDLL(str(built)))


def _cache_dir() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "mtrain"


def _process_dir() -> Path:
    """Make a temporary folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="mtrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(compiler: str, machine_flags: tuple[str, ...], output: Path) -> bool:
    command = [compiler, *_FLAGS, *machine_flags, *map(str, _SOURCES), "-o", str(output), "-lm"]
    env = os.environ | {"TMPDIR": str(output.parent)}  # /tmp may be full
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _fingerprint() -> str:
    """Return a hash of sources, flags and processor: a home folder may be shared by machines."""
    parts = [
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        repr((_FLAGS, _MACHINE_FLAGS)).encode(),
    ]
    parts.append(repr((platform.system(), platform.machine(), platform.processor())).encode())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        # instruction sets, as x86 and ARM kernels name them
        parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    except OSError:
        pass
    return _hash(b"\0".join(parts))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


_POINTER, _INT, _COUNT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_REAL, _SHAPE = ctypes.c_float, ctypes.POINTER(AttentionShape)
_DROPOUT = [_COUNT, _REAL, _COUNT]
_SIGNATURES = {
    "dropout": [_POINTER, _POINTER, _INT, *_DROPOUT],
    "add_norm": [*[_POINTER] * 7, _INT, _INT, _REAL, *_DROPOUT],
    "add_norm_grad": [*[_POINTER] * 10, _INT, _INT, *_DROPOUT],
    "attention": [_SHAPE, *[_POINTER] * 5],
    "attention_grad": [_SHAPE, *[_POINTER] * 8],
    "paged_attention": [*[_POINTER] * 4, *[_INT] * 6, _REAL],
    "topk": [*[_POINTER] * 4, *[_INT] * 4],
    "cross_entropy": [_POINTER, _POINTER, *[_INT] * 3, _REAL, ctypes.c_int, _POINTER],
    "linear": [*[_POINTER] * 4, *[_INT] * 3, ctypes.c_int],
    "linear_grad": [*[_POINTER] * 6, *[_INT] * 3, ctypes.c_int],
    "projected_cross_entropy": [*[_POINTER] * 5, *[_INT] * 3, _REAL, _POINTER],
}
_FLOAT_SIGNATURES = {
    "packed_linear_float": [*[_POINTER] * 4, *[_INT] * 3, ctypes.c_int],
    "packed_linear_sparse_float": [*[_POINTER] * 4, *[_INT] * 3],
    "packed_topk_float": [*[_POINTER] * 5, *[_INT] * 5],
    "packed_argmax_float": [*[_POINTER] * 6, *[_INT] * 4],
}


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, types in _SIGNATURES.items():
        for dtype_name in _DTYPE_NAMES.values():
            getattr(library, f"{name}_{dtype_name}").argtypes = types
    for name, types in _FLOAT_SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library
