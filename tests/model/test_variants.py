"""Every variant of the model trains and translates, and all names in docs/model.md exist."""

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Cli
from safetensors.torch import load_file
from tasks import REPOSITORY, write

from mtrain.config import config_file
from mtrain.config.sections import TrainingConfig
from mtrain.data.batch import collate
from mtrain.decode.translator import load
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.training.loss import loss_of

DIRECTORY = REPOSITORY / "configs" / "variants"
VARIANTS = sorted(path.stem for path in DIRECTORY.glob("*.yaml"))
PAGE = (REPOSITORY / "docs" / "model.md").read_text(encoding="utf-8")
HEADS = {"train": 400, "valid": 4, "test": 4}
SMALL = [
    "tokenizer.vocab_size=600",
    "model.d_model=32",
    "model.d_ff=64",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "training.max_steps=40",
    "training.batch_tokens=512",
    "training.warmup_steps=10",
    "training.validate_every=40",
    "training.save_every=20",
    "training.average=2",
    "training.log_every=1",
    "training.device=cpu",
    "training.precision=float32",
    "decoding.max_extra_tokens=3",
]


class Trained(NamedTuple):
    run: RunDir
    losses: list[float]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first lines of the demo corpus, where the configs look for it."""
    directory = tmp_path_factory.mktemp("variants")
    (directory / "data" / "demo").mkdir(parents=True)
    for split, count in HEADS.items():
        for side in ("en", "de"):
            name = f"data/demo/{split}.{side}"
            lines = (REPOSITORY / name).read_text("utf-8").splitlines()[:count]
            write(directory / name, lines)
    return directory


@pytest.fixture
def train(cli: Cli, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a variant through the command line, at a small size, with its own options kept."""
    monkeypatch.chdir(corpus)

    def trained(name: str) -> Trained:
        run = RunDir(Path("runs") / name)
        if not run.model_path.exists():
            overrides = [word for setting in SMALL for word in ("--set", setting)]
            outcome = cli("train", DIRECTORY / f"{name}.yaml", *overrides, "--run", run.path)
            assert outcome.code == 0, outcome.err
        lines = map(json.loads, run.metrics_path.read_text("utf-8").splitlines())
        return Trained(run, [line["loss"] for line in lines if "loss" in line])

    return trained


def test_configs_exist_for_paper_prenorm_learned_and_encoder_padding() -> None:
    assert {"paper", "prenorm", "learned", "encoder_padding"} <= set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_comment_at_the_top_of_each_variant_config_mentions_its_source(name: str) -> None:
    _, first, second, *_ = (DIRECTORY / f"{name}.yaml").read_text("utf-8").splitlines()
    assert first.startswith("# ") and second.startswith("# ")
    assert "document" in first or "paper" in first or "listings" in first


def test_the_variant_configs_set_the_options_that_their_names_promise() -> None:
    paper, prenorm, learned, padding = (
        config_file.load(DIRECTORY / f"{name}.yaml")
        for name in ("paper", "prenorm", "learned", "encoder_padding")
    )
    model = paper.model
    assert (model.norm, model.positions, model.activation) == ("post", "sinusoidal", "relu")
    assert (model.tie_embeddings, paper.training.schedule) == ("all", "noam")
    assert model.attention_dropout == model.activation_dropout == 0
    assert prenorm.model == model.model_copy(update={"norm": "pre"})
    model = learned.model
    assert (model.positions, model.activation, model.tie_embeddings) == ("learned", "gelu", "none")
    assert not learned.tokenizer.shared
    assert min(model.dropout, model.attention_dropout, model.activation_dropout) > 0
    assert padding.model.tie_embeddings == "decoder"
    assert not padding.tokenizer.shared
    windowed = config_file.load(DIRECTORY / "window.yaml").model
    assert windowed == paper.model.model_copy(update={"attention_window": 4})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_learns_and_translates(name: str, train: Any, cli: Cli) -> None:
    run, losses = train(name)
    assert len(losses) == 40
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]
    outcome = cli("translate", run.path, stdin=b"The old farmer is tired.\n\nWe wait.\n")
    assert outcome.code == 0
    assert (len(outcome.lines), outcome.lines[1]) == (3, "")
    outcome = cli("eval", run.path)
    assert outcome.code == 0
    assert "BLEU" in "\n".join(outcome.lines)


def test_a_line_longer_than_the_learned_positions_is_translated_with_a_warning(
    train: Any, cli: Cli
) -> None:
    run, _ = train("learned")
    limit = run.config.model.max_positions
    long = "The old farmer is tired. " * 20
    num_tokens = len(load(run, loading=LoadOptions("cpu")).tokenizer.encode_src([long])[0])
    assert limit is not None and num_tokens > limit
    whole = ["--max-input-tokens", str(num_tokens)]
    outcome = cli("translate", run.path, *whole, stdin=f"We wait.\n{long}\n".encode())
    assert (outcome.code, len(outcome.lines)) == (0, 2)
    assert outcome.err.startswith(
        f"mtrain: line 2: has {num_tokens} tokens, but the model learned {limit} positions; the "
        "tokens after them share the last one. `mtrain translate --max-input-tokens` cuts such "
        "lines.\n"
    )


@pytest.mark.parametrize(
    ("name", "num_tables"), [("paper", 1), ("encoder_padding", 2), ("learned", 3)]
)
def test_a_run_stores_tied_embedding_tables_once(train: Any, name: str, num_tables: int) -> None:
    stored = set(load_file(train(name).run.model_path))
    tables = {"src_embedding.weight", "tgt_embedding.weight", "output.weight"}
    assert len(tables & stored) == num_tables
    assert ("src_positions.table.weight" in stored) == (name == "learned")


@torch.no_grad()
def test_the_loss_does_not_depend_on_the_id_used_for_padding(train: Any) -> None:
    """Compare the loss of a batch padded with 0, as in mtrain, and with 1."""
    translator = load(train("encoder_padding").run, loading=LoadOptions("cpu"))
    translator.model.eval()
    special = translator.tokenizer.tgt
    assert special.pad == translator.tokenizer.src.pad == 0
    lines = ["We wait.", "The brother is a young student."]
    src, tgt = translator.tokenizer.encode_src(lines), special.encode(lines)
    losses = []
    for pad in (special.pad, 1):
        batch = collate(src, tgt, pad, special.bos, special.eos)
        assert (batch.src_BS[~batch.src_keep_BS] == pad).all() and not batch.src_keep_BS.all()
        losses.append(loss_of(translator.model, batch, TrainingConfig()).loss.item())
    assert losses[0] == losses[1]


# The page


def test_every_class_and_function_that_the_page_names_exists() -> None:
    trees = [
        ast.parse((REPOSITORY / "mtrain" / "model" / name).read_text(encoding="utf-8"))
        for name in ("transformer.py", "kv_cache.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    known = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named = set(re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", PAGE)) | set(re.findall(r"`(\w+)\(\)`", PAGE))
    others = {"Linear", "Dropout", "LayerNorm", "GELU", "ReLU"}  # of the kernels and of torch
    assert named - known - others == set()
