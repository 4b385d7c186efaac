"""Which training pairs are left out, and why: by the rules of the audit, and by no others."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mtrain.audit import rules
from mtrain.audit.features import Ints
from mtrain.audit.rules import RULES, PairBlock, Rule, UsualRatios
from mtrain.audit.scan import Scan
from mtrain.audit.side_classifier import Languages
from mtrain.config.sections import DataConfig
from mtrain.corpus.formats import tell_nobody
from mtrain.io.atomic import write_lines

Reasons = list[str | None]


def rules_of(clean: Iterable[str]) -> list[Rule]:
    """Return the rules that leave pairs out, in the order in which they are asked.

    Args:
        clean: `data.clean`; what is over `data.max_tokens` is left out in any case.
    """
    names = {*clean, "max-tokens"}
    if "blank-side" in names:
        names.add("blank-pair")
    return [rule for rule in RULES if rule.name in names]


def reasons(chosen: Sequence[Rule], pairs: PairBlock, usual: UsualRatios) -> Reasons:
    """Return for each pair the first rule that finds it; None if it may stay."""
    found: Reasons = [None] * len(pairs.src)
    for rule in reversed(chosen):
        for place in np.flatnonzero(rule.judge(pairs, usual)).tolist():
            found[place] = rule.name
    return found


class PairFilter:
    """Says of training pairs, in any order, why they are left out."""

    def __init__(self, data: DataConfig, train: Scan) -> None:
        self._rules, self._train = rules_of(data.clean), train
        self._usual = rules.learn(train.windows(), data.max_tokens)
        if any(rule.refers for rule in self._rules):
            train.find_repeats()

    def reasons(self, first: int, count: int) -> Reasons:
        """Judge `count` pairs from number `first` on by their text alone."""
        return reasons(self._rules, self._train.pairs(first, count), self._usual)

    def reasons_of_encoded(self, first: int, src_tokens: Ints, tgt_tokens: Ints) -> Reasons:
        """Judge pairs from number `first` on, given how many tokens, eos included, they have."""
        pairs = self._train.pairs(first, len(src_tokens))
        pairs.src["tokens"], pairs.tgt["tokens"] = src_tokens, tgt_tokens
        return reasons(self._rules, pairs, self._usual)


@contextmanager
def pair_filter_for(data: DataConfig, directory: Path) -> Iterator[PairFilter]:
    """Read the corpora and give a judge of the training pairs; it keeps records on disk meanwhile.

    Args:
        data: the corpora; of the training text every line must be UTF-8.
        directory: where the records are kept. Those that an earlier call has left there, because
            something ended it, are of the same corpora, and are not made again.
    """
    records = directory / ".records"
    read = records / "read.json"
    if (num_pairs := _num_read(read)) is not None:
        train = Scan("train", data.train, records, None)
        train.take_over(num_pairs)
    else:
        shutil.rmtree(records, ignore_errors=True)
        records.mkdir(parents=True)
        train = _read(data, records)
        write_lines(read, [str(train.intake.num_pairs)])
    yield PairFilter(data, train)
    shutil.rmtree(records)


def _num_read(path: Path) -> int | None:
    """Return of how many training pairs there are records; None if not of all."""
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _read(data: DataConfig, records: Path) -> Scan:
    """Read all corpora, and make the records of the training pairs."""
    held_out = [Scan(f"tests.{name}", own, records, None) for name, own in data.tests.items()]
    held_out.append(Scan("valid", data.valid, records, None))
    languages, train = Languages(), Scan("train", data.train, records, None)
    for survey in held_out:
        survey.read(languages, [], True, tell_nobody)
    train.read(languages, held_out, False, tell_nobody)
    return train
