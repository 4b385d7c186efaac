"""ONNX exports: graphs that compute what the model does, and a tokenizer with the same ids."""

from __future__ import annotations

import json
import locale
import os
import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import SRC_LINES, TGT_LINES, vocabularies
from conftest import Cli
from exporting import EXACT, LINES, check_exact, copied, random_model, settings, tempted_model
from hypothesis import given
from hypothesis import strategies as st

from mtrain import errors
from mtrain.config.sections import TokenizerConfig
from mtrain.decode.translator import Translator
from mtrain.errors import ConfigError, RunError
from mtrain.exporters import export
from mtrain.exporters.export import ExportReport, ExportRequest
from mtrain.exporters.onnx import OnnxModel
from mtrain.exporters.tokenizer_json import special_pieces, tokenizer_json
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Vocabulary

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

NODE_PACKAGE = "@huggingface/transformers"
LONGEST = 32 + 5 + 2  # max_tokens and max_extra_tokens of the copy task, bos and eos
LETTERS = [
    *"aaaa bb  cde   ....----,,''\"\"1230▁▁<>/sx0F\t\x01\x7f\x85",
    *"äöüßéñ日本語مرحبا😀👍🏽ﬁ㈱Ⅷİ\u00a0\u3000\u200b\u2028\ufeff",
    *("</s>", "<0x41>", "<unk>", "e\u0301", "<s>", "<pad>"),
]


@pytest.fixture(scope="module")
def whole(trained: RunDir, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport]:
    """Export the copy task with the web page; return the folder and the report."""
    directory = tmp_path_factory.mktemp("onnx") / "copy"
    request = ExportRequest("onnx", has_page=True)
    return directory, export.export(trained, directory, request, lambda _: None)


# Graphs


def onnx_model(translator: Translator, directory: Path) -> OnnxModel:
    model = copied(translator, "onnx", directory)
    assert isinstance(model, OnnxModel)
    return model


@pytest.mark.parametrize(
    "variant",
    [
        {"tie_embeddings": "all"},
        {"tie_embeddings": "decoder", "norm": "pre", "activation": "gelu"},
        {"positions": "learned", "max_positions": 4},
        {"attention_window": 2, "num_encoder_layers": 1},
        {"num_decoder_layers": 1, "kind": "bpe"},
    ],
    ids=str,
)
def test_every_variant_has_the_outputs_and_scores_of_mtrain_in_onnx_runtime(
    variant: dict[str, Any], tmp_path: Path
) -> None:
    check_exact(random_model(**variant), "onnx", tmp_path)


def test_one_decoder_graph_runs_the_first_step_and_the_later_steps(tmp_path: Path) -> None:
    """As transformers.js expects: no `use_cache_branch`, and the source is projected once."""
    model = onnx_model(random_model(kind="bpe"), tmp_path)
    (ids,) = model.encode(["a man with a hat"])
    state = model.start(torch.tensor([ids, ids]), torch.ones(2, len(ids), dtype=torch.bool))
    names = {each.name for each in model.decoder.get_inputs()}
    assert "past_key_values.1.encoder.value" in names and "use_cache_branch" not in names
    (cached,) = [each for each in model.decoder.get_inputs() if each.name.endswith("0.encoder.key")]
    assert cached.shape == ["batch_size", 2, "past_encoder_sequence_length", 6]
    for length in (1, 2, 3):
        logits_NTV = state.logits(torch.tensor([[2], [5]]))
        assert logits_NTV.shape == (2, 1, 420)
        assert state.feeds["past_key_values.0.decoder.key"].shape == (2, 2, length, 6)
        assert state.feeds["past_key_values.0.encoder.key"].shape == (2, 2, len(ids), 6)


def test_the_graphs_load_in_versions_of_onnx_runtime_without_a_cosine_in_float64(
    whole: tuple[Path, ExportReport],
) -> None:
    paths = sorted((whole[0] / "onnx").glob("*.onnx"))
    assert len(paths) == 4
    for path in paths:
        operations = {node.op_type for node in onnx.load(path).graph.node}
        assert "Sin" in operations and "Cos" not in operations, path.name


def test_padding_bos_and_tags_are_never_generated_with_onnx_runtime(tmp_path: Path) -> None:
    translator = tempted_model()
    copy, tgt = copied(translator, "onnx", tmp_path), translator.tokenizer.tgt
    never = {tgt.pad, tgt.bos, tgt.tags["bt"]}
    generation = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    assert set(generation["suppress_tokens"]) == never
    sources = translator.tokenizer.encode_src(LINES.src)
    for beam in (1, 3):
        for hypothesis in copy.search(sources, beam, [4] * len(sources)):
            assert hypothesis.ids and not never & set(hypothesis.ids)


