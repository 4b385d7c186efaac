import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tasks import Said, write

from mtrain.autoconfig import benchmark, presets, split, write_config
from mtrain.autoconfig.write_config import Files, InitRequest
from mtrain.config import config_file
from mtrain.data.prepare import prepare, read_counts, read_test, read_valid
from mtrain.errors import ConfigError, DataError, WriteError
from mtrain.model.transformer import num_parameters
from mtrain.run.load_model import build_model
from mtrain.run.run_dir import RunDir

WORDS = [f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu") for b in ("ha", "je", "ki", "lo", "mu")]


def sentences(count, seed=1):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) for _ in range(count)]


measure = benchmark.measure


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    """Train no model, but count its weights: what is tested is what is chosen and written."""

    def counted(size, sample, vocabulary, device):
        return presets.MeasuredPreset(
            size, num_parameters(build_model(size.model, vocabulary)), 20_000.0
        )

    monkeypatch.setattr(benchmark, "measure", counted)


@pytest.fixture
def short_trials(monkeypatch, no_trials):
    """Train each model that is tried for two updates."""
    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "_MIN_S", 0.0)
    monkeypatch.setattr(benchmark, "_WARMUP_BATCHES", 1)
    monkeypatch.setattr(benchmark, "_MIN_BATCHES", 1)


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = sentences(400)
    src, tgt = write(Path("a.en"), lines), write(Path("a.de"), [line.upper() for line in lines])
    return InitRequest(
        train=Files(Path(src), Path(tgt)),
        src_lang="en",
        tgt_lang="de",
        budget_s=600.0,
        device="cpu",
        config_path=Path("en-de.yaml"),
        run_dir="runs/en-de",
        valid=None,
        test=None,
    )


def read(path):
    return Path(path).read_text(encoding="utf-8").splitlines()


def test_the_config_that_is_written_trains_on_the_corpus_without_what_is_held_out(wanted):
    write_config.init(wanted, Said(), lambda _: None)
    config = config_file.load(wanted.config_path)
    run = RunDir(Path(config.run_dir))
    prepare(config, run, Said())
    assert read_counts(run) == {"held-out-pair": 40}
    held_out = [*read_valid(run).src, *read_test(run, "test").src]
    assert len({*held_out}) == len(held_out) == 40
    assert {*held_out} <= {*read("a.en")}


def test_held_out_files_are_pairs_of_the_corpus(wanted):
    write_config.init(wanted, Said(), lambda _: None)
    pairs = {*zip(read("a.en"), read("a.de"), strict=True)}
    for name in ("valid", "test"):
        held_out = [*zip(read(f"en-de.{name}.en"), read(f"en-de.{name}.de"), strict=True)]
        assert len(held_out) == 20
        assert {*held_out} <= pairs


def test_files_of_ones_own_are_named_and_nothing_is_held_out(wanted):
    write(Path("v.en"), ["one two"])
    write(Path("v.de"), ["eins zwei"])
    own = Files(Path("v.en"), Path("v.de"))
    report = write_config.init(replace(wanted, valid=own, test=own), Said(), lambda _: None)
    config = config_file.load(wanted.config_path)
    assert config.data.valid == config.data.tests["test"] == own.corpus()
    assert not any("held out" in line for line in report)
    assert not list(Path().glob("en-de.*.en"))


@pytest.mark.parametrize("other", ["en", "EN"])
def test_held_out_files_of_one_language_on_both_sides_have_a_name_for_each(wanted, other):
    report = write_config.init(replace(wanted, tgt_lang=other), Said(), lambda _: None)
    assert report[0].startswith("wrote     en-de.valid.src.en and en-de.valid.tgt.")
    config = config_file.load(wanted.config_path)
    held_out = (config.data.valid, config.data.tests["test"])
    sides = [(read(own.src[0]), read(own.tgt[0])) for own in held_out]
    assert all([line.upper() for line in src] == tgt for src, tgt in sides)
    run = RunDir(Path(config.run_dir))
    prepare(config, run, Said())
    assert read_counts(run) == {"held-out-pair": 40}


