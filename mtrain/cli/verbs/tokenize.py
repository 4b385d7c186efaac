"""The verb `mtrain tokenize`."""

from __future__ import annotations

from mtrain import api
from mtrain.cli import options


def tokenize(
    config: options.ConfigArgument, set_: options.SetOption = None, run: options.RunOption = None
) -> None:
    """Train the tokenizer and encode the corpora into the run folder.

    Example: mtrain tokenize configs/demo.yaml --run runs/small --set tokenizer.vocab_size=1000
    """
    api.tokenize(api.load_config(config, set_ or [], run))
