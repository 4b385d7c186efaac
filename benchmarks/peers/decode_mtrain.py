"""Translate with mtrain, text to text: tokenizing is timed too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from peers.decoding import Job, Loaded, serve

from mtrain import __version__
from mtrain.decode import translator
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.translator import EncodedSource
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_settings import own_process


def main() -> None:
    own_process()  # as the command line does
    serve(load)


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    run, (precision, *others) = RunDir(Path(job.run)), job.precision.split("-")
    options = replace(
        DecodingOptions.from_config(run.config),
        beam=job.beam,
        length_alpha=job.alpha,
        max_input_tokens=None,
        with_scores=False,
        shortlist="fast" if others else None,
        retry_flagged=False,  # a second search, which the other systems do not make
    )
    loading = LoadOptions("cpu", precision)  # type: ignore[arg-type]
    model = translator.load(run, options, loading)
    usual = EncodedSource.max_length

    def limited(self: EncodedSource, max_extra_tokens: int) -> int:
        return min(usual(self, max_extra_tokens), job.max_tokens - 1)

    EncodedSource.max_length = limited  # type: ignore[method-assign]
    versions = {"mtrain": __version__, "torch": torch.__version__}
    return Loaded(lambda: translate_lines(model, job.lines, block_lines=len(job.lines)), versions)


if __name__ == "__main__":
    main()