def test_the_same_corpus_gives_the_same_held_out_pairs(wanted):
    write_config.init(wanted, Said(), lambda _: None)
    first = read("en-de.test.en")
    for path in Path().glob("en-de.*"):
        path.unlink()
    write_config.init(wanted, Said(), lambda _: None)
    assert read("en-de.test.en") == first


def test_a_model_is_tried_by_real_updates_of_its_size(wanted, short_trials):
    seen = split.read_overview(wanted.train.corpus(), 1, lambda _: None)
    vocabulary = write_config._train_tokenizer(seen.sample, 400)
    sample = benchmark.encode(seen.sample, vocabulary)
    torch.backends.cuda.enable_cudnn_sdp(True)
    tried = benchmark.measure(presets.PRESETS[0], sample, vocabulary, "cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "a plan for each shape is what it measures"
    shapes = presets.PRESETS[0].model
    own = len(vocabulary.tgt) * shapes.d_model
    assert tried.num_parameters > own + 8 * shapes.d_model * shapes.d_model
    assert tried.tokens_per_s > 0
    lengths = [len(ids) + 1 for ids in vocabulary.tgt.encode([p.tgt for p in seen.sample])]
    assert sample.tgt_tokens_per_pair == pytest.approx(sum(lengths) / 400)


def test_sizes_are_tried_until_one_is_too_large_for_the_budget_or_the_corpus(wanted, monkeypatch):
    tried = []

    def measure(size, sample, vocabulary, device):
        tried.append(size.name)
        return presets.MeasuredPreset(size, 10 ** (6 + len(tried)), 10_000 / len(tried))

    monkeypatch.setattr(benchmark, "measure", measure)
    for num_train, budget_s, names in (
        (10_000, 1e9, ["tiny"]),
        (500_000, 1e9, ["tiny", "small", "medium"]),
        (10**7, 1e6, ["tiny", "small", "medium"]),
        (10**7, 1, ["tiny"]),
    ):
        tried.clear()
        own, told = replace(wanted, budget_s=budget_s), []
        list(write_config._measure_presets(own, num_train, None, None, told.append))
        assert tried == names
        assert told == [f"trying {name}" for name in names]


def test_what_is_measured_and_chosen_is_said(wanted, short_trials):
    said = Said()
    report = write_config.init(wanted, said, lambda _: None)
    assert said.lines[0] == "corpus    400 pairs, of 6.4 source and 6.4 target words"
    assert said.lines[1].startswith("pieces    ")
    assert said.lines[2].startswith("tried     tiny")
    assert report[0] == "wrote     en-de.valid.en and en-de.valid.de: 20 pairs, held out"
    assert report[-2:] == [
        "next      mtrain check en-de.yaml",
        "          mtrain train en-de.yaml",
    ]
    assert all(len(line) <= 80 for line in [*said.lines, *report])
    assert "warning" not in str(report)


def test_the_commands_that_are_shown_last_can_be_pasted_into_a_shell(wanted):
    report = write_config.init(
        replace(wanted, config_path=Path("my own.yaml")), Said(), lambda _: None
    )
    commands = [shlex.split(line.removeprefix("next")) for line in report[-2:]]
    assert commands == [["mtrain", verb, "my own.yaml"] for verb in ("check", "train")]


def test_too_little_time_is_warned_of(wanted):
    report = write_config.init(replace(wanted, budget_s=0.01), Said(), lambda _: None)
    assert "warning   that is little time for this corpus: take a longer --budget" in report


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (90, "1.5 minutes"),
        (45, "45 seconds"),
        (1, "1 second"),
        (60, "1 minute"),
        (36_000, "10 hours"),
        (6_000_000, "1,666.7 hours"),
    ],
)
def test_the_time_is_said_in_words(wanted, seconds, said):
    report = write_config.init(replace(wanted, budget_s=float(seconds)), Said(), lambda _: None)
    assert any(f" in {said}, " in line for line in report)


def test_every_line_of_the_config_fits_and_every_choice_is_explained(wanted):
    write_config.init(wanted, Said(), lambda _: None)
    lines = read(wanted.config_path)
    assert all(len(line) <= 100 for line in lines)
    assert sum("#" in line for line in lines) > 10


