import json
import math
import os
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from tasks import Said, write

import mtrain
from mtrain.audit.audit import audit
from mtrain.audit.rules import Severity
from mtrain.autoconfig import benchmark, presets, split, write_config
from mtrain.config import config_file
from mtrain.config.corpora import FilesCorpus, TsvCorpus
from mtrain.config.sections import DecodingConfig
from mtrain.corpus.dropped import read_counts
from mtrain.data.loader import TrainingData
from mtrain.data.prepare import prepare, read_test, read_valid
from mtrain.errors import ConfigError, DataError, RunError, WriteError
from mtrain.io import atomic
from mtrain.model.transformer import num_parameters
from mtrain.run.load_model import build_model
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.tokenizer import sentencepiece

WORDS = [f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu") for b in ("ha", "je", "ki", "lo", "mu")]


def sentences(count, seed=1):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) for _ in range(count)]


measure, seconds_per_sentence = benchmark.measure, benchmark.seconds_per_sentence
startup_s = benchmark.startup_s


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    """Replace training trials by fixed speeds; only the parameters of each model are counted."""

    def counted(preset, batch_tokens, sample, device, consistency=None):
        num_weights = num_parameters(build_model(preset.model, sample.tokenizer))
        speed = 8000.0 if consistency else 20_000.0
        of_a_batch = batch_tokens, num_weights, speed, float(batch_tokens)
        return presets.MeasuredPreset(preset, *of_a_batch, 1.0, consistency)

    monkeypatch.setattr(benchmark, "measure", counted)
    monkeypatch.setattr(benchmark, "seconds_per_sentence", lambda *arguments: 0.001)
    monkeypatch.setattr(benchmark, "load_average", lambda: 0.0)
    monkeypatch.setattr(benchmark, "startup_s", lambda: 0.0)


@pytest.fixture
def short_trials(monkeypatch, no_trials):
    """Run real trials of two updates each."""
    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "_WINDOW_S", 0.0)
    monkeypatch.setattr(benchmark, "_WARMUP_BATCHES", 1)
    monkeypatch.setattr(benchmark, "_MIN_WINDOWS", 1)


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = sentences(400)
    write(Path("a.en"), lines)
    write(Path("a.de"), [line.upper() for line in lines])
    return Path("a.en"), Path("a.de")


def parse(languages=("en", "de"), overrides=(), output=None, run=None, **files):
    files = {"train": ("a.en", "a.de")} | files
    paths = {key: (Path(src), Path(tgt)) for key, (src, tgt) in files.items()}
    output = output and Path(output)
    return write_config.parse_request(languages, paths, overrides, "10m", "cpu", output, run)


def init(said=None, budget_s=600.0, **options):
    """Write a config; return the report."""
    request = replace(parse(**options), budget_s=budget_s)
    return write_config.init(request, said or Said(), lambda _: None).lines


def overview():
    return split.read_overview(FilesCorpus(src=["a.en"], tgt=["a.de"]), [], 1, lambda _: None)


def written(path="en-de.yaml", overrides=()):
    return config_file.load(Path(path), overrides)


def tokenized(config):
    run = RunDir(Path(config.run_dir))
    prepare(config, run, Said())
    return run


def read(path):
    return Path(path).read_text(encoding="utf-8").splitlines()


def test_the_written_config_excludes_the_held_out_pairs_from_training():
    init()
    run = tokenized(written())
    assert read_counts(run.data_dir) == {"held-out-pair": 40}
    held_out = [*read_valid(run).src, *read_test(run, "test").src]
    assert len({*held_out}) == len(held_out) == 40
    assert {*held_out} <= {*read("a.en")}


def test_each_held_out_set_has_20_pairs_of_the_corpus():
    init()
    pairs = {*zip(read("a.en"), read("a.de"), strict=True)}
    for name in ("valid", "test"):
        held_out = [*zip(read(f"en-de.{name}.en"), read(f"en-de.{name}.de"), strict=True)]
        assert len(held_out) == 20
        assert {*held_out} <= pairs


def test_given_valid_and_test_files_are_used_and_nothing_is_held_out():
    write(Path("v.en"), ["one two"])
    write(Path("v.de"), ["eins zwei"])
    report = init(valid=("v.en", "v.de"), test=("v.en", "v.de"))
    data = written().data
    assert data.valid == data.tests["test"] == FilesCorpus(src=["v.en"], tgt=["v.de"])
    assert data.clean == ["blank-side", "held-out-pair"]
    assert not any("held out" in line for line in report)
    assert not list(Path().glob("en-de.*.en"))


@pytest.mark.parametrize("other", ["en", "EN"])
def test_held_out_files_have_distinct_names_if_both_sides_have_the_same_language(other):
    report = init(languages=("en", other), output="en-de.yaml")
    assert report[0].startswith("wrote     en-de.valid.src.en and en-de.valid.tgt.")
    config = written()
    held_out = (config.data.valid, config.data.tests["test"])
    sides = [(read(own.src[0]), read(own.tgt[0])) for own in held_out]
    assert all([line.upper() for line in src] == tgt for src, tgt in sides)
    assert read_counts(tokenized(config).data_dir) == {"held-out-pair": 40}


def test_the_same_corpus_gives_the_same_held_out_pairs():
    init()
    first = read("en-de.test.en")
    for path in Path().glob("en-de.*"):
        path.unlink()
    init()
    assert read("en-de.test.en") == first


