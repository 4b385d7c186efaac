"""What the hostile tests share: how many cases, the bounds on each, and what an error must be.

`MTRAIN_FUZZ` multiplies the cases, and has them drawn anew each time.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from conftest import Outcome
from hypothesis import settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("MTRAIN_FUZZ", "1"))
MAX_SECONDS = 10  # of the processor; of a clock on the wall, many more
MAX_BYTES = 2 << 30  # of address space that a case may add
tried: Counter[str] = Counter()  # cases, by test


def cases(number: int) -> settings:
    """How many cases a test tries by default."""
    return settings(max_examples=number * TIMES)


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Count a case, and stop it if it takes too much time or memory."""
    tried[name] += 1
    for number in (signal.SIGVTALRM, signal.SIGALRM):
        signal.signal(number, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    signal.alarm(60 * MAX_SECONDS)
    limit, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.alarm(0)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"a case takes more than {MAX_SECONDS} s")


def assert_one_line(error: object) -> None:
    """Hold what is said of an error to be one line."""
    assert is_one_line(str(error)), repr(error)


def is_one_line(text: str) -> bool:
    """Tell whether a text ends no line, moves no cursor, and can be written as UTF-8."""
    return text != "" and not {"Cc", "Zl", "Zp", "Cs"} & set(map(unicodedata.category, text))


def assert_refused(outcome: Outcome) -> bool:
    """Hold a command to have ended with an error of one line, after warnings at most."""
    *warnings, last = outcome.err.removesuffix("\n").split("\n")
    assert outcome.code == 2 and last.startswith("mtrain: "), outcome
    assert all(is_one_line(line) for line in (*warnings, last)), outcome
    assert outcome.err.endswith("\n") and "Traceback" not in outcome.err
    return True


def leftovers(directory: Path) -> list[str]:
    """Names of files and folders that a save left behind half-written."""
    return [str(path) for path in directory.rglob("*.tmp")]


LINE_ENDS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r\r"]
ODD = ["\0", "\ufeff", "\ufffe", "\x1b[2J", "\u202e", "\u2581", "\u2581\u2581", "<s>", "</s>"]
ODD += ["<unk>", "<pad>", "<0x0A>", "\u200b", "e\u0301" * 9, "\U0010ffff", "\ud7ff", "\t", " "]
WORDS = ["ba", "ce", "di", "\u00e9", "\u4f60\u597d", "\U0001f600", "a" * 90, "." * 50, "ba " * 40]
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\n")
texts = st.lists(  # of a line, without its end
    st.one_of(st.sampled_from(LINE_ENDS), st.sampled_from(ODD), st.sampled_from(WORDS), characters),
    max_size=12,
).map("".join)
BAD_BYTES = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xef\xbb\xbf"]
raw_lines = st.one_of(  # the bytes of a line, without its end
    texts.map(str.encode),
    st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")),
    st.tuples(texts, st.sampled_from(BAD_BYTES), texts).map(
        lambda parts: parts[0].encode() + parts[1] + parts[2].encode()
    ),
)
