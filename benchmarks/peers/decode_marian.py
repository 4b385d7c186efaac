"""Translate with Marian, text to text, by mtrain's export, in this environment with pymarian."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import pymarian
from peers.decoding import Job, Loaded, run_apart, serve

from mtrain.decode import translator
from mtrain.exporters import marian
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir


def main() -> None:
    serve(load)


def load(job: Job) -> Loaded:
    with tempfile.TemporaryDirectory() as folder:
        run_apart(export, job, folder)
        options = [
            *("--config", f"{folder}/decoder.yml", "--models", f"{folder}/model.bin", "--quiet"),
            *("--beam-size", str(job.beam), "--normalize", f"{job.alpha:g}"),
            *("--mini-batch", str(job.batch_size), "--cpu-threads", str(job.threads)),
            *(["--skip-cost"] if job.beam == 1 else []),
        ]
        engine = pymarian.Translator(" ".join(options))
    versions = {"pymarian": importlib.metadata.version("pymarian"), "in": job.precision}
    return Loaded(lambda: engine.translate(job.lines), versions)


def export(job: Job, folder: str) -> None:
    """Write the run's model for Marian, in float32 or with the weights of products in 8 bits."""
    run = RunDir(Path(job.run))
    loaded = translator.load(run, loading=LoadOptions("cpu"))
    marian.write(loaded.model, loaded.tokenizer, run.config, Path(folder), None)
    gemm = "intgemm8" if job.precision == "int8" else job.precision
    convert = [sys.executable, "-m", "pymarian", "convert", "--gemm-type", gemm]
    paths = ("--from", f"{folder}/model.npz", "--to", f"{folder}/model.bin")
    subprocess.run([*convert, *paths], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