def test_a_corpus_of_repeated_sentences_is_split_and_its_remaining_pairs_are_counted():
    lines = sentences(400)
    lines = [line for n, line in enumerate(lines) for _ in range(1 if n < 15 else 2 + n % 4)]
    write(Path("a.en"), lines)
    write(Path("a.de"), [line.upper() for line in lines])
    said = Said()
    init(said)
    counts = read_counts(tokenized(written()).data_dir)
    num_dropped = counts["held-out-pair"]
    assert num_dropped > 40, "all copies are dropped"
    assert counts == {"held-out-pair": num_dropped}
    num_kept = len(lines) - num_dropped
    assert said.lines[1:3] == [
        f"training  {num_kept:,} pairs, 360 of them different",
        f"dropped   {num_dropped} held out",
    ]
    assert f"# en-de, {num_kept:,} pairs, by `mtrain init`." in read("en-de.yaml")


def test_the_dropout_depends_on_the_reads_of_each_different_pair():
    init(output="once.yaml")
    lines = [read(path) * 10 for path in ("a.en", "a.de")]
    for path, side in zip(("a.en", "a.de"), lines, strict=True):
        write(Path(path), side)
    init(output="copies.yaml", budget_s=60)
    assert written("copies.yaml").model.dropout == written("once.yaml").model.dropout == 0.3


def test_the_speeds_of_all_sizes_of_batches_stand_in_one_column():
    said = Said()
    init(said, budget_s=60)
    tried = [line for line in said.lines if line.startswith("tried")]
    sizes = [re.search(r"batches of ([\d,]+) ", line)[1] for line in tried]
    assert (sizes[0], len(sizes[-1])) == ("4,096", 3)
    assert len({line.rindex(" tokens/s") for line in tried}) == 1


def test_a_long_budget_adds_the_consistency_loss_and_plans_with_its_measured_speed(
    monkeypatch,
):
    plain, consistent = Said(), Said()
    init(plain, output="short.yaml", budget_s=300)
    init(consistent, output="long.yaml", budget_s=1200)
    short, long = written("short.yaml").training, written("long.yaml").training
    assert (short.batch_tokens, short.consistency) == (2048, None)
    assert (long.batch_tokens, long.consistency) == (4096, presets.CONSISTENCY)
    tried = [[line for line in said.lines if "tried" in line] for said in (plain, consistent)]
    assert [line.split()[-2] for line in tried[0]] == ["20,000"] * 2  # in smaller batches, too
    assert tried[1][1:] == [
        "tried     tiny       consistency loss  batches of 4,096    8,000 tokens/s"
    ]
    monkeypatch.setattr(presets, "_CONSISTENCY_READS", math.inf)
    init(output="plain.yaml", budget_s=1200)
    expected, slower = (
        int(re.search(r"about ([\d,]+) updates", "\n".join(read(name)))[1].replace(",", ""))
        for name in ("plain.yaml", "long.yaml")
    )
    assert slower == pytest.approx(expected * 8000 / 20_000, abs=1)


def test_pairs_that_share_one_sentence_with_a_held_out_pair_are_dropped_and_counted():
    lines, others = sentences(400), sentences(400, seed=2)
    write(Path("a.en"), [line for line in lines for _ in range(2)])
    write(Path("a.de"), [text for pair in zip(lines, others, strict=True) for text in pair])
    said = Said()
    init(said)
    counts = read_counts(tokenized(written()).data_dir)
    assert said.lines[2] == f"dropped   {sum(counts.values())} held out"
    assert said.lines[1].startswith(f"training  {800 - sum(counts.values())} pairs, ")


def test_pairs_of_the_given_sets_are_not_counted_as_training_pairs():
    for side in ("en", "de"):
        write(Path(f"v.{side}"), read(f"a.{side}")[:300])
    said = Said()
    init(said, valid=("v.en", "v.de"), test=("v.en", "v.de"))
    assert said.lines[1:3] == [
        "training  100 pairs, 100 of them different",
        "dropped   300 in the given sets",
    ]
    assert read_counts(tokenized(written()).data_dir) == {"held-out-pair": 300}


def test_given_sets_that_contain_the_whole_corpus_are_an_error():
    with pytest.raises(DataError) as error:
        init(valid=("a.en", "a.de"), test=("a.en", "a.de"))
    assert str(error.value) == (
        "the corpus must have pairs to train on, but all are blank or in the given sets."
    )
    assert not list(Path().glob("en-de*"))


def test_a_corpus_of_a_list_that_the_given_sets_contain_is_an_error():
    write(Path("v.en"), ["one two three"])
    write(Path("v.de"), ["eins zwei drei"])
    train = "data.train=[{src: [a.en], tgt: [a.de]}, {src: [v.en], tgt: [v.de]}]"
    request = write_config.parse_request(
        ("en", "de"), {"valid": (Path("v.en"), Path("v.de"))}, [train], "1m", "cpu", None, None
    )
    with pytest.raises(DataError) as error:
        write_config.init(request, Said(), lambda _: None)
    assert str(error.value) == (
        "`data.train[1]` must have pairs to train on, but all are blank, in the given sets or held "
        "out; leave it out."
    )
    assert not list(Path().glob("en-de*"))