def test_what_is_done_is_told_while_it_is_done(wanted):
    told = []
    write_config.init(wanted, Said(), lambda _: told.append("reading"), told.append)
    assert list(dict.fromkeys(told))[-3:] == ["learning pieces", "trying tiny", "writing"]


def test_only_a_size_that_the_budget_can_teach_is_called_the_largest_that_it_can(wanted):
    write_config.init(replace(wanted, budget_s=1e8), Said(), lambda _: None)
    text = wanted.config_path.read_text("utf-8")
    assert "The largest that sees\n# 5 tokens a weight in the time" in text
    brief = replace(wanted, budget_s=0.01, config_path=Path("brief.yaml"))
    write_config.init(brief, Said(), lambda _: None)
    text = brief.config_path.read_text("utf-8")
    assert "The smallest, though it does not see\n# 5 tokens a weight in the time" in text
    assert "largest" not in text


def test_a_training_of_few_updates_logs_some_of_them(wanted):
    write_config.init(replace(wanted, budget_s=0.01), Said(), lambda _: None)
    assert config_file.load(wanted.config_path).training.log_every == 1


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_measured(wanted):
    Path("file").write_text("x")
    said, own = Said(), replace(wanted, config_path=Path("file/en-de.yaml"))
    with pytest.raises(WriteError, match=r"^file/en-de\.yaml: cannot be written: "):
        write_config.init(own, said, lambda _: pytest.fail("reads the corpus"))
    assert said.lines == []


@pytest.mark.parametrize("name", ["en-de.yaml", "en-de.valid.en", "en-de.test.de"])
def test_no_file_is_written_over(wanted, name):
    Path(name).write_text("mine\n")
    with pytest.raises(ConfigError, match=f"^{name}: is there already; take another --output"):
        write_config.init(wanted, Said(), lambda _: None)
    assert Path(name).read_text() == "mine\n"
    assert [path.name for path in Path().glob("en-de*")] == [name]