def test_int8_weights_are_near_the_float32_weights_and_a_tied_matrix_is_stored_once(
    tmp_path: Path,
) -> None:
    translator = random_model(tie_embeddings="all", d_model=64, d_ff=128)
    model = onnx_model(translator, tmp_path)
    graph = onnx.load(tmp_path / "onnx/decoder_model_merged_quantized.onnx").graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    weights = translator.model.tgt_embedding.weight.detach().numpy()
    large = [name for name, array in stored.items() if array.size >= weights.size]
    (name,) = large
    scale = stored[name.replace(".int8", ".scale")]
    assert np.abs(stored[name]).max() == 63
    assert np.abs(stored[name] * scale - weights).max() <= 0.51 * scale.max()
    assert not any(
        array.ndim == 2 and array.shape[1] > 1
        for array in stored.values()
        if array.dtype == np.float32
    )
    sizes = [
        (tmp_path / f"onnx/decoder_model_merged{suffix}.onnx").stat().st_size
        for suffix in ("_quantized", "")
    ]
    assert sizes[0] < 0.4 * sizes[1]
    quantised = model.quantised
    assert quantised is not None and quantised.quantised is None
    sources = model.encode(LINES.src)
    targets = translator.tokenizer.tgt.encode(LINES.tgt)
    pairs = zip(model.score(sources, targets), quantised.score(sources, targets), strict=True)
    differences = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    assert 0 < sum(differences) / len(differences) < 0.1


def test_the_graphs_contain_no_path_of_this_machine(whole: tuple[Path, ExportReport]) -> None:
    for path in whole[0].rglob("*.onnx"):
        content = path.read_bytes()
        assert b".py" not in content and str(Path.cwd()).encode() not in content


# The tokenizer


def odd_lines(count: int) -> list[str]:
    """Return random lines of spaces, repeated letters, byte and special pieces, many scripts."""
    rng = random.Random(1)
    words = " ".join(SRC_LINES + TGT_LINES).split()
    parts = [*words, *LETTERS * 20]
    return [
        "".join(
            rng.choice(["", " ", " ", "  "]) + rng.choice(parts) * rng.choice([1, 1, 1, 2, 5])
            for _ in range(rng.randint(0, 12))
        )
        for _ in range(count)
    ]


def trained_vocabulary(kind: str, byte_fallback: bool) -> Vocabulary:
    if byte_fallback:
        return vocabularies(kind).tgt
    config = TokenizerConfig.model_validate(
        {"kind": kind, "vocab_size": 200, "byte_fallback": False}
    )
    pairs = zip(SRC_LINES, TGT_LINES, strict=True)
    return sentencepiece.train(config, pairs, len(SRC_LINES), seed=1).tgt


@pytest.fixture(scope="module", params=["bpe", "unigram", "bpe-bytes", "unigram-bytes"])
def both(request: pytest.FixtureRequest) -> tuple[Vocabulary, Any]:
    kind, _, has_bytes = request.param.partition("-")
    vocabulary = trained_vocabulary(kind, bool(has_bytes))
    return vocabulary, tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))


def assert_same(vocabulary: Vocabulary, copy: Any, lines: Sequence[str]) -> None:
    ids = vocabulary.encode(lines)
    theirs = [encoding.ids for encoding in copy.encode_batch(list(lines))]
    for line, ours, other in zip(lines, ids, theirs, strict=True):
        assert [*ours, vocabulary.eos] == other, ascii(line)
    known = [row for row in ids if vocabulary.unk not in row]
    texts = [text.replace("\n", " ").replace("\r", " ") for text in copy.decode_batch(known)]
    assert [re.sub(" +", " ", text) for text in vocabulary.decode(known)] == [
        re.sub(" +", " ", text) for text in texts
    ]


def test_thousands_of_odd_lines_have_the_ids_and_texts_of_sentencepiece(
    both: tuple[Vocabulary, Any],
) -> None:
    assert_same(*both, [*odd_lines(3000), *SRC_LINES, *TGT_LINES])


