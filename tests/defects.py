"""Defects planted in clean text at known lines, and how many of them an audit finds."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tasks import Pair, Tree, write_config

Planter = Callable[[list[Pair], int, random.Random], Pair]


def inside(line: str, text: str) -> str:
    """Put `text` between two words."""
    first, space, rest = line.partition(" ")
    return first + text + space + rest


def mojibake(line: str) -> str:
    """Read the UTF-8 of a line with an umlaut as if it were Windows-1252."""
    return inside(line, " für").encode("utf-8").decode("cp1252")


def cyrillic(line: str) -> str:
    return "".join(chr(0x430 + ord(c) % 32) if c.isalpha() else c for c in line)


def shaken(line: str) -> str:
    """Change case, punctuation and spaces, but no word."""
    return f"  {line.upper().rstrip('.?')} - !" if "ß" not in line else f" {line.rstrip('.?')}, !"


# What is planted, and the list in which it must be found.
PLANTERS: dict[str, Planter] = {
    "not-utf8": lambda pairs, n, rng: pairs[n]._replace(tgt=inside(pairs[n].tgt, " \udce4")),
    "blank-side": lambda pairs, n, rng: pairs[n]._replace(tgt=rng.choice(["", " \u3000"])),
    "blank-pair": lambda pairs, n, rng: Pair(" ", ""),
    "copied": lambda pairs, n, rng: pairs[n]._replace(tgt=pairs[n].src),
    "repeated-pair": lambda pairs, n, rng: pairs[n // 2],
    "repeated-source": lambda pairs, n, rng: Pair(pairs[n // 2].src, f"Ja, {pairs[n // 2].tgt}"),
    "length-ratio": lambda pairs, n, rng: pairs[n]._replace(
        tgt=" ".join(pair.tgt for pair in rng.sample(pairs, 8))
    ),
    "long-line": lambda pairs, n, rng: Pair(
        " ".join(pair.src for pair in pairs[n : n + 60]),
        " ".join(pair.tgt for pair in pairs[n : n + 60]),
    ),
    "strange-script": lambda pairs, n, rng: pairs[n]._replace(src=cyrillic(pairs[n].src)),
    "swapped": lambda pairs, n, rng: Pair(pairs[n].tgt, pairs[n].src),
    "no-words": lambda pairs, n, rng: Pair(f"12.05.{n} 14:30 (+49)", f'<a href="x">{n} == 1,5</a>'),
    "mojibake": lambda pairs, n, rng: pairs[n]._replace(tgt=mojibake(pairs[n].tgt)),
    "line-break": lambda pairs, n, rng: pairs[n]._replace(
        src=inside(pairs[n].src, rng.choice("\u2028\u2029\x85\x0b\x0c\r"))
    ),
    "control": lambda pairs, n, rng: pairs[n]._replace(
        tgt=inside(pairs[n].tgt, rng.choice("\x00\x07\x1b\x7f"))
    ),
    "invisible": lambda pairs, n, rng: pairs[n]._replace(
        src=inside(pairs[n].src, rng.choice("\u200b\u00ad\u202e\ufeff"))
    ),
    "not-nfc": lambda pairs, n, rng: pairs[n]._replace(
        tgt=unicodedata.normalize("NFD", inside(pairs[n].tgt, " schön"))
    ),
    "tab": lambda pairs, n, rng: pairs[n]._replace(src=inside(pairs[n].src, "\t")),
}
SHIFT_PAIRS = 150


@dataclass
class Planted:
    """A corpus with defects, and the lines, from 1, that each list must hold."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    lines: dict[str, set[int]] = field(default_factory=dict)
    moved: range = range(0)  # the lines of the shift, whose pairs may have any other fault


def plant(pairs: list[Pair], held_out: list[Pair], seed: int, times: int = 5) -> Planted:
    """Plant each defect at as many lines of the training text, and leaks in the held-out text."""
    rng = random.Random(seed)
    half = len(held_out) // 2
    planted = Planted(list(pairs), held_out[:half], held_out[half:])
    room = len(pairs) - 4 * SHIFT_PAIRS  # the shift has the end for itself
    chosen = iter(rng.sample(range(100, room), times * (len(PLANTERS) + 4)))
    for name, planter in PLANTERS.items():
        places = [next(chosen) for _ in range(times)]
        for place in places:
            planted.train[place] = planter(pairs, place, rng)
        planted.lines[f"train.{name}"] = {place + 1 for place in places}
    _plant_leaks(planted, [next(chosen) for _ in range(4 * times)], times)
    _plant_shift(planted, rng.randrange(room + 100, room + 2 * SHIFT_PAIRS))
    return planted


