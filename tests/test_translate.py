"""A batch is no different from its lines, order is kept, and a block is all that is held."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from builders import SRC_LINES, TGT_LINES, model_config, randomise, vocabularies
from tasks import WORDS, copy_task

from mtrain import tokenizer, translate
from mtrain.config import DecodingConfig
from mtrain.errors import ConfigError, RunError
from mtrain.model import DecoderLayer
from mtrain.rundir import RunDir
from mtrain.translate import Translator

LINES = [
    *(pair.src for pair in copy_task(24, 9)),
    "",
    "ba",
    "   ",
    " ".join(WORDS),
    "Unseen letters, too!",
    "é \N{SNOWMAN}",
]


@pytest.fixture(scope="module")
def translator(trained: RunDir) -> Translator:
    return translate.load(trained, device="cpu")


def never(text: str) -> None:
    raise AssertionError(f"warned: {text}")


def with_decoding(translator: Translator, changes: dict[str, object]) -> Translator:
    decoding = translator.decoding.model_copy(update=changes)
    return Translator(translator.model, translator.tokenizer, decoding, translator.device)


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_a_batch_of_many_equals_many_batches_of_one(translator: Translator, beam: int) -> None:
    searching = with_decoding(translator, {"beam": beam})
    together = searching.translate(LINES)
    assert together == [searching.translate([line])[0] for line in LINES]
    assert sum(a == b for a, b in zip(together[:24], LINES[:24], strict=True)) >= 20


@pytest.mark.parametrize("budget", [1, 20, 60])
def test_the_size_of_the_batches_changes_no_translation(
    translator: Translator, budget: int
) -> None:
    small = with_decoding(translator, {"batch_tokens": budget})
    assert small.translate(LINES) == translator.translate(LINES)


@pytest.mark.parametrize(("budget", "beam"), [(1, 1), (40, 1), (40, 4), (1000, 2)])
def test_batches_are_full_under_their_budget_of_places(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, budget: int, beam: int
) -> None:
    shapes: list[list[int]] = []
    search = Translator.search

    def spy(self: Translator, src: list[list[int]]) -> object:
        shapes.append([len(ids) for ids in src])
        return search(self, src)

    monkeypatch.setattr(Translator, "search", spy)
    with_decoding(translator, {"batch_tokens": budget, "beam": beam}).translate(LINES)
    assert sum(map(len, shapes)) == len(LINES) - 2
    cells = [len(lengths) * max(lengths) * beam for lengths in shapes]
    assert all(n <= budget or len(x) == 1 for n, x in zip(cells, shapes, strict=True))
    for lengths, after in pairwise(shapes):
        assert (len(lengths) + 1) * after[0] * beam > budget


def test_order_is_kept_whatever_the_lengths(translator: Translator) -> None:
    backwards = translator.translate(LINES[::-1])
    assert backwards[::-1] == translator.translate(LINES)


def test_blank_lines_give_empty_ones(translator: Translator) -> None:
    lines = ["", " ", "\t", "\u3000", "\u2028", "\x0b\x0c"]
    assert translator.translate(lines) == [""] * len(lines)


def test_no_lines_give_no_lines(translator: Translator) -> None:
    assert translator.translate([]) == []
    assert list(translator.stream([], never)) == []


def test_a_stream_is_read_a_block_at_a_time(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "_BLOCK_LINES", 4)
    num_read = 0

    def endless() -> Iterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield LINES[(num_read - 1) % len(LINES)]

    stream = translator.stream(endless(), never)
    whole = translator.translate(LINES[:10])
    for index, expected in enumerate(whole):
        assert next(stream) == expected
        assert num_read == 4 * (index // 4 + 1)


def test_a_stream_ends_with_a_block_that_is_not_full(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "_BLOCK_LINES", 4)
    assert list(translator.stream(LINES[:10], never)) == translator.translate(LINES[:10])


def untrained(**settings: object) -> Translator:
    """A translator that writes nonsense, but always the same for the same line."""
    torch.manual_seed(1)
    model = translate.build_model(model_config(**settings), vocabularies()).double()
    randomise(model, seed=1)
    with torch.no_grad():
        for layer in [*model.encoder, *model.decoder]:
            for weight in layer.parameters():
                weight *= 3
            if isinstance(layer, DecoderLayer):
                layer.cross_attention.output.weight *= 30  # else no source is heard
    decoding = DecodingConfig(beam=2, max_extra_tokens=3)
    return Translator(model, vocabularies(), decoding, torch.device("cpu"))


def test_each_line_gets_its_own_translation_whatever_stands_beside_it() -> None:
    translator, lines = untrained(), ["", *TGT_LINES[:6], "a", " ", *SRC_LINES[:6]]
    alone = [translator.translate([line])[0] for line in lines]
    assert len(set(alone)) > 8
    assert translator.translate(lines) == alone
    assert translator.translate(lines[::-1]) == alone[::-1]


def test_a_stream_warns_of_each_line_that_is_longer_than_the_learned_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translate, "_BLOCK_LINES", 3)
    lines = ["a", "", "The dog is old a.", "b", "The dog is old.", "c", " ".join(SRC_LINES[:4])]
    lengths = [len(ids) for ids in vocabularies().encode_src(lines)]
    limit = lengths[4]
    assert lengths[2] == limit + 1
    assert [length > limit for length in lengths] == [index in (2, 6) for index in range(7)]
    translator = untrained(positions="learned", max_positions=limit)
    warnings: list[str] = []
    streamed = list(translator.stream(lines, warnings.append))
    assert warnings == [
        f"line {number}: has {lengths[number - 1]} tokens, but the model learned {limit} "
        "positions; the tokens after them share the last one."
        for number in (3, 7)
    ]
    assert streamed == translator.translate(lines)


def test_a_model_with_sinusoids_warns_of_no_length() -> None:
    assert len(list(untrained().stream([" ".join(SRC_LINES)], never))) == 1


def test_a_translation_has_at_most_the_pieces_of_its_source_and_a_few(
    trained: RunDir, translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained model that never wants to end must end at the limit."""
    decoded: list[int] = []

    def decode(self: tokenizer.Vocabulary, ids: Sequence[Sequence[int]]) -> list[str]:
        decoded.extend(len(row) for row in ids)
        return [""] * len(ids)

    monkeypatch.setattr(tokenizer.Vocabulary, "decode", decode)
    torch.manual_seed(1)
    model = translate.build_model(trained.load_config().model, translator.tokenizer)
    with torch.no_grad():
        model.output.weight[translator.tokenizer.tgt.eos] = -model.output.weight.sum(0)
    lines = ["ba", "ba ce di fo gu"]
    lengths = sorted(len(ids) for ids in translator.tokenizer.src.encode(lines))
    for beam, extra in ((1, 0), (1, 7), (3, 4)):
        decoded.clear()
        changes = {"beam": beam, "max_extra_tokens": extra}
        decoding = translator.decoding.model_copy(update=changes)
        Translator(model, translator.tokenizer, decoding, translator.device).translate(lines)
        assert all(n <= limit + extra for n, limit in zip(decoded, lengths, strict=True))