def test_an_audit_of_the_written_config_reports_only_notes(tmp_path):
    init()
    config = written()
    (tmp_path / "lists").mkdir()
    report = audit(config, None, tmp_path / "lists", lambda _: None)
    assert "pair-in-train" in [finding.name for finding in report.findings]
    assert {finding.severity for finding in report.findings} == {Severity.NOTE}


def forms():
    """Write the corpus in other formats; return the text of `data.train` for each."""
    pairs = [*zip(read("a.en"), read("a.de"), strict=True)]
    write(Path("a.tsv"), ["\t".join(pair) for pair in pairs])
    rows = [{"text": dict(zip(("en", "de"), pair, strict=True))} for pair in pairs]
    write(Path("a.jsonl"), [json.dumps(row) for row in rows])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    Path("hub").mkdir()
    write(Path("hub/train.jsonl"), read("a.jsonl"))
    return {
        "tsv": "{tsv: [a.tsv]}",
        "jsonl": "{jsonl: [a.jsonl], src: text.en, tgt: text.de}",
        "parquet": "{parquet: [a.parquet], src: text.en, tgt: text.de}",
        "hub": "{hub: hub, split: train, src: text.en, tgt: text.de}",
        "mixture": "[{src: [a.en], tgt: [a.de], weight: 2}, {tsv: [a.tsv], weight: 1}]",
    }


@pytest.mark.parametrize("form", ["tsv", "jsonl", "parquet", "hub", "mixture"])
def test_init_reads_and_splits_every_corpus_format_and_writes_it_to_the_config(form):
    corpus = forms()[form]
    said = Said()
    request = write_config.parse_request(
        ("en", "de"), {}, [f"data.train={corpus}"], "10m", "cpu", None, None
    )
    write_config.init(request, said, lambda _: None)
    config, num_pairs = written(), 800 if form == "mixture" else 400
    assert config.data.train == request.data.train
    assert said.lines[0].startswith(f"corpus    {num_pairs} pairs")
    dropped = read_counts(tokenized(config).data_dir).get("held-out-pair")
    assert said.lines[2] == f"dropped   {dropped} held out"
    assert dropped == num_pairs // 10


def test_the_length_of_text_without_spaces_is_reported_in_letters():
    letters = {ord("a") + number: chr(0x4E00 + number) for number in range(26)} | {ord(" "): None}
    write(Path("a.zh"), [line.translate(letters) for line in read("a.en")])
    said = Said()
    init(said, languages=("zh", "de"), train=("a.zh", "a.de"))
    length = r"corpus    400 pairs, of \d+\.\d source"
    assert re.fullmatch(length + r" letters and \d\.\d target words", said.lines[0])
    sets = {"valid": ("a.en", "a.de"), "test": ("a.en", "a.de")}
    init(said := Said(), languages=("zh", "ja"), train=("a.zh", "a.zh"), **sets)
    assert re.fullmatch(length + r" and \d+\.\d target letters", said.lines[0])


def write_tables(*first_lines):
    """Write the corpus as one table for each first line; return the override that names them."""
    rows = ["\t".join(pair) for pair in zip(read("a.en"), read("a.de"), strict=True)]
    names = [f"{number}.tsv" for number in range(len(first_lines))]
    for number, first in enumerate(first_lines):
        part = rows[number :: len(first_lines)]
        write(Path(names[number]), part if first is None else [first, *part])
    return f"{{tsv: [{', '.join(names)}]}}"


def init_said(*overrides):
    said = Said()
    request = write_config.parse_request(
        ("en", "de"), {}, overrides, "10m", "cpu", Path("new.yaml"), None
    )
    write_config.init(request, said, lambda _: None)
    return said.lines


@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_header_of_a_table_is_detected_skipped_and_reported(is_mixture):
    table = write_tables("English\tGerman", "source\ttarget")
    train = f"[{table[:-1]}, weight: 1}}]" if is_mixture else table
    said = init_said(f"data.train={train}")
    assert said[:2] == [
        "header    0.tsv: English TAB German: left out by `header: true`",
        "header    1.tsv: source TAB target: left out by `header: true`",
    ]
    assert said[2].startswith("corpus    400 pairs")
    train = written("new.yaml").data.train
    assert (train[0] if is_mixture else train).header is True
    assert "English" not in read("new.valid.en") + read("new.test.en")


def test_the_header_of_a_given_set_is_detected_and_recorded_in_the_config():
    write(Path("v.tsv"), ["en\tde", "ba ce\tBA CE"])
    init(overrides=["data.valid={tsv: [v.tsv]}"])
    assert written().data.valid == TsvCorpus(tsv=["v.tsv"], header=True)


def test_a_header_that_not_every_table_has_is_kept_as_a_pair_and_reported():
    said = init_said(f"data.train={write_tables('en	de', None)}")
    assert (
        said[0] == "header    0.tsv: en TAB de: a pair, as other files of the corpus have no header"
    )
    assert said[1].startswith("corpus    401 pairs")
    assert written("new.yaml").data.train.header is None


def test_an_explicit_header_setting_is_not_overridden():
    table = write_tables("en\tde")
    said = init_said(f"data.train={table[:-1]}, header: false}}")
    assert said[0].startswith("corpus    401 pairs")
    assert written("new.yaml").data.train.header is False


