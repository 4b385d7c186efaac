"""Output on several kinds of terminals, and completion in shells."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Cli, open_terminal, sent_to_a_terminal
from tasks import tiny_tree, write_config, write_task

import mtrain.runtime.device
from mtrain.data.prepare import ParallelLines
from mtrain.errors import ConfigError
from mtrain.io.text_width import fitted
from mtrain.ops import native
from mtrain.run.logger import Stderr
from mtrain.run.run_dir import RunDir
from mtrain.tokenizer import sentencepiece
from mtrain.training.validation import ValidationSet

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BAR = re.compile(r"\d+%\|")
SHELLS = ["bash", "zsh", "fish"]


def test_version_prints_the_versions_the_device_and_the_precision(cli: Cli) -> None:
    outcome = cli("--version")
    assert (outcome.code, outcome.err) == (0, "")
    said = dict(line.split(maxsplit=1) for line in outcome.lines)
    assert list(said) == ["mtrain", "python", "torch", "device", "precision", "kernels"]
    assert said["kernels"] == native.describe()
    assert said["mtrain"] == mtrain.__version__
    assert said["torch"] == torch.__version__
    assert said["device"].startswith("cuda" if torch.cuda.is_available() else "cpu, ")
    assert re.match(r"(bfloat16|float32) in training, float32 in translation", said["precision"])


@pytest.mark.parametrize(("num_threads", "said"), [(1, "1 thread"), (8, "8 threads")])
def test_version_prints_the_number_of_cpu_threads(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, num_threads: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    device = next(line for line in cli("--version").lines if line.startswith("device"))
    assert device.endswith(f", {said}")


def test_version_is_printed_even_if_torch_cannot_be_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mtrain.runtime.device", raising=False)
    monkeypatch.delattr(mtrain.runtime, "device", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = cli("--version")
    assert outcome.code == 2
    assert outcome.lines[0].split() == ["mtrain", mtrain.__version__]
    assert outcome.lines[1].startswith("torch      cannot be loaded: ")


def test_version_is_printed_even_if_the_gpu_cannot_be_used(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> torch.device:
        raise ConfigError("`device` is 'cuda', but this GPU cannot be used.")

    monkeypatch.setattr(mtrain.runtime.device, "pick_device", refuse)
    outcome = cli("--version")
    assert outcome.code == 2
    assert [line.split()[0] for line in outcome.lines] == ["mtrain", "python", "torch"]
    assert outcome.err == "mtrain: `device` is 'cuda', but this GPU cannot be used.\n"


def test_version_is_printed_even_if_the_kernels_cannot_be_used(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_NATIVE", "avx3")
    native.library.cache_clear()
    outcome = cli("--version")
    native.library.cache_clear()
    assert outcome.code == 2
    said = ["mtrain", "python", "torch", "device", "precision"]
    assert [line.split()[0] for line in outcome.lines] == said
    assert outcome.err.startswith("mtrain: `MTRAIN_NATIVE` must be ")


def test_the_progress_bar_fits_80_columns_and_is_not_coloured(tmp_path: Path) -> None:
    code, text = sent_to_a_terminal("train", write_task(tmp_path))
    parts = [part for part in re.split(r"[\r\n]", text) if BAR.search(part)]
    assert code == 0
    assert parts
    assert max(map(len, parts)) <= 80
    assert not COLOUR.search(text)


def test_a_dumb_terminal_gets_plain_lines_without_escapes_or_progress_bars(
    trained: RunDir, tmp_path: Path
) -> None:
    path = write_task(tmp_path)
    (tmp_path / "in").write_text("ba ce\n" * 20, encoding="utf-8")
    code, text = sent_to_a_terminal("train", path, term="dumb")
    assert code == 0
    assert re.search(r"^step 12, loss [\d.]+, [\d,]+ tokens/s, lr \S+\r$", text, re.MULTILINE)
    files = [tmp_path / "in", "-o", tmp_path / "out"]
    texts = [text]
    for arguments in (["translate", trained.path, *files], ["check", path]):
        texts.append(sent_to_a_terminal(*arguments, term="dumb").text)
    for text in texts:
        assert "\x1b" not in text
        assert "\r" not in text.replace("\r\n", "\n")
        assert not BAR.search(text)


@pytest.mark.parametrize("no_color", [True, False])
@pytest.mark.parametrize("arguments", [["--help"], ["frob"], ["train", "absent.yaml"]])
def test_help_and_errors_are_not_coloured_with_or_without_no_color(
    arguments: list[str], no_color: bool
) -> None:
    code, text = sent_to_a_terminal(*arguments, no_color=no_color)
    assert code in (0, 2)
    assert text
    assert not COLOUR.search(text)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_completion_script_and_completes_commands(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    outcome = cli("--show-completion")
    assert outcome.code == 0
    assert "_MTRAIN_COMPLETE" in outcome.out.decode()
    monkeypatch.setenv("_MTRAIN_COMPLETE", f"complete_{shell}")
    asked = {"COMP_WORDS": "mtrain tr", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "mtrain tr"}
    for name, value in (asked | {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}).items():
        monkeypatch.setenv(name, value)
    completed = cli("").out.decode()
    assert {"train", "translate"} <= set(re.findall(r"\w+", completed))
    assert "tokenize" not in completed


def test_bash_completes_a_command_with_the_printed_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    start = "import sys; sys.argv[0] = 'mtrain'; from mtrain.cli.main import main; main()"
    command = tmp_path / "mtrain"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{start}" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(mtrain --show-completion)"
        COMP_WORDS=(mtrain tok) COMP_CWORD=1
        _mtrain_completion mtrain
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("tokenize\n", "")


def test_control_characters_in_validation_examples_are_escaped_and_long_lines_cut(
    trained: RunDir,
) -> None:
    lines = ParallelLines(["ba \x1b[31m"], ["ce " * 100])
    valid = ValidationSet(lines, sentencepiece.load(trained.tokenizer_dir), 1000, 500)
    source, reference, translation = valid.examples(["\x1b]0;title\x07"], 1, 0)
    assert source == r"  source       ba \x1b[31m"
    assert reference.endswith("ce c...")
    assert len(reference) == 160
    assert translation == r"  translation  \x1b]0;title\x07"


def test_errors_are_wrapped_between_words_to_80_columns(cli: Cli) -> None:
    for arguments in [("eval", "folder " * 12 + "x"), ("train", "absent/" * 12 + "c.yaml")]:
        said = cli(*arguments).err.strip()
        code, text = sent_to_a_terminal(*arguments)
        rows = text.strip().split("\r\n")
        assert code == 2
        assert " ".join(rows) == said
        assert len(rows) > 1
        assert [row for row in rows if len(row) > 80 and " " in row.strip()] == []


def test_training_messages_are_wrapped_to_80_columns_on_a_terminal_and_not_elsewhere(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path)
    tree["data"]["max_tokens"] = 16  # some pairs are dropped, and the path of their list is printed
    config = write_config(tmp_path / "config.yaml", tree)
    said = cli("train", config, "--run", tmp_path / "one").err.splitlines()
    code, text = sent_to_a_terminal("train", config, "--run", tmp_path / "two")
    rows = re.split(r"[\r\n]+", text)
    assert code == 0
    assert [row for row in rows if len(row) > 80 and " " in row.strip()] == []
    shown = " ".join(rows).replace(str(tmp_path / "two"), str(tmp_path / "one"))
    wide = [line for line in said if len(line) > 80]
    assert {line.partition(":")[0] for line in wide} >= {"dropped", str(tmp_path / "one")}
    words = " ".join(shown.split())  # without the indentation of rows below a label
    assert all(" ".join(line.split()) in words for line in wide)


def test_a_command_in_a_message_is_not_wrapped() -> None:
    command = "`mtrain train " + "x " * 40 + "`"
    master, stream = open_terminal()
    with os.fdopen(master), os.fdopen(stream, "w") as terminal:
        rows = fitted(f"some words before it: {command} and some after it", terminal).split("\n")
    assert rows == ["some words before it:", command, "and some after it"]


def rows_of(text: str) -> list[str]:
    """Return the rows of a text on a terminal of 80 columns."""
    master, stream = open_terminal()
    with os.fdopen(master), os.fdopen(stream, "w") as terminal:
        return fitted(text, terminal).split("\n")


def test_text_without_spaces_is_broken_at_the_last_column_and_indented_past_its_label() -> None:
    label, below = "  translation  ", " " * 15
    assert rows_of(f"{label}{'Der' * 30}") == [label + "Der" * 21 + "De", below + "r" + "Der" * 8]
    chinese = rows_of(f"{label}{'老农夫累了' * 13}")  # each of them is two columns wide
    assert chinese[0] == label + "老农夫累了" * 6 + "老农"
    assert chinese[1].startswith(below + "夫累了")
    assert "".join(row[15:] for row in chinese) == "老农夫累了" * 13


def test_a_long_file_name_is_not_wrapped() -> None:
    name = "folder/" * 20 + "file"
    assert rows_of(f"mtrain: {name}: is there already") == [
        "mtrain:",
        f"{name}:",
        "is there already",
    ]


def test_wrapped_rows_are_indented_past_their_label() -> None:
    assert rows_of("pairs    1,356 for training, dropped 144 (" + "blank-side 2, " * 6 + ")") == [
        "pairs    1,356 for training, dropped 144 (blank-side 2, blank-side 2, blank-side",
        "         2, blank-side 2, blank-side 2, blank-side 2, )",
    ]


def test_combining_marks_take_no_columns() -> None:
    assert rows_of("a\u0323\u0301 " * 40) == ["a\u0323\u0301 " * 39 + "a\u0323\u0301"]


def test_a_terminal_gets_escapes_for_control_characters_of_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a\x1b]0;b\x07\x9b2J\u2028\u202ec\n\u2066\udcff"
    shown = "a\\x1b]0;b\\x07\\x9b2J\\u2028\\u202ec\\n\\u2066\\udcff"
    assert str(ConfigError(name)) == shown
    Stderr().say(name)
    assert capsys.readouterr().err == f"{shown}\n"
