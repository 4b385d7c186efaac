"""Compile the C files into shared libraries, one for each instruction set of a processor family.

    python mtrain/ops/build.py [NAME...]    # into mtrain/ops/lib, if the sources have changed

The build hook of the wheel runs this file by its path, so it must not import the package.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

CSRC_DIR = Path(__file__).with_name("csrc")
LIB_DIR = Path(__file__).with_name("lib")
SOURCES = tuple(sorted(CSRC_DIR.glob("*.c")))
HEADERS = tuple(sorted(CSRC_DIR.glob("*.h")))
COMPILE_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-fast-math",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
ELEM_FLAGS = {"float": (), "bf16": ("-DBF16",)}  # each file is compiled once for each type
_LINK_FLAGS = ("-shared", "-Wl,-z,relro,-z,now") if sys.platform == "linux" else ("-shared",)
_TIMEOUT_S = 600.0
_MAX_PROCESSES = 8  # each takes up to 200 MB


class InstructionSet(NamedTuple):
    """An instruction set that a library is compiled for.

    Attributes:
        name: the name of the library, and the value of `MTRAIN_NATIVE` that selects it.
        flags: compiler flags.
        features: the features in /proc/cpuinfo that a processor must have.
    """

    name: str
    flags: tuple[str, ...]
    features: tuple[str, ...]


_AVX2 = ("-march=x86-64", "-mavx2", "-mfma")
_HAS_AVX512 = tuple(f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))
_AVX512 = (*_AVX2, *(f"-m{feature}" for feature in _HAS_AVX512), "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mtune=znver3")  # attention is faster
_HAS_AVX512_BF16 = ("avx2", "fma", *_HAS_AVX512, "avx512_bf16", "avx512_vnni")
_X86 = (
    InstructionSet("sse2", ("-march=x86-64",), ()),
    InstructionSet("avx2", _AVX2, ("avx2", "fma")),
    InstructionSet("avx512", _AVX512, ("avx2", "fma", *_HAS_AVX512)),
    InstructionSet("avx512_bf16", _AVX512_BF16, _HAS_AVX512_BF16),
    InstructionSet(
        "amx",
        (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        (*_HAS_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    ),
)
_ARM = (
    InstructionSet("neon", (), ()),
    InstructionSet("neon_bf16", ("-march=armv8.2-a+bf16",), ("asimd", "bf16")),
)
_FAMILIES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_OTHER = (InstructionSet("generic", (), ()),)


class BuildError(Exception):
    """There is no compiler, or it does not compile the C; the text is one line that says why."""


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets of this family of processors, each a superset of those before."""
    return _FAMILIES.get(platform.machine().lower(), _OTHER)


def find_compiler() -> list[str]:
    """Return the command of the C compiler: `$CC`, or the first of cc, gcc and clang.

    Raises:
        BuildError: if there is none.
    """
    try:
        if named := shlex.split(os.environ.get("CC", "")):
            return named
    except ValueError as error:
        raise BuildError(f"CC must be a command, but is {os.environ['CC']!r}: {error}") from None
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C compiler was found")


def library_path(directory: Path, name: str) -> Path:
    """Return the path of the library for an instruction set.

    Its name has a hash of sources and flags, so that a library of other sources is never loaded.
    """
    digest = hashlib.sha256(repr((COMPILE_FLAGS, _LINK_FLAGS, instruction_sets())).encode())
    for path in (*SOURCES, *HEADERS):
        digest.update(b"\0" + path.read_bytes())
    return directory / f"{name}-{digest.hexdigest()[:12]}.so"


