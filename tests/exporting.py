"""Models with random weights, and what other libraries make of them."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from builders import SRC_LINES, TGT_LINES, model_config, transformer, vocabularies

from mtrain.config.sections import Config, TokenizerConfig
from mtrain.data.prepare import ParallelLines
from mtrain.decode.options import DecodingOptions
from mtrain.decode.translator import Translator
from mtrain.exporters import export, parity
from mtrain.exporters.exporter import ExportedModel
from mtrain.exporters.registry import Library, exporters
from mtrain.model.transformer import Transformer
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

EXPORTERS = exporters()
EXACT = 1e-4  # of a log-probability in float32
LINES = ParallelLines(SRC_LINES[:3], TGT_LINES[:3])
ODD = [
    "a </s> b <pad> <unk> <s> c",
    "two  spaces , and a space before a point .",
    " \N{SNOWMAN} \N{GRINNING FACE} ",
    "▁ a marker",
    "ﬁ and tab\tand NBSP\N{NO-BREAK SPACE}end",
]


def need(library: Library) -> None:
    for package in (EXPORTERS[library].PACKAGE, *EXPORTERS[library].OTHER_PACKAGES):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def settings(**data: object) -> Config:
    corpus = {"src": ["a"], "tgt": ["b"]}
    tree = {"src_lang": "en", "tgt_lang": "de", "train": corpus, "valid": corpus, "max_tokens": 64}
    return Config.model_validate({"run_dir": "x", "data": tree | data})


def translator_of(model: Transformer, tokenizer: Tokenizer) -> Translator:
    options = DecodingOptions(beam=3, max_extra_tokens=2)
    return Translator([model], tokenizer, options, torch.device("cpu"))


def random_model(kind: str = "unigram", shared: bool = True, **variant: object) -> Translator:
    """A float32 model none of whose weights is a zero or a one."""
    tokenizer = vocabularies(kind, shared)
    config = model_config(**variant)
    model = transformer(config, len(tokenizer.src), len(tokenizer.tgt)).float()
    return translator_of(model, tokenizer)


def tempted_model() -> Translator:
    """A model with a tag, whose likeliest tokens are those that must never be generated."""
    pairs = zip(SRC_LINES, TGT_LINES, strict=True)
    config = TokenizerConfig(vocab_size=420)
    tokenizer = sentencepiece.train(config, pairs, len(SRC_LINES), seed=1, tags=["bt"])
    tgt = tokenizer.tgt
    model = transformer(model_config(num_decoder_layers=1), len(tgt), len(tgt)).float()
    norm = model.decoder[0].residual_3.norm
    with torch.no_grad():
        norm.weight.zero_()  # every state is the norm's bias
        model.output.weight[[tgt.pad, tgt.bos, tgt.tags["bt"]]] = norm.bias
    return translator_of(model, tokenizer)


def copied(translator: Translator, library: Library, directory: Path) -> ExportedModel:
    model, exporter = translator.model, EXPORTERS[library]
    tokenizer_config = TokenizerConfig(shared=translator.tokenizer.src is translator.tokenizer.tgt)
    config = settings().model_copy(update={"model": model.config, "tokenizer": tokenizer_config})
    export.check_supported(library, config)
    exporter.write(model, translator.tokenizer, config, directory, None)
    return exporter.load(directory)


def check_exact(translator: Translator, library: Library, directory: Path) -> None:
    compared = parity.compare(translator, copied(translator, library, directory), LINES)
    assert compared.problems() == []
    assert compared.same_source == compared.same_greedy == compared.same_text == (3, 3)
    assert compared.reference_diff < EXACT and compared.beam_diff < EXACT
