"""Load many damaged tokenizers and use those that can be loaded.

    python tests/hostile_tokenizers.py MODEL COUNT

Ends with 0 if each was refused or worked; the seed of each is on stderr before it is
tried, so that the last one is there if the process dies.
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from mtrain.errors import RunError
from mtrain.tokenizer import sentencepiece

LINES = ["ba ce di", "\u4f60\0\u2581 z", "", "<s> <0x0A>"]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Flip, delete, insert and cut here and there."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        start = rng.randrange(len(data)) if rng.random() < 0.8 else max(0, len(data) - 300)
        stop = start + rng.randrange(1, 30)
        kind = rng.choice(["flip", "flip", "delete", "insert", "set", "cut"])
        if kind == "flip":
            data[start] ^= 1 << rng.randrange(8)
        elif kind == "delete":
            del data[start:stop]
        elif kind == "insert":
            data[start:start] = rng.randbytes(stop - start)
        elif kind == "set":
            data[start] = rng.choice([0, 127, 128, 255])
        else:
            del data[start:]
        data = data or bytearray(b"x")
    return bytes(data)


def use(directory: Path) -> None:
    """Do with a tokenizer all that mtrain does."""
    found = sentencepiece.load(directory)
    rows = found.encode_src(LINES)
    assert all(0 <= piece < len(found.src) for row in rows for piece in row)
    pieces = list(range(len(found.tgt)))
    lines = found.tgt.decode([*rows, pieces])
    assert len(lines) == len(rows) + 1 and not any("\n" in line for line in lines)
    found.tgt.pieces_of(pieces)
    found.src.sample(LINES, 0.1, 1)
    found.src.unknown(LINES[1])


def main(model: Path, count: int) -> None:
    raw = model.read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(count):
            print(seed, file=sys.stderr)
            (Path(directory) / "shared.model").write_bytes(damaged(raw, random.Random(seed)))
            with suppress(RunError):
                use(Path(directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
