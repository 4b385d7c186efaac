"""Which training pairs are dropped, and why: by the rules of the audit, and by no others."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path

import numpy as np

from mtrain.audit import rules
from mtrain.audit.features import Feature, Ints, SideClassifier
from mtrain.audit.rules import RULES, CorpusProfile, PairBlock, Rule
from mtrain.audit.scan import Scan
from mtrain.config.sections import DataConfig
from mtrain.corpus.formats import tell_nobody
from mtrain.io.atomic import write_lines

Reasons = list[str | None]


def rules_of(clean: Iterable[str]) -> list[Rule]:
    """Return the rules that drop pairs, in the order in which they apply.

    Args:
        clean: `data.clean`; what is over `data.max_tokens` is dropped in any case.
    """
    names = {*clean, "max-tokens"}
    if "blank-side" in names:
        names.add("blank-pair")
    return [rule for rule in RULES if rule.name in names]


def reasons(chosen: Sequence[Rule], pairs: PairBlock, profile: CorpusProfile) -> Reasons:
    """Return for each pair the first rule that drops it; None if it is kept."""
    names: Reasons = [None] * len(pairs.src)
    for rule in reversed(chosen):
        for row in np.flatnonzero(rule.judge(pairs, profile)).tolist():
            names[row] = rule.name
    return names


class PairFilter:
    """Returns for training pairs, in any order, why they are dropped."""

    def __init__(self, data: DataConfig, train: Scan) -> None:
        self._rules, self._train = rules_of(data.clean), train
        self._profile = rules.learn(train.records.windows(), data.max_tokens)
        if any(rule.refers for rule in self._rules):
            train.find_repeats()

    def reasons(self, first: int, count: int) -> Reasons:
        """Judge `count` pairs from number `first` on by their text alone."""
        return reasons(self._rules, self._train.pairs(first, count), self._profile)

    def reasons_of_encoded(self, first: int, src_tokens: Ints, tgt_tokens: Ints) -> Reasons:
        """Judge pairs from number `first` on, given their numbers of tokens, eos included."""
        pairs = self._train.pairs(first, len(src_tokens))
        pairs.src["tokens"], pairs.tgt["tokens"] = src_tokens, tgt_tokens
        return reasons(self._rules, pairs, self._profile)


@contextmanager
def pair_filter_for(data: DataConfig, directory: Path) -> Iterator[PairFilter]:
    """Read the corpora and give a filter of the training pairs; records are on disk meanwhile.

    Only the features that the rules of `data.clean` read are computed.

    Args:
        data: the corpora; every line of the training text must be UTF-8.
        directory: of the records. Those that an interrupted call has left there are of the same
            settings and corpora, and are used.
    """
    records_dir = directory / ".records"
    done_path = records_dir / "read.json"
    try:
        num_pairs = int(done_path.read_text("utf-8"))
    except (OSError, ValueError):
        shutil.rmtree(records_dir, ignore_errors=True)
        records_dir.mkdir(parents=True)
        train = _read(data, records_dir)
        write_lines(done_path, [str(train.reader.num_pairs)])
    else:
        train = Scan("train", data.train, records_dir, None)
        train.resume(num_pairs)
    yield PairFilter(data, train)
    shutil.rmtree(records_dir)


def _read(data: DataConfig, records_dir: Path) -> Scan:
    """Read all corpora, and write the records of the training pairs."""
    features = reduce(or_, (rule.features for rule in rules_of(data.clean)), Feature.NONE)
    classifier, held_out = SideClassifier(), []
    corpora = {f"tests.{name}": test for name, test in data.tests.items()} | {"valid": data.valid}
    for name, corpus in corpora.items():
        held_out.append(Scan(name, corpus, records_dir, None))
        held_out[-1].read(classifier, [], True, tell_nobody, features)
    train = Scan("train", data.train, records_dir, None)
    train.read(classifier, held_out, False, tell_nobody, features)
    return train