def test_a_pipe_is_refused_as_a_table_and_not_opened():
    os.mkfifo("pipe")
    with pytest.raises(DataError, match=r"^pipe: must be a regular file"):
        init_said("data.train={tsv: [pipe]}")


def test_valid_and_test_sets_can_be_given_as_tsv_by_overrides():
    forms()
    write(Path("b.en"), lines := sentences(100, seed=3))
    write(Path("b.de"), lines)
    sets = ["data.valid={tsv: [a.tsv]}", "data.tests={a: {tsv: [a.tsv]}, b: {tsv: [a.tsv]}}"]
    init(overrides=sets, train=("b.en", "b.de"))
    data = written().data
    assert data.valid == data.tests["a"] == data.tests["b"] == TsvCorpus(tsv=["a.tsv"])
    assert data.clean == ["blank-side", "held-out-pair"]


def test_a_drawn_validation_set_shares_no_source_with_a_given_test_set():
    for side in ("en", "de"):
        write(Path(f"t.{side}"), read(f"a.{side}")[:100])
    init(test=("t.en", "t.de"))
    assert written().data.tests == {"test": FilesCorpus(src=["t.en"], tgt=["t.de"])}
    assert not {*read("en-de.valid.en")} & {*read("t.en")}
    assert read_counts(tokenized(written()).data_dir) == {"held-out-pair": 115}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.d_model=64",
            "`--set` must name data.train, data.valid or data.tests, but is 'model.d_model=64' "
            "instead; other keys can be changed in the config that is written.",
        ),
        (
            "data.trainer={tsv: [a.tsv]}",
            "`--set` must name data.train, data.valid or data.tests, but is 'data.trainer=",
        ),
        ("data.valid={tsv: a.tsv}", "--set: `data.valid.tsv` must be a list, but is 'a.tsv' "),
        ("data.valid={jsonl: [a]}", "--set: `data.valid.src` must be given, but is missing."),
    ],
)
def test_an_override_that_is_not_a_valid_corpus_is_an_error(override, message):
    with pytest.raises(ConfigError) as error:
        parse(overrides=[override])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("option", "override", "files"),
    [
        ("--src", "data.train={tsv: [a.tsv]}", {}),
        ("--src", "data.train.src=[o.en]", {}),
        ("--valid", "data.valid={tsv: [a.tsv]}", {"valid": ("a.en", "a.de")}),
        ("--valid", "data.valid.src=[o.en]", {"valid": ("a.en", "a.de")}),
        ("--test", "data.tests={a: {tsv: [a.tsv]}}", {"test": ("a.en", "a.de")}),
        ("--test", "data.tests.test={src: [o.en], tgt: [o.de]}", {"test": ("a.en", "a.de")}),
        ("--test", "data.tests.test.tsv=[a.tsv]", {"test": ("a.en", "a.de")}),
    ],
)
def test_a_corpus_named_by_an_option_and_an_override_is_an_error(option, override, files):
    with pytest.raises(ConfigError) as error:
        parse(overrides=[override], **files)
    key = override.partition("=")[0]
    assert str(error.value) == f"`{option}` has no effect with `--set {key}=...`; leave it out."


def test_set_may_name_a_held_out_set_key_by_key_and_needs_all_its_keys():
    request = parse(overrides=["data.valid.tsv=[v.tsv]", "data.tests.test.tsv=[t.tsv]"])
    assert request.data.valid == TsvCorpus(tsv=["v.tsv"])
    assert request.data.tests == {"test": TsvCorpus(tsv=["t.tsv"])}
    assert request.held_out == {}
    with pytest.raises(ConfigError) as error:
        parse(overrides=["data.valid.src=[v.en]"])
    assert str(error.value) == "--set: `data.valid.tgt` must be given, but is missing."


def test_another_test_set_stands_beside_the_one_that_is_given_or_held_out():
    other = "data.tests.a={tsv: [a.tsv]}"
    request = parse(overrides=[other])
    assert (list(request.held_out), list(request.data.tests)) == (["valid", "test"], ["test", "a"])
    request = parse(overrides=[other], test=("a.en", "a.de"))
    assert (list(request.held_out), list(request.data.tests)) == (["valid"], ["test", "a"])


def test_set_may_give_a_corpus_key_by_key():
    overrides = ["data.train.tsv=[a.tsv]", "data.train.header=true"]
    request = write_config.parse_request(("en", "de"), {}, overrides, "10m", "cpu", None, None)
    whole = write_config.parse_request(
        ("en", "de"), {}, ["data.train={tsv: [a.tsv], header: true}"], "10m", "cpu", None, None
    )
    assert request.data == whole.data


def test_init_without_a_corpus_is_an_error():
    with pytest.raises(ConfigError) as error:
        write_config.parse_request(("en", "de"), {}, [], "10m", "cpu", None, None)
    assert str(error.value) == (
        "`--src` and `--tgt` must name the corpus, or `--set data.train=...`, but neither does."
    )


