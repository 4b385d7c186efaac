"""The command line: one output line for each input line, and a one-line message for each error."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import Cli, Logged, Shell, at_a_terminal
from fork_server import ForkedProcess, MtrainProcess
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tasks import WORDS, copy_task, write_task

from mtrain.cli import main as main_module
from mtrain.cli.verbs import translate as translate_verb
from mtrain.cli.verbs.translate import _formatted
from mtrain.config import config_file
from mtrain.decode.formats import NOTHING, TranslatedLine, Translation
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.io import atomic
from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece

VERBS = [
    "demo",
    "init",
    "check",
    "tokenize",
    "train",
    "translate",
    "eval",
    "plot",
    "export",
    "doctor",
    "augment",
    "distill",
    "serve",
]
ODD_LINES = [
    "",
    "   ",
    "\t",
    "\u3000\u00a0",
    "ba ce",
    "\N{GRINNING FACE} \N{WAVING BLACK FLAG}",
    "שלום עולם",
    "\u202eba\u202c",
    "你好，世界",
    "ba\x00\x01\x1b[31mce",
    "ba\u2028ce\u2029di",
    "ba\x85ce\x0bdi\x0cfo",
    "ba\rce",
    "<s> </s> <unk> <pad> <0x0A>",
    "\ufeff",
    "a\u0301" * 30,
    " ba ce ",
    "\u2581\u2581ba",
]


@pytest.fixture
def copied(trained: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the trained run that a test may damage."""
    shutil.copytree(trained.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def error_line(outcome: object) -> str:
    """Return the one-line error message; check that the exit code is 2."""
    code, err = getattr(outcome, "code", None), getattr(outcome, "err", "")
    assert code == 2, err
    assert err.count("\n") == 1
    assert err.startswith("mtrain: ")
    return str(err.removeprefix("mtrain: ").rstrip("\n"))


def test_a_model_trained_by_the_command_line_scores_at_least_90_bleu(
    trained: RunDir, shell: Shell
) -> None:
    result = shell("eval", trained.path, "--json")
    assert result.returncode == 0, result.stderr.decode()
    scores = {
        score["metric"]: score["value"] for score in json.loads(result.stdout)["held_out"]["scores"]
    }
    assert scores["BLEU"] >= 90


def test_translate_reads_stdin_and_writes_stdout(trained: RunDir, shell: Shell) -> None:
    lines = [pair.src for pair in copy_task(20, 3)]
    result = shell("translate", trained.path, stdin="".join(f"{x}\n" for x in lines).encode())
    assert (result.returncode, result.stderr) == (0, b"")
    translations = result.stdout.decode().splitlines()
    assert sum(a == b for a, b in zip(translations, lines, strict=True)) >= 16


def test_a_file_and_its_gzip_give_the_same_translations_as_stdin(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    raw = "".join(f"{pair.src}\n" for pair in copy_task(20, 4)).encode()
    (tmp_path / "in").write_bytes(raw)
    (tmp_path / "in.gz").write_bytes(gzip.compress(raw))
    by_stdin = cli("translate", trained.path, stdin=raw)
    assert by_stdin.code == 0
    assert len(by_stdin.lines) == 20
    assert cli("translate", trained.path, tmp_path / "in") == by_stdin
    assert cli("translate", trained.path, tmp_path / "in.gz") == by_stdin


def test_an_output_file_holds_the_same_bytes_as_stdout(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "out"
    direct = cli("translate", trained.path, stdin=b"ba ce\ndi fo\n")
    outcome = cli("translate", trained.path, "-o", path, stdin=b"ba ce\ndi fo\n")
    assert (outcome.code, outcome.out, outcome.err) == (0, b"", "")
    assert path.read_bytes() == direct.out
    direct = cli("eval", trained.path)
    assert cli("eval", trained.path, "--output", path).out == b""
    assert path.read_bytes() == direct.out


def test_output_files_whose_names_end_in_gz_are_gzipped(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    def written(suffix: str) -> list[bytes]:
        paths = [tmp_path / f"{name}{suffix}" for name in ("out", "align")]
        command = ["translate", trained.path, "-o", paths[0], "--alignments", paths[1]]
        assert cli(*command, stdin=b"ba ce\ndi fo\n").code == 0
        return [path.read_bytes() for path in paths]

    plain, zipped = written(""), written(".gz")
    assert [gzip.decompress(raw) for raw in zipped] == plain
    assert len(plain[0].splitlines()) == 2
    assert written(".gz") == zipped


def test_translate_writes_one_line_for_every_line_of_unusual_text(
    cli: Cli, trained: RunDir
) -> None:
    raw = "".join(f"{line}\n" for line in ODD_LINES).encode()
    outcome = cli("translate", trained.path, "--beam", "1", stdin=raw)
    assert outcome.code == 0
    warnings = re.compile(r"mtrain: (line \d+: .*|\d+ more lines?: .*)\.")
    assert all(warnings.fullmatch(line) for line in outcome.err.split("\n")[:-1])
    assert len(outcome.lines) == len(ODD_LINES)
    blank = [line == "" or line.isspace() for line in ODD_LINES]
    assert [outcome.lines[i] for i, is_blank in enumerate(blank) if is_blank] == [""] * sum(blank)
    assert outcome.lines[ODD_LINES.index("ba ce")] == "ba ce"


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"ba", 1),
        (b"ba\nce", 2),
        (b"ba\n\n\n", 3),
        (b"ba\r\nce\r\n", 2),
        (b"ba\rce\n", 1),
        (b"\xef\xbb\xbfba\n", 1),
        (b"\r", 1),
    ],
)
def test_lines_are_counted_by_newlines_and_an_unterminated_last_line_counts(
    cli: Cli, trained: RunDir, raw: bytes, count: int
) -> None:
    outcome = cli("translate", trained.path, "--beam", "1", stdin=raw)
    assert (outcome.code, len(outcome.lines)) == (0, count)


def test_windows_line_ends_and_a_byte_order_mark_change_no_translation(
    cli: Cli, trained: RunDir
) -> None:
    plain = cli("translate", trained.path, stdin=b"ba ce di\nfo gu\n")
    assert cli("translate", trained.path, stdin=b"\xef\xbb\xbfba ce di\r\nfo gu\r\n") == plain


def test_invalid_utf8_is_replaced_with_a_warning_that_names_the_line(
    cli: Cli, trained: RunDir
) -> None:
    outcome = cli("translate", trained.path, stdin=b"ba ce\nb\xff ce\n\xc3\ndi\n")
    assert (outcome.code, len(outcome.lines)) == (0, 4)
    assert outcome.err.splitlines() == [
        "mtrain: line 2: is not UTF-8: byte 0xff at byte 2 of the line; replaced by U+FFFD.",
        "mtrain: line 3: is not UTF-8: byte 0xc3 at byte 1 of the line; replaced by U+FFFD.",
    ]


def test_a_line_of_ten_thousand_words_gives_one_output_line(cli: Cli, trained: RunDir) -> None:
    raw = (" ".join(WORDS * 667) + "\nba ce\n").encode()
    outcome = cli("translate", trained.path, "--beam", "1", stdin=raw)
    assert (outcome.code, len(outcome.lines)) == (0, 2)
    assert outcome.lines[1] == "ba ce"


@settings(max_examples=15)
@example(["\n"])
@example(["ba", "", "\r"])
@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_text_gives_as_many_output_lines_as_input_lines(
    cli: Cli, trained: RunDir, lines: list[str]
) -> None:
    raw = "".join(f"{line}\n" for line in lines).encode()
    outcome = cli("translate", trained.path, "--beam", "1", stdin=raw)
    assert outcome.code == 0
    assert len(outcome.lines) == raw.count(b"\n")


@settings(max_examples=15)
@given(st.binary(max_size=60))
def test_any_bytes_give_as_many_output_lines_as_input_lines(
    cli: Cli, trained: RunDir, raw: bytes
) -> None:
    outcome = cli("translate", trained.path, "--beam", "1", stdin=raw)
    assert outcome.code == 0
    assert len(outcome.lines) == raw.count(b"\n") + (raw != b"" and not raw.endswith(b"\n"))


def test_a_run_folder_that_was_moved_still_translates_and_evaluates(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = tmp_path / "origin"
    assert cli("train", write_task(origin)).code == 0
    before = cli("eval", origin / "run", "--json")
    translated = cli("translate", origin / "run", stdin=b"ba ce\n")
    assert (before.code, translated.code) == (0, 0)
    shutil.copytree(origin / "run", tmp_path / "elsewhere" / "moved")
    shutil.rmtree(origin)
    monkeypatch.chdir(tmp_path / "elsewhere")
    after = cli("eval", "moved", "--json")
    own, others = (f'"system": "{path}"'.encode() for path in (origin / "run", "moved"))
    assert (after.out, after.err) == (before.out.replace(own, others), before.err)
    assert cli("translate", "moved", stdin=b"ba ce\n") == translated


def test_decoding_options_are_taken_from_the_run_unless_given(
    cli: Cli, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.decode import translator
    from mtrain.run import load_model

    seen = []

    def load(*arguments: Any) -> translator.Translator:
        seen.append(arguments[1:])
        return real_load(*arguments)

    real_load = translator.load
    monkeypatch.setattr(translator, "load", load)
    assert cli("translate", trained.path, stdin=b"ba\n").code == 0
    options = ["--beam", "3", "--length-alpha", "0", "--device", "cpu", "--n-best", "2"]
    options += ["--early-stop", "--no-repeat-ngram", "4", "--batch-tokens", "99"]
    assert cli("translate", trained.path, *options, stdin=b"ba\n").code == 0
    own = replace(DecodingOptions.from_config(trained.config), with_scores=False)
    assert seen[0] == (own, load_model.LoadOptions())
    changed = replace(
        own,
        beam=3,
        length_alpha=0.0,
        early_stop=True,
        no_repeat_ngram=4,
        batch_tokens=99,
        num_best=2,
    )
    assert seen[1] == (changed, load_model.LoadOptions("cpu"))
    options = ["--sample", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9"]
    assert cli("translate", trained.path, *options, stdin=b"ba\n").code == 0
    assert seen[2][0] == replace(own, sampling=Sampling(0.5, 4, 0.9))


def test_text_tsv_and_jsonl_hold_the_same_translations(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    raw, links = b"ba ce di\n\nfo gu\n", tmp_path / "links"
    options = ["--beam", "3", "--n-best", "2"]
    text = cli("translate", trained.path, *options, stdin=raw).lines
    assert len(text) == 6
    assert text[2:4] == ["", ""]
    tsv = cli("translate", trained.path, *options, "--format", "tsv", stdin=raw).lines
    columns = [line.split("\t") for line in tsv]
    assert [row[:2] for row in columns] == [[str(n), str(k)] for n in (1, 2, 3) for k in (1, 2)]
    assert [row[5] for row in columns] == text
    asked = [*options, "--format", "jsonl", "--alignments", links]
    trees = [json.loads(line) for line in cli("translate", trained.path, *asked, stdin=raw).lines]
    assert [tree["source"] for tree in trees] == ["ba ce di", "", "fo gu"]
    for number, tree in enumerate(trees):
        best = [found["translation"] for found in tree["n_best"]]
        assert best + [""] * (2 - len(best)) == text[2 * number : 2 * number + 2]
        assert tree["log_prob"] == pytest.approx(float(columns[2 * number][3]), abs=1e-6)
    assert links.read_text("utf-8") == "0-0 1-1 2-2\n\n0-0 1-1\n"


def test_a_run_given_twice_translates_as_once_and_the_input_file_comes_last(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("ba ce\n", encoding="utf-8")
    alone = cli("translate", trained.path, tmp_path / "in").lines
    assert cli("translate", trained.path, trained.path, tmp_path / "in").lines == alone
    assert cli("translate", trained.path, trained.path, stdin=b"ba ce\n").lines == alone


def test_a_prefix_file_sets_the_beginning_of_each_translation(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "prefix").write_text("tu\n\n", encoding="utf-8")
    options = ["--prefix", tmp_path / "prefix"]
    lines = cli("translate", trained.path, *options, stdin=b"ba ce\nfo gu\n").lines
    assert lines[0].startswith("tu")
    assert lines[1] == "fo gu"
    said = error_line(cli("translate", trained.path, *options, stdin=b"ba\n" * 3))
    assert said == "`--prefix` must have a line for each line of the input, but ends at line 2."


def test_a_progress_bar_shows_sentences_per_second_and_does_not_break_up_warnings(
    trained: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("ba ce\n" * 50 + "ba\xff\n", encoding="latin-1")
    parts = at_a_terminal("translate", trained.path, tmp_path / "in", "-o", tmp_path / "out")
    assert any(re.match(r"51 sentences \[[\d:]+, [\d.]+ sentences/s\]", part) for part in parts)
    warned = "mtrain: line 51: is not UTF-8: byte 0xff at byte 3 of the line; replaced by"
    shown = [part.strip() for part in parts]
    assert shown[shown.index(warned) + 1] == "U+FFFD."
    assert (tmp_path / "out").read_text("utf-8").count("\n") == 51


def test_a_line_of_200_000_characters_is_translated_in_parts_and_affects_no_other_line(
    cli: Cli, trained: RunDir
) -> None:
    """It is split at the training length; attention over the whole would be quadratic in it."""
    endless = ("ba ce di fo. " * 16_000)[:200_000]
    stdin = f"ba ce\n{endless}\nlo mu\n".encode()
    outcome = cli("translate", trained.path, "--beam", "1", stdin=stdin)
    first, long, last = outcome.lines
    assert (outcome.code, first, last) == (0, "ba ce", "lo mu")
    (sentence,) = sentencepiece.load(trained.tokenizer_dir).src.encode(["ba ce di fo."])
    num_sentences = 31 // len(sentence)  # of 32 tokens, the last of which is eos
    num_whole = len(endless) // 13 // num_sentences
    said = rf"mtrain: line 2: has [\d,]+ tokens; translated in {num_whole + 1:,} parts\."
    assert re.match(said, outcome.err)
    part = cli("translate", trained.path, "--beam", "1", stdin=b"ba ce di fo. " * num_sentences)
    assert part.lines[0].startswith("ba ce")
    assert long.startswith(" ".join(part.lines * num_whole))


def test_a_line_over_the_training_length_is_split_unless_an_option_changes_this(
    cli: Cli, trained: RunDir
) -> None:
    line = b"ba ce di fo. " * 10
    assert trained.config.data.max_tokens == 32
    assert "translated in 2 parts" in cli("translate", trained.path, stdin=line).err
    whole = cli("translate", trained.path, "--max-input-tokens", "99", stdin=line)
    assert "translated whole" in whole.err
    refused = error_line(cli("translate", trained.path, "--on-long", "error", stdin=line))
    assert refused.startswith("line 1: must have at most 32 tokens, but has ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--top-k", "3"], "`--top-k` needs `--sample`."),
        (["--seed", "3"], "`--seed` needs `--sample`."),
        (["--sample", "--beam", "3"], "`--beam` has no effect with `--sample`; leave it out."),
        (
            ["--sample", "--length-alpha", "1"],
            "`--length-alpha` has no effect with `--sample`; leave it out.",
        ),
        (["--n-best", "3"], "`--n-best` must be at most the beam (2), but is 3 instead."),
        (
            ["--max-input-tokens", "3", "--on-long", "error"],
            "line 1: must have at most 3 tokens, but has 4 instead; `--on-long split` or "
            "`--on-long truncate` takes it.",
        ),
    ],
)
def test_options_that_would_do_nothing_or_cannot_be_met_are_refused(
    cli: Cli, trained: RunDir, options: list[str], said: str
) -> None:
    assert error_line(cli("translate", trained.path, *options, stdin=b"ba ce di\n")) == said


@pytest.mark.parametrize(
    "option",
    [
        ["--tokenize", "none"],
        ["--lowercase"],
        ["--json"],
        ["--details"],
        ["--metrics", "bleu"],
        ["--comet", "model.ckpt"],
        ["--resamples", "100"],
        ["--compare", "other"],
        ["--shortlist", "fast"],
    ],
)
def test_options_without_an_effect_are_refused_with_eval_score(
    cli: Cli, trained: RunDir, option: list[str]
) -> None:
    said = error_line(cli("eval", trained.path, "--score", *option))
    assert said == f"`{option[0]}` has no effect with `--score`; leave it out."


def test_eval_score_equals_the_score_that_the_search_gave_the_same_translation(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    run = shutil.copytree(trained.path, tmp_path / "run")
    own = (run / "data" / "tests" / "held_out.src").read_text("utf-8")
    found = cli("translate", run, "--format", "jsonl", stdin=own.encode())
    trees = [json.loads(line) for line in found.lines]
    texts = "".join(tree["translation"] + "\n" for tree in trees)
    (run / "data" / "tests" / "held_out.tgt").write_text(texts, encoding="utf-8")
    rows = [line.split("\t") for line in cli("eval", run, "--score").lines]
    assert [row[:2] for row in rows] == [["held_out", str(n)] for n in range(1, len(trees) + 1)]
    same = [
        (tree, row)
        for tree, row in zip(trees, rows, strict=True)
        if int(row[4]) == len(tree["tokens"]) and "<0x" not in "".join(tree["tokens"])
    ]
    assert len(same) > 30
    for tree, row in same:
        assert float(row[2]) == pytest.approx(tree["score"], abs=1.1e-5)
        assert float(row[3]) == pytest.approx(tree["log_prob"], abs=3e-5)


def test_the_list_of_verbs_in_this_file_is_complete() -> None:
    assert sorted(main_module.VERBS) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_fits_80_columns_and_has_an_example_of_that_verb(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli(verb, "--help")
    assert outcome.code == 0
    assert max(len(line) for line in outcome.lines) <= 80
    (example_line,) = (line for line in outcome.lines if "Example:" in line)
    assert f"mtrain {verb} " in example_line


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_optional_arguments_in_single_brackets(cli: Cli, verb: str) -> None:
    usage = cli(verb, "--help").lines[0]
    assert f"mtrain {verb} " in usage
    assert "[[" not in usage


def test_help_lists_every_verb_with_an_untruncated_description_in_80_columns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli("--help")
    assert outcome.code == 0
    assert max(len(line) for line in outcome.lines) <= 80
    for verb in VERBS:
        assert any(re.match(rf"\s+{verb}\s+[A-Z]", line) for line in outcome.lines)
    assert "..." not in outcome.out.decode().partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("frob", "no such command 'frob'; see `mtrain --help`."),
        ("train", "missing argument 'CONFIG'; see `mtrain train --help`."),
        ("translate", "missing argument 'RUN... [FILE]'; see `mtrain translate --help`."),
        (
            "translate RUN --beam",
            "option '--beam' requires an argument; see `mtrain translate --help`.",
        ),
        (
            "translate run -o --early-stop",
            "option '-o' requires an argument, but '--early-stop' is an option; see `mtrain "
            "translate --help`.",
        ),
        (
            "init --valid v.en --src-lang en --tgt-lang de",
            "option '--valid' requires 2 arguments, but '--src-lang' is an option; see `mtrain "
            "init --help`.",
        ),
        ("translate run --beam --help", "option '--beam' requires an argument, but '--help' is "),
        ("train a.yaml --set --set --run", "option '--set' requires an argument, but '--set' is "),
        (
            "export RUN d",
            "missing option '--to'. Choose from: ctranslate2, huggingface, argos, marian, onnx; "
            "see `mtrain export --help`.",
        ),
        ("train a.yaml --frob", "no such option: --frob; see `mtrain train --help`."),
        ("train a.yaml b.yaml", None),
        ("translate run --beam 0", "`--beam` must be >= 1, but is '0' instead; see "),
        ("translate run --beam x", "`--beam` must be a whole number, but is 'x' instead; see "),
        (
            "eval run --length-alpha -1",
            "`--length-alpha` must be >= 0.0, but is '-1' instead; see ",
        ),
        (
            "translate run --format csv",
            "`--format` must be one of 'text', 'tsv', 'jsonl', but is 'csv' instead; see ",
        ),
    ],
)
def test_an_invalid_command_line_gives_a_one_line_error_and_exits_with_2(
    cli: Cli, arguments: str, message: str | None
) -> None:
    outcome = cli(*arguments.split())
    assert outcome.out == b""
    assert error_line(outcome).startswith(message or "")


def test_a_path_that_may_not_be_read_is_named_with_its_place_in_the_command_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    said = error_line(cli("translate", tmp_path))
    expected = f"path '{tmp_path}' is not readable; see `mtrain translate --help`."
    assert said == f"`RUN... [FILE]`: {expected}"
    assert error_line(cli("translate", "run", "--prefix", tmp_path)) == f"`--prefix`: {expected}"


def test_mtrain_alone_shows_its_help_and_exits_with_2(cli: Cli) -> None:
    outcome = cli()
    assert (outcome.code, outcome.out) == (2, b"")
    assert "Train a translator" in outcome.err


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_length_alpha_that_is_not_finite_is_refused(
    cli: Cli, trained: RunDir, value: str
) -> None:
    outcome = cli("translate", trained.path, "--length-alpha", value, stdin=b"ba ce\n")
    assert (outcome.code, outcome.out) == (2, b"")


def test_a_config_error_is_one_line_with_its_file_and_key(cli: Cli, tmp_path: Path) -> None:
    path = write_task(tmp_path)
    said = error_line(cli("train", path, "--set", "training.warmup_steps=-3"))
    assert said == f"{path}: `training.warmup_steps` must be >= 0, but is -3 instead."
    said = error_line(cli("tokenize", tmp_path / "absent.yaml"))
    assert said == f"{tmp_path / 'absent.yaml'}: cannot be read: No such file or directory."
    assert not (tmp_path / "run").exists()


def test_set_and_run_override_the_config(cli: Cli, tmp_path: Path) -> None:
    path, run = write_task(tmp_path), RunDir(tmp_path / "other")
    outcome = cli("tokenize", path, "--set", "seed=7", "--set", "model.d_ff=8", "--run", run.path)
    assert (outcome.code, outcome.out) == (0, b"")
    config = run.config
    assert (config.seed, config.model.d_ff, config.run_dir) == (7, 8, str(run.path))
    assert not (tmp_path / "run").exists()


def test_an_error_in_the_corpora_is_a_one_line_message(cli: Cli, tmp_path: Path) -> None:
    path = write_task(tmp_path)
    (tmp_path / "valid.tgt").write_bytes(b"ba\n")
    said = error_line(cli("tokenize", path))
    assert said == (
        f"{tmp_path / 'valid.src'} and {tmp_path / 'valid.tgt'} must have the same number of "
        "lines, but have 12 and 1 instead."
    )


def test_an_unexpected_exception_keeps_its_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, overrides: object, run: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(config_file, "load", broken)
    with pytest.raises(ZeroDivisionError):
        cli("train", "a.yaml")


def test_ctrl_c_exits_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, overrides: object, run: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(config_file, "load", interrupted)
    assert cli("train", "a.yaml").code == 130


@pytest.mark.parametrize("verb", ["translate", "eval"])
def test_a_run_path_that_is_missing_or_a_file_is_reported(
    cli: Cli, tmp_path: Path, verb: str
) -> None:
    path = tmp_path / "absent"
    said = error_line(cli(verb, path))
    assert said == f"{path}: must be a run folder, but does not exist."
    path.write_text("a file")
    said = error_line(cli(verb, path))
    assert said == f"{path}: must be a run folder, but is a file instead."
    said = error_line(cli("train", write_task(tmp_path), "--run", path))
    assert said == f"{path}: must be a run folder, but is a file instead."


@pytest.mark.parametrize("verb", ["translate", "eval"])
def test_a_folder_that_is_not_a_run_is_reported(cli: Cli, tmp_path: Path, verb: str) -> None:
    said = error_line(cli(verb, tmp_path))
    assert said == (
        f"{tmp_path}: must be a run folder, but has no config.yaml; "
        "`mtrain train CONFIG` makes one."
    )


@pytest.mark.parametrize("verb", ["translate", "train"])
def test_a_run_without_its_config_is_to_be_restored(
    cli: Cli, copied: RunDir, tmp_path: Path, verb: str
) -> None:
    copied.config_path.unlink()
    config = write_task(tmp_path / "task")
    said = error_line(cli(verb, *([config, "--run"] if verb == "train" else []), copied.path))
    assert "has no config.yaml; restore " in said
    assert "makes one" not in said


@pytest.mark.parametrize("verb", ["translate", "eval"])
def test_a_run_without_a_model_is_reported(cli: Cli, copied: RunDir, verb: str) -> None:
    copied.model_path.unlink()
    said = error_line(cli(verb, copied.path))
    assert said == (
        f"{copied.model_path}: is missing until the training ends; `mtrain train CONFIG` goes on "
        "with it, and `mtrain translate --checkpoint "
        f"{max(checkpoint.steps(copied.checkpoints_dir))}` takes the weights so far."
    )
    shutil.rmtree(copied.checkpoints_dir)
    said = error_line(cli(verb, copied.path))
    assert said == f"{copied.model_path}: is missing; `mtrain train CONFIG` makes it."


@pytest.mark.parametrize("damage", [b"", b"not a model", None])
def test_a_damaged_model_file_is_reported(cli: Cli, copied: RunDir, damage: bytes | None) -> None:
    whole = copied.model_path.read_bytes()
    copied.model_path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    said = error_line(cli("translate", copied.path))
    assert said.startswith(f"{copied.model_path}: must be a whole safetensors file, but is not: ")


def test_a_safetensors_file_of_another_program_is_refused(cli: Cli, copied: RunDir) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, copied.model_path)
    said = error_line(cli("translate", copied.path))
    assert said == (
        f"{copied.model_path}: must be weights in mtrain's format 1, but is "
        "'something else' instead."
    )


def test_a_missing_tokenizer_is_reported_with_advice_to_restore_it(
    cli: Cli, copied: RunDir
) -> None:
    (copied.tokenizer_dir / "shared.model").unlink()
    said = error_line(cli("translate", copied.path))
    assert said == (
        f"{copied.tokenizer_dir / 'shared.model'}: is missing; restore it from a copy of the run."
    )


def test_a_damaged_tokenizer_file_is_reported(cli: Cli, copied: RunDir) -> None:
    path = copied.tokenizer_dir / "shared.model"
    path.write_bytes(b"damaged")
    said = error_line(cli("translate", copied.path))
    assert said == (
        f"{path}: must be a SentencePiece model, but is not; restore it from a copy of the run."
    )


def test_the_tokenizer_of_another_run_is_refused(cli: Cli, copied: RunDir, tmp_path: Path) -> None:
    other = write_task(tmp_path / "other", num_train=150)
    assert cli("tokenize", other).code == 0
    model = tmp_path / "other" / "run" / "tokenizer" / "shared.model"
    shutil.copy(model, copied.tokenizer_dir / "shared.model")
    said = error_line(cli("translate", copied.path))
    assert said == (
        f"{copied.model_path}: must belong to the tokenizer beside it, but was trained with "
        "another one; restore the run's own tokenizer folder, or train again."
    )


def test_a_config_that_does_not_fit_the_model_is_refused(cli: Cli, copied: RunDir) -> None:
    text = copied.config_path.read_text(encoding="utf-8")
    copied.config_path.write_text(text.replace("d_ff: 64", "d_ff: 32"), encoding="utf-8")
    said = error_line(cli("translate", copied.path))
    assert said.startswith(f"{copied.model_path}: `")
    assert said.endswith("instead; restore the run's own config.yaml.")


def test_a_damaged_config_of_a_run_is_reported(cli: Cli, copied: RunDir) -> None:
    copied.config_path.write_text("a: [", encoding="utf-8")
    said = error_line(cli("translate", copied.path))
    assert said.startswith(f"{copied.config_path}: line 1: must be valid YAML, but is not: ")
    assert said.endswith("Restore the file from a copy of the run.")


def test_a_run_without_test_sets_cannot_be_evaluated(cli: Cli, copied: RunDir) -> None:
    text = copied.config_path.read_text(encoding="utf-8")
    start, stop = text.index("  tests:"), text.index("  max_tokens:")
    copied.config_path.write_text(text[:start] + text[stop:], encoding="utf-8")
    said = error_line(cli("eval", copied.path))
    assert said == f"{copied.config_path}: `data.tests` must name a test set, but is empty."


@pytest.mark.parametrize("device", ["tpu", "meta"])
def test_an_unknown_device_is_refused(cli: Cli, trained: RunDir, device: str) -> None:
    said = error_line(cli("translate", trained.path, "--device", device, stdin=b"ba\n"))
    assert said == (f"`device` must be auto, cpu, cuda or cuda:N, but is {device!r} instead.")


def test_an_unreadable_input_gives_a_one_line_error(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    said = error_line(cli("translate", trained.path, tmp_path / "absent"))
    assert said == f"{tmp_path / 'absent'}: cannot be read: No such file or directory."
    said = error_line(cli("translate", trained.path, tmp_path))
    assert said.startswith(f"{tmp_path}: must be a run folder, but has no config.yaml;")


@pytest.mark.parametrize("damage", ["truncated", "plain", "damaged"])
def test_a_damaged_gzip_input_gives_a_one_line_error_and_no_output(
    cli: Cli, trained: RunDir, tmp_path: Path, damage: str
) -> None:
    path, raw = tmp_path / "in.gz", bytearray(gzip.compress(b"ba ce di fo\n" * 99))
    if damage == "truncated":
        del raw[-12:]
    elif damage == "plain":
        raw = bytearray(b"ba ce\n")
    else:
        raw[10] = 0xFF
    path.write_bytes(raw)
    said = error_line(cli("translate", trained.path, path, "-o", tmp_path / "out"))
    assert said.startswith(f"{path}: ")
    assert not (tmp_path / "out").exists()


def test_an_unwritable_output_gives_a_one_line_error(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "out", tmp_path):
        said = error_line(cli("translate", trained.path, "-o", path, stdin=b"ba\n"))
        assert said.startswith(f"{path}: cannot be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_that_is_a_folder_is_refused_before_any_model_is_loaded(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.decode import translator

    monkeypatch.setattr(translator, "load", lambda *_: pytest.fail("a model was loaded"))
    for arguments in (["translate", "-o"], ["translate", "--alignments"], ["eval", "-o"]):
        said = error_line(cli(*arguments, tmp_path, trained.path))
        assert said == f"{tmp_path}: cannot be written: Is a directory."


def test_two_outputs_to_the_same_file_are_refused_except_for_dev_null(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    for other in (path, link):
        outputs = ["-o", path, "--alignments", other]
        said = error_line(cli("translate", trained.path, *outputs, stdin=b"ba\n"))
        assert said == (f"`--alignments` must be another file than `--output`, but is {other} too.")
    outputs = ["-o", "/dev/null", "--alignments", "/dev/null"]
    assert cli("translate", trained.path, *outputs, stdin=b"ba\n").code == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["translate", "RUN", "TEXT", "-o", "TEXT"], "--output"),
        (["translate", "RUN", "TEXT", "-o", "LINK"], "--output"),
        (["translate", "RUN", "TEXT", "--alignments", "TEXT"], "--alignments"),
        (["translate", "RUN", "--prefix", "TEXT", "-o", "TEXT"], "--output"),
        (["eval", "RUN", "--compare", "TEXT", "-o", "TEXT"], "--output"),
    ],
)
def test_an_output_that_would_overwrite_an_input_is_refused(
    cli: Cli, trained: RunDir, tmp_path: Path, arguments: list[str], name: str
) -> None:
    text, link = tmp_path / "text", tmp_path / "link"
    text.write_bytes(b"ba ce\n")
    link.symlink_to(text)
    paths = {"RUN": trained.path, "TEXT": text, "LINK": link}
    said = error_line(cli(*(paths.get(word, word) for word in arguments), stdin=b"ba\n"))
    assert said == f"`{name}` would overwrite the input {text}; choose another file."
    assert text.read_bytes() == b"ba ce\n"


def test_outputs_are_written_through_symbolic_links(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    outputs = []
    for option in ("-o", "--alignments"):
        (tmp_path / f"link{option}").symlink_to(f"file{option}")
        outputs += [option, tmp_path / f"link{option}"]
    assert cli("translate", trained.path, *outputs, stdin=b"ba ce\n").code == 0
    assert (tmp_path / "file-o").read_bytes() == b"ba ce\n"
    assert (tmp_path / "file--alignments").read_bytes().startswith(b"0-0")
    assert (tmp_path / "link-o").is_symlink()
    assert (tmp_path / "link--alignments").is_symlink()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("arguments", ["--help", "eval --help", "--version"])
def test_help_for_a_full_device_is_an_error_of_one_line(arguments: str) -> None:
    with (
        Path("/dev/full").open("wb") as full,
        MtrainProcess(*arguments.split(), stdout=full.fileno(), stderr=PIPE) as process,
    ):
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 2
    assert said == b"mtrain: stdout: cannot be written: No space left on device.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_an_error_that_cannot_be_printed_exits_with_2_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mtrain", "translate", "absent"]
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run(command, stderr=full, cwd=tmp_path, timeout=120).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_output_device_is_reported_and_the_other_output_is_removed(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    outputs = ["-o", tmp_path / "out", "--alignments", "/dev/full"]
    said = error_line(cli("translate", trained.path, *outputs, stdin=b"ba\n"))
    assert said == "/dev/full: cannot be written: No space left on device."
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_translation_leaves_no_output_files(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.decode.pipeline import LineTranslator

    def interrupted(self: LineTranslator, *arguments: object) -> object:
        yield TranslatedLine(1, "ba", [NOTHING])
        raise KeyboardInterrupt

    monkeypatch.setattr(LineTranslator, "translate", interrupted)
    outputs = ["-o", tmp_path / "out", "--alignments", tmp_path / "links"]
    outcome = cli("translate", trained.path, *outputs, stdin=b"ba\nce\n")
    assert outcome.code == 130
    assert list(tmp_path.iterdir()) == []


def test_translate_ends_silently_when_the_reader_of_stdout_closes_the_pipe(
    trained: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text("ba ce\n\n\n\n" * 20_000)
    command = ["translate", trained.path, "--beam", "1", tmp_path / "in"]
    with MtrainProcess(*command, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert first == b"ba ce\n"
    assert err == b""
    assert process.returncode in (0, 128 + signal.SIGPIPE)


def test_the_config_of_a_copied_run_does_not_train_the_original(
    cli: Cli, noisy: RunDir, tmp_path: Path
) -> None:
    copied = RunDir(Path(shutil.copytree(noisy.path, tmp_path / "copied")))
    for verb in ("train", "tokenize", "check"):
        assert error_line(cli(verb, copied.config_path)) == (
            f"{copied.config_path}: `run_dir` must be {copied.path}, the run folder that it is in, "
            f"but is {noisy.path} instead; correct it, or choose a folder with --run."
        )
    for options in (["--run", copied.path], ["--set", f"run_dir={copied.path}"]):
        assert cli("tokenize", copied.config_path, *options).code == 0
    (tmp_path / "link").symlink_to(copied.path)
    text = copied.config_path.read_text("utf-8")
    copied.config_path.write_text(text.replace(str(noisy.path), str(copied.path)), "utf-8")
    assert cli("tokenize", tmp_path / "link" / "config.yaml").code == 0


def test_alignments_are_discarded_when_the_reader_of_stdout_closes_the_pipe(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_iterators = []

    def print_one(lines: Iterator[str]) -> None:
        open_iterators.append(lines)
        next(lines)

    monkeypatch.setattr(atomic, "print_lines", print_one)
    options = ["--beam", "1", "--alignments", tmp_path / "links"]
    assert cli("translate", trained.path, *options, stdin=b"ba ce\nba\n").code == 0
    assert list(tmp_path.iterdir()) == []


def test_alignments_that_are_not_written_because_stdout_was_closed_are_named(
    tmp_path: Path, logged: Logged
) -> None:
    line = TranslatedLine(1, "a", [Translation("b", alignment=())])
    path = tmp_path / "links"
    written = _formatted(iter([line, line]), "text", 1, path)
    next(written)
    written.close()
    assert not path.exists()
    assert logged.messages == [f"{path}: not written, because stdout was closed before the end"]


@pytest.mark.parametrize(
    ("closing", "asked", "code"),
    [("<&-", "RUN", 0), ("2>&-", "absent", 2), ("<&- >&- 2>&-", "RUN in", 0)],
)
def test_closed_standard_streams_behave_like_dev_null(
    trained: RunDir, tmp_path: Path, closing: str, asked: str, code: int
) -> None:
    (tmp_path / "in").write_text("ba ce\n", encoding="utf-8")
    (tmp_path / "RUN").symlink_to(trained.path)
    command = f"{sys.executable} -m mtrain translate {asked} --alignments links {closing}"
    done = subprocess.run(command, shell=True, capture_output=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
    if code == 0:
        assert (tmp_path / "links").read_text() == ("0-0 1-1\n" if "in" in asked else "")


def test_ctrl_c_while_waiting_for_stdin_exits_with_130_and_no_traceback(trained: RunDir) -> None:
    with MtrainProcess("translate", trained.path, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"b\xff\n" * 4000)  # its warnings show that reading has begun
        process.stdin.flush()
        assert process.stderr.readline().startswith(b"mtrain: line 1: is not UTF-8")
        patience = threading.Timer(60, process.kill)
        patience.start()
        os.kill(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        patience.cancel()
    assert process.returncode == 130
    assert b"Traceback" not in rest


def test_sigterm_leaves_no_output_files(trained: RunDir, tmp_path: Path) -> None:
    outputs = ["-o", tmp_path / "out", "--alignments", tmp_path / "links"]
    with MtrainProcess(
        "translate", trained.path, *outputs, stdin=PIPE, stdout=PIPE, stderr=PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"b\xff\n")
        process.stdin.flush()
        assert process.stderr.readline().startswith(b"mtrain: line 1: is not UTF-8")
        patience = threading.Timer(60, process.kill)
        patience.start()
        process.terminate()
        rest = process.stderr.read()
        patience.cancel()
    assert process.returncode == 143
    assert b"Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def stopped_export() -> None:
    """Run `mtrain export`, which receives SIGTERM when it begins to write."""
    from mtrain.cli.main import main
    from mtrain.exporters import ctranslate2, export

    export._require_library = lambda wanted: None
    ctranslate2.write = lambda *given: signal.raise_signal(signal.SIGTERM)
    main()


def test_an_export_stopped_by_sigterm_leaves_no_files(trained: RunDir, tmp_path: Path) -> None:
    arguments = ["mtrain", "export", trained.path, tmp_path / "out", "--to", "ctranslate2"]
    with ForkedProcess(stopped_export, arguments, stderr=PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 143
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_further_signals_do_not_interrupt_the_cleanup_after_the_first(
    number: int, code: int
) -> None:
    script = f"""
import signal
from mtrain.runtime.signals import unwind_when_stopped
unwind_when_stopped()
try:
    signal.raise_signal({int(number)})
except KeyboardInterrupt:
    raise SystemExit(130)
finally:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    print("clean")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "clean\n", "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_during_an_import_that_catches_all_exceptions_ends_the_command_after_it(
    tmp_path: Path, number: int, code: int
) -> None:
    (tmp_path / "swallowing.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\n"
        "except BaseException:\n    pass\n"
    )
    script = """
import time
from mtrain.runtime.signals import unwind_when_stopped
unwind_when_stopped()
try:
    import swallowing
    time.sleep(30)
except KeyboardInterrupt:
    raise SystemExit(130)
finally:
    print("clean")
"""
    command = [sys.executable, "-c", script]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, timeout=25
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "clean\n", "")


def test_ctrl_c_before_the_command_line_is_read_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", "--help"],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("mtrain.cli.main.main()", 2), ("mtrain.train", 1)],
)
def test_a_system_that_is_not_posix_gives_an_error_that_says_so(code: str, exit_code: int) -> None:
    without = "import signal; del signal.SIGHUP; import mtrain.cli.main; "
    command = [sys.executable, "-c", f"{without}import os; os.name = 'nt'; {code}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    *before, last = ended.stderr.splitlines()
    assert ended.returncode == exit_code
    assert last.endswith(
        ": mtrain needs Linux, macOS or another POSIX system; on Windows, WSL is one."
    )
    assert exit_code == 1 or before == []


@pytest.mark.parametrize("options", [[], ["--sample", "--beam", "4"], ["--n-best", "2"]])
def test_translate_with_mbr_writes_as_many_lines_as_requested(
    cli: Cli, trained: RunDir, options: list[str]
) -> None:
    outcome = cli("translate", trained.path, "--mbr", "chrf", *options, stdin=b"ba ce\n\nfo gu\n")
    assert outcome.code == 0, outcome.err
    assert len(outcome.lines) == 3 * (2 if "--n-best" in options else 1)


def test_translate_and_eval_rerank_with_a_run_of_the_reverse_direction(
    cli: Cli, reverser: RunDir, back_run: Path
) -> None:
    with_back = ["--rerank-with", str(back_run)]
    outcome = cli("translate", reverser.path, *with_back, stdin=b"ba ce\n\nfo gu\n")
    assert (outcome.code, outcome.lines) == (0, ["ce ba", "", "gu fo"]), outcome.err
    both = cli("translate", reverser.path, *with_back, "--mbr", "bleu", stdin=b"ba ce\n")
    assert (both.code, both.lines) == (0, ["ce ba"]), both.err
    sampled = [*with_back, "--rerank-weight", "2", "--sample", "--beam", "3", "--n-best", "4"]
    sampled += ["--length-alpha", "0.5"]
    outcome = cli("translate", reverser.path, *sampled, stdin=b"ba ce\n")
    assert (outcome.code, len(outcome.lines)) == (0, 4), outcome.err
    evaluated = cli("eval", reverser.path, *with_back, "--resamples", "0")
    assert evaluated.code == 0, evaluated.err
    assert f"  translated with `--rerank-with {back_run}`" in evaluated.lines
    assert "  translated with `--rerank-weight 0.3`" in evaluated.lines
    as_json = cli("eval", reverser.path, *with_back, "--json", "--resamples", "0")
    (tree,) = json.loads("\n".join(as_json.lines)).values()
    assert (tree["rerank_with"], tree["rerank_weight"]) == (str(back_run), 0.3)
    unweighted = [*with_back, "--rerank-weight", "0", "--json", "--resamples", "0"]
    (tree,) = json.loads("\n".join(cli("eval", reverser.path, *unweighted).lines)).values()
    assert tree["rerank_weight"] == 0.0


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        (
            "translate",
            ["--rerank-with", "{run}"],
            "{run}: must translate bb to aa for `--rerank-with`, but translates aa to bb instead.",
        ),
        ("translate", ["--rerank-weight", "1"], "`--rerank-weight` needs `--rerank-with`."),
        (
            "translate",
            ["--rerank-with", "{back}", "--beam", "1"],
            "`--rerank-with` has no effect with a beam of 1; leave it out.",
        ),
        (
            "translate",
            ["--rerank-with", "{back}", "--engine", "ctranslate2"],
            "`--rerank-with` has no effect with `--engine ctranslate2`; leave it out.",
        ),
        (
            "translate",
            ["--rerank-with", "{back}/none"],
            "{back}/none: must be a run folder, but does not exist.",
        ),
        ("eval", ["--rerank-weight", "1"], "`--rerank-weight` needs `--rerank-with`."),
        (
            "eval",
            ["--rerank-with", "{back}", "--score"],
            "`--rerank-with` has no effect with `--score`; leave it out.",
        ),
    ],
)
def test_impossible_reranking_options_are_refused(
    cli: Cli, reverser: RunDir, back_run: Path, verb: str, options: list[str], message: str
) -> None:
    def filled(text: str) -> str:
        return text.format(run=reverser.path, back=back_run)

    outcome = cli(verb, reverser.path, *map(filled, options), stdin=b"ba\n")
    assert (outcome.code, outcome.lines) == (2, [])
    assert outcome.err == f"mtrain: {filled(message)}\n"


@pytest.mark.parametrize("verb", ["translate", "eval"])
def test_rerank_with_is_refused_for_a_config_with_a_beam_of_1(
    cli: Cli, reverser: RunDir, back_run: Path, tmp_path: Path, verb: str
) -> None:
    run = RunDir(shutil.copytree(reverser.path, tmp_path / "greedy"))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    run.config_path.write_text(yaml.safe_dump({**tree, "decoding": {"beam": 1}}), "utf-8")
    said = error_line(cli(verb, run.path, "--rerank-with", back_run, stdin=b"ba\n"))
    assert said == "`--rerank-with` has no effect with a beam of 1; leave it out."


@pytest.fixture
def with_mbr(reverser: RunDir, tmp_path: Path) -> Path:
    run = RunDir(shutil.copytree(reverser.path, tmp_path / "mbr"))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["decoding"] = {**tree.get("decoding", {}), "beam": 3, "mbr": "chrf"}
    run.config_path.write_text(yaml.safe_dump(tree), "utf-8")
    return run.path


def test_mbr_of_a_config_is_turned_off_by_none_and_takes_a_number_of_samples(
    cli: Cli, with_mbr: Path, back_run: Path
) -> None:
    reranked = ["--sample", "--rerank-with", str(back_run)]
    for options in (
        ["--beam", "1"],
        reranked,
        ["--sample", "--n-best", "2"],
        ["--shortlist", "fast"],
    ):
        outcome = cli("translate", with_mbr, "--mbr", "none", *options, stdin=b"ba ce\n")
        assert (outcome.code, len(outcome.lines)) == (0, 1 + ("2" in options)), outcome.err
    assert cli("translate", with_mbr, "--sample", "--beam", "8", stdin=b"ba ce\n").code == 0
    evaluated = cli("eval", with_mbr, "--mbr", "none", "--beam", "1", "--resamples", "0")
    assert evaluated.code == 0, evaluated.err
    assert "  translated with `--mbr none`" in evaluated.lines
    off = "instead; `--mbr none` turns it off."
    wider = f"`beam` must be at least 2 for `mbr`, but is 1 {off}"
    both = "`mbr` must be None with `rerank_weight` for samples, but is "
    for verb, options, message in (
        ("translate", ["--beam", "1"], wider),
        ("eval", ["--beam", "1"], wider),
        ("translate", reranked, f"{both}chrf {off}"),
        ("translate", [*reranked, "--mbr", "bleu"], f"{both}bleu {off}"),
    ):
        assert error_line(cli(verb, with_mbr, *options, stdin=b"ba\n")) == message


def test_mbr_takes_the_beam_of_the_command_line_and_refuses_one_of_1(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(trained.path, tmp_path / "greedy"))
    tree = yaml.safe_load(run.config_path.read_text("utf-8"))
    tree["decoding"] = {"beam": 1}
    run.config_path.write_text(yaml.safe_dump(tree), "utf-8")
    for verb, stdin in (("translate", b"ba\n"), ("eval", b"")):
        wider = cli(verb, run.path, "--mbr", "chrf", "--beam", "2", stdin=stdin)
        assert wider.code == 0, wider.err
        assert error_line(cli(verb, run.path, "--mbr", "chrf", stdin=stdin)) == (
            "`beam` must be at least 2 for `mbr`, but is 1 instead; `--mbr none` turns it off."
        )


def test_ranks_that_do_not_write_keep_no_translations(
    cli: Cli, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Line:
        pass

    most = 0

    def translate(_: object) -> Iterator[Line]:
        nonlocal most
        alive: weakref.WeakSet[Line] = weakref.WeakSet()
        for _ in range(5):
            line = Line()
            alive.add(line)
            yield line
            most = max(most, len(alive))

    group = SimpleNamespace(is_first=False, size=2)
    monkeypatch.setattr(translate_verb, "joined_process_group", lambda _: nullcontext(group))
    monkeypatch.setattr(translate_verb, "_load", lambda *_: SimpleNamespace(translate=translate))
    outcome = cli("translate", trained.path, stdin=b"")
    assert (outcome.code, outcome.lines) == (0, []), outcome.err
    assert most == 1
