"""The tokenizer is lossless: decoding restores every character of the text."""

import functools
import io
import itertools
import math
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import sentencepiece
from builders import SRC_LINES, TGT_LINES, vocabularies
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrain.config.sections import TokenizerConfig
from mtrain.errors import ConfigError, RunError, UserError
from mtrain.tokenizer import sentencepiece as sentencepiece_module
from mtrain.tokenizer.sentencepiece import Tokenizer

KINDS = ["unigram", "bpe"]
LINES = SRC_LINES + TGT_LINES
UNSEEN = [
    "żółć",
    "日本語",
    "👩‍👩‍👧 🏳️‍🌈",
    "a\tb",
    "\u00a0x\u00ad",
    "\x00\x7f",
    "e\u0301 é",
    "𝄞",
    "﷽",
]


def config(kind: str = "unigram", vocab_size: int = 420, **changes: object) -> TokenizerConfig:
    return TokenizerConfig.model_validate({"kind": kind, "vocab_size": vocab_size, **changes})


def train(settings_: TokenizerConfig, seed: int = 1) -> Tokenizer:
    pairs = list(zip(SRC_LINES, TGT_LINES, strict=True))
    return sentencepiece_module.train(settings_, pairs, len(pairs), seed)


def without_extra_spaces(line: str) -> str:
    """Normalize spaces as SentencePiece does; U+2581 is its character for a space."""
    return re.sub(" +", " ", line.replace("\u2581", " ")).strip(" ")


# Encode and decode

