"""The virtual environments of the peers: how they are made, and how a worker runs in one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import say

REPOSITORY = Path(__file__).resolve().parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
VENVS = REPOSITORY / "build" / "venvs"

_TORCH_FIRST = ("torch", "numpy")
PACKAGES = {  # what pip installs into each; JoeyNMT and eole import a package that they do not name
    "joeynmt": (*_TORCH_FIRST, "joeynmt==2.3.0", "importlib_metadata", "safetensors"),
    "hf": (*_TORCH_FIRST, "transformers==5.23.0"),
    "eole": (*_TORCH_FIRST, "eole==0.6.4", "aiohttp"),
    "ctranslate2": ("ctranslate2==4.8.5", "numpy", "safetensors"),
}


class NotMeasured(Exception):  # noqa: N818 - its text is a row of the table
    """A system cannot be installed or run; the text says why."""


def requirements(name: str) -> list[str]:
    """Return all that is asked of pip, with torch by its exact version."""
    lines = (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    return [torch if package == "torch" else package for package in PACKAGES[name]]


def is_installed(name: str) -> bool:
    ready = VENVS / name / "ready.json"
    return ready.is_file() and json.loads(ready.read_text("utf-8")) == requirements(name)


def state(name: str | None) -> str:
    """Say where a system would run; None is mtrain's own environment, which runs this script."""
    if name is None:
        return "this environment"
    return "installed" if is_installed(name) else "not installed yet"


def install(name: str | None) -> str | None:
    """Make an environment unless it is there; return why it cannot be made.

    torch comes first and alone, by its exact version, so that no other package chooses another
    version or build of it; it is named again beside the others, so that none replaces it.
    """
    if name is None or is_installed(name):
        return None
    folder, wanted = VENVS / name, requirements(name)
    say(f"{name}: installing {' '.join(wanted)}")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, *wanted[:2]],
        [*pip, *wanted],
    ):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            return f"cannot be installed: {last_words(done.stderr)}"
    (folder / "ready.json").write_text(json.dumps(wanted), encoding="utf-8")
    return None


def last_words(text: str) -> str:
    """Return the line that says what went wrong: pip's ERROR, or the end of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1]


def python(name: str | None) -> str:
    """Return the interpreter of an environment."""
    return str(VENVS / name / "bin" / "python") if name else sys.executable


def variables(name: str | None, threads: int) -> dict[str, str]:
    """Return the environment variables that a worker runs with."""
    found = dict(os.environ)
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        found[key] = str(threads)
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [BENCHMARKS] if name else [BENCHMARKS, REPOSITORY]
    found["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return found


def run_worker(
    name: str | None,
    worker: str,
    job: Mapping[str, Any],
    env: Mapping[str, str],
    patience_s: float,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a worker, a module of `peers`, on a job; return what its one line of JSON holds.

    Raises:
        NotMeasured: if it fails or does not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        try:
            done = subprocess.run(
                [python(name), "-m", f"peers.{worker}", str(path), *arguments],
                capture_output=True,
                text=True,
                cwd=folder,
                env=env,
                timeout=patience_s,
            )
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"did not end within {patience_s:.0f} s") from None
    if done.returncode != 0:
        raise NotMeasured(f"failed: {last_words(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
