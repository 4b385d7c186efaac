"""Lines typed at a terminal, each translated at once."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator


def is_at_terminal() -> bool:
    """Tell whether stdin and stderr are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _prompt(language: str) -> str:
    return "".join(char for char in language if char.isprintable())[:20] + "> "


def with_prompt(lines: Iterable[str], language: str) -> Iterable[str]:
    """Put the prompt of a language before each line, unless stdout is a file."""
    return (_prompt(language) + line for line in lines) if sys.stdout.isatty() else lines


def read_typed(language: str) -> Iterator[list[str]]:
    """Yield each line that is typed, as a block of its own, until Ctrl-D.

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
