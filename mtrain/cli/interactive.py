"""Lines that somebody types at a terminal, one at a time. Knows nothing of what becomes of them."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator


def is_asked() -> bool:
    """Tell whether somebody sits at a terminal, and stdin is that terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def mark(language: str) -> str:
    """Return what stands before a line in this language."""
    return "".join(char for char in language if char.isprintable())[:20] + "> "


def answers(lines: Iterable[str], language: str) -> Iterable[str]:
    """Return lines as they are shown to somebody: behind a mark, unless stdout is a file."""
    return (mark(language) + line for line in lines) if sys.stdout.isatty() else lines


def ask(language: str) -> Iterator[list[str]]:
    """Yield each line that is typed, as a block of its own, until Ctrl-D.

    Where stdout is the terminal too, the arrow keys edit the line and bring back those before it.
    Bytes that are not UTF-8 become U+FFFD.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    print(f"One line of {mark(language)[:-2]} at a time; Ctrl-D ends.", file=sys.stderr)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is there
    try:
        while True:
            yield [_line(mark(language))]
    except EOFError:
        print(file=sys.stderr)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise


def _line(mark: str) -> str:
    """Return what is typed after `mark`, which never goes into a file.

    Raises:
        EOFError: at the end of the input.
    """
    if sys.stdout.isatty():
        return input(mark)
    print(mark, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
