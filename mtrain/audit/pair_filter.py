"""Which training pairs are dropped, and why: by the rules of the audit, and by no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

import numpy as np

from mtrain.audit import rules
from mtrain.audit.features import Feature, Ints, SideClassifier
from mtrain.audit.rules import RULES, CorpusProfile, PairBlock, Rule
from mtrain.audit.scan import Scan
from mtrain.config.sections import DataConfig

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


def scan_corpora(data: DataConfig, directory: Path) -> list[Scan]:
    """Read all corpora once, strictly: the held-out ones first, the training text last.

    Only the features that the rules of `data.clean` read are computed.

    Args:
        data: the corpora.
        directory: where the records of the pairs go.

    Raises:
        DataError: as a strict `Reader`.
    """
    features = reduce(or_, (rule.features for rule in rules_of(data.clean)), Feature.NONE)
    classifier, held_out = SideClassifier(), []
    corpora = {f"tests.{name}": test for name, test in data.tests.items()} | {"valid": data.valid}
    for name, corpus in corpora.items():
        held_out.append(Scan(name, corpus, directory, is_strict=True))
        held_out[-1].read(classifier, [], True, features=features)
    train = Scan("train", data.train, directory, is_strict=True)
    train.read(classifier, held_out, False, features=features)
    return [*held_out, train]


def reopen_scan(data: DataConfig, directory: Path, num_pairs: int) -> Scan:
    """Return the scan of the training text whose records `scan_corpora` has left in a folder."""
    train = Scan("train", data.train, directory)
    train.resume(num_pairs)
    return train