@pytest.mark.parametrize(("load", "spread", "is_said"), [(0.4, 1.4, 0), (0.6, 1.0, 1), (0, 1.6, 1)])
def test_a_busy_machine_gives_a_warning_and_an_idle_one_does_not(
    monkeypatch, load, spread, is_said
):
    counted = benchmark.measure
    monkeypatch.setattr(benchmark, "load_average", lambda: load)
    monkeypatch.setattr(
        benchmark, "measure", lambda *arguments: counted(*arguments)._replace(spread=spread)
    )
    said = Said()
    init(said)
    warnings = [line for line in said.lines if line.startswith("warning")]
    assert len(warnings) == is_said
    assert all(f"speeds varied {spread}-fold, load {load:.1f} a pro" in line for line in warnings)


def test_time_for_tokenizing_and_evaluation_is_reported_and_subtracted_from_the_budget(monkeypatch):
    monkeypatch.setattr(benchmark, "seconds_per_sentence", lambda *arguments: 0.5)
    monkeypatch.setattr(benchmark, "startup_s", lambda: 3.0)
    monkeypatch.setattr(write_config, "time", Clock([0]))  # times tokenizing
    report = init()
    assert report[4] == "          tokenizing, the last validations and the test sets: 36 seconds"
    assert written().training.max_minutes == (600 - 36) / 60
    monkeypatch.setattr(write_config, "time", Clock([0]))
    report = init(budget_s=40, output="short.yaml", run="short")
    assert "warning   training and the rest take longer than the budget" in report
    assert written("short.yaml").training.max_minutes == 0.33
    for side in ("en", "de"):
        write(Path(f"v.{side}"), read(f"a.{side}")[:20])
    monkeypatch.setattr(write_config, "time", Clock([0]))
    pair = ("v.en", "v.de")
    report = init(budget_s=40, output="given.yaml", run="given", valid=pair, test=pair)
    assert sum("longer than the budget: take smaller sets" in line for line in report) == 1
    assert max(map(len, report)) <= 80


def test_the_start_of_a_process_is_timed(monkeypatch):
    started = []
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *args, **options: started.append(args))
    monkeypatch.setattr(benchmark, "time", Clock([6]))
    benchmark.time.monotonic()
    assert startup_s() == 3
    assert len(started) == 1


def test_translation_time_is_measured_with_greedy_and_beam_search(short_trials):
    pairs = [*overview().sample.values()]
    sample = benchmark.encode(pairs, write_config._train_tokenizer(pairs, 400))
    lines = [src for src, _ in pairs]
    for beam in (1, 5):
        decoding = DecodingConfig(beam=beam)
        assert seconds_per_sentence(presets.PRESETS[0], sample, lines, decoding, "cpu") > 0


