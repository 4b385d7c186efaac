"""Build the wheel, install it alone into a fresh environment, and use it far from the sources.

    python benchmarks/check_wheel.py            # the whole demo, minutes
    python benchmarks/check_wheel.py --quick    # a training of a few updates instead

The wheel must be small, for this platform, and hold a library for each instruction set, and
`auditwheel` says on which systems it runs. Where it is used, no compiler is on the PATH. The tests
of the operations pass with the library of each instruction set of this processor, and without a
compiler the build makes a pure wheel. Prints sizes and times; ends with an error at the first
command that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from mtrain.ops.build import instruction_sets  # noqa: E402  it imports nothing of the package

SENTENCE = b"The old farmer is tired.\n"
MAX_BYTES = 2_500_000
USABLE = "from mtrain.ops import native; print(*(one.name for one in native.usable_sets()))"
QUICK = """\
import mtrain
from mtrain.demo.demo import write_corpus
from pathlib import Path
write_corpus(Path("corpus"))
mtrain.train({
    "run_dir": "run",
    "data": {
        "src_lang": "en", "tgt_lang": "de",
        **{own: {"src": [f"corpus/{own}.en"], "tgt": [f"corpus/{own}.de"]}
           for own in ("train", "valid")},
        "tests": {"demo": {"src": ["corpus/test.en"], "tgt": ["corpus/test.de"]}},
    },
    "tokenizer": {"vocab_size": 1200},
    "model": {"d_model": 64, "d_ff": 64, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "training": {"max_steps": 30, "validate_every": 15, "batch_tokens": 1024, "average": 1},
}, tensorboard=True)
"""


def call(*command: str | Path, cwd: Path, stdin: bytes = b"", **changes: Any) -> str:
    """Run a command as a user does: nothing of the sources is in its environment."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env | changes, input=stdin, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}")
    return done.stdout.decode()


def build(directory: Path, **changes: Any) -> Path:
    """Return the wheel that is built with these changes of the environment."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    call(*pip, "--wheel-dir", directory, REPOSITORY, cwd=directory.parent, **changes)
    (wheel,) = directory.glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Print the size of the wheel, and check what it contains."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        unpacked = sum(info.file_size for info in file.infolist())
    print(
        f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(names)} files, {unpacked:,} unpacked"
    )
    assert wheel.stat().st_size <= MAX_BYTES
    files = [
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "mtrain").rglob("*")
        if path.suffix in (".c", ".h", ".xz") or path.name == "py.typed"
    ]
    assert {Path(file).suffix for file in files} == {".c", ".h", ".xz", ".typed"}
    assert set(files) <= set(names)
    assert all(name.startswith(("mtrain/", "mtrain-")) for name in names)
    libraries = [name for name in names if name.endswith(".so")]
    known = [one.name for one in instruction_sets()]
    assert sorted(Path(name).name.partition("-")[0] for name in libraries) == sorted(known)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def audit(wheel: Path, directory: Path) -> None:
    """Print on which systems the wheel runs, as auditwheel sees it."""
    call(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    pip = (directory / "bin" / "python", "-m", "pip", "install", "--quiet", "auditwheel")
    call(*pip, cwd=directory.parent)
    said = call(directory / "bin" / "auditwheel", "show", wheel, cwd=directory.parent)
    assert "manylinux" in said or "musllinux" in said, said
    print(" ".join(said.split()))


def check_pure(directory: Path) -> None:
    """Build without a compiler; the wheel is pure."""
    wheel = build(directory, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl"), wheel.name
    with zipfile.ZipFile(wheel) as file:
        assert not any(name.endswith(".so") for name in file.namelist())
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, without a compiler")


def install(wheel: Path, directory: Path) -> Path:
    """Return the `bin` of a fresh environment that holds the wheel and all its extras."""
    started = time.monotonic()
    call(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    pip = (directory / "bin" / "python", "-m", "pip", "install", "--quiet")
    constraints = ("--constraint", REPOSITORY / "constraints.txt")
    call(*pip, *constraints, f"{wheel}[all]", cwd=directory.parent)
    print(f"installed with all extras in {time.monotonic() - started:.0f} s")
    return directory / "bin"


def use(bin_dir: Path, home: Path, is_quick: bool) -> None:
    """Train, translate, evaluate, plot, export and check, outside of the sources."""
    mtrain = bin_dir / "mtrain"
    path = str(bin_dir)  # no compiler is on it
    print(call(mtrain, "--version", cwd=home, PATH=path), end="")
    started = time.monotonic()
    if is_quick:
        call(bin_dir / "python", "-c", QUICK, cwd=home, PATH=path)
    else:
        print(call(mtrain, "demo", "run", cwd=home, PATH=path), end="")
    print(f"trained in {time.monotonic() - started:.0f} s")
    for start in ("first", "second"):
        started = time.monotonic()
        print(call(mtrain, "translate", "run", cwd=home, stdin=SENTENCE, PATH=path), end="")
        print(f"{start} start of translate: {time.monotonic() - started:.1f} s to its end")
    print(call(mtrain, "eval", "run", cwd=home), end="")
    print(f"{call(mtrain, 'plot', 'run', cwd=home).count('png')} pictures")
    print(call(mtrain, "doctor", "run", cwd=home), end="")
    for library in ("ctranslate2", "huggingface"):
        call(mtrain, "export", "run", library, "--to", library, "--check-lines", "20", cwd=home)
        print(f"exported to {library}")


def hold_to_each_instruction_set(bin_dir: Path, home: Path) -> None:
    """Run the tests of the operations with each library that this processor can run."""
    python = bin_dir / "python"
    call(python, "-m", "pip", "install", "--quiet", "pytest", "hypothesis", cwd=home)
    tests = sorted((REPOSITORY / "tests" / "ops").glob("test_*.py"))
    files = [path for path in tests if path.stem not in ("test_native", "test_build")]
    flags = ["-q", "-p", "no:cacheprovider", "-k", "not plain"]
    for name in call(python, "-c", USABLE, cwd=home).split():
        said = call(python, "-m", "pytest", *flags, *files, cwd=home, MTRAIN_NATIVE=name)
        print(f"held to {name}: {said.splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few updates instead of the demo")
    is_quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="mtrain-wheel-") as folder:
        home = Path(folder) / "somewhere else"
        for name in ("somewhere else", "wheel", "pure"):
            (Path(folder) / name).mkdir()
        wheel = build(Path(folder) / "wheel")
        check(wheel)
        if sys.platform == "linux":
            audit(wheel, Path(folder) / "auditwheel")
        check_pure(Path(folder) / "pure")
        bin_dir = install(wheel, Path(folder) / "environment")
        use(bin_dir, home, is_quick)
        hold_to_each_instruction_set(bin_dir, home)


if __name__ == "__main__":
    main()
