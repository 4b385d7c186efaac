"""Build the wheel, install it alone into a fresh environment, and use it far from the sources.

    python benchmarks/check_wheel.py            # the whole demo, minutes
    python benchmarks/check_wheel.py --quick    # a training of a few updates instead

Prints sizes and times; ends with an error at the first command that fails.
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

REPOSITORY = Path(__file__).parent.parent
SENTENCE = b"The old farmer is tired.\n"
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


def call(*command: str | Path, cwd: Path, stdin: bytes = b"") -> str:
    """Run a command as a user does: nothing of the sources is in its environment."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, input=stdin, stdout=subprocess.PIPE
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}")
    return done.stdout.decode()


def build(directory: Path) -> Path:
    """Return the wheel, after a word on its size."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    call(*pip, "--wheel-dir", directory, REPOSITORY, cwd=directory)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        unpacked = sum(info.file_size for info in file.infolist())
    print(
        f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(names)} files, {unpacked:,} unpacked"
    )
    files = [
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "mtrain").rglob("*")
        if path.suffix in (".c", ".h", ".xz") or path.name == "py.typed"
    ]
    assert {Path(file).suffix for file in files} == {".c", ".h", ".xz", ""}
    assert set(files) <= set(names)
    assert all(name.startswith(("mtrain/", "mtrain-")) for name in names)
    return wheel


def install(wheel: Path, directory: Path) -> Path:
    """Return the `bin` of a fresh environment that holds the wheel and all its extras."""
    started = time.monotonic()
    call(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    pip = [directory / "bin" / "python", "-m", "pip", "install", "--quiet"]
    constraints = ["--constraint", REPOSITORY / "constraints.txt"]
    call(*pip, *constraints, f"{wheel}[all]", cwd=directory.parent)
    print(f"installed with all extras in {time.monotonic() - started:.0f} s")
    return directory / "bin"


def use(bin_dir: Path, home: Path, is_quick: bool) -> None:
    """Train, translate, evaluate, plot, export and check, outside of the sources."""
    mtrain = bin_dir / "mtrain"
    print(call(mtrain, "--version", cwd=home), end="")
    started = time.monotonic()
    if is_quick:
        call(bin_dir / "python", "-c", QUICK, cwd=home)
    else:
        print(call(mtrain, "demo", "run", cwd=home), end="")
    print(f"trained in {time.monotonic() - started:.0f} s")
    print(call(mtrain, "translate", "run", cwd=home, stdin=SENTENCE), end="")
    print(call(mtrain, "eval", "run", cwd=home), end="")
    print(f"{call(mtrain, 'plot', 'run', cwd=home).count('png')} pictures")
    print(call(mtrain, "doctor", "run", cwd=home), end="")
    for library in ("ctranslate2", "huggingface"):
        call(mtrain, "export", "run", library, "--to", library, "--check-lines", "20", cwd=home)
        print(f"exported to {library}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few updates instead of the demo")
    is_quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="mtrain-wheel-") as folder:
        home = Path(folder) / "somewhere else"
        home.mkdir()
        bin_dir = install(build(Path(folder)), Path(folder) / "environment")
        use(bin_dir, home, is_quick)


if __name__ == "__main__":
    main()