any_character = st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")
any_text = st.text(st.one_of(any_character, st.sampled_from("  aeß.▁😀<s/>")), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(lines=st.lists(any_text, max_size=20))
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
def test_any_text_is_restored_by_decoding_except_for_extra_spaces(kind, lines):
    vocabulary = vocabularies(kind).src
    ids = vocabulary.encode(lines)
    assert vocabulary.decode(ids) == [without_extra_spaces(line) for line in lines]


@pytest.mark.parametrize("kind", KINDS)
@given(lines=st.lists(any_text, max_size=20))
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
def test_encoding_any_text_gives_no_special_ids(kind, lines):
    vocabulary = vocabularies(kind).src
    special = {vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos}
    assert not {piece for ids in vocabulary.encode(lines) for piece in ids} & special


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", UNSEEN)
def test_unseen_characters_become_byte_pieces_and_are_restored_by_decoding(kind, line):
    vocabulary = vocabularies(kind).src
    (ids,) = vocabulary.encode([line])
    assert vocabulary.unk not in ids
    assert vocabulary.decode([ids]) == [line]
    assert any(re.fullmatch("<0x[0-9A-F]{2}>", piece) for piece in vocabulary.pieces(line))


def test_without_byte_fallback_an_unseen_character_is_unknown():
    vocabulary = train(config(vocab_size=100, byte_fallback=False)).src
    (ids,) = vocabulary.encode(["日"])
    assert vocabulary.unk in ids
    assert vocabulary.unknown("日 日") == ["日"]


@pytest.mark.parametrize("kind", KINDS)
@given(line=any_text)
@example(line="a\tb\xa0c\t")
@settings(derandomize=True, database=None, deadline=None, max_examples=200)
def test_unknown_returns_exactly_the_characters_encoded_as_byte_pieces(kind, line):
    vocabulary = vocabularies(kind).src
    by_bytes = set(vocabulary.byte_pieces)
    (ids,) = vocabulary.encode([line])
    assert bool(vocabulary.unknown(line)) == bool(by_bytes.intersection(ids))
    each = {character: vocabulary.encode([character])[0] for character in line}
    assert vocabulary.unknown(line) == sorted(
        character for character, own in each.items() if by_bytes.intersection(own)
    )


@pytest.mark.parametrize("line", ["<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "a </s> b"])
def test_text_that_looks_like_a_special_piece_is_encoded_as_ordinary_text(line):
    vocabulary = vocabularies().src
    (ids,) = vocabulary.encode([line])
    assert not set(ids) & {vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos}
    assert len(ids) > 1
    assert vocabulary.decode([ids]) == [line]


def test_unicode_normalization_forms_are_preserved():
    composed, decomposed, wide = "é", "e\u0301", "ｗｉｄｅ"
    vocabulary = vocabularies().src
    lines = [composed, decomposed, wide]
    assert vocabulary.decode(vocabulary.encode(lines)) == lines


def test_characters_that_a_models_normalization_maps_to_known_ones_are_not_unknown():
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=made,
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc_cf",
        pad_id=3,
        minloglevel=2,
    )
    vocabulary = sentencepiece_module.Vocabulary(made.getvalue())
    first = LINES[0].split()[0]
    line = f"{first.upper()}\t{first}\xa0\u2581{first}"
    assert vocabulary.unknown(line) == []
    assert vocabulary.unknown(line + "\u65e5") == ["\u65e5"]


def test_pieces_concatenate_to_the_text_and_are_as_many_as_the_ids():
    vocabulary = vocabularies().src
    for line in LINES:
        assert "".join(vocabulary.pieces(line)) == "\u2581" + line.replace(" ", "\u2581")
        assert len(vocabulary.pieces(line)) == len(vocabulary.encode([line])[0])


def test_a_text_has_fewer_pieces_than_characters():
    num_pieces = sum(len(ids) for ids in vocabularies().src.encode(LINES))
    assert num_pieces < 0.8 * sum(len(line) for line in LINES)


# Decoding


@given(ids=st.lists(st.lists(st.integers(0, 419), max_size=30), max_size=10))
@settings(derandomize=True, database=None, deadline=None, max_examples=100)
def test_any_ids_decode_to_one_line_each(ids):
    lines = vocabularies().src.decode(ids)
    assert len(lines) == len(ids)
    assert not any("\n" in line or "\r" in line for line in lines)


@pytest.mark.parametrize("between", ["\n", "\r", "\r\n", "\n\n"])
def test_a_line_break_is_decoded_as_a_space(between):
    vocabulary = vocabularies().src
    (ids,) = vocabulary.encode([f"a{between}b"])
    assert vocabulary.decode([ids]) == ["a b"]


def test_incomplete_utf8_bytes_decode_to_a_replacement_character():
    vocabulary = vocabularies().src
    (ids,) = vocabulary.encode(["日"])
    (line,) = vocabulary.decode([ids[:-1]])
    assert "\ufffd" in line


@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=40),
    ids=st.lists(st.lists(st.integers(0, 419), max_size=8), max_size=40),
)
def test_small_and_large_batches_are_encoded_and_decoded_alike(lines, ids):
    vocabulary = vocabularies("bpe").tgt
    count = sentencepiece_module._NUM_BATCHED
    alone = [vocabulary.encode([line])[0] for line in lines]
    assert vocabulary.encode([*lines, *["a"] * count])[: len(lines)] == alone
    texts = [vocabulary.decode([row])[0] for row in ids]
    assert vocabulary.decode([*ids, *[[5]] * count])[: len(ids)] == texts


def test_special_ids_decode_to_nothing():
    vocabulary = vocabularies().src
    (ids,) = vocabulary.encode(["The dog."])
    framed = [vocabulary.bos, *ids, vocabulary.eos, vocabulary.pad]
    assert vocabulary.decode([framed]) == ["The dog."]


def test_an_empty_list_stays_empty_and_empty_lines_stay_empty_lines():
    vocabulary = vocabularies().src
    assert vocabulary.encode([]) == vocabulary.decode([]) == []
    assert vocabulary.sample([], 0.5, 1) == []
    assert vocabulary.encode(["", "a", ""])[0::2] == [[], []]
    assert vocabulary.decode([[], [5], []])[0::2] == ["", ""]


# The vocabulary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [True, False])
def test_special_ids_are_pad_0_unk_1_bos_2_eos_3(kind, shared):
    found = vocabularies(kind, shared)
    for vocabulary in (found.src, found.tgt):
        assert (vocabulary.pad, vocabulary.unk, vocabulary.bos, vocabulary.eos) == (0, 1, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [350, 420])