def build(
    directory: Path,
    sets: Iterable[InstructionSet],
    extra_flags: tuple[str, ...] = (),
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, str]:
    """Compile a library for each instruction set into `directory`, all files at the same time.

    Returns:
        {name: error} for each instruction set that could not be compiled.

    Raises:
        BuildError: if there is no compiler, none of the libraries can be compiled, or it takes
            longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    compiler, chosen = find_compiler(), list(sets)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as name:
        folder = Path(name)
        objects: dict[str, list[Path]] = {isa.name: [] for isa in chosen}
        commands = []
        for source, elem, isa in itertools.product(SOURCES, ELEM_FLAGS, chosen):
            object_path = folder / f"{source.stem}-{elem}-{isa.name}.o"
            objects[isa.name].append(object_path)
            command = [*compiler, *COMPILE_FLAGS, *ELEM_FLAGS[elem], *isa.flags, *extra_flags, "-c"]
            commands.append((isa.name, [*command, str(source), "-o", str(object_path)]))
        failed = _run_all(commands, folder, deadline)
        built = {isa.name: folder / f"{isa.name}.so" for isa in chosen if isa.name not in failed}
        commands = []
        for isa_name, output in built.items():
            command = [*compiler, *_LINK_FLAGS, *extra_flags, *map(str, objects[isa_name])]
            commands.append((isa_name, [*command, "-o", str(output), "-lm"]))
        failed |= _run_all(commands, folder, deadline)
        if failed.keys() >= objects.keys():
            raise BuildError(next(iter(failed.values()), "no instruction set was asked for"))
        for isa_name, output in built.items():
            if isa_name not in failed:
                output.replace(library_path(directory, isa_name))
    return failed


def _run_all(
    commands: list[tuple[str, list[str]]], folder: Path, deadline: float
) -> dict[str, str]:
    """Run commands, up to 8 at once, on separate cores; return {key: error} for failures."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    num_processes = min(_MAX_PROCESSES, num_cores)
    waiting, failed = list(commands), dict[str, str]()
    running: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    env = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}  # /tmp may be full
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                key, command = waiting.pop(0)
                log_path = folder / f"{len(waiting)}.log"
                with log_path.open("wb") as log:
                    try:
                        process = subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=env,
                            start_new_session=True,  # to kill its child processes, too
                        )
                    except OSError as error:
                        raise BuildError(f"{command[0]}: {error.strerror}") from None
                running.append((key, process, log_path))
            if time.monotonic() > deadline:
                raise BuildError("the C compiler took too long")
            time.sleep(0.01)
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                running.remove(entry)
                key, process, log_path = entry
                if process.returncode:
                    text = log_path.read_text(encoding="utf-8", errors="replace")
                    failed.setdefault(key, _first_error(text, process.returncode))
    finally:
        for _, process, _ in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return failed


def _first_error(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line]
    return next(iter(lines), f"the C compiler ended with exit code {code}")


def update(directory: Path = LIB_DIR, names: Collection[str] = ()) -> dict[str, str]:
    """Build the libraries that are missing in `directory`: of `names`, or of all instruction sets.

    Returns and raises what `build` does.
    """
    missing = [
        isa
        for isa in instruction_sets()
        if (not names or isa.name in names) and not library_path(directory, isa.name).exists()
    ]
    try:
        return build(directory, missing) if missing else {}
    except OSError as error:  # the folder cannot be written, or the disk is full
        raise BuildError(str(error)) from None


def main() -> int:
    """Update the libraries in the source tree, delete old ones, and return the exit code."""
    known = [isa.name for isa in instruction_sets()]
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        print(
            f"instruction sets must be some of {', '.join(known)}, but are {', '.join(unknown)} "
            "instead.",
            file=sys.stderr,
        )
        return 2
    try:
        failed = update(names=sys.argv[1:])
    except BuildError as error:
        print(f"nothing was compiled: {error}", file=sys.stderr)
        return 1
    for name, reason in failed.items():
        print(f"nothing was compiled for {name}: {reason}", file=sys.stderr)
    current = {library_path(LIB_DIR, isa.name) for isa in instruction_sets()}
    for path in set(LIB_DIR.glob("*.so")) - current:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
