"""Standard streams, output files, warnings and progress bars of the verbs.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from tqdm import tqdm

from mtrain.errors import ConfigError, on_one_line
from mtrain.io import atomic
from mtrain.run.logger import Stderr, is_live

T = TypeVar("T")


def open_closed_streams() -> None:
    """Connect a standard stream that the shell has closed (`>&-`) to /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - stays open
            setattr(sys, name, nowhere)


class _StderrHandler(logging.Handler):
    """Prints the lines that the package logs on stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line and the traceback; a warning begins with the name of the program."""
        prefix = "mtrain: " if record.levelno >= logging.WARNING else ""
        Stderr().say(prefix + record.getMessage())
        if record.exc_info:
            for line in logging.Formatter().formatException(record.exc_info).split("\n"):
                Stderr().say(line)


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Print what the logger `mtrain` receives, and propagate it to no other handler."""
    logger, handler = logging.getLogger("mtrain"), _StderrHandler()
    previous = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = previous


def check_outputs(
    output: Path | None, alignments: Path | None = None, read: Iterable[Path] = ()
) -> None:
    """Refuse outputs that cannot be written, are the same file, or would replace an input."""
    outputs = {"--output": output, "--alignments": alignments}
    replaced = {
        name: os.path.realpath(path)
        for name, path in outputs.items()
        if path is not None and atomic.is_replaced(path)
    }
    if len({*replaced.values()}) < len(replaced):
        raise ConfigError(
            f"`--alignments` must be another file than `--output`, but is {alignments} too."
        )
    inputs = {os.path.realpath(path): path for path in read}
    for name, path in replaced.items():
        if path in inputs:
            raise ConfigError(
                f"`{name}` would overwrite the input {inputs[path]}; choose another file."
            )


def put(lines: Iterable[str], output: Path | None) -> None:
    """Print lines, or write them to a file; unpaired surrogates become escapes."""
    texts = (line.encode(errors="backslashreplace").decode() for line in lines)
    if output is None:
        atomic.print_lines(texts)
    else:
        atomic.write_lines(atomic.resolve_links(output), texts)


def warn(text: str) -> None:
    """Print a warning on stderr, above a progress bar if one is shown."""
    logging.getLogger("mtrain").warning("%s", text)


def reading(total: int | None) -> tqdm[NoReturn]:
    """Return a progress bar of bytes read, to be updated; it is shown on a terminal only."""
    return tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="reading",
        file=sys.stderr,
        disable=not is_live(),
        leave=False,
    )


def with_progress(lines: Iterable[T], output: Path | None) -> Iterable[T]:
    """Show sentences per second on stderr, unless the lines are printed to the same terminal."""
    is_seen = is_live() and not (output is None and sys.stdout.isatty())
    return tqdm(lines, unit=" sentences", smoothing=0.1, disable=not is_seen)


def is_at_terminal() -> bool:
    """Return whether stdin and stderr are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _prompt(language: str) -> str:
    return "".join(char for char in language if char.isprintable())[:20] + "> "


def with_prompt(lines: Iterable[str], language: str) -> Iterable[str]:
    """Put the prompt of a language before each line, unless stdout is a file.

    Control characters are shown as escapes: a model can put any byte into its output.
    """
    if not sys.stdout.isatty():
        return lines
    return (_prompt(language) + on_one_line(line) for line in lines)


def read_typed(language: str) -> Generator[list[str], None, None]:
    """Yield each typed line as a block, and an empty block after it, until Ctrl-D.

    Where stdout is the terminal too, the arrow keys edit the line and bring back those before it.
    Bytes that are not UTF-8 become U+FFFD.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    print(f"One line of {_prompt(language)[:-2]} at a time; Ctrl-D ends.", file=sys.stderr)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is there
    try:
        while True:
            yield [_input(_prompt(language))]
            yield []  # a flush: the line is translated before the next prompt
    except EOFError:
        print(file=sys.stderr)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise


def _input(prompt: str) -> str:
    """Return a line typed after `prompt`, which is shown on stderr where stdout is a file.

    Raises:
        EOFError: at the end of the input.
    """
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
