"""Hold the demo corpus to its generator, its shipped files, and what it promises to hold."""

import lzma
import re
from collections import Counter
from pathlib import Path

import demo_corpus
import lexicon
import pytest
from grammar import Pair

import mtrain.demo

DEMO_DIR = Path(__file__).parent.parent
FILES = sorted(path for path in DEMO_DIR.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[Pair]]:
    return demo_corpus.corpus()


def words(line: str) -> list[str]:
    return re.findall(r"\w+", line.lower())


# The files and the generator ------------------------------------------------------------------


def test_files_in_data_demo_equal_the_generators_output(tmp_path: Path) -> None:
    demo_corpus.write_corpus(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in FILES}
    assert sorted(shipped) == sorted(written)
    assert len(written) == 2 * len(demo_corpus.SPLITS) + 1
    for name in written:
        assert shipped[name] == written[name], f"{name} differs: run demo_corpus.py"


def test_the_package_carries_the_same_files_compressed() -> None:
    packaged = {
        path.name: lzma.decompress(path.read_bytes())
        for path in (Path(mtrain.demo.__file__).parent / "corpus").iterdir()
    }
    assert packaged == {
        f"{path.name}.xz": path.read_bytes() for path in FILES if path.suffix in {".en", ".de"}
    }


def test_files_end_their_lines_with_a_line_feed_alone() -> None:
    for path in FILES:
        data = path.read_bytes()
        assert data.endswith(b"\n") and b"\r" not in data and not data.endswith(b"\n\n")


def test_the_same_seed_gives_the_same_sentences() -> None:
    assert demo_corpus.sentences(7, 200) == demo_corpus.sentences(7, 200)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert demo_corpus.sentences(7, 200)[:50] == demo_corpus.sentences(7, 50)


def test_another_seed_gives_other_sentences() -> None:
    ours, theirs = demo_corpus.sentences(7, 200), demo_corpus.sentences(8, 200)
    assert len(set(ours) & set(theirs)) < 50


def test_a_small_draw_is_this_one_on_every_python() -> None:
    lines = [pair.src for pair in demo_corpus.sentences(1, 3)]
    assert lines == [
        "Although the friendly student throws away my jacket today, she wants to drink my tea.",
        "The key is as cheap as our white gift.",
        "Where will my brother see the small daughter?",
    ]


def test_splits_have_the_sizes_that_they_declare(corpus: dict[str, list[Pair]]) -> None:
    assert {split: len(pairs) for split, pairs in corpus.items()} == demo_corpus.SPLITS


def test_no_source_occurs_twice_in_or_across_splits(corpus: dict[str, list[Pair]]) -> None:
    sources = Counter(pair.src for pairs in corpus.values() for pair in pairs)
    assert sources.most_common(1)[0][1] == 1


def test_every_source_has_one_target_over_several_seeds() -> None:
    targets: dict[str, str] = {}
    for seed in range(3):
        for pair in demo_corpus.sentences(seed, 4000):
            assert targets.setdefault(pair.src, pair.tgt) == pair.tgt


def test_a_second_translation_of_a_source_stops_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = iter([Pair("The cat sleeps here.", "a"), Pair("The cat sleeps here.", "b")])
    monkeypatch.setattr(demo_corpus, "RECIPES", ((1, lambda rng: next(recipe)),))
    with pytest.raises(AssertionError, match="two translations"):
        demo_corpus.sentences(1, 2)


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_every_line_looks_like_a_sentence(corpus: dict[str, list[Pair]], side: str) -> None:
    shape = re.compile(r"[A-ZÄÖÜ][a-zäöüß]*(,? [0-9A-Za-zÄÖÜäöüß]+('clock)?)*[.?]")
    for pair in (pair for pairs in corpus.values() for pair in pairs):
        line = getattr(pair, side)
        assert shape.fullmatch(line), line


def test_questions_are_questions_in_both_languages(corpus: dict[str, list[Pair]]) -> None:
    for pair in corpus["train"]:
        assert pair.src[-1] == pair.tgt[-1]


def test_sentences_have_four_to_eighteen_words(corpus: dict[str, list[Pair]]) -> None:
    lengths = [len(pair.src.split()) for pairs in corpus.values() for pair in pairs]
    assert min(lengths) >= 4 and max(lengths) <= 18
    assert 8.5 < sum(lengths) / len(lengths) < 10.5


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_every_word_of_test_and_valid_occurs_ten_times_in_train(
    corpus: dict[str, list[Pair]], side: str
) -> None:
    train = Counter(word for pair in corpus["train"] for word in words(getattr(pair, side)))
    held_out = corpus["valid"] + corpus["test"]
    rare = {word for pair in held_out for word in words(getattr(pair, side)) if train[word] < 10}
    assert not rare


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_every_word_of_train_occurs_about_as_often_as_it_must(
    corpus: dict[str, list[Pair]], side: str
) -> None:
    train = Counter(word for pair in corpus["train"] for word in words(getattr(pair, side)))
    assert min(train.values()) >= 10
    assert sum(count < 20 for count in train.values()) <= 25


def test_every_word_of_the_lexicon_is_used(corpus: dict[str, list[Pair]]) -> None:
    german = {word for pair in corpus["train"] for word in words(pair.tgt)}
    nouns = {
        form.lower() for n in lexicon.NOUNS if n.kind != "place" for form in (n.de, n.de_plural)
    }
    assert nouns - {""} <= german
    assert {verb.infinitive for verb in lexicon.VERBS} <= german
    assert {adjective.de for adjective in lexicon.ADJECTIVES} <= german


# What the corpus holds --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        r", (weil|obwohl|wenn|dass|als) .* (ist|hat|will|kann|muss|wird)\.$",
        r"^(Weil|Obwohl|Wenn|Als) [^,]*, \w+ (er|sie|es|ich|wir|der|die|das) ",
        r"^(Gestern|Heute|Morgen) \w+ (ich|er|sie|wir|der|die|das) ",
        r" ruft .* an\.$",
        r"anruft\b",
        r" angerufen",
        r" anzurufen",
        r" (bin|ist|sind) .* gegangen",
        r" (habe|hat|haben) .* gekauft",
        r" kein(e|en)? ",
        r" nicht\.",
        r" gern ",
        r" um .* zu \w+en\.",
        r"^(Wen|Wem|Wer|Was|Wo|Warum) .*\?$",
        r"gibt es ",
        r"älter als ",
        r" so \w+ wie ",
        r", (der|die|das|den|dem) .*, ",
        r" \d+ Euro\.",
        r" (zwei|drei|zwölf|zwanzig) Euro\.",
        r" (den|einen) \w*en Jungen",
    ],
)
def test_the_corpus_holds_each_phenomenon_many_times(
    corpus: dict[str, list[Pair]], pattern: str
) -> None:
    assert sum(bool(re.search(pattern, pair.tgt)) for pair in corpus["train"]) >= 20


def test_no_noun_phrase_of_the_corpus_breaks_agreement(corpus: dict[str, list[Pair]]) -> None:
    stems = "|".join(a.stem or a.de.removesuffix("e") for a in lexicon.ADJECTIVES)
    # no ending of an adjective but -en can follow "dem", "den", "im", "zum", "einem" or "einen"
    wrong = re.compile(rf"\b(dem|den|im|zum|\w+em|einen|keinen) ({stems})(e|es|er|em)\b")
    for pairs in corpus.values():
        for pair in pairs:
            assert not wrong.search(pair.tgt), pair.tgt
