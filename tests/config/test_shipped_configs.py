"""Every shipped config loads; the demo and WMT configs have the settings of demo and paper."""

from pathlib import Path

import pytest
from tasks import REPOSITORY

from mtrain.config import config_file
from mtrain.config.corpora import corpora_of
from mtrain.config.sections import Config
from mtrain.demo import demo

DIRECTORY = REPOSITORY / "configs"
SHIPPED = sorted(path.relative_to(DIRECTORY).as_posix() for path in DIRECTORY.rglob("*.yaml"))
VARIANTS = [name for name in SHIPPED if name.startswith("variants/")]


def shipped(name: str) -> Config:
    return config_file.load(DIRECTORY / name)


def test_the_demo_multi30k_and_wmt14_configs_are_shipped() -> None:
    expected = {"demo.yaml", "multi30k_tiny.yaml", "wmt14_base.yaml", "wmt14_big.yaml"}
    assert expected <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_loads_and_has_only_relative_paths(name: str) -> None:
    config = shipped(name)
    corpora = [named.corpus for named in corpora_of(config.data.train)]
    corpora += [config.data.valid, *config.data.tests.values()]
    files = [path for corpus in corpora for path in corpus.src + corpus.tgt]
    assert not any(Path(path).is_absolute() for path in [config.run_dir, *files])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_has_a_run_folder_of_its_own_name_and_a_test_set(name: str) -> None:
    config = shipped(name)
    assert config.run_dir == f"runs/{Path(name).with_suffix('').as_posix()}"
    assert config.data.tests


def test_the_shipped_demo_config_equals_the_one_that_the_demo_writes() -> None:
    written = config_file.HEAD + demo.config_text("data/demo", "runs/demo")
    assert (DIRECTORY / "demo.yaml").read_bytes() == written.encode()


@pytest.mark.parametrize("name", ["demo.yaml", *VARIANTS])
def test_the_files_of_the_demo_and_variant_configs_are_shipped(name: str) -> None:
    data = shipped(name).data
    corpora = [data.train, data.valid, *data.tests.values()]
    for path in [name for corpus in corpora for name in corpus.src + corpus.tgt]:
        assert (REPOSITORY / path).is_file()


@pytest.mark.parametrize(
    ("name", "d_model", "d_ff", "num_heads", "dropout", "averaged", "steps"),
    [
        ("wmt14_base.yaml", 512, 2048, 8, 0.1, 5, 100_000),
        ("wmt14_big.yaml", 1024, 4096, 16, 0.3, 20, 300_000),
    ],
)
def test_the_wmt_configs_have_the_settings_of_the_paper(
    name: str, d_model: int, d_ff: int, num_heads: int, dropout: float, averaged: int, steps: int
) -> None:
    config = shipped(name)
    model, training, decoding = config.model, config.training, config.decoding
    assert (model.d_model, model.d_ff, model.num_heads) == (d_model, d_ff, num_heads)
    assert (model.num_encoder_layers, model.num_decoder_layers) == (6, 6)
    assert (model.dropout, model.norm, model.activation) == (dropout, "post", "relu")
    assert (model.positions, model.tie_embeddings) == ("sinusoidal", "all")
    assert (config.tokenizer.vocab_size, config.tokenizer.shared) == (37_000, True)
    assert config.tokenizer.kind == "bpe"
    assert (training.schedule, training.lr, training.warmup_steps) == ("noam", 1.0, 4000)
    assert (training.betas, training.eps) == ([0.9, 0.98], 1e-9)
    assert (training.label_smoothing, training.weight_decay) == (0.1, 0.0)
    assert training.batch_tokens * training.accumulate == pytest.approx(25_000, rel=0.02)
    assert (training.average, training.average_of, training.max_steps) == (averaged, "last", steps)
    assert (decoding.beam, decoding.length_alpha, decoding.max_extra_tokens) == (4, 0.6, 50)
    assert (config.data.src_lang, config.data.tgt_lang) == ("en", "de")