def _plant_leaks(planted: Planted, places: list[int], times: int) -> None:
    for kind, offset in (("pair", 0), ("source", times), ("target", 2 * times)):
        for number, place in enumerate(places[offset : offset + times]):
            leaked, own = planted.test[offset + number], planted.train[place]
            src = shaken(leaked.src) if kind != "target" else own.src
            tgt = shaken(leaked.tgt) if kind != "source" else own.tgt
            planted.train[place] = Pair(src, tgt)
        name = f"tests.held_out.{kind}-in-train"
        planted.lines[name] = {offset + number + 1 for number in range(times)}
    for number, place in enumerate(places[3 * times :]):
        planted.train[place] = planted.valid[number]
    planted.lines["train.held-out-pair"] = {place + 1 for place in places[3 * times :]}
    planted.lines["valid.pair-in-train"] = {number + 1 for number in range(times)}
    planted.lines["train.held-out"] = {place + 1 for place in places[: 3 * times]}
    planted.valid[-2] = planted.valid[-2]._replace(src=planted.test[-2].src)
    planted.lines["valid.held-out"] = {len(planted.valid) - 1}
    planted.lines["tests.held_out.source-in-valid"] = {len(planted.test) - 1}
    planted.valid[-1] = planted.test[-1]
    planted.lines["valid.held-out-pair"] = {len(planted.valid)}
    planted.lines["tests.held_out.pair-in-valid"] = {len(planted.test)}


def _plant_shift(planted: Planted, first: int) -> None:
    """Lose a target line, and a source line further on."""
    src = [pair.src for pair in planted.train]
    tgt = [pair.tgt for pair in planted.train]
    del tgt[first]
    del src[first + SHIFT_PAIRS]
    planted.train = [Pair(*sides) for sides in zip(src, tgt, strict=True)]
    planted.lines["train.shift"] = {first + 1}
    planted.moved = range(first + 1, first + SHIFT_PAIRS + 2)


def write_pairs(directory: Path, name: str, pairs: list[Pair]) -> dict[str, list[str]]:
    """Write a corpus as bytes; a lone surrogate is a byte that is not UTF-8."""
    named = {}
    for side in ("src", "tgt"):
        raw = "".join(f"{getattr(pair, side)}\n" for pair in pairs)
        path = directory / f"{name}.{side}"
        path.write_bytes(raw.encode("utf-8", errors="surrogateescape"))
        named[side] = [str(path)]
    return named


def write_planted(directory: Path, planted: Planted) -> Path:
    """Write the corpora and a config; return the path of the config."""
    directory.mkdir(parents=True, exist_ok=True)
    tree: Tree = {
        "run_dir": str(directory / "run"),
        "data": {
            "src_lang": "en",
            "tgt_lang": "de",
            "train": write_pairs(directory, "train", planted.train),
            "valid": write_pairs(directory, "valid", planted.valid),
            "tests": {"held_out": write_pairs(directory, "test", planted.test)},
        },
    }
    return write_config(directory / "config.yaml", tree)


def found_lines(check_dir: Path) -> dict[str, list[int]]:
    """Return the lines that each list of an audit holds."""
    return {
        path.name.removesuffix(".jsonl"): [
            json.loads(line)["line"] for line in path.read_text("utf-8").split("\n")[:-1]
        ]
        for path in sorted(check_dir.glob("*.jsonl"))
    }


@dataclass
class Tally:
    """What was planted and found in one list; a shift may be some lines off."""

    planted: int = 0
    found: int = 0
    right: int = 0
    lines_off: list[int] = field(default_factory=list)

    @property
    def precision(self) -> float:
        return self.right / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        return self.right / self.planted if self.planted else 1.0


MOST_LINES_OFF = 10


def without_found(pairs: list[Pair], lines: dict[str, list[int]], corpus: str) -> list[Pair]:
    """Leave out the pairs of a corpus that an audit has found something in."""
    found = {line for name, own in lines.items() for line in own if name.startswith(f"{corpus}.")}
    return [pair for number, pair in enumerate(pairs, start=1) if number not in found]


def tally(planted: Planted, found: dict[str, list[int]], tallies: dict[str, Tally]) -> None:
    """Add the outcome of one audit, the lines of each list, to the tallies."""
    for name in planted.lines.keys() | found.keys():
        truth, seen = planted.lines.get(name, set()), found.get(name, [])
        if name.startswith("train.") and name != "train.shift":
            seen = [line for line in seen if line not in planted.moved]
        own = tallies.setdefault(name, Tally())
        own.planted += len(truth)
        own.found += len(seen)
        if name.endswith("shift"):
            off = [line - min(truth) for line in seen if abs(line - min(truth)) <= MOST_LINES_OFF]
            own.right += len(off)
            own.lines_off += off
        else:
            own.right += len(truth & set(seen))
