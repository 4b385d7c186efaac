"""The error messages of configs, the pitfalls of YAML, and the defaults that users rely on."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config import config_file
from mtrain.config.corpora import bidirectional_corpora, corpora_of, has_both_directions
from mtrain.config.sections import Config
from mtrain.errors import ConfigError

MINIMAL = """\
run_dir: runs/x
data:
  src_lang: en
  tgt_lang: de
  train: {src: [train.en], tgt: [train.de]}
  valid: {src: [valid.en], tgt: [valid.de]}
"""
SEPARATE = "must be 'decoder' or 'none' when `tokenizer.shared` is false, but is 'all' instead."
FILES = "{src: [a.en], tgt: [a.de]}"
WEIGHTED = "{src: [a.en], tgt: [a.de], weight: 2}"


@pytest.fixture
def minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of only the required keys, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(MINIMAL, encoding="utf-8")
    return Path("c.yaml")


def message(path: Path, *overrides: str, run: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        config_file.load(path, overrides, run)
    text = str(error.value)
    assert "\n" not in text
    return text


def message_of(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    Path("c.yaml").write_bytes(raw)
    return message(Path("c.yaml"))


def test_a_minimal_config_has_exactly_the_listed_defaults(minimal: Path) -> None:
    tree = config_file.load(minimal).model_dump()
    assert tree.pop("run_dir") == "runs/x"
    assert tree.pop("seed") == 1
    assert tree.pop("data") == {
        "src_lang": "en",
        "tgt_lang": "de",
        "train": {"src": ["train.en"], "tgt": ["train.de"]},
        "temperature": None,
        "valid": {"src": ["valid.en"], "tgt": ["valid.de"]},
        "tests": {},
        "max_tokens": 256,
        "clean": ["blank-side", "held-out-pair"],
    }
    assert tree.pop("tokenizer") == {
        "kind": "unigram",
        "vocab_size": None,
        "shared": True,
        "character_coverage": 1.0,
        "byte_fallback": True,
        "sampling_alpha": 0.0,
        "max_training_lines": 500_000,
    }
    assert tree.pop("model") == {
        "d_model": 128,
        "num_heads": 4,
        "d_ff": 256,
        "num_encoder_layers": 4,
        "num_decoder_layers": 4,
        "dropout": 0.3,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "norm": "post",
        "positions": "sinusoidal",
        "max_positions": None,
        "attention_window": None,
        "activation": "relu",
        "tie_embeddings": "all",
        "branch_gain": 0.05,
    }
    assert tree.pop("training") == {
        "max_steps": 8000,
        "max_minutes": None,
        "batch_tokens": 4096,
        "accumulate": 1,
        "parallel": "ddp",
        "exchange": "float32",
        "label_smoothing": 0.1,
        "consistency": None,
        "optimizer": "adam",
        "schedule": "inverse_sqrt",
        "lr": 0.005,
        "warmup_steps": 2000,
        "betas": [0.9, 0.98],
        "eps": 1e-9,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "init_from": None,
        "replay": 0.0,
        "device": "auto",
        "precision": "auto",
        "compile": True,
        "log_every": 50,
        "num_examples": 1,
        "validate_every": 500,
        "save_every": None,
        "patience": 10,
        "keep_last": 5,
        "keep_best": 1,
        "average": 5,
        "average_of": "last",
    }
    assert tree.pop("decoding") == {
        "beam": 5,
        "length_alpha": 0.6,
        "max_extra_tokens": 50,
        "batch_tokens": 8192,
        "no_repeat_ngram": 0,
        "retry_flagged": True,
        "mbr": None,
        "early_stop": False,
    }
    assert tree == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainin.lr=1", "`trainin` is not a key of the config; did you mean `training`?"),
        ("sed=1", "`sed` is not a key of the config; did you mean `seed`?"),
        (
            "model.d_modl=8",
            "`model.d_modl` is not a key of the config; did you mean `model.d_model`?",
        ),
        (
            "training.d_model=8",
            "`training.d_model` is not a key of the config; did you mean `model.d_model`?",
        ),
        (
            "model.batch_tokens=8",
            "`model.batch_tokens` is not a key of the config; did you mean "
            "`training.batch_tokens`?",
        ),
        (
            "training.batch_token=8",
            "`training.batch_token` is not a key of the config; did you mean "
            "`training.batch_tokens`?",
        ),
        (
            "training.consistency={wieght: 1}",
            "`training.consistency.wieght` is not a key of the config; did you mean "
            "`training.consistency.weight`?",
        ),
        (
            "model.vocabsize=8",
            "`model.vocabsize` is not a key of the config; did you mean `tokenizer.vocab_size`?",
        ),
        (
            "model.zzz=1",
            "`model.zzz` is not a key of the config; the nearest are `tie_embeddings`, "
            "`positions`, `num_heads`, and the config.yaml of every run has them all.",
        ),
        (
            "training.early_stopping=3",
            "`training.early_stopping` is not a key of the config; did you mean "
            "`training.patience`?",
        ),
        (
            "early-stopping=3",
            "`early-stopping` is not a key of the config; did you mean `training.patience`?",
        ),
        (
            "training.epochs=3",
            "`training.epochs` is not a key of the config; did you mean `training.max_steps`?",
        ),
        (
            "training.learning_rate=1",
            "`training.learning_rate` is not a key of the config; did you mean `training.lr`?",
        ),
        (
            "model.hidden_size=64",
            "`model.hidden_size` is not a key of the config; did you mean `model.d_model`?",
        ),
        (
            "zzz=1",
            "`zzz` is not a key of the config; known here: run_dir, seed, data, tokenizer, model, "
            "training, decoding.",
        ),
        ("data.train.foo=1", "`data.train.foo` is not a key of the config; known here: src, tgt."),
        (
            "data.tests.t={src: [a], tgt: [b], foo: 1}",
            "`data.tests.t.foo` is not a key of the config; known here: src, tgt.",
        ),
        (
            "data.valid={src: [a], tgt: [b], 3: x}",
            "`data.valid.3` is not a key of the config; known here: src, tgt.",
        ),
        (
            "data.valid={src: [a], tgt: [b], <<: {tsv: [c]}}",
            "`data.valid.<<` is not a key of the config; known here: src, tgt.",
        ),
        (
            "training={null: 1}",
            "`training.null` is not a key of the config; the nearest are `num_examples`, "
            "`schedule`, `parallel`, and the config.yaml of every run has them all.",
        ),
    ],
)
def test_an_unknown_key_is_an_error_that_suggests_known_keys(
    minimal: Path, override: str, said: str
) -> None:
    assert message(minimal, override) == f"c.yaml: {said}"


def test_a_key_that_a_file_joins_by_a_dot_is_refused(minimal: Path) -> None:
    with minimal.open("a", encoding="utf-8") as file:
        file.write("training.max_steps: 3\n")
    assert message(minimal) == (
        "c.yaml: `training.max_steps` must be `max_steps` in the section `training`, but is one "
        "key with a dot instead."
    )


def test_an_unknown_key_is_reported_before_a_wrong_value(minimal: Path) -> None:
    said = message(minimal, "seed=x", "model.d_modl=8")
    assert said.startswith("c.yaml: `model.d_modl` is not a key")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1.5", "`seed` must be a whole number, but is 1.5 instead."),
        ("seed=x", "`seed` must be a whole number, but is 'x' instead."),
        (
            "training.max_steps=1e3",
            "`training.max_steps` must be a whole number, but is 1000.0 instead.",
        ),
        ("training.lr=fast", "`training.lr` must be a number, but is 'fast' instead."),
        ("training.lr=.nan", "`training.lr` must be a number, but is '.nan' instead."),
        ("run_dir=5", "`run_dir` must be text, but is 5 instead."),
        ("data.train.src=a.en", "`data.train.src` must be a list, but is 'a.en' instead."),
        ("data.train.src=[1]", "`data.train.src[0]` must be text, but is 1 instead."),
        ("training.betas=[0.9, x]", "`training.betas[1]` must be a number, but is 'x' instead."),
        ("tokenizer.shared=yes", "`tokenizer.shared` must be true or false, but is 'yes' instead."),
        ("tokenizer.shared=1", "`tokenizer.shared` must be true or false, but is 1 instead."),
        ("model=5", "`model` must be a section of keys, but is 5 instead."),
        ("data.tests=[]", "`data.tests` must be a mapping of names to values, but is [] instead."),
        ("data.tests.t=5", "`data.tests.t` must be a section of keys, but is 5 instead."),
        ("model.norm=mid", "`model.norm` must be 'post' or 'pre', but is 'mid' instead."),
        (
            "training.schedule=step",
            "`training.schedule` must be 'inverse_sqrt', 'noam', 'linear' or 'cosine', "
            "but is 'step' instead.",
        ),
        (
            "model.positions=rotary",
            "`model.positions` must be 'sinusoidal' or 'learned', but is 'rotary' instead.",
        ),
    ],
)
def test_a_value_of_the_wrong_type_or_choice_is_reported_with_the_allowed_ones(
    minimal: Path, override: str, said: str
) -> None:
    assert message(minimal, override) == f"c.yaml: {said}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=true", "`seed` must be a whole number, but is true instead."),
        ("training.lr=null", "`training.lr` must be a number, but is null instead."),
        ("model=", "`model` must be a section of keys, but is null instead."),
    ],
)
def test_a_wrong_value_is_shown_as_yaml_spells_it(minimal: Path, override: str, said: str) -> None:
    assert message(minimal, override) == f"c.yaml: {said}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("decoding.beam=0", "`decoding.beam` must be >= 1, but is 0 instead."),
        (
            "decoding.max_extra_tokens=100001",
            "`decoding.max_extra_tokens` must be <= 100000, but is 100001 instead.",
        ),
        ("decoding.length_alpha=-1", "`decoding.length_alpha` must be >= 0.0, but is -1 instead."),
        ("training.warmup_steps=-3", "`training.warmup_steps` must be >= 0, but is -3 instead."),
        ("training.max_steps=0", "`training.max_steps` must be >= 1, but is 0 instead."),
        ("training.max_minutes=0", "`training.max_minutes` must be > 0.0, but is 0 instead."),
        ("training.lr=0", "`training.lr` must be > 0.0, but is 0 instead."),
        (
            "training.consistency.weight=0",
            "`training.consistency.weight` must be > 0.0, but is 0 instead.",
        ),
        (
            "training.consistency.cutoff=1",
            "`training.consistency.cutoff` must be < 1.0, but is 1 instead.",
        ),
        (
            "training.consistency={cutoff: -0.1}",
            "`training.consistency.cutoff` must be >= 0.0, but is -0.1 instead.",
        ),
        (
            "training.label_smoothing=1.0",
            "`training.label_smoothing` must be < 1.0, but is 1.0 instead.",
        ),
        (
            "training.parallel=zero",
            "`training.parallel` must be 'ddp' or 'fsdp', but is 'zero' instead.",
        ),
        (
            "training={optimizer: muon, parallel: fsdp}",
            "`training` must have `parallel: ddp` for Muon, which needs whole matrices on each "
            "rank, but `parallel` is 'fsdp' instead.",
        ),
        (
            "decoding={mbr: chrf, beam: 1}",
            "`decoding` must have a `beam` of at least 2 for `mbr`, but has 1 instead.",
        ),
        ("training.patience=0", "`training.patience` must be >= 1, but is 0 instead."),
        ("training.accumulate=0", "`training.accumulate` must be >= 1, but is 0 instead."),
        (
            "training.betas=[0.9]",
            "`training.betas` must be a list of at least 2, but is [0.9] instead.",
        ),
        (
            "training.betas=[0.9, 0.98, 0.99]",
            "`training.betas` must be a list of at most 2, but is [0.9, 0.98, 0.99] instead.",
        ),
        (
            "training.betas=[0.9, 1.0]",
            "`training` must have betas in [0, 1), but has [0.9, 1.0] instead.",
        ),
        ("model.dropout=1.0", "`model.dropout` must be < 1.0, but is 1.0 instead."),
        (
            "model.attention_dropout=1.0",
            "`model.attention_dropout` must be < 1.0, but is 1.0 instead.",
        ),
        (
            "model.activation_dropout=-0.1",
            "`model.activation_dropout` must be >= 0.0, but is -0.1 instead.",
        ),
        ("model.attention_window=0", "`model.attention_window` must be >= 1, but is 0 instead."),
        ("model.max_positions=1", "`model.max_positions` must be >= 2, but is 1 instead."),
        ("model.num_heads=0", "`model.num_heads` must be >= 1, but is 0 instead."),
        (
            "model.num_heads=3",
            "`model` must have a `d_model` that is divisible by `num_heads`, but 128 is not "
            "divisible by 3.",
        ),
        (
            "model={d_model: 7, num_heads: 7}",
            "`model` must have an even `d_model` for sinusoidal positions, but has 7 instead.",
        ),
        (
            "tokenizer.character_coverage=1.5",
            "`tokenizer.character_coverage` must be <= 1.0, but is 1.5 instead.",
        ),
        (
            "tokenizer.character_coverage=0.95",
            "`tokenizer.character_coverage` must be >= 0.98, but is 0.95 instead.",
        ),
        ("tokenizer.vocab_size=7", "`tokenizer.vocab_size` must be >= 8, but is 7 instead."),
        ("data.max_tokens=1", "`data.max_tokens` must be >= 2, but is 1 instead."),
        (
            "data.src_lang=''",
            "`data.src_lang` must be at least 1 character long, but is '' instead.",
        ),
        ("data.train.src=[]", "`data.train.src` must be a list of at least 1, but is [] instead."),
        ("training.lr=1e400", "`training.lr` must be a finite number, but is inf instead."),
    ],
)
def test_a_value_out_of_range_is_reported_with_its_bound(
    minimal: Path, override: str, said: str
) -> None:
    assert message(minimal, override) == f"c.yaml: {said}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "data.train.src=[a.en, b.en]",
            "`data.train` must name as many source as target files, but names 2 and 1 instead.",
        ),
        (
            "data.train={src: [a], tgt: [b, c]}",
            "`data.train` must name as many source as target files, but names 1 and 2 instead.",
        ),
        (
            "data.tests.a/b={src: [x], tgt: [y]}",
            "`data` must name its test sets with letters, digits, '_', '-' and '.', "
            "but has 'a/b' instead.",
        ),
        (
            "data.tests={..: {src: [x], tgt: [y]}}",
            "`data` must name its test sets with letters, digits, '_', '-' and '.', "
            "but has '..' instead.",
        ),
        ("tokenizer.shared=false", f"`model.tie_embeddings` {SEPARATE}"),
        (
            "model.positions=learned",
            "`model` must say with `max_positions` how many positions are learned, but it is null "
            "instead.",
        ),
        (
            "model.max_positions=300",
            "`model` must leave `max_positions` null unless `positions` is 'learned', but it is "
            "300 instead.",
        ),
        (
            "model={positions: learned, max_positions: 255}",
            "`model.max_positions` must be >= `data.max_tokens` (256), but is 255 instead.",
        ),
        (
            "training.average=6",
            "`training` must keep the 6 checkpoints that it averages, but keep_last is 5 instead.",
        ),
        (
            "training.average_of=best",
            "`training` must keep the 5 checkpoints that it averages, but keep_best is 1 instead.",
        ),
        (
            "training.max_steps=null",
            "`training` must have max_steps or max_minutes, but both are null instead.",
        ),
        (
            "training.batch_tokens=255",
            "`training.batch_tokens` must be >= `data.max_tokens` (256), but is 255 instead.",
        ),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(
    minimal: Path, override: str, said: str
) -> None:
    assert message(minimal, override) == f"c.yaml: {said}"


def test_a_test_set_named_by_a_number_is_refused(minimal: Path) -> None:
    said = message(minimal, "data.tests={2016: {src: [x], tgt: [y]}}")
    assert said == (
        "c.yaml: `data.tests` must name its test sets by text, but has 2016 instead; "
        "write it in quotes."
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.max_steps=null", "training.max_minutes=0.5"],
        ["tokenizer.shared=false", "model.tie_embeddings=decoder"],
        ["tokenizer.shared=false", "model.tie_embeddings=none"],
        ["training.batch_tokens=256"],
        ["training.average=1", "training.average_of=best"],
        ["model.num_heads=1", "model.d_model=2"],
        ["model.positions=learned", "model.max_positions=256"],
        ["model={d_model: 7, num_heads: 7, positions: learned, max_positions: 256}"],
        ["model.attention_window=1", "model.attention_dropout=0", "model.activation_dropout=0.99"],
        ["decoding.beam=1", "decoding.length_alpha=0", "training.warmup_steps=0"],
        ["data.tests={flickr_2016-v1.0: {src: [x], tgt: [y]}}"],
        ["training.save_every=null", "training.lr=1"],
    ],
)
def test_boundary_values_are_accepted(minimal: Path, overrides: list[str]) -> None:
    config_file.load(minimal, overrides)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("run_dir: runs/x\n", "run_dir"),
        ("  src_lang: en\n", "data.src_lang"),
        ("  valid: {src: [valid.en], tgt: [valid.de]}\n", "data.valid"),
        (", tgt: [train.de]", "data.train.tgt"),
    ],
)
def test_a_missing_key_is_reported_with_its_full_name(minimal: Path, line: str, key: str) -> None:
    assert line in MINIMAL
    said = message_of(MINIMAL.replace(line, ""))
    assert said == f"c.yaml: `{key}` must be given, but is missing."


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n", "5\n"])
def test_a_file_that_is_not_a_mapping_is_refused(minimal: Path, text: str) -> None:
    assert message_of(text) == "c.yaml: must be a YAML mapping of keys to values, but is not."


@pytest.mark.parametrize(
    ("text", "where"),
    [("a: 1\nb: [1\n", "line 3"), ("a:\n\tb: 1\n", "line 2"), ("a: 1\nb: 'x\n", "line 3")],
)
def test_bad_yaml_is_refused_with_its_line(minimal: Path, text: str, where: str) -> None:
    assert message_of(text).startswith(f"c.yaml: {where}: must be valid YAML, but is not: ")


@pytest.mark.parametrize("number", [2**64, -(2**64), 10**300])
def test_a_number_of_more_than_64_bits_is_refused_with_its_line(minimal: Path, number: int) -> None:
    said = message_of(f"seed: 1\nrun_dir: {number}\n")
    assert said.startswith("c.yaml: line 2: must be a number of 64 bits, but is ")


@pytest.mark.parametrize(("text", "seed"), [("010", 10), ("08", 8), ("+7", 7), ("1_000", 1000)])
def test_a_number_with_leading_zeros_is_decimal(minimal: Path, text: str, seed: int) -> None:
    assert config_file.load(minimal, [f"seed={text}"]).seed == seed


@pytest.mark.parametrize("text", ["1:30", "0x1F", "0b11", "0o17", "1__0"])
def test_minutes_with_seconds_and_numbers_in_another_base_are_refused(
    minimal: Path, text: str
) -> None:
    """In YAML 1.1 1:30 is 90."""
    with pytest.raises(ConfigError) as caught:
        config_file.load(minimal, [f"training.max_minutes={text}"])
    wanted = f"c.yaml: `training.max_minutes` must be a number, but is '{text}' instead."
    assert str(caught.value) == wanted


@pytest.mark.parametrize("text", ["a: 2024-13-45\n", "!!int x: 3\n", "a: \x00\n"])
def test_yaml_values_that_pyyaml_cannot_construct_are_refused(minimal: Path, text: str) -> None:
    assert message_of(text).startswith("c.yaml: ")


def test_yaml_tags_for_python_objects_are_refused(minimal: Path) -> None:
    said = message_of("a: !!python/object/apply:os.getcwd []\n")
    assert said.startswith("c.yaml: line 1: must have no YAML tag, but has ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINIMAL + "run_dir: y\n", "line 7: `run_dir` must stand once, but is repeated."),
        ("a: {b: 1, b: 2}\n", "line 1: `b` must stand once, but is repeated."),
    ],
)
def test_a_repeated_key_is_refused_with_its_line(minimal: Path, text: str, said: str) -> None:
    assert message_of(text) == f"c.yaml: {said}"


def test_a_file_that_is_not_utf8_is_refused(minimal: Path) -> None:
    assert message_of(b"run_dir: caf\xe9\n") == "c.yaml: must be UTF-8 text, but is not."


def test_a_byte_order_mark_is_ignored(minimal: Path) -> None:
    minimal.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert config_file.load(minimal).run_dir == "runs/x"


def test_a_missing_file_and_a_folder_are_refused(minimal: Path) -> None:
    assert message(Path("absent.yaml")) == "absent.yaml: cannot be read: No such file or directory."
    assert message(Path("..")) == "..: cannot be read: Is a directory."


@pytest.mark.parametrize("override", ["training.lr", "=1", "training..lr=1", ".lr=1", "", "="])
def test_a_malformed_override_is_refused(minimal: Path, override: str) -> None:
    assert message(minimal, override) == f"--set must be KEY=VALUE, but is {override!r} instead."


@pytest.mark.parametrize("override", ["run_dir.x=1", "data.src_lang.x.y=1", "data.train.src.x=1"])
def test_an_override_below_a_key_that_is_not_a_section_is_refused(
    minimal: Path, override: str
) -> None:
    dotted = override.removesuffix("=1")
    wrong = {"run_dir.x": "run_dir", "data.src_lang.x.y": "src_lang", "data.train.src.x": "src"}
    said = message(minimal, override)
    assert said == f"--set {dotted}: `{wrong[dotted]}` is not a section of the config."


def test_bad_yaml_in_an_override_names_the_override(minimal: Path) -> None:
    said = message(minimal, "training.betas=[0.9")
    assert said.startswith("--set training.betas: line 1: must be valid YAML, but is not: ")
    said = message(minimal, "data.tests.t={src: [a], src: [b]}")
    assert said == "--set data.tests.t: line 1: `src` must stand once, but is repeated."


def test_overrides_apply_in_order_and_may_create_a_section(minimal: Path) -> None:
    config = config_file.load(minimal, ["training.lr=1", "model.d_ff=8", "training.lr=2.5e-1"])
    assert (config.training.lr, config.model.d_ff) == (0.25, 8)


def test_an_override_may_set_a_key_of_a_section_that_is_null(minimal: Path) -> None:
    minimal.write_text(f"{MINIMAL}training:\nmodel: {{}}\n", "utf-8")
    assert config_file.load(minimal, ["training.lr=0.5"]).training.lr == 0.5
    minimal.write_text(f"{MINIMAL}training: {{consistency: null}}\n", "utf-8")
    consistency = config_file.load(minimal, ["training.consistency.weight=2"]).training.consistency
    assert consistency is not None
    assert consistency.weight == 2.0


def test_an_equals_sign_in_a_value_belongs_to_the_value(minimal: Path) -> None:
    assert config_file.load(minimal, ["run_dir=a=b"]).run_dir == "a=b"


def test_run_takes_precedence_over_the_file_and_over_set(minimal: Path) -> None:
    config = config_file.load(minimal, ["run_dir=from_set"], "from_run")
    assert config.run_dir == "from_run"
    assert config_file.load(minimal, ["run_dir=from_set"]).run_dir == "from_set"


def test_an_empty_run_folder_name_is_refused(minimal: Path) -> None:
    said = message(minimal, run="")
    assert said == "c.yaml: `run_dir` must be at least 1 character long, but is '' instead."


def test_a_run_folder_whose_name_is_not_utf8_is_refused(minimal: Path) -> None:
    said = message(minimal, run="caf\udce9")
    assert said == "c.yaml: `run_dir` must be UTF-8 text, but is 'caf\\udce9' instead."


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-3", 5e-3), ("1e-9", 1e-9), ("1E+2", 100.0), (".5", 0.5), ("5.", 5.0), ("1", 1.0)],
)
def test_numbers_may_have_an_exponent_or_lack_digits_beside_the_point(
    minimal: Path, text: str, value: float
) -> None:
    minimal.write_text(f"{MINIMAL}training: {{lr: {text}}}\n", encoding="utf-8")
    assert config_file.load(minimal).training.lr == value
    assert config_file.load(minimal, [f"training.lr={text}"]).training.lr == value


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "y", "n", "NO"])
def test_language_codes_that_yaml_reads_as_booleans_stay_text(minimal: Path, word: str) -> None:
    minimal.write_text(MINIMAL.replace("src_lang: en", f"src_lang: {word}"), encoding="utf-8")
    assert config_file.load(minimal).data.src_lang == word


def test_a_run_folder_named_by_a_date_stays_text(minimal: Path) -> None:
    assert config_file.load(minimal, ["run_dir=2024-01-31"]).run_dir == "2024-01-31"


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), ("TRUE", True)])
def test_true_and_false_are_booleans_in_any_case(minimal: Path, word: str, value: bool) -> None:
    overrides = [f"tokenizer.shared={word}", "model.tie_embeddings=none"]
    assert config_file.load(minimal, overrides).tokenizer.shared is value


def test_a_saved_config_loads_as_an_equal_config(minimal: Path) -> None:
    config = config_file.load(
        minimal,
        [
            "training.lr=5e-5",
            "training.max_minutes=0.1",
            "data.tests.t={src: [a.gz], tgt: [b.gz]}",
            "data.src_lang=no",
            "run_dir='runs/a: b # c'",
        ],
    )
    config_file.save(config, Path("saved.yaml"))
    assert config_file.load(Path("saved.yaml")) == config
    assert config != config_file.load(minimal)


@pytest.mark.parametrize("run", ["1e5", "5e-3", "1.5", "no", "null", "0x1f", "é", "a\x85b", "~"])
def test_a_run_dir_of_unusual_text_survives_saving(minimal: Path, run: str) -> None:
    config = config_file.load(minimal, run_dir=run)
    config_file.save(config, Path("saved.yaml"))
    assert config_file.load(Path("saved.yaml")).run_dir == run


@given(
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    betas=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    lang=st.text(st.characters(codec="utf-8"), min_size=1),
)
def test_any_valid_config_survives_a_dump(
    tmp_path_factory: pytest.TempPathFactory, lr: float, betas: list[float], seed: int, lang: str
) -> None:
    tree = yaml.safe_load(MINIMAL) | {"seed": seed, "training": {"lr": lr, "betas": betas}}
    tree["data"]["src_lang"] = lang
    config = Config.model_validate(tree)
    path = tmp_path_factory.mktemp("dump") / "c.yaml"
    path.write_bytes(config_file.dump_tree(config.model_dump()).encode())
    assert config_file.load(path) == config


def test_a_saved_config_includes_keys_left_at_their_defaults(minimal: Path) -> None:
    config_file.save(config_file.load(minimal), Path("saved.yaml"))
    tree = yaml.safe_load(Path("saved.yaml").read_text("utf-8"))
    assert set(tree) == set(Config.model_fields)
    assert "patience" in tree["training"]


def test_assigning_to_a_loaded_config_is_an_error(minimal: Path) -> None:
    config = config_file.load(minimal)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 2  # type: ignore[misc]


# Mixtures


def test_a_mixture_of_five_corpus_formats_survives_saving(minimal: Path) -> None:
    corpora = f"[{WEIGHTED}, {{tsv: [b.tsv], weight: 0.5}}, "
    corpora += "{jsonl: [c.jsonl], src: a, tgt: b, weight: 1}, "
    corpora += "{parquet: [c.parquet], src: a, tgt: b, weight: 1}, "
    corpora += "{hub: x/y, split: train, src: a, tgt: b, weight: 1}]"
    config = config_file.load(minimal, [f"data.train={corpora}"])
    config_file.save(config, Path("saved.yaml"))
    assert config_file.load(Path("saved.yaml")) == config
    named = corpora_of(config.data.train)
    assert [own.name for own in named] == [f"data.train[{number}]" for number in range(5)]
    assert [own.corpus.weight for own in named] == [2, 0.5, 1, 1, 1]


def test_a_single_corpus_is_saved_without_a_weight(minimal: Path) -> None:
    config = config_file.load(minimal)
    assert set(config.model_dump()["data"]["train"]) == {"src", "tgt"}
    (named,) = corpora_of(config.data.train)
    assert named == ("data.train", config.data.train)
    assert named.corpus.weight is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train=[a]"], "`data.train[0]` must be a section of keys, but is 'a' instead."),
        (["train=[]"], "`data.train` must be a list of at least 1, but is [] instead."),
        (
            ["train=[{src: [a], tgt: [b], wieght: 2}]"],
            "`data.train[0].wieght` is not a key of the config; did you mean "
            "`data.train[0].weight`?",
        ),
        (
            ["train=[{src: [a], tgt: [b], weight: 0}]"],
            "`data.train[0].weight` must be > 0.0, but is 0 instead.",
        ),
        (
            [f"train=[{FILES}, {{tsv: [x], columns: [1]}}]"],
            "`data.train[1].columns` must be two columns, counted from 1, but is [1] instead.",
        ),
        (
            [f"train=[{FILES}, {{src: [a], tgt: []}}]"],
            "`data.train[1].tgt` must be a list of at least 1, but is [] instead.",
        ),
        ([f"train=[{FILES}, 3]"], "`data.train[1]` must be a section of keys, but is 3 instead."),
        (
            [f"train=[{WEIGHTED}, {FILES}]"],
            "`data` must give a `weight` to each corpus of `train` or to none, but gives one to 1 "
            "of 2 instead.",
        ),
        (
            [f"train=[{WEIGHTED}, {WEIGHTED}]", "temperature=5"],
            "`data` must leave `temperature` out where its corpora have weights, but it is 5.0 "
            "instead.",
        ),
        (
            ["temperature=5"],
            "`data` must leave `temperature` out where `train` is one corpus, but it is 5.0 "
            "instead.",
        ),
        (
            [f"train=[{{src: [a], tgt: [b], tag: {'a' * 33}}}]"],
            "`data.train[0].tag` must be a letter, then at most 31 letters, digits, '_' and '-', "
            f"but is '{'a' * 33}' instead.",
        ),
        (["temperature=0.5"], "`data.temperature` must be >= 1.0, but is 0.5 instead."),
        (
            ["train={src: [a], tgt: [b], weight: 2}"],
            "`data.train.weight` is not a key of the config; known here: src, tgt.",
        ),
        (
            ["valid={tsv: [a], weight: 2}"],
            "`data.valid.weight` is not a key of the config; known here: tsv, columns, header.",
        ),
        (
            ["tests={t: {src: [a], tgt: [b], weight: null}}"],
            "`data.tests.t.weight` is not a key of the config; known here: src, tgt.",
        ),
        (
            ["valid=[{src: [a], tgt: [b]}]"],
            "`data.valid` must be one corpus, and no list of them, but is [{'src': ['a'], 'tgt': "
            "['b']}] instead.",
        ),
    ],
)
def test_invalid_corpora_weights_and_temperatures_are_refused(
    minimal: Path, overrides: list[str], said: str
) -> None:
    assert message(minimal, *(f"data.{own}" for own in overrides)) == f"c.yaml: {said}"


def test_aliases_from_other_toolkits_map_to_existing_keys() -> None:
    keys = config_file._all_keys(Config, "")
    names = [name for names in config_file._ALIASES.values() for name in names.split()]
    assert set(config_file._ALIASES) <= set(keys)
    assert len(names) == len(set(names))
    assert not {key.rsplit(".", 1)[-1] for key in keys} & set(names), "a key, not another's name"


def test_no_raw_pydantic_message_reaches_the_user(minimal: Path) -> None:
    said = []
    for value in ("[]", "{}", "[1]", "text", "1.5", "-1e9", "1e999", "true", "null", "''"):
        for key in config_file._all_keys(Config, ""):
            try:
                config_file.load(minimal, [f"{key}={value}"])
            except ConfigError as error:
                said.append(str(error))
    raw = re.compile("Input should|Value error|valid (string|integer|number)")
    assert len(said) > 300
    assert [text for text in said if raw.search(text)] == []


@pytest.mark.parametrize(
    ("train", "both"),
    [
        (FILES, False),
        (f"[{FILES}, {{src: [a.de], tgt: [a.en]}}]", True),
        (f"[{WEIGHTED}, {{src: [a.de], tgt: [a.en], weight: 1}}]", True),
        (f"[{FILES}, {{src: [b.de], tgt: [a.en]}}]", False),
        (f"[{FILES}, {{src: [a.de], tgt: [a.en], until: 0.5}}]", False),
        (f"[{FILES}, {{src: [a.de], tgt: [a.en], tag: de}}]", False),
        ("[{tsv: [a.tsv]}, {tsv: [a.tsv], columns: [2, 1]}]", True),
        ("[{tsv: [a.tsv]}, {tsv: [a.tsv], columns: [1, 2]}]", False),
        ("[{jsonl: [a], src: en, tgt: de}, {jsonl: [a], src: de, tgt: en}]", True),
        ("[{jsonl: [a], src: en, tgt: de}, {parquet: [a], src: de, tgt: en}]", False),
        (f"[{FILES}, {{synthetic: a}}, {{synthetic: a}}]", False),
    ],
)
def test_a_mixture_has_both_directions_if_two_corpora_differ_only_in_swapped_sides(
    minimal: Path, train: str, both: bool
) -> None:
    minimal.write_text(MINIMAL.replace("{src: [train.en], tgt: [train.de]}", train), "utf-8")
    assert has_both_directions(config_file.load(minimal).data.train) == both


def test_corpora_that_are_listed_with_their_sides_exchanged_are_found_in_any_order_and_use(
    minimal: Path,
) -> None:
    reverse = "{src: [a.de], tgt: [a.en], until: 0.5, tag: de}"
    copied = "{src: [a.de], tgt: [a.de]}"
    train = f"[{copied}, {reverse}, {FILES}, {{src: [b.de], tgt: [b.en]}}, {reverse}, {copied}]"
    minimal.write_text(MINIMAL.replace("{src: [train.en], tgt: [train.de]}", train), "utf-8")
    found = bidirectional_corpora(config_file.load(minimal).data.train)
    assert found == {"data.train[1]", "data.train[2]", "data.train[4]"}


def test_a_tilde_at_the_start_of_a_path_is_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    changes = ["data.valid.src=[~/a~/b, ./~/c]", "data.valid.tgt=[a, b]"]
    config = config_file.load(path, ["training.init_from=~/old", *changes], "~/x")
    assert config.run_dir == str(tmp_path / "x")
    assert config.training.init_from == str(tmp_path / "old")
    assert config.data.valid.src == [str(tmp_path / "a~/b"), "./~/c"]