@given(line=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_line_has_the_ids_and_the_text_of_sentencepiece(
    both: tuple[Vocabulary, Any], line: str
) -> None:
    assert_same(*both, [line])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_special_pieces_in_a_text_are_encoded_as_ordinary_text(kind: str) -> None:
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 420})
    pairs = list(zip(SRC_LINES, TGT_LINES, strict=True))
    vocabulary = sentencepiece.train(config, pairs, len(pairs), 1, ["bt"]).src
    assert list(vocabulary.tags) == ["bt"]
    copy = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))
    for text in ("</s>", "<pad>", "<unk>", "<s>", "<0x41>", "<tag:bt>"):
        *ids, eos = copy.encode(f"a {text} b").ids
        assert eos == vocabulary.eos and not {0, 1, 2, 3, *vocabulary.tags.values()} & set(ids)
        assert copy.decode(ids) == f"a {text} b"


# A whole export


def test_the_folder_has_the_files_and_settings_that_transformers_js_reads(
    whole: tuple[Path, ExportReport],
) -> None:
    directory, report = whole
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*.*")}
    assert names == {
        *("README.md", "export.json", "config.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("onnx/encoder_model.onnx", "onnx/encoder_model_quantized.onnx"),
        *("onnx/decoder_model_merged.onnx", "onnx/decoder_model_merged_quantized.onnx"),
        *("index.html", "page.js", "page.css", "page.json", "icon.svg", "service-worker.js"),
    }
    assert json.loads((directory / "config.json").read_text("utf-8"))["model_type"] == "marian"
    generation = json.loads((directory / "generation_config.json").read_text("utf-8"))
    assert (generation["max_length"], generation["suppress_tokens"]) == (LONGEST, [0, 2])
    assert (generation["decoder_start_token_id"], generation["forced_eos_token_id"]) == (2, 3)
    assert report.parity.same_greedy == report.parity.same_beam == (12, 12)
    assert report.parity.reference_diff < EXACT


def test_the_table_has_the_bleu_of_the_int8_graphs(whole: tuple[Path, ExportReport]) -> None:
    _, report = whole
    assert report.precision == "float32 and int8"
    assert report.bleu["int8, greedy"] > report.bleu["mtrain, greedy"] - 5
    table = "\n".join(export.as_text(report))
    assert re.search(r"weights +float32 and int8, 0\.\d MB", table)
    assert re.search(r"validation BLEU, mtrain, greedy +\d+\.\d\d\n", table)
    assert re.search(r"validation BLEU, int8, greedy +\d+\.\d\d \([+-]\d\.\d\d\)", table)


def test_a_model_with_two_vocabularies_is_refused() -> None:
    config = settings().model_copy(update={"tokenizer": TokenizerConfig(shared=False)})
    with pytest.raises(ConfigError, match=r"`tokenizer\.shared` must be true for transformers\.js"):
        export.check_supported("onnx", config)


def test_a_page_is_refused_for_transformers(cli: Cli, trained: RunDir, tmp_path: Path) -> None:
    outcome = cli("export", trained.path, tmp_path / "out", "--to", "huggingface", "--page")
    assert outcome.err == (
        "mtrain: `--page` has no effect with `--to huggingface`; leave it out.\n"
    )


def test_a_missing_package_is_named(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "onnx" else name)
    outcome = cli("export", trained.path, tmp_path / "out", "--to", "onnx")
    assert outcome.err.endswith(
        "mtrain: `mtrain export --to onnx` must have onnx: pip install 'mtrain[onnx]' adds it.\n"
    )
    assert not (tmp_path / "out").exists()


# transformers.js


def node_with(code: str, answer: object = None, cwd: Path | None = None) -> Any:
    """Run JavaScript under node with `answer` on stdin; skip if transformers.js is missing."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run(
        [node, "-e", code], input=json.dumps(answer), capture_output=True, text=True, cwd=cwd
    )
    if f"Cannot find module '{NODE_PACKAGE}'" in done.stderr:
        pytest.skip(f"{NODE_PACKAGE} is in no folder that NODE_PATH names")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_transformers_js_gives_the_same_text(whole: tuple[Path, ExportReport]) -> None:
    node_with(f"require('{NODE_PACKAGE}'); console.log('1')")
    own_call = whole[1].parity.own_call
    assert own_call is not None and own_call.same == (12, 12)
    assert own_call.program.startswith("transformers.js ")


def test_transformers_js_gives_the_ids_and_texts_of_sentencepiece(
    tmp_path: Path, both: tuple[Vocabulary, Any]
) -> None:
    vocabulary, copy = both
    special = special_pieces(vocabulary)
    settings = {"eos_token": special[3], "additional_special_tokens": special}
    lines = [line for line in odd_lines(1500) if "\ufeff" not in line]  # see docs/exporting.md
    request = {
        "tree": json.loads(copy.to_str()),
        "config": settings | {"clean_up_tokenization_spaces": False},
        "lines": lines,
    }
    code = f"""
        const {{ PreTrainedTokenizer }} = require("{NODE_PACKAGE}");
        const request = JSON.parse(require("fs").readFileSync(0, "utf-8"));
        const tokenizer = new PreTrainedTokenizer(request.tree, request.config);
        console.log(JSON.stringify(request.lines.map((line) => {{
          const ids = tokenizer.encode(line);
          return [ids, tokenizer.decode(ids, {{ skip_special_tokens: true }})];
        }})));"""
    answers = node_with(code, request)
    ids = vocabulary.encode(lines)
    for line, ours, (theirs, _) in zip(lines, ids, answers, strict=True):
        assert [*ours, vocabulary.eos] == theirs, ascii(line)
    for ours, text, (_, theirs) in zip(ids, vocabulary.decode(ids), answers, strict=True):
        assert vocabulary.unk in ours or text == theirs


def test_a_caller_can_override_the_limit_of_output_length_in_transformers_js(
    whole: tuple[Path, ExportReport],
) -> None:
    code = f"""
        const {{ AutoModelForSeq2SeqLM, AutoTokenizer, env }} = require("{NODE_PACKAGE}");
        env.localModelPath = "";
        const path = JSON.parse(require("fs").readFileSync(0, "utf-8"));
        (async () => {{
          const tokenizer = await AutoTokenizer.from_pretrained(path);
          const model = await AutoModelForSeq2SeqLM.from_pretrained(path, {{ dtype: "fp32" }});
          const inputs = {{ ...tokenizer("ba ce di"), suppress_tokens: [0, 2, 3] }}; // no eos
          const lengths = [];
          for (const limit of [{{}}, {{ max_new_tokens: 2 }}, {{ max_length: 4 }}])
            lengths.push((await model.generate({{ ...inputs, ...limit }})).dims.at(-1));
          console.log(JSON.stringify(lengths));
        }})();"""
    assert node_with(code, str(whole[0])) == [LONGEST, 3, 4]  # with bos


def test_the_javascript_example_of_the_model_card_translates(
    whole: tuple[Path, ExportReport], tmp_path: Path
) -> None:
    card = (whole[0] / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```js\n(.*?)```", card, flags=re.DOTALL)
    (tmp_path / "model").symlink_to(whole[0])
    code = (
        code.replace("import", "const")
        .replace(" from ", " = require(")
        .replace(f'"{NODE_PACKAGE}";', f'"{NODE_PACKAGE}");')
    )
    code = code.replace("console.log(", "console.log(JSON.stringify(").replace("text);", "text));")
    wrapped = f"(async () => {{ {code} }})();"
    where = node_with(f"console.log(JSON.stringify(require.resolve('{NODE_PACKAGE}')))")
    code = wrapped.replace(f'require("{NODE_PACKAGE}")', f"require({json.dumps(where)})")
    text = node_with(code, cwd=tmp_path)
    example = re.findall(r"translate\((.*?), \{", card)[0]
    assert text == json.loads(example.replace("'", '"'))  # the model copies


def test_a_missing_node_or_transformers_js_is_noted_and_a_failing_one_is_an_error(
    whole: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = OnnxModel(whole[0])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NODE_PATH", f"{os.pathsep}{tmp_path}")
    assert model.own_call(["ba"]).notes == ("node is not installed",)
    write_node(tmp_path, 'echo "TypeError: no" >&2; exit 1')
    own_call = model.own_call(["ba"])
    assert own_call.same is None
    assert own_call.notes == ("it is in no folder that NODE_PATH names",)
    (tmp_path / NODE_PACKAGE).mkdir(parents=True)
    with pytest.raises(RunError, match="must translate, but ends with: TypeError: no"):
        model.own_call(["ba"])


def test_the_output_of_node_is_read_as_utf_8_in_any_locale(
    whole: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NODE_PATH", str(tmp_path))
    (tmp_path / NODE_PACKAGE).mkdir(parents=True)
    write_node(tmp_path, """echo '{"version": "4", "texts": ["Tür"]}'""")
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C")
        assert OnnxModel(whole[0]).translate(["ba"], "fp32") == ("4", ["Tür"])
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def write_node(directory: Path, command: str) -> None:
    """Write a `node` that runs a shell command."""
    path = directory / "node"
    path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    path.chmod(0o755)