def test_a_trial_trains_a_model_of_the_presets_size_and_measures_its_speed(
    short_trials, monkeypatch
):
    monkeypatch.setattr(device, "is_own_process", lambda: True)
    pairs = [*overview().sample.values()]
    vocabulary = write_config._train_tokenizer(pairs, 400)
    sample = benchmark.encode(pairs, vocabulary)
    torch.backends.cuda.enable_cudnn_sdp(True)
    tried = benchmark.measure(presets.PRESETS[0], 512, sample, "cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "a plan for each shape is what it measures"
    shapes = presets.PRESETS[0].model
    own = len(vocabulary.tgt) * shapes.d_model
    assert tried.num_parameters > own + 8 * shapes.d_model * shapes.d_model
    assert tried.tokens_per_s > 0
    assert tried.spread == 1
    lengths = [len(ids) + 1 for ids in vocabulary.tgt.encode([tgt for _, tgt in pairs])]
    assert sample.tgt_tokens_per_pair == pytest.approx(sum(lengths) / 400)


def test_the_expected_updates_of_an_epoch_are_those_of_the_training(short_trials):
    write(Path("a.en"), [" ".join([line] * 4) for line in read("a.en")])  # longer than the targets
    report = init()
    updates, epochs = re.search(r"about ([\d,]+) updates, ([\d,.]+) epochs", report[3]).groups()
    config = written()
    run = tokenized(config)
    data = TrainingData(run.data_dir, sentencepiece.load(run.tokenizer_dir), seed=1)
    per_epoch = float(updates.replace(",", "")) / float(epochs.replace(",", ""))
    num_batches = data.plan(config.training.batch_tokens).num_batches
    assert per_epoch == pytest.approx(num_batches, rel=0.1)


class Clock:
    """A fake clock: each measured window takes the next of the given durations."""

    def __init__(self, durations):
        self.steps = iter([step for seconds in durations for step in (0, seconds / 2, seconds / 2)])
        self.now = 0.0

    def monotonic(self):
        self.now += next(self.steps)
        return self.now


@pytest.mark.parametrize(
    ("durations", "median", "spread"),
    [
        ([4, 5, 4, 4, 5], 4, 1.25),
        ([4, 8, 2, *[8] * 9, *[2] * 3], 8, 4),
        ([4, 4, 4, 4, 40, *[4] * 10], 4, 10),
    ],
)
def test_the_speed_is_the_median_of_windows_and_variation_adds_windows(
    short_trials, monkeypatch, durations, median, spread
):
    pairs = [*overview().sample.values()]
    sample = benchmark.encode(pairs, write_config._train_tokenizer(pairs, 400))
    monkeypatch.setattr(benchmark, "_MIN_WINDOWS", 5)
    monkeypatch.setattr(benchmark, "time", clock := Clock(durations))
    preset = replace(presets.PRESETS[0], model=presets._model(16, 1, 16, 1))
    tried = benchmark.measure(preset, 100_000, sample, "cpu")
    num_tokens = round(400 * sample.tgt_tokens_per_pair)
    assert tried.tokens_per_s == pytest.approx(num_tokens / median)
    assert tried.spread == spread
    assert next(clock.steps, None) is None, "no more and no fewer windows"


def test_presets_are_tried_until_one_is_too_large_for_the_budget_or_the_corpus(monkeypatch):
    tried = []

    def measure(preset, batch_tokens, sample, device, consistency):
        tried.append((preset.name, batch_tokens))
        num_tried, speed = len(tried), 10_000 / len(tried)
        return presets.MeasuredPreset(preset, batch_tokens, 10 ** (6 + num_tried), speed, 1.0, 1.0)

    monkeypatch.setattr(benchmark, "measure", measure)
    for num_pairs, budget_s, names, chosen in (
        (10_000, 1e9, ["tiny"], "tiny"),
        (500_000, 1e9, ["tiny", "small", "medium"], "medium"),
        (10**7, 1e6, ["tiny", "small", "medium"], "small"),
    ):
        tried.clear()
        own, told = replace(parse(), budget_s=budget_s), []
        found = write_config._measure(own, num_pairs, None, Said(), told.append)
        assert (found.preset.name, found.batch_tokens) == (chosen, 4096)
        assert tried == [(name, 4096) for name in names]
        assert told == [f"trying {name}" for name in names]


def test_a_short_budget_repeats_the_trial_with_smaller_batches(monkeypatch):
    tried = []

    def measure(preset, batch_tokens, sample, device, consistency):
        tried.append((preset.name, batch_tokens))
        return presets.MeasuredPreset(preset, batch_tokens, 10**6, 2 * batch_tokens, 1.0, 1.0)

    monkeypatch.setattr(benchmark, "measure", measure)
    said, own = Said(), replace(parse(), budget_s=300.0)
    found = write_config._measure(own, 10**7, None, said, lambda _: None)
    assert tried == [("tiny", 4096), ("tiny", 1024)]
    assert (found.batch_tokens, found.tokens_per_s) == (1024, 2048)
    assert len(said.lines) == 2


def test_init_prints_its_measurements_and_the_next_commands_within_80_columns(short_trials):
    said = Said()
    report = init(said)
    assert said.lines[:3] == [
        "corpus    400 pairs, of 6.4 source and 6.4 target words",
        "training  360 pairs, 360 of them different",
        "dropped   40 held out",
    ]
    assert said.lines[3].startswith("subwords  ")
    assert said.lines[4].startswith("tried     tiny")
    assert report[0] == "wrote     en-de.valid.en and en-de.valid.de: 20 pairs, held out"
    within = init(output="in/en-de.yaml", run="other")
    assert within[0] == "wrote     in/en-de.valid.en and in/en-de.valid.de: 20 pairs, held out"
    assert report[-2:] == [
        "next      mtrain check en-de.yaml",
        "          mtrain train en-de.yaml",
    ]
    assert all(len(line) <= 80 for line in [*said.lines, *report])
    assert "warning" not in str(report)


def test_few_pairs_give_a_hint_at_augment(monkeypatch):
    hint = "hint      with few pairs, text in one language helps: mtrain augment --help"
    assert hint in init()
    monkeypatch.setattr(write_config, "_FEW_PAIRS", 360)  # without the 40 that are held out
    assert hint in init(output="again.yaml", run="again")
    monkeypatch.setattr(write_config, "_FEW_PAIRS", 359)
    assert hint not in init(output="more.yaml", run="more")


def test_the_next_commands_are_quoted_for_the_shell():
    report = init(output="my own.yaml")
    commands = [shlex.split(line.removeprefix("next")) for line in report[-2:]]
    assert commands == [["mtrain", verb, "my own.yaml"] for verb in ("check", "train")]


def test_a_budget_too_short_for_the_corpus_gives_a_warning():
    report = init(budget_s=0.01)
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
def test_a_duration_is_formatted_in_words(seconds, said):
    assert write_config._format_time(seconds) == said


def test_the_written_config_has_lines_of_at_most_100_characters_and_over_10_comments():
    init()
    lines = read(Path("en-de.yaml"))
    assert all(len(line) <= 100 for line in lines)
    assert sum("#" in line for line in lines) > 10


def test_a_schema_of_the_user_beside_the_config_is_kept_and_not_named():
    Path("config.schema.json").write_text('{"title": "Mine"}')
    init()
    assert Path("config.schema.json").read_text() == '{"title": "Mine"}'
    assert read("en-de.yaml")[0] == "# en-de, 360 pairs, by `mtrain init`."


def test_progress_reports_the_stages_of_init_in_order():
    told = []
    write_config.init(parse(), Said(), lambda _: told.append("reading"), told.append)
    stages = ["reading", "learning subwords", "trying tiny", "translating"]
    stages += ["trying a consistency loss", "writing"]
    assert list(dict.fromkeys(told)) == stages


def test_the_config_calls_the_preset_the_largest_only_if_the_budget_suffices_for_it():
    init(budget_s=1e8)
    text = Path("en-de.yaml").read_text("utf-8")
    assert "The largest that sees\n# 5 tokens a weight in the time" in text
    init(budget_s=0.01, output="brief.yaml")
    text = Path("brief.yaml").read_text("utf-8")
    assert "The smallest, though it does not see\n# 5 tokens a weight in the time" in text
    assert "largest" not in text


def test_a_training_of_few_updates_logs_every_update():
    init(budget_s=0.01)
    assert written().training.log_every == 1


def test_an_output_path_that_cannot_be_written_is_an_error_before_anything_is_measured():
    Path("file").write_text("x")
    with pytest.raises(WriteError, match=r"^file/en-de\.yaml: cannot be written: "):
        parse(output="file/en-de.yaml")


def test_held_out_files_are_left_out_if_the_config_cannot_be_written():
    Path("config.schema.json").mkdir()
    with pytest.raises(WriteError, match=r"^config\.schema\.json: cannot be written: "):
        init()
    assert {path.name for path in Path().iterdir()} == {"a.en", "a.de", "config.schema.json"}


@pytest.mark.parametrize("number", [1, 3, 5])
def test_config_and_held_out_files_are_written_all_or_none(number, monkeypatch):
    written = []

    def write_fully(path, lines):
        written.append(path)
        if len(written) == number:
            raise WriteError(f"{path}: cannot be written: the disk is full.")
        atomic.write_lines(path, lines)

    monkeypatch.setattr(write_config, "write_lines", write_fully)
    with pytest.raises(WriteError, match="the disk is full"):
        init()
    assert {path.name for path in Path().iterdir()} == {"a.en", "a.de", "config.schema.json"}


@pytest.mark.parametrize("name", [".", "/", "configs"])
def test_a_folder_is_refused_as_the_output(name):
    Path("configs").mkdir()
    with pytest.raises(ConfigError) as error:
        parse(output=name)
    assert str(error.value) == f"`--output` must be a file, but is the folder {name} instead."


def test_a_file_is_refused_as_the_run_folder():
    Path("run").write_text("mine\n")
    with pytest.raises(RunError, match=r"^run: must be a run folder, but is a file instead"):
        parse(run="run")


@pytest.mark.parametrize("pair", ["valid.en", "de", Path("v"), ("valid.en",), ("a", "b", "c")])
def test_a_validation_set_that_is_not_two_files_is_refused_from_python(pair):
    with pytest.raises(ConfigError) as error:
        mtrain.init("en", "de", src="a.en", tgt="a.de", valid=pair)
    assert str(error.value) == f"`valid` must be two files, but is {pair!r} instead."


@pytest.mark.parametrize("name", ["en-de.yaml", "en-de.valid.en", "en-de.test.de"])
def test_an_existing_file_is_not_overwritten(name):
    Path(name).write_text("mine\n")
    with pytest.raises(ConfigError, match=f"^{name}: already exists; choose another with -o"):
        parse()
    assert Path(name).read_text() == "mine\n"
    assert [path.name for path in Path().glob("en-de*")] == [name]


def test_an_unknown_device_is_an_error_before_a_corpus_is_read(monkeypatch):
    monkeypatch.setattr(split, "read_overview", None)
    with pytest.raises(ConfigError, match=r"^`device` must be auto, cpu, .* is 'tpu' instead\.$"):
        write_config.init(replace(parse(), device="tpu"), Said(), lambda _: None)


def test_an_existing_run_folder_is_an_error_before_anything_is_written():
    folder = Path("runs/en-de")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"^runs/en-de: already holds a run; choose another with"):
        parse()
    assert not list(Path().glob("en-de*"))


