"""`mtrain translate` at a terminal: typed lines are translated; Ctrl-D and Ctrl-C end it."""

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import open_terminal
from fork_server import MtrainProcess

from mtrain.cli.console import with_prompt
from mtrain.run.run_dir import RunDir

ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class Terminal:
    """`mtrain ARGUMENTS` run interactively in a terminal 80 columns wide."""

    def __init__(self, *arguments: str | Path, term: str, stdout: int | None = None) -> None:
        self._master, terminal = open_terminal()
        self.process = MtrainProcess(
            *arguments,
            stdin=terminal,
            stdout=terminal if stdout is None else stdout,
            stderr=terminal,
            env=os.environ | {"TERM": term},
            has_terminal=True,
        )
        os.close(terminal)
        self.raw = b""

    @property
    def shown(self) -> str:
        return ESCAPES.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n")

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 90
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            self._read()

    def wait_until_it_waits(self) -> None:
        """Wait until the process sleeps: readline misses signals while it echoes what was typed."""
        state, deadline = Path(f"/proc/{self.process.pid}/stat"), time.monotonic() + 90
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.01)

    def close(self) -> int:
        deadline = time.monotonic() + 90
        while self._read():
            assert time.monotonic() < deadline, self.shown
        os.close(self._master)
        return self.process.wait(60)

    def _read(self) -> bool:
        """Read output for up to 5 seconds; return whether more can follow."""
        if not select.select([self._master], [], [], 5)[0]:
            return True
        with contextlib.suppress(OSError):  # on Linux, the other end has closed
            part = os.read(self._master, 4096)
            self.raw += part
            return bool(part)
        return False


@pytest.fixture
def opened(trained: RunDir) -> Iterator[list[Terminal]]:
    """Terminals whose processes are killed after a test, even if it fails."""
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_each_typed_line_is_translated_until_ctrl_d(
    trained: RunDir, opened: list[Terminal], term: str
) -> None:
    terminal = Terminal("translate", trained.path, "--beam", "1", term=term)
    opened.append(terminal)
    terminal.wait_for("aa> ")
    terminal.type(b"ba ce di\n")
    terminal.wait_for("bb> ba ce di\naa> ")
    terminal.type(b"\n")
    terminal.wait_for("bb> \naa> ")
    if term == "xterm" and find_spec("readline") is not None:
        terminal.type(b"\x1b[A fo\n")  # recall the previous line and append to it
        terminal.wait_for("bb> ba ce di fo\naa> ")
    terminal.type(b"\x04")
    assert terminal.close() == 0
    assert terminal.shown.startswith("One line of aa at a time; Ctrl-D ends.\naa> ba ce di\nbb> ")
    assert terminal.shown.endswith("\naa> \n")
    if term == "dumb":
        assert b"\x1b" not in terminal.raw


def test_ctrl_c_at_the_prompt_exits_with_130_and_prints_nothing_more(
    trained: RunDir, opened: list[Terminal]
) -> None:
    terminal = Terminal("translate", trained.path, "--beam", "1", term="xterm")
    opened.append(terminal)
    terminal.wait_for("aa> ")
    terminal.type(b"ba")
    terminal.wait_for("aa> ba")
    terminal.wait_until_it_waits()
    terminal.type(b"\x03")
    assert terminal.close() == 130
    assert re.fullmatch(r"One line of [^\n]*\naa> ba(\^C)?\n+", terminal.shown)


def test_stdout_to_a_file_holds_only_translations_and_no_prompts(
    trained: RunDir, opened: list[Terminal], tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        arguments = ["translate", trained.path, "--beam", "1"]
        terminal = Terminal(*arguments, term="xterm", stdout=out.fileno())
        opened.append(terminal)
        terminal.wait_for("aa> ")
        terminal.type(b"ba ce\n")
        terminal.wait_for("aa> ba ce\naa> ")
        terminal.type(b"fo \xff\n")  # invalid UTF-8 is translated, too
        terminal.type(b"\x04")
        assert terminal.close() == 0
    first, second, end = (tmp_path / "out").read_bytes().split(b"\n")
    assert (first, second[:2], end) == (b"ba ce", b"fo", b"")


def test_control_characters_of_a_translation_are_shown_as_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert [*with_prompt(["\x1b]0;a\x07 b\u3000\xa0"], "de")] == ["de> \\x1b]0;a\\x07 b\u3000\xa0"]
