"""Plots show the computed values, and `mtrain plot` draws all that a run folder contains."""

import json
import math
import random
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from conftest import Cli
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file
from tasks import prepared, reverse_task, train, write_task

from mtrain.config import config_file
from mtrain.config.sections import ConsistencyConfig
from mtrain.data.batch import collate
from mtrain.data.loader import TrainingData
from mtrain.decode import translator
from mtrain.decode.formats import Translation
from mtrain.decode.pipeline import translate_lines
from mtrain.errors import RunError
from mtrain.plots import collect, heatmaps
from mtrain.plots import draw as draw_module
from mtrain.run import checkpoint, load_model
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.training.trainer import Trainer, Validation

SENTENCE = "ba ce di fo gu"
ODD_SENTENCE = "你ש \N{GRINNING FACE} e\u0301 $x$ \u202eb\u202c \x1b[m %s {0} \\f"
OF_DATA = ["positions", "masks", "lengths", "batch"]
OF_SENTENCE = [
    *("alignment", "attention_encoder_1", "attention_encoder_2"),
    *("attention_decoder_1", "attention_cross_1"),
]


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("plots"), reverse_task)


@pytest.fixture(scope="module")
def run(config_path: Path) -> RunDir:
    """Sixty updates of a model with two encoder layers. Tests only read it."""
    training = ["max_steps=60", "log_every=10", "validate_every=20", "patience=99", "average=2"]
    overrides = [f"training.{setting}" for setting in training]
    return train(
        config_path, "model.num_encoder_layers=2", *overrides, run=str(config_path.parent / "run")
    )


