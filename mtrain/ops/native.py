"""Compile the C files once with the machine's own compiler, and call their functions with tensors.

Without a compiler there is no library, and `kernels` and `products` take their plain formulas.
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
from typing import NamedTuple

import torch
from torch import Tensor

_CSRC = Path(__file__).with_name("csrc")
_SOURCES = tuple(
    _CSRC / f"{name}.c"
    for name in ("layer_norm", "attention", "linear", "cross_entropy", "decode_linear")
)
_HEADERS = (_CSRC / "vec.h", _CSRC / "gemm.h")
_STORES = {torch.bfloat16: "bf16", torch.float32: "float"}
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
_FLAGS_OF_MACHINES = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())


class AttentionShape(ctypes.Structure):
    """The sizes, strides and settings of one attention, as `attention.c` lays them out."""

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
    """Return the compiled functions, or None where nothing compiles them or they are not wanted."""
    if not is_wanted():
        return None
    for folder in (_cache, _own_folder):
        try:
            library = _load(folder())
        except (OSError, RuntimeError):  # no such folder; it cannot be written; it runs no code
            continue
        if library is not None or not any(map(shutil.which, _COMPILERS)):
            return library  # a compiler that made nothing may have had no room
    return None


def is_wanted() -> bool:
    """Tell whether the environment lets us compile: `MTRAIN_NATIVE=0` asks for plain formulas."""
    return os.environ.get("MTRAIN_NATIVE") != "0"


def name() -> str:
    """Return what tells the functions in use from others: "plain", or a hash of the library."""
    library = compiled()
    if library is None:
        return "plain"
    return "compiled " + Path(library._name).stem.rpartition("-")[2]


class Functions(NamedTuple):
    """The compiled functions for values that are stored in one type."""

    library: ctypes.CDLL
    store: str

    def multiply(self) -> bool:
        """Tell whether their matrix products are faster than PyTorch's."""
        return bool(ctypes.c_int64.in_dll(self.library, f"multiplies_{self.store}").value)

    def numbers_of_a_word(self) -> int:
        """Return how many numbers their products add up at once; rows are whole words."""
        return 2 if self.store == "bf16" else 1

    def panel_width(self) -> int:
        """Return how many rows of weights stand side by side where a projection reads them."""
        return ctypes.c_int64.in_dll(self.library, "panel_width").value

    def call(
        self,
        name: str,
        tensors: tuple[Tensor | None, ...],
        *numbers: float,
        shape: AttentionShape | None = None,
    ) -> None:
        """Run a function on tensors that are laid out as it wants them.

        Raises:
            MemoryError: if the memory does not hold what it works with.
        """
        function = getattr(self.library, f"{name}_{self.store}")
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        shapes = () if shape is None else (shape,)
        if function(*shapes, *pointers, *numbers):
            raise MemoryError


def functions_for(*tensors: Tensor, is_training: bool = False) -> Functions | None:
    """Return the compiled functions for these tensors, if there are any and they pay.

    They run on one thread: training and translating split their batches over the threads.
    """
    first, *others = tensors
    store = _STORES.get(first.dtype)
    if store is None or not first.is_cpu or not first.numel():
        return None
    if not (is_training or torch.is_grad_enabled() or torch.get_num_threads() == 1):
        return None
    if others and any(tensor.dtype != first.dtype for tensor in others):
        return None
    library = compiled()
    return None if library is None else Functions(library, store)


def _load(folder: Path) -> ctypes.CDLL | None:
    """Return the library that lies in `folder`, or is put there now; None if nothing compiles it.

    Its name ends in a hash of its content: to load a file that was cut off ends the process.
    """
    prefix = f"kernels-{_fingerprint()}-"
    for built in folder.glob(f"{prefix}*.so"):
        if built.name == f"{prefix}{_hash(built.read_bytes())}.so":
            return _typed(ctypes.CDLL(str(built)))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        made = Path(beside) / "kernels.so"
        if not any(
            _compiles(compiler, flags, made)
            for compiler in _COMPILERS
            for flags in _FLAGS_OF_MACHINES
        ):
            return None
        built = made.replace(folder / f"{prefix}{_hash(made.read_bytes())}.so")
    return _typed(ctypes.CDLL(str(built)))


def _cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "mtrain"


def _own_folder() -> Path:
    """Make a folder of this process alone, which goes when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="mtrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compiles(compiler: str, machine_flags: tuple[str, ...], output: Path) -> bool:
    command = [compiler, *_FLAGS, *machine_flags, *map(str, _SOURCES), "-o", str(output), "-lm"]
    env = os.environ | {"TMPDIR": str(output.parent)}  # has room, or the library has none either
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _fingerprint() -> str:
    """Tell one source, compilation and processor from another: home folders are shared."""
    parts = [
        *(source.read_bytes() for source in (*_SOURCES, *_HEADERS)),
        repr((_FLAGS, _FLAGS_OF_MACHINES)).encode(),
    ]
    parts.append(repr((platform.system(), platform.machine(), platform.processor())).encode())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = ("flags", "Features")  # as Intel's kind calls what a processor can do, and ARM's
        parts += [line.encode() for line in lines if line.startswith(named)][:1]
    except OSError:
        pass
    return _hash(b"\0".join(parts))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


_POINTER, _INT, _COUNT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_REAL, _SHAPE = ctypes.c_float, ctypes.POINTER(AttentionShape)
_DROPOUT = [_COUNT, _REAL, _COUNT]
_OF_EACH_STORE = {
    "dropout": [_POINTER, _POINTER, _INT, *_DROPOUT],
    "add_norm": [*[_POINTER] * 7, _INT, _INT, _REAL, *_DROPOUT],
    "add_norm_grad": [*[_POINTER] * 10, _INT, _INT, *_DROPOUT],
    "attention": [_SHAPE, *[_POINTER] * 5],
    "attention_grad": [_SHAPE, *[_POINTER] * 8],
    "attend": [*[_POINTER] * 4, *[_INT] * 6, _REAL],
    "top_pieces": [*[_POINTER] * 4, *[_INT] * 4],
    "cross_entropy": [_POINTER, _POINTER, *[_INT] * 3, _REAL, ctypes.c_int, _POINTER],
    "linear": [*[_POINTER] * 4, *[_INT] * 3, ctypes.c_int],
    "linear_grad": [*[_POINTER] * 6, *[_INT] * 3, ctypes.c_int],
    "projected_cross_entropy": [*[_POINTER] * 5, *[_INT] * 3, _REAL, _POINTER],
}
_OF_ONE_STORE = {
    "project_float": [*[_POINTER] * 4, *[_INT] * 3, ctypes.c_int],
    "project_sparse_float": [*[_POINTER] * 4, *[_INT] * 3],
    "project_top_pieces_float": [*[_POINTER] * 5, *[_INT] * 5],
    "project_likeliest_float": [*[_POINTER] * 6, *[_INT] * 4],
}


def _typed(functions: ctypes.CDLL) -> ctypes.CDLL:
    types = {f"{name}_{s}": own for name, own in _OF_EACH_STORE.items() for s in ("bf16", "float")}
    for name, own in (types | _OF_ONE_STORE).items():
        getattr(functions, name).argtypes = own
    return functions