def test_a_vocabulary_has_the_requested_size(kind, vocab_size):
    assert len(vocabularies(kind, vocab_size=vocab_size).src) == vocab_size


def test_a_shared_vocabulary_is_the_same_object_for_both_sides():
    shared = vocabularies(shared=True)
    assert shared.src is shared.tgt


def test_separate_vocabularies_segment_their_own_language_into_fewer_pieces():
    separate = vocabularies(shared=False)
    assert separate.src.model != separate.tgt.model
    assert len(separate.src.pieces("The dog sees")) < len(separate.tgt.pieces("The dog sees"))
    assert len(separate.tgt.pieces("Der Hund")) < len(separate.src.pieces("Der Hund"))


def test_a_shared_vocabulary_encodes_umlauts_without_byte_pieces():
    vocabulary = vocabularies(shared=True).src
    umlauts = ["schön", "Stühle"]
    assert not any("<0x" in piece for line in umlauts for piece in vocabulary.pieces(line))


def test_sources_end_with_eos_and_begin_without_bos():
    found = vocabularies()
    plain, with_eos = found.src.encode(LINES), found.encode_src(LINES)
    assert with_eos == [[*ids, found.src.eos] for ids in plain]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_too_large_vocab_size_is_an_error_that_names_the_largest_possible_size(
    kind, byte_fallback
):
    with pytest.raises(ConfigError, match=r"`tokenizer.vocab_size` must be at most \d+") as caught:
        train(config(kind, 100_000, byte_fallback=byte_fallback))
    assert str(caught.value).endswith("but is 100000 instead.")
    bound = int(re.findall(r"\d+", str(caught.value))[0])
    assert len(train(config(kind, bound, byte_fallback=byte_fallback)).src) <= bound
    with pytest.raises(ConfigError):
        train(config(kind, bound + 1, byte_fallback=byte_fallback))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_too_small_vocab_size_is_an_error_that_names_the_smallest_possible_size(
    kind, byte_fallback
):
    with pytest.raises(ConfigError, match=r"`tokenizer.vocab_size` must be at least \d+") as caught:
        train(config(kind, 8, byte_fallback=byte_fallback))
    assert str(caught.value).endswith("but is 8 instead.")
    bound = int(re.findall(r"\d+", str(caught.value))[0])
    assert len(train(config(kind, bound, byte_fallback=byte_fallback)).src) == bound
    with pytest.raises(ConfigError):
        train(config(kind, bound - 1, byte_fallback=byte_fallback))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_text_of_more_characters_than_the_default_size_gets_longer_pieces_too(kind):
    first = ord("\u4e00")
    lines = ["".join(map(chr, range(n, n + 9))) for n in range(first, first + 8400, 4)] * 2
    settings = TokenizerConfig(kind=kind)
    pairs = list(zip(lines, lines, strict=True))
    vocabulary = sentencepiece_module.train(settings, pairs, len(pairs), seed=1).src
    assert len(vocabulary) > 8400 + 260
    (ids,) = vocabulary.encode([lines[0]])
    assert len(ids) - 1 < 9


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("lines", [[], [""], ["   "]])
def test_training_on_empty_text_raises_a_user_error(shared, lines):
    pairs = [(line, line) for line in lines]
    with pytest.raises(UserError):
        sentencepiece_module.train(config(shared=shared), pairs, len(pairs), seed=1)


def test_a_side_with_too_little_text_for_its_own_vocabulary_is_an_error():
    pairs = [(line, "Ja!") for line in SRC_LINES]
    with pytest.raises(ConfigError, match="must be at most"):
        sentencepiece_module.train(config(shared=False), pairs, len(pairs), seed=1)


# Reproducible training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [True, False])
def test_training_is_deterministic(kind, shared):
    again = train(config(kind, shared=shared))
    assert again.fingerprint() == vocabularies(kind, shared).fingerprint()


def test_the_seed_determines_which_lines_are_sampled_for_max_training_lines():
    few = config(vocab_size=320, max_training_lines=8)
    first, again = train(few, seed=1), train(few, seed=1)
    assert first.fingerprint() == again.fingerprint()
    others = {train(few, seed=seed).fingerprint() for seed in range(2, 5)}
    assert others != {first.fingerprint()}