def test_a_corpus_with_too_few_pairs_to_hold_some_out_is_an_error():
    for name in ("a.en", "a.de"):
        write(Path(name), read(name)[:35])
    with pytest.raises(DataError, match="must have 20 pairs that can be held out, but has 17"):
        init()
    assert not list(Path().glob("en-de*"))


def test_a_corpus_of_few_words_gets_a_vocabulary_below_the_usual_size():
    tokenizer = write_config._train_tokenizer([*overview().sample.values()], 10**6)
    assert len(tokenizer.tgt) < presets.vocabulary_size(10**6)


def test_the_vocabulary_size_can_be_trained_without_the_held_out_pairs():
    rng, lines = random.Random(5), sentences(400)
    for row in range(12):  # words that occur once, some of them in held-out pairs
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=9))
        lines[row * 400 // 12] += f" {word}"
    write(Path("a.en"), lines)
    write(Path("a.de"), [line.upper() for line in lines])
    init()
    config = written()
    assert config.tokenizer.vocab_size == presets.vocabulary_size(360) // 4
    tokenized(config)


def test_synthetic_pairs_are_not_held_out_and_do_not_enlarge_the_vocabulary():
    rng, folder = random.Random(5), Path("synthetic")
    folder.mkdir()
    words = ["".join(rng.choices("αβγδεζηθικλμνξοπρστυφχψω", k=9)) for _ in range(2000)]
    lines = [" ".join(words[row : row + 4]) for row in range(0, 2000, 4)]
    rows = [{"src": line, "tgt": line.upper()} for line in lines]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {"settings": {}, "num_pairs": len(rows), "shards": {"a.jsonl": None}}
    (folder / "record.json").write_text(json.dumps(record))
    corpora = "[{src: [a.en], tgt: [a.de]}, {synthetic: synthetic}]"
    assert init_said(f"data.train={corpora}")[0].startswith("corpus    900 pairs")
    assert {*read("new.valid.en"), *read("new.test.en")} < {*read("a.en")}
    tokenized(written("new.yaml"))


def test_a_corpus_in_both_directions_needs_given_sets_whose_pairs_are_found_in_both():
    corpora = "data.train=[{src: [a.en], tgt: [a.de]}, {src: [a.de], tgt: [a.en], until: 0.5}]"
    for side in ("en", "de"):
        write(Path(f"v.{side}"), read(f"a.{side}")[:30])
    sets = [f"data.{key}={{src: [v.en], tgt: [v.de]}}" for key in ("valid", "tests.test")]
    with pytest.raises(ConfigError) as error:
        init_said(corpora, sets[0])
    assert str(error.value) == (
        "`data.train` must have each corpus in one direction to hold out pairs, but has one in "
        "both; give --valid and --test, or add the other direction to the config that is written."
    )
    assert init_said(corpora, *sets)[2] == "dropped   60 in the given sets"


def test_a_corpus_of_one_pair_gets_a_config_that_can_be_tokenized():
    write(Path("a.en"), ["a b"])
    write(Path("a.de"), ["A B"])
    write(Path("v.en"), ["one two"])
    write(Path("v.de"), ["eins zwei"])
    said = Said()
    init(said, valid=("v.en", "v.de"), test=("v.en", "v.de"))
    assert said.lines[0].startswith("corpus    1 pair, of ")
    text = Path("en-de.yaml").read_text()
    assert ", 1 pair, by" in text and " as 1 pair can teach" in text
    config = written()
    assert config.tokenizer.vocab_size < write_config._MIN_VOCABULARY
    tokenized(config)


def test_a_corpus_of_many_characters_gets_a_vocabulary_that_covers_them_without_bytes():
    for name in ("a.en", "a.de"):
        first = ord("\u4e00") if name == "a.en" else ord("\uac00")
        write(Path(name), ["".join(map(chr, range(n, n + 9))) for n in range(first, first + 900)])
    vocabulary = write_config._train_tokenizer([*overview().sample.values()], 900).tgt
    assert len(vocabulary) > presets.vocabulary_size(900) + 1800
    pieces = vocabulary.pieces_of(range(len(vocabulary)))
    assert sum(len(piece) > 1 and piece[0] != "<" for piece in pieces) > 1700
    assert not {piece for ids in vocabulary.encode(read("a.de")) for piece in ids} & {
        *vocabulary.byte_pieces
    }


@pytest.mark.parametrize("code", ["", "a/b", "..", "a b", "-x", "a.b", "a\n"])
@pytest.mark.parametrize("side", ["src", "tgt"])
def test_an_invalid_language_code_is_an_error_before_anything_is_written(side, code):
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as error:
        parse(languages=(code, "de") if side == "src" else ("en", code))
    assert str(error.value) == (
        f"`--{side}-lang` must be a code such as en or pt-BR, but is {code!r} instead."
    )
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("key", ["train", "valid", "run", "output"])
def test_a_path_that_is_not_utf8_is_an_error(key):
    name = "a\udcff"
    with pytest.raises(ConfigError) as error:
        parse(**{key: name if key in ("run", "output") else ("a.en", name)})
    assert str(error.value) == "'a\\udcff': must be UTF-8, as a config is, but is not."


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400)]
)
def test_a_budget_is_parsed_into_seconds(text, seconds):
    assert write_config.parse_budget(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "m", "0m", "30min", "1m1h", "-5m", "9" * 9 + "h", "9" * 5000 + "h"]
)
def test_an_invalid_budget_is_an_error(text):
    with pytest.raises(ConfigError, match="`--budget` must be a time such as 30m or 1h30m"):
        write_config.parse_budget(text)


