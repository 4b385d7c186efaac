"""Run the tests of the compiled operations under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/sanitize.py [NAME...]

The C is compiled with both in a copy of the package, for each instruction set that this processor
can run, or for those that are named. The first finding ends the process that runs the tests; the
exit code is 1 if there is one, or if a test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mutations import copy_to

from mtrain.ops import build, native

FLAGS = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
NOT_RUN = ("test_native", "test_build")  # they compile
# the names of the plain formulas, and of tests that measure memory: the sanitizers take more of it
WANTED = "not plain and not never_holds and not memory_runs_out"


def compile_in(directory: Path, names: list[str]) -> None:
    """Compile the C of the copy with the sanitizers."""
    code = f"""\
import build
sets = [one for one in build.instruction_sets() if one.name in {names!r}]
failed = build.build(build.LIB_DIR, sets, extra_flags={FLAGS!r}, timeout_s=1800)
assert not failed, failed
"""
    subprocess.run([sys.executable, "-c", code], cwd=directory / "mtrain" / "ops", check=True)


def preloaded() -> str:
    """Return what must be loaded first: AddressSanitizer, and C++, which it wraps."""
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*build.find_compiler(), f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        paths.append(done.stdout.strip())
    return " ".join(paths)


def is_clean(directory: Path, name: str) -> bool:
    """Run the tests with the library for an instruction set."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MTRAIN_NATIVE": name,
        "LD_PRELOAD": preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0",  # of Python, which frees little at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    files = sorted((directory / "tests" / "ops").glob("test_*.py"))
    paths = [str(path) for path in files if path.stem not in NOT_RUN]
    flags = ["-q", "-x", "--capture=sys", "-p", "no:cacheprovider", "-k", WANTED]
    command = [sys.executable, "-m", "pytest", *flags, *paths]
    print(f"with the sanitizers: {name}", flush=True)
    return subprocess.run(command, cwd=directory, env=environment).returncode == 0


def main(names: list[str]) -> int:
    """Run the tests for each instruction set; return the exit code."""
    names = names or [one.name for one in native.usable_sets()]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        copy_to(directory)
        for path in (directory / "mtrain" / "ops" / "lib").glob("*.so"):
            path.unlink()
        compile_in(directory, names)
        return 0 if all(is_clean(directory, name) for name in names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