def test_a_greedy_translation_is_the_best_piece_at_every_place(translator: Translator) -> None:
    """The other path: the whole target at once, without a cache or a search."""
    model, vocabulary = translator.model.eval(), translator.tokenizer
    line = "ba ce di fo"
    (src,) = vocabulary.encode_src([line])
    src_BS = torch.tensor([src])
    keep_BS = torch.ones_like(src_BS, dtype=torch.bool)
    written = [vocabulary.tgt.bos]
    with torch.inference_mode():
        while written[-1] != vocabulary.tgt.eos:
            states_BTD = model(src_BS, keep_BS, torch.tensor([written]))
            written.append(int(model.output(states_BTD[0, -1]).argmax()))
    greedy = with_decoding(translator, {"beam": 1})
    assert greedy.translate([line]) == vocabulary.tgt.decode([written[1:-1]])


def test_a_model_in_training_mode_translates_without_dropout(
    trained: RunDir, translator: Translator
) -> None:
    config = trained.load_config().model.model_copy(update={"dropout": 0.5})
    model = translate.build_model(config, translator.tokenizer)
    translate.set_weights(model, dict(translator.model.named_parameters()), trained.model_path)
    model.train()
    same = Translator(model, translator.tokenizer, translator.decoding, translator.device)
    assert same.translate(LINES) == translator.translate(LINES)


def test_weights_of_another_shape_or_that_lack_a_tensor_are_refused(
    trained: RunDir, translator: Translator
) -> None:
    weights = dict(translator.model.named_parameters())
    name = "src_embedding.weight"
    shape = tuple(weights[name].shape)
    wrong = {**weights, name: weights[name][:-1]}
    lacking = {key: value for key, value in weights.items() if key != name}
    for tensors, found in ((wrong, (shape[0] - 1, shape[1])), (lacking, "missing")):
        with pytest.raises(RunError) as error:
            translate.set_weights(translator.model, tensors, trained.model_path)
        assert str(error.value) == (
            f"{trained.model_path}: `{name}` must have the shape {shape} that config.yaml asks "
            f"for, but is {found} instead; restore the run's own config.yaml."
        )


def test_a_device_is_found_or_refused() -> None:
    assert translate.pick_device("cpu").type == "cpu"
    assert translate.pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tpu", "cpu:x", "", "meta", "cuda:99"):
        with pytest.raises(ConfigError, match=r"^`device` must be one of this machine"):
            translate.pick_device(name)