def test_unusual_file_and_language_names_survive_writing_and_loading_the_config():
    src, tgt = Path("odd: name, [1].en"), Path("# no\x7f\x85\U0001f600\ufffe.de")
    src.write_text(Path("a.en").read_text())
    tgt.write_text(Path("a.de").read_text())
    init(train=(src, tgt), languages=("no", "de"), run="runs/null", output="a.yaml")
    config = written("a.yaml")
    assert (config.data.src_lang, config.run_dir) == ("no", "runs/null")
    assert config.data.train == FilesCorpus(src=[str(src)], tgt=[str(tgt)])


def test_the_init_command_prints_its_report_to_stdout_and_its_measurements_to_stderr(
    short_trials, monkeypatch, capfdbinary
):
    from mtrain.cli.main import main

    arguments = ["--src", "a.en", "--tgt", "a.de", "--src-lang", "en", "--tgt-lang", "xx"]
    arguments += ["--budget", "5m", "--device", "cpu", "-o", "mine.yaml", "--run", "there"]
    monkeypatch.setattr("sys.argv", ["mtrain", "init", *arguments])
    with pytest.raises(SystemExit) as outcome:
        main()
    assert outcome.value.code in (None, 0)
    captured = capfdbinary.readouterr()
    assert captured.out.decode().splitlines()[0].startswith("wrote     mine.valid.en and ")
    assert b"corpus    400 pairs" in captured.err
    config = config_file.load(Path("mine.yaml"))
    assert config.run_dir == "there"
    assert 2.5 <= config.training.max_minutes <= 5