def test_a_run_folder_that_is_taken_is_an_error_before_anything_is_done(wanted):
    folder = Path(wanted.run_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("mine\n")
    said = Said()
    with pytest.raises(ConfigError, match=r"^runs/en-de: holds a run already; take another --run"):
        write_config.init(wanted, said, lambda _: None)
    assert said.lines == []
    assert not list(Path().glob("en-de*"))


def test_a_corpus_with_too_few_pairs_to_hold_some_out_is_an_error(wanted):
    for name in ("a.en", "a.de"):
        write(Path(name), read(name)[:150])
    with pytest.raises(
        DataError, match=r"a\.en must have at least 200 pairs .* but has 150 instead"
    ):
        write_config.init(wanted, Said(), lambda _: None)
    assert not list(Path().glob("en-de*"))


def test_a_corpus_of_few_words_gets_the_vocabulary_that_it_can_fill(wanted):
    seen = split.read_overview(wanted.train.corpus(), 1, lambda _: None)
    assert len(write_config._train_tokenizer(seen.sample, 10**6).tgt) < presets.vocabulary_size(
        10**6
    )


def test_a_vocabulary_that_only_the_held_out_pairs_fill_is_not_chosen(wanted):
    rng, lines = random.Random(5), sentences(400)
    for row in range(12):  # words that stand once, some of them in what is held out
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=9))
        lines[row * 400 // 12] += f" {word}"
    write(Path("a.en"), lines)
    write(Path("a.de"), [line.upper() for line in lines])
    write_config.init(wanted, Said(), lambda _: None)
    config = config_file.load(wanted.config_path)
    assert config.tokenizer.vocab_size == presets.vocabulary_size(360) // 2
    prepare(config, RunDir(Path(config.run_dir)), Said())


def test_a_corpus_of_one_pair_gets_a_config_that_trains_on_it(wanted):
    write(Path("a.en"), ["a b"])
    write(Path("a.de"), ["A B"])
    own = Files(Path("a.en"), Path("a.de"))
    said = Said()
    write_config.init(replace(wanted, valid=own, test=own), said, lambda _: None)
    assert said.lines[0].startswith("corpus    1 pair, of ")
    text = wanted.config_path.read_text()
    assert ", 1 pair, by" in text and " as 1 pair can teach" in text
    config = config_file.load(wanted.config_path, ["data.clean=[]"])
    assert config.tokenizer.vocab_size < write_config._MIN_VOCABULARY
    prepare(config, RunDir(Path(config.run_dir)), Said())


def test_a_corpus_of_many_characters_gets_the_vocabulary_that_has_room_for_them(wanted):
    for name in ("a.en", "a.de"):
        first = ord("\u4e00") if name == "a.en" else ord("\uac00")
        write(Path(name), ["".join(map(chr, range(n, n + 9))) for n in range(first, first + 900)])
    seen = split.read_overview(wanted.train.corpus(), 1, lambda _: None)
    vocabulary = write_config._train_tokenizer(seen.sample, 900).tgt
    assert len(vocabulary) > presets.vocabulary_size(900)
    assert not {piece for ids in vocabulary.encode(read("a.de")) for piece in ids} & {
        *vocabulary.byte_pieces
    }


@pytest.mark.parametrize("code", ["", "a/b", "..", "a b", "-x", "a.b", "a\n"])
@pytest.mark.parametrize("side", ["src", "tgt"])
def test_a_language_that_is_no_code_is_an_error_before_anything_is_done(wanted, side, code):
    said, before = Said(), sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as error:
        write_config.init(replace(wanted, **{f"{side}_lang": code}), said, lambda _: None)
    assert str(error.value) == (
        f"`--{side}-lang` must be a code such as en or pt-BR, but is {code!r} instead."
    )
    assert said.lines == []
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("key", ["train", "valid", "run_dir", "config_path"])
def test_a_path_that_no_config_can_name_is_an_error_before_anything_is_done(wanted, key):
    name = "a\udcff"
    own = {"run_dir": name, "config_path": Path(name)}.get(key, Files(Path("a.en"), Path(name)))
    with pytest.raises(ConfigError) as error:
        write_config.init(replace(wanted, **{key: own}), Said(), lambda _: None)
    assert str(error.value) == "'a\\udcff': must be UTF-8, as a config is, but is not."


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400)]
)
def test_a_budget_is_read(text, seconds):
    assert write_config.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "0m", "30min", "1m1h", "-5m", "9" * 30 + "h"])
def test_a_budget_that_is_no_time_is_an_error(text):
    with pytest.raises(ConfigError, match="`--budget` must be a time such as 30m or 1h30m"):
        write_config.parse_budget(text)


def test_odd_names_of_files_and_languages_are_written_so_that_they_are_read_back(wanted):
    src, tgt = Path("odd: name, [1].en"), Path("# no.de")
    src.write_text(Path("a.en").read_text())
    tgt.write_text(Path("a.de").read_text())
    odd = replace(wanted, train=Files(src, tgt), src_lang="no", run_dir="runs/null")
    write_config.init(odd, Said(), lambda _: None)
    config = config_file.load(wanted.config_path)
    assert (config.data.src_lang, config.run_dir) == ("no", "runs/null")
    assert config.data.train == odd.train.corpus()


def test_the_verb_writes_what_it_says_and_its_messages_go_where_they_belong(
    wanted, short_trials, monkeypatch, capfdbinary
):
    from mtrain.cli.main import main

    arguments = ["--src", "a.en", "--tgt", "a.de", "--src-lang", "en", "--tgt-lang", "xx"]
    arguments += ["--budget", "5m", "--device", "cpu", "-o", "mine.yaml", "--run", "there"]
    monkeypatch.setattr("sys.argv", ["mtrain", "init", *arguments])
    with pytest.raises(SystemExit) as outcome:
        main()
    assert outcome.value.code == 0
    captured = capfdbinary.readouterr()
    assert captured.out.decode().splitlines()[0].startswith("wrote     mine.valid.en and ")
    assert b"corpus    400 pairs" in captured.err
    config = config_file.load(Path("mine.yaml"))
    assert (config.run_dir, config.training.max_minutes) == ("there", 5)