def test_training_lines_are_sampled_uniformly():
    counts = dict.fromkeys(range(40), 0)
    num_draws = 2000
    for seed in range(num_draws):
        kept = sentencepiece_module._sample(len(counts), 10, seed)
        assert len(kept) == len(set(kept)) == 10
        for number in kept:
            counts[number] += 1
    assert min(counts.values()) > 0.8 * num_draws / 4
    assert max(counts.values()) < 1.2 * num_draws / 4


def test_training_accepts_an_iterator_of_pairs():
    pairs = zip(SRC_LINES, TGT_LINES, strict=True)
    found = sentencepiece_module.train(config(), pairs, len(SRC_LINES), seed=1)
    assert found.fingerprint() == train(config()).fingerprint()


# Files


@pytest.mark.parametrize("shared", [True, False])
def test_a_tokenizer_is_loaded_as_it_was_saved(shared, tmp_path):
    saved = vocabularies(shared=shared)
    saved.save(tmp_path)
    names = {"shared.model"} if shared else {"src.model", "tgt.model"}
    assert {path.name for path in tmp_path.iterdir()} == names
    loaded = sentencepiece_module.load(tmp_path)
    assert (loaded.src is loaded.tgt) == shared
    assert loaded.fingerprint() == saved.fingerprint()
    assert loaded.encode_src(LINES) == saved.encode_src(LINES)
    assert loaded.tgt.encode(LINES) == saved.tgt.encode(LINES)