@pytest.fixture
def copied(run: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(run.path, tmp_path / "copy")
    return RunDir(tmp_path / "copy")


@pytest.fixture(scope="module")
def pictures(run: RunDir) -> collect.Pictures:
    return collect.gather(run, None)


@pytest.fixture(scope="module")
def attention(run: RunDir) -> collect.AttentionPicture:
    picture = collect.gather(run, SENTENCE).attention
    assert picture is not None
    return picture


def metrics(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


def names(outcome_lines: list[str]) -> list[str]:
    """Return the pictures that were written, each as PNG and as SVG."""
    paths = [Path(line) for line in outcome_lines]
    assert [path.suffix for path in paths] == [".png", ".svg"] * (len(paths) // 2)
    assert all(path.stat().st_size > 0 for path in paths)
    return [path.stem for path in paths[::2]]


def test_the_curves_equal_the_logged_metrics(run: RunDir, pictures: collect.Pictures) -> None:
    curves = pictures.curves
    assert curves is not None
    for curve, key, steps in (
        (curves.by_key["loss"], "loss", [10, 20, 30, 40, 50, 60]),
        (curves.by_key["lr"], "lr", [10, 20, 30, 40, 50, 60]),
        (curves.by_key["tgt_tokens_per_s"], "tgt_tokens_per_s", [10, 20, 30, 40, 50, 60]),
        (curves.by_key["valid_loss"], "valid_loss", [20, 40, 60]),
        (curves.by_key["valid_bleu"], "valid_bleu", [20, 40, 60]),
    ):
        logged = {line["step"]: line[key] for line in metrics(run) if key in line}
        assert curve.steps.tolist() == steps == list(logged)
        assert curve.values.tolist() == list(logged.values())


@pytest.mark.parametrize("with_consistency", [False, True])
def test_the_label_of_the_training_loss_says_whether_it_includes_the_consistency_loss(
    pictures: collect.Pictures, with_consistency: bool
) -> None:
    consistency = ConsistencyConfig() if with_consistency else None
    training = pictures.config.training.model_copy(update={"consistency": consistency})
    config = pictures.config.model_copy(update={"training": training})
    name, draw_figure = next(draw_module._figures(replace(pictures, config=config), "run"))
    assert name == "curves"
    shown = draw_figure().axes[0].get_legend_handles_labels()[1][:2]
    batches = "training batches" + ", with the consistency loss" * with_consistency
    assert shown == [batches, "validation set"]


def test_a_non_finite_loss_is_a_gap_in_the_curve(copied: RunDir) -> None:
    line = {"step": 14, "loss": math.inf, "lr": 0.1, "tgt_tokens_per_s": 1.0}
    with copied.metrics_path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    loss = collect.read_curves(copied, []).by_key["loss"]
    assert math.isnan(loss.values[-1])
    assert np.isfinite(loss.values[:-1]).all()


def test_a_truncated_line_of_metrics_is_skipped_and_named(copied: RunDir) -> None:
    whole, skipped = collect.read_curves(copied, []), []
    with copied.metrics_path.open("a") as stream:
        stream.write('{"step": 14, "lo')
    curves = collect.read_curves(copied, skipped)
    assert curves.by_key["loss"].steps.tolist() == whole.by_key["loss"].steps.tolist()
    assert skipped == [f"curves: a line skipped: {copied.metrics_path}:11: is cut off."]


@pytest.mark.parametrize("gain", [-1.0, 1.0])
def test_the_mark_names_the_checkpoints_that_are_averaged_into_the_final_weights(
    monkeypatch: pytest.MonkeyPatch, config_path: Path, tmp_path: Path, gain: float
) -> None:
    bleu = iter([50 + gain, 50 + 2 * gain, 50 + 3 * gain, 50 + 4 * gain])

    def scored(trainer: Trainer) -> Validation:
        return Validation(1.0, 1.0, next(bleu))

    monkeypatch.setattr(Trainer, "_score", scored)
    run = train(config_path, "training.average=2", run=str(tmp_path / "run"))
    mark = collect.read_curves(run, []).mark
    assert mark is not None
    made_of = [8, 12] if gain > 0 else [4]
    assert [mark.first_step, mark.last_step] == [made_of[0], made_of[-1]]
    assert mark.bleu == (54.0 if gain > 0 else 49.0)
    shown = "mean of 2 checkpoints, steps 8 to 12" if gain > 0 else "step 4"
    assert mark.text == f"model.safetensors: {shown}"
    stored = [
        load_file(run.checkpoints_dir / f"step-{step:08d}" / "model.safetensors")
        for step in made_of
    ]
    for name, weight in load_file(run.model_path).items():
        mean = sum(weights[name].double() for weights in stored) / len(stored)
        assert torch.equal(weight, mean.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("is_trained", [False, True])
def test_without_a_record_of_the_chosen_checkpoint_the_best_validation_is_marked(
    copied: RunDir, is_trained: bool
) -> None:
    validations = [(4, 7.0), (8, 9.0), (12, 9.0)]
    lines = [{"step": s, "valid_loss": 3.0, "valid_bleu": bleu} for s, bleu in validations]
    copied.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint.save_model(copied.model_path, load_file(copied.model_path), "a tokenizer")
    if not is_trained:
        copied.model_path.unlink()
    mark = collect.read_curves(copied, []).mark
    unsaid = " (the run does not say what was chosen)" if is_trained else ""
    assert mark == collect.CheckpointMark(8, 8, 9.0, f"best validation, step 8{unsaid}")


def test_of_validations_whose_bleu_is_noise_the_one_of_least_loss_is_marked(
    copied: RunDir,
) -> None:
    validations = [(4, 9.0, 0.5), (8, 7.0, 0.2), (12, 8.0, 0.2)]
    lines = [{"step": s, "valid_loss": loss, "valid_bleu": bleu} for s, loss, bleu in validations]
    copied.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    copied.model_path.unlink()
    mark = collect.read_curves(copied, []).mark
    assert mark is not None
    assert mark.first_step == 8


def test_the_attention_of_the_first_encoder_layer_equals_the_written_out_formula(
    run: RunDir, attention: collect.AttentionPicture
) -> None:
    model, vocabulary = run.config.model, sentencepiece.load(run.tokenizer_dir)
    weights = {name: w.double().numpy() for name, w in load_file(run.model_path).items()}
    (name,) = (name for name in weights if name.endswith("_embedding.weight"))
    (ids,), width = vocabulary.encode_src([SENTENCE]), model.d_model // model.num_heads
    x = np.zeros((len(ids), model.d_model))
    for place, piece in enumerate(ids):
        for dim in range(model.d_model):
            angle = place / 10_000 ** (dim // 2 * 2 / model.d_model)
            position = math.cos(angle) if dim % 2 else math.sin(angle)
            x[place, dim] = weights[name][piece, dim] * math.sqrt(model.d_model) + position
    projection = "encoder.0.self_attention.queries_keys_values"
    projected = x @ weights[f"{projection}.weight"].T + weights[f"{projection}.bias"]
    for head in range(model.num_heads):
        at = slice(head * width, (head + 1) * width)
        queries, keys = projected[:, at], projected[:, model.d_model :][:, at]
        raised = np.exp(queries @ keys.T / math.sqrt(width))
        expected = raised / raised.sum(1, keepdims=True)
        np.testing.assert_allclose(attention.maps["encoder"][0][head], expected, atol=1e-5)


def test_the_target_of_the_drawn_attention_is_the_translation_by_the_run(
    run: RunDir, attention: collect.AttentionPicture
) -> None:
    loaded = translator.load(run, loading=load_model.LoadOptions("cpu"))
    (translation,) = translate_lines(loaded, [SENTENCE])
    assert attention.translation == translation
    text = "".join(attention.tgt_out[:-1]).replace("\u2581", " ").strip()
    assert text == translation
    assert attention.tgt_in == ["<s>", *attention.tgt_out[:-1]]
    assert attention.tgt_out[-1] == attention.src[-1] == "</s>"
    assert "".join(attention.src[:-1]).replace("\u2581", " ").strip() == SENTENCE
    assert (attention.source, attention.origin) == (SENTENCE, "the given sentence")


def test_the_drawn_translation_is_the_one_that_mbr_chooses(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_first(candidates: Sequence[Translation], *_: object) -> list[Translation]:
        return list(candidates)[::-1]

    monkeypatch.setattr("mtrain.decode.pipeline.by_agreement", last_first)
    loaded = translator.load(run, loading=load_model.LoadOptions("cpu"))
    chosen = loaded.with_options(replace(loaded.options, beam=4, mbr="chrf"))
    (translation,) = translate_lines(chosen, [SENTENCE])
    assert translation not in translate_lines(loaded, [SENTENCE])
    picture = collect.attention(chosen, run, SENTENCE)
    assert picture.translation == translation
    assert "".join(picture.tgt_out[:-1]).replace("\u2581", " ").strip() == translation


def test_each_head_of_each_layer_has_an_attention_map_whose_rows_sum_to_one(
    attention: collect.AttentionPicture,
) -> None:
    num_src, num_tgt = len(attention.src), len(attention.tgt_in)
    assert num_tgt > 3, "a translation that shows nothing"
    shapes = {kind: [layer.shape for layer in maps] for kind, maps in attention.maps.items()}
    assert shapes == {
        "encoder": 2 * [(2, num_src, num_src)],
        "decoder": [(2, num_tgt, num_tgt)],
        "cross": [(2, num_tgt, num_src)],
    }
    for layers in attention.maps.values():
        for layer in layers:
            np.testing.assert_allclose(layer.sum(-1), 1, atol=1e-5)
    assert all(not np.triu(head, 1).any() for head in attention.maps["decoder"][0])


def test_the_alignment_is_the_mean_of_all_heads_of_all_layers(
    attention: collect.AttentionPicture,
) -> None:
    rng = np.random.default_rng(1)
    cross = [rng.random((2, len(attention.tgt_out), len(attention.src))) for _ in range(3)]
    axes = draw_module.draw_alignment(attention._replace(maps={"cross": cross})).axes[0]
    assert axes.get_title() == "mean of 6 heads"
    drawn = axes.get_images()[0].get_array()
    assert drawn is not None
    for row, column in ((0, 0), (1, 2), (-1, -1)):
        values = [cross[layer][head, row, column] for layer in range(3) for head in range(2)]
        assert drawn[row, column] == pytest.approx(sum(values) / 6)
    for ring in axes.get_lines():
        columns, rows = ring.get_data()
        assert [drawn[row].argmax() for row in rows] == list(columns)


def test_without_a_given_sentence_one_of_the_validation_set_is_drawn_and_named(
    run: RunDir, pictures: collect.Pictures
) -> None:
    lines = (run.data_dir / "valid.src").read_text().splitlines()
    assert pictures.attention is not None
    row = lines.index(pictures.attention.source)
    assert pictures.attention.origin == f"line {row + 1} of the validation set"
    vocabulary = sentencepiece.load(run.tokenizer_dir)
    assert collect.choose_sentence(["", lines[row], " "], vocabulary) == 1
    assert collect.choose_sentence([" ", "\t", ""], vocabulary) is None


def test_dot_products_of_sinusoidal_positions_depend_on_the_distance_alone(
    run: RunDir, pictures: collect.Pictures
) -> None:
    table, width = pictures.positions["sinusoidal"].astype(np.float64), run.config.model.d_model
    spread = collect.products_by_distance(table @ table.T)
    for distance in range(len(table)):
        cosines = [math.cos(distance / 10_000 ** (2 * i / width)) for i in range(width // 2)]
        for value in spread:
            assert value[distance] == pytest.approx(sum(cosines), abs=1e-9)


def test_products_by_distance_are_mean_min_and_max_over_all_pairs_at_that_distance() -> None:
    values = np.random.default_rng(2).normal(size=(7, 3))
    spreads = collect.products_by_distance(values @ values.T)
    for distance in range(7):
        products = [float(values[i] @ values[i + distance]) for i in range(7 - distance)]
        spread = [side[distance] for side in spreads]
        mean = sum(products) / len(products)
        assert spread == pytest.approx([mean, min(products), max(products)])


def test_drawn_learned_positions_equal_the_tables_of_the_model(
    config_path: Path, tmp_path: Path
) -> None:
    learned = ["model.positions=learned", "model.max_positions=32", "training.max_steps=2"]
    run = train(config_path, *learned, run=str(tmp_path / "run"))
    tables = collect.gather(run, None).positions
    weights = load_file(run.model_path)
    assert list(tables) == ["learned, source", "learned, target"]
    for side, table in zip(("src", "tgt"), tables.values(), strict=True):
        assert np.array_equal(table, weights[f"{side}_positions.table.weight"].numpy())
    figure = draw_module.draw_positions(tables)
    assert len(figure.axes) == 2 * 3 + 4  # two tables and their colour bars


def drawn_masks(figure: Figure) -> list[np.ndarray[Any, Any]]:
    """Return the padding masks of both sides, and the masks of both self-attentions."""
    return [np.asarray(axes.get_images()[0].get_array()) for axes in figure.axes]


@pytest.mark.parametrize("window", [None, 2])
def test_the_drawn_masks_equal_the_expected_masks_at_every_position(window: int | None) -> None:
    src, tgt = [[5, 6, 7, 8, 3], [5, 3], [5, 6, 7, 3]], [[5, 6], [5, 6, 7], [5]]
    batch = collate(src, tgt, pad=0, bos=2, eos=3)
    batches = collect.Batches(batch, batch, [collect.batch_size(batch)], True)
    figure = draw_module.draw_masks(batches, window)
    assert figure.get_suptitle() == "Keep-masks of training batch 1, the most padded of 1"
    src_keep, tgt_keep, encoder, decoder = drawn_masks(figure)
    assert "sentence 2:" in figure.axes[2].get_title()
    for row in range(3):
        assert src_keep[row].tolist() == [place < len(src[row]) for place in range(5)]
        assert tgt_keep[row].tolist() == [place <= len(tgt[row]) for place in range(4)]
    reach = 99 if window is None else window
    for query in range(5):
        seen = [key < len(src[1]) and abs(query - key) <= reach for key in range(5)]
        assert encoder[query].tolist() == seen
    for query in range(4):
        assert decoder[query].tolist() == [
            key <= query and query - key <= reach for key in range(4)
        ]


def test_the_drawn_masks_are_those_of_the_most_padded_batch(pictures: collect.Pictures) -> None:
    batches = pictures.batches
    assert batches is not None
    figure = draw_module.draw_masks(batches, None)
    number, count = map(int, re.findall(r"\d+", figure.get_suptitle()))
    assert count == len(batches.sizes)
    size = batches.sizes[number - 1]
    assert collect.padding([size]) == max(collect.padding([each]) for each in batches.sizes)
    assert collect.batch_size(batches.most_padded) == size
    assert figure.axes[0].get_title().endswith(f" of {len(batches.most_padded.src_BS)} sentences")
    src_keep, tgt_keep, *_ = drawn_masks(figure)
    assert src_keep.tolist() == batches.most_padded.src_keep_BS[: len(src_keep)].tolist()
    num_kept = batches.most_padded.src_keep_BS.sum() + batches.most_padded.tgt_keep_BT.sum()
    assert num_kept == size.num_tokens
    assert tgt_keep.shape[0] == src_keep.shape[0]


def test_the_drawn_batches_match_the_plan_of_the_first_epoch(
    run: RunDir, pictures: collect.Pictures
) -> None:
    config, vocabulary = run.config, sentencepiece.load(run.tokenizer_dir)
    data = TrainingData(run.data_dir, vocabulary, config.seed)
    plan, batches = data.plan(config.training.batch_tokens), pictures.batches
    assert batches is not None
    assert batches.is_whole_epoch
    assert len(batches.sizes) == plan.num_batches
    assert collect.padding(batches.sizes) == pytest.approx(plan.padding)
    num_tokens = data.num_src_tokens + data.num_tgt_tokens
    assert sum(size.num_tokens for size in batches.sizes) == num_tokens


def test_only_the_first_batches_of_a_long_epoch_are_drawn(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, pictures: collect.Pictures
) -> None:
    monkeypatch.setattr(collect, "_MAX_BATCHES", 3)
    config, vocabulary = run.config, sentencepiece.load(run.tokenizer_dir)
    data = TrainingData(run.data_dir, vocabulary, config.seed)
    batches = collect.read_batches(data, config.training.batch_tokens)
    assert pictures.batches is not None
    assert batches.sizes == pictures.batches.sizes[:3]
    assert not batches.is_whole_epoch
    assert collect.training_name(data) == "training"
    for lengths, expected in zip(data.lengths(), pictures.lengths["training"], strict=True):
        assert np.array_equal(lengths, expected)
    assert "beginning" in draw_module.draw_batch(batches, 192).get_suptitle()


def test_the_name_of_the_training_lengths_says_if_they_are_of_a_part_of_the_pairs(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = sentencepiece.load(run.tokenizer_dir)
    data = TrainingData(run.data_dir, vocabulary, seed=1)
    assert collect.training_name(data) == "training"
    share = data.shares[0]
    monkeypatch.setattr(TrainingData, "shares", [share, share])
    assert collect.training_name(data) == "training (an epoch)"
    monkeypatch.setattr(TrainingData, "__len__", lambda _: 201)
    assert collect.training_name(data) == "training (beginning)"


def test_the_drawn_lengths_are_the_token_counts_of_the_texts_with_eos(
    run: RunDir, pictures: collect.Pictures
) -> None:
    vocabulary = sentencepiece.load(run.tokenizer_dir)
    directory = run.path.parent
    files = {"training": "train", "validation": "valid", "test held_out": "test"}
    assert list(pictures.lengths) == list(files)
    for name, sides in pictures.lengths.items():
        for side, lengths in zip(("src", "tgt"), sides, strict=True):
            lines = (directory / f"{files[name]}.{side}").read_text().splitlines()
            expected = [len(vocabulary.src.pieces(line)) + 1 for line in lines]
            assert sorted(lengths.tolist()) == sorted(expected)
            if name != "training":
                assert lengths.tolist() == expected


def test_the_lengths_have_whole_numbers_of_tokens_on_their_axis() -> None:
    lengths = np.arange(1, 21, dtype=np.int32)
    for axes in draw_module.draw_lengths({"training": (lengths, lengths)}).axes:
        assert (axes.get_xticks() % 1 == 0).all()


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("\u2581the", "␣the"),
        ("\u2581", "␣"),
        ("</s>", "</s>"),
        ("<0x0A>", "<0x0A>"),
        ("$x$", "$x$"),
        ("\u4f60\u597d", "\\u4f60\\u597d"),
        ("\U0001f9ff", "\\U0001f9ff"),
        ("a\u202eb", "a\\u202eb"),
        ("\x1b\n", "\\x1b\\n"),
        ("\u05e9\u05dc", "\u05e9\u05dc"),
        ("e\u0301", "e\u0301"),
        ("x" * 20, "x" * 20),
        ("x" * 21, "x" * 19 + "…"),
    ],
)
def test_a_label_is_the_piece_with_undrawable_characters_escaped_and_long_text_cut(
    monkeypatch: pytest.MonkeyPatch, piece: str, shown: str
) -> None:
    monkeypatch.setattr(heatmaps, "_OTHER_FONTS", ())
    assert heatmaps.label(piece) == shown


def test_a_fallback_font_is_used_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    letter = "\N{MATHEMATICAL SANS-SERIF BOLD CAPITAL ALPHA}"
    monkeypatch.setattr(heatmaps, "_OTHER_FONTS", ("A font that is not installed",))
    assert heatmaps.fonts() == ["DejaVu Sans"]
    assert heatmaps.readable(letter) == "\\U0001d756"
    monkeypatch.setattr(heatmaps, "_OTHER_FONTS", ("STIXGeneral", "A font that is not installed"))
    assert heatmaps.fonts() == ["DejaVu Sans", "STIXGeneral"]
    assert heatmaps.readable(letter) == letter


def test_characters_that_no_font_has_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmaps, "_OTHER_FONTS", ())
    assert heatmaps.missing_fonts("a horse, سلام\u200b") is None
    assert heatmaps.missing_fonts("茶 ชา ชา") == (
        "no font here has 3 characters of the sentence, such as '茶', which is drawn as \\u8336; "
        "install one, such as a Noto Sans"
    )


def page(num_maps: int, num_rows: int, num_columns: int) -> Figure:
    rng = random.Random(num_rows * num_columns)
    rows, columns = (
        [rng.choice(["\u2581", ""]) + "Wj" * rng.randint(1, 8) for _ in range(count)]
        for count in (num_rows, num_columns)
    )
    values = np.random.default_rng(3).random((num_rows, num_columns))
    maps = {f"head {number + 1}": values for number in range(num_maps)}
    names = ("piece being written", "attends to piece written so far", "weight\n(share of 1)")
    notes = ["word " * 60, "another note"]
    return heatmaps.draw_heatmaps("A title", maps, (rows, columns), names, notes)


@pytest.mark.parametrize(
    ("num_maps", "num_rows", "num_columns"),
    [
        (1, 1, 1),
        (1, 2, 60),
        (1, 41, 41),
        (1, 90, 150),
        (2, 1, 1),
        (2, 90, 150),
        (4, 41, 41),
        (4, 1, 2),
        (8, 6, 6),
    ],
)
def test_heatmaps_have_no_overlapping_or_clipped_text_for_any_number_of_tokens(
    num_maps: int, num_rows: int, num_columns: int
) -> None:
    with matplotlib.rc_context({"font.size": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}):
        figure = page(num_maps, num_rows, num_columns)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
    if max(num_rows, num_columns) <= 41:
        assert figure.get_size_inches()[0] <= 15, "too wide for a screen"
    *panels, bar = figure.axes
    for axes in panels:
        for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            boxes = [text.get_window_extent(renderer) for text in axis.get_ticklabels()]
            spans = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
    texts = [text.get_window_extent(renderer) for text in figure.texts]
    whole = [axes.get_tightbbox(renderer) for axes in [*panels, bar]]
    everything = [*texts, *(box for box in whole if box is not None)]
    assert len(everything) == len(figure.texts) + num_maps + 1
    for index, box in enumerate(everything):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in everything[index + 1 :])


def drawn_in_style(draw: Callable[[], Figure]) -> Figure:
    with matplotlib.rc_context(draw_module._STYLE):
        figure = draw()
        FigureCanvasAgg(figure).draw()
    return figure


def test_the_other_plots_have_no_overlapping_or_clipped_axes(
    pictures: collect.Pictures,
) -> None:
    assert pictures.curves is not None
    assert pictures.batches is not None
    mark = collect.CheckpointMark(
        20, 60, 37.8, "model.safetensors: mean of 5 checkpoints, steps 20 to 60"
    )
    curves = pictures.curves._replace(mark=mark)
    values = np.random.default_rng(4).normal(size=(256, 64))
    tables = {f"learned, {side}": values for side in ("source", "target")}
    for draw in (
        partial(draw_module.draw_curves, curves, "a_run_with_a_long_name", 0.1),
        partial(draw_module.draw_positions, pictures.positions),
        partial(draw_module.draw_positions, tables),
        partial(draw_module.draw_masks, pictures.batches, 120),
        partial(draw_module.draw_lengths, pictures.lengths),
        partial(draw_module.draw_batch, pictures.batches, 4096),
    ):
        figure = drawn_in_style(draw)
        boxes = [axes.get_tightbbox() for axes in figure.axes]
        for index, box in enumerate(boxes):
            assert box is not None
            assert -0.5 <= box.x0 < box.x1 <= figure.bbox.x1 + 0.5
            assert -0.5 <= box.y0 < box.y1 <= figure.bbox.y1 + 0.5
            assert not any(box.overlaps(other) for other in boxes[index + 1 :] if other)


def test_plot_draws_every_picture_and_the_same_bytes_each_time(
    cli: Cli, run: RunDir, tmp_path: Path
) -> None:
    settings = dict(matplotlib.rcParams)
    outcome = cli("plot", run.path, "--sentence", ODD_SENTENCE, "--out", tmp_path / "out")
    lacking = heatmaps.missing_fonts(ODD_SENTENCE)  # which differs by machine
    assert (outcome.code, outcome.err) == (0, f"mtrain: {lacking}\n" if lacking else "")
    assert names(outcome.lines) == ["curves", *OF_SENTENCE, *OF_DATA]
    paths = [Path(line) for line in outcome.lines]
    assert sorted((tmp_path / "out").iterdir()) == sorted(paths)
    again = draw_module._figures(collect.gather(run, ODD_SENTENCE), run.path.name)
    for name, draw_figure in again:
        if name not in OF_SENTENCE[1:-1]:  # drawn as the cross-attention is
            for suffix, encoded in draw_module.encode(draw_figure).items():
                assert encoded == (tmp_path / "out" / f"{name}.{suffix}").read_bytes()
    assert dict(matplotlib.rcParams) == settings
    for path in paths:
        if path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
                assert min(image.size) > 300
        else:
            assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
            assert "<dc:date>" not in path.read_text(encoding="utf-8")


def test_an_untrained_run_gets_only_the_plots_of_its_data(
    cli: Cli, config_path: Path, tmp_path: Path, sketched: None
) -> None:
    run = prepared(config_file.load(config_path, run_dir=str(tmp_path / "run")))
    outcome = cli("plot", run.path)
    assert (outcome.code, names(outcome.lines)) == (0, OF_DATA)
    assert {Path(line).parent for line in outcome.lines} == {run.path / "plots"}
    assert outcome.err.splitlines() == [
        f"mtrain: curves: skipped: {run.metrics_path}: is missing; `mtrain train CONFIG` "
        "writes it.",
        f"mtrain: attention, alignment: skipped: {run.model_path}: is missing; "
        "`mtrain train CONFIG` makes it.",
    ]


def test_a_run_without_data_gets_only_the_plots_of_its_model(
    cli: Cli, copied: RunDir, sketched: None
) -> None:
    shutil.rmtree(copied.data_dir)
    copied.metrics_path.unlink()
    outcome = cli("plot", copied.path, "--sentence", SENTENCE)
    assert (outcome.code, names(outcome.lines)) == (0, [*OF_SENTENCE, "positions"])
    assert [line.split(": ")[1] for line in outcome.err.splitlines()] == [
        *("curves", "batch, masks", "lengths of validation", "lengths of test held_out")
    ]
    outcome = cli("plot", copied.path)
    assert (outcome.code, names(outcome.lines)) == (0, ["positions"])
    assert "mtrain: attention, alignment: skipped: " in outcome.err


@pytest.mark.parametrize(
    ("kept", "missing", "shown"),
    [
        ("loss", "validation loss and BLEU", "no validation yet"),
        ("valid_loss", "training loss", "no logged step yet"),
    ],
)
def test_curves_without_validations_or_without_steps_say_what_is_missing(
    copied: RunDir, kept: str, missing: str, shown: str
) -> None:
    lines = [json.dumps(line) + "\n" for line in metrics(copied) if kept in line]
    copied.metrics_path.write_text("".join(lines))
    skipped: list[str] = []
    figure = draw_module.draw_curves(collect.read_curves(copied, skipped), "copy", 0.1)
    said = f"curves: {missing} skipped: {copied.metrics_path}: holds none yet."
    assert skipped == [said]
    assert shown in {text.get_text() for axes in figure.axes for text in axes.texts}


def test_an_empty_metrics_file_is_an_error(copied: RunDir) -> None:
    copied.metrics_path.write_text("")
    with pytest.raises(RunError, match="holds no logged step and no validation yet"):
        collect.read_curves(copied, [])


def test_a_run_with_nothing_to_draw_gives_a_one_line_error(cli: Cli, copied: RunDir) -> None:
    learned = ["model.positions=learned", "model.max_positions=32"]
    config_file.save(config_file.load(copied.config_path, learned), copied.config_path)
    shutil.rmtree(copied.data_dir)
    copied.metrics_path.unlink()
    copied.model_path.unlink()
    outcome = cli("plot", copied.path)
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (
        f"mtrain: {copied.path}: holds nothing to draw yet; `mtrain train CONFIG` fills it.\n"
    )


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        (" \t", "--sentence must have text, but is blank."),
        ("\udcff", "--sentence must be UTF-8 text, but is not."),
    ],
)
def test_a_blank_or_non_utf8_sentence_gives_a_one_line_error(
    cli: Cli, run: RunDir, sentence: str, said: str
) -> None:
    outcome = cli("plot", run.path, "--sentence", sentence)
    assert (outcome.code, outcome.out, outcome.err) == (2, b"", f"mtrain: {said}\n")


def test_a_blank_validation_set_gives_no_attention_plot(cli: Cli, copied: RunDir) -> None:
    for side in ("src", "tgt"):
        (copied.data_dir / f"valid.{side}").write_text("\n\n")
    pictures = collect.gather(copied, None)
    assert pictures.attention is None
    assert pictures.skipped == [
        f"attention, alignment: skipped: {copied.data_dir}: its validation set holds no sentence."
    ]


def test_an_output_folder_that_cannot_be_written_is_an_error(
    cli: Cli, run: RunDir, tmp_path: Path, sketched: None
) -> None:
    (tmp_path / "file").write_text("x")
    outcome = cli("plot", run.path, "--out", tmp_path / "file")
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith(f"mtrain: {tmp_path / 'file' / 'curves.png'}: cannot be written")
    assert outcome.err.count("\n") == 1


def test_without_matplotlib_a_one_line_error_says_how_to_install_it(
    cli: Cli, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = cli("plot", run.path)
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (
        "mtrain: `mtrain plot` must have matplotlib: pip install 'mtrain[plot]' adds it.\n"
    )