def test_a_missing_tokenizer_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(RunError, match=r"shared\.model: is missing"):
        sentencepiece_module.load(tmp_path)
    vocabularies(shared=False).save(tmp_path)
    (tmp_path / "tgt.model").unlink()
    with pytest.raises(RunError, match=r"tgt\.model: .*missing"):
        sentencepiece_module.load(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not a model", None])
def test_a_damaged_tokenizer_is_an_error_that_names_the_file(damage, tmp_path):
    path = tmp_path / "shared.model"
    model = vocabularies().src.model
    path.write_bytes(model[: len(model) // 2] if damage is None else damage)
    with pytest.raises(RunError, match=r"shared\.model: must be a SentencePiece model"):
        sentencepiece_module.load(tmp_path)


def test_different_tokenizers_have_different_fingerprints():
    separate, shared = vocabularies(shared=False), vocabularies(shared=True)
    swapped = Tokenizer(separate.tgt, separate.src)
    one_side = Tokenizer(separate.src, separate.src)
    different = (separate, shared, swapped, one_side, vocabularies("bpe"))
    assert len({tokens.fingerprint() for tokens in different}) == len(different)


# Sampling


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_segmentations_are_determined_by_the_seed(kind):
    vocabulary = vocabularies(kind).src
    first, again, other = (vocabulary.sample(LINES, 0.3, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_does_not_depend_on_earlier_samples(kind):
    vocabulary = vocabularies(kind).src
    first = vocabulary.sample(LINES, 0.3, 5)
    vocabulary.sample(LINES[:3], 0.3, 8)
    vocabulary.encode(LINES)
    assert vocabulary.sample(LINES, 0.3, 5) == first


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_gives_other_segmentations_of_the_same_text(kind):
    vocabulary = vocabularies(kind).src
    best, sampled = vocabulary.encode(LINES), vocabulary.sample(LINES, 0.3, 5)
    assert sum(one != other for one, other in zip(best, sampled, strict=True)) > len(LINES) / 3
    assert vocabulary.decode(sampled) == LINES
    assert vocabulary.unk not in {piece for ids in sampled for piece in ids}


@pytest.mark.parametrize("line", UNSEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_a_sample_restores_unseen_characters(kind, line):
    vocabulary = vocabularies(kind).src
    assert vocabulary.decode(vocabulary.sample([line] * 5, 0.5, 3)) == [line] * 5


DRAW = """
import sys
from pathlib import Path
from mtrain.tokenizer import sentencepiece
vocabulary = sentencepiece.load(Path(sys.argv[1])).src
print(vocabulary.sample(sys.argv[2:], 0.3, 5))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_in_every_process(kind, tmp_path):
    vocabularies(kind).save(tmp_path)
    lines = LINES[::10]
    drawn = [
        subprocess.run(
            [sys.executable, "-c", DRAW, str(tmp_path), *lines],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert drawn == [f"{vocabularies(kind).src.sample(lines, 0.3, 5)}\n"] * 2


@pytest.mark.parametrize("byte_fallback", [True, False])
@given(lines=st.lists(any_text, max_size=20))
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
def test_bpe_sampling_with_alpha_0_equals_the_plain_encoding(byte_fallback, lines):
    vocabulary = vocabularies("bpe").src
    if not byte_fallback:
        vocabulary = without_byte_fallback()
    for own in (lines, LINES):
        assert vocabulary.sample(own, 0.0, 5) == vocabulary.encode(own)


@functools.cache
def without_byte_fallback():
    return train(config("bpe", vocab_size=100, byte_fallback=False)).src


def test_a_larger_alpha_makes_unigram_samples_more_like_the_plain_encoding():
    vocabulary = vocabularies("unigram").src
    plain = vocabulary.encode(LINES + UNSEEN)
    assert vocabulary.sample(LINES + UNSEEN, 1e9, 5) == plain
    num_same = [
        sum(map(list.__eq__, plain, vocabulary.sample(LINES + UNSEEN, alpha, 5)))
        for alpha in (0.0, 0.3, 1.0)
    ]
    assert num_same == sorted(num_same)


def test_bpe_sampling_with_alpha_1_gives_single_characters():
    vocabulary = vocabularies("bpe").src
    (ids,) = vocabulary.sample(["The dog"], 1.0, 5)
    assert vocabulary.pieces_of(ids) == [*"\u2581The\u2581dog"]


def test_user_defined_symbols_stay_whole_when_all_merges_are_dropped():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        user_defined_symbols=["<x>", "<x>y", "a\u2581b", "\u2581tok", "dog"],
        minloglevel=2,
    )
    vocabulary = sentencepiece_module.Vocabulary(model.getvalue())
    lines = [
        "The <x>dog<x> x<x>",
        "<x>y<x>z tok tok a ba",
        "\u2581tok <x",
        "dogdog a b",
        "",
        *LINES,
    ]
    assert vocabulary.sample(lines, 0.0, 5) == vocabulary.encode(lines)
    (ids,) = vocabulary.sample(["The <x>ydog<x> tok a b"], 1.0, 5)
    assert vocabulary.pieces_of(ids) == [
        *"\u2581The\u2581",
        *["<x>y", "dog", "<x>", "\u2581tok", "\u2581", "a\u2581b"],
    ]


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_unigram_segmentations_are_sampled_in_proportion_to_probability_to_the_power_alpha(alpha):
    """Enumerate all segmentations of a word, fewer than the n-best list that is sampled from."""
    vocabulary, word, num_draws = vocabularies("unigram").src, "mother", 4000
    pieces = vocabulary.pieces_of(range(len(vocabulary)))
    score_of = {piece: vocabulary._processor.get_score(i) for i, piece in enumerate(pieces)}
    text, expected = "\u2581" + word, {}
    for cuts in itertools.product([False, True], repeat=len(word)):
        ends = [place for place, cut in enumerate(cuts, start=1) if cut]
        parts = [text[i:j] for i, j in itertools.pairwise([0, *ends, len(text)])]
        if all(part in score_of for part in parts):
            expected[tuple(parts)] = math.exp(alpha * sum(score_of[part] for part in parts))
    counts = Counter(
        tuple(vocabulary.pieces_of(ids)) for ids in vocabulary.sample([word] * num_draws, alpha, 1)
    )
    total = sum(expected.values())
    assert 3 < len(expected) < 64
    assert set(counts) <= set(expected)
    means = {parts: num_draws * weight / total for parts, weight in expected.items()}
    chi_square = sum((counts[parts] - mean) ** 2 / mean for parts, mean in means.items())
    assert chi_square < 3 * len(expected)
