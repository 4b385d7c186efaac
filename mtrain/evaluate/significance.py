"""Is the difference of two translations more than chance? By sacreBLEU's paired tests.

Knows lines, no runs. Clark et al. 2011 and Riezler and Maxwell 2005 describe approximate
randomisation, Koehn 2004 the paired bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from mtrain.evaluate.metrics import Scorer, ScoringOptions


class SystemOutput(NamedTuple):
    """The translations of a test set by one system."""

    name: str
    hypotheses: list[str]


@dataclass(frozen=True)
class SystemComparison:
    """A system beside the baseline, by one metric.

    Attributes:
        metric: its name.
        baseline: the first system.
        system: the other one.
        difference: the system's score less the baseline's.
        p_bootstrap: how likely such a difference is by chance, by the paired bootstrap.
        p_randomization: the same, by approximate randomisation.
        bootstrap_signature: says how the first was computed.
        randomization_signature: says how the second was computed.
    """

    metric: str
    baseline: str
    system: str
    difference: float
    p_bootstrap: float
    p_randomization: float
    bootstrap_signature: str
    randomization_signature: str


def compare(
    outputs: Sequence[SystemOutput],
    references: Sequence[str],
    options: ScoringOptions,
    sources: Sequence[str] = (),
) -> list[SystemComparison]:
    """Compare each system with the first one, by every metric.

    Args:
        outputs: the baseline, and at least one other; their names differ.
        references: one for each line.
        options: how is scored; `num_resamples` must not be 0.
        sources: one for each line; only COMET reads them.
    """
    scorer = Scorer(references, options, sources)  # one that has made no intervals yet
    found = []
    for metric in scorer.metrics:
        by_bootstrap = _test(outputs, metric, "bs", options.num_resamples)
        by_randomization = _test(outputs, metric, "ar", 0)
        baseline = by_bootstrap.results[0].score
        for output, one, other in zip(
            outputs[1:], by_bootstrap.results[1:], by_randomization.results[1:], strict=True
        ):
            difference = float(one.score - baseline)
            found.append(
                SystemComparison(
                    by_bootstrap.metric,
                    outputs[0].name,
                    output.name,
                    difference,
                    _p_value(one, difference),
                    _p_value(other, difference),
                    by_bootstrap.signature,
                    by_randomization.signature,
                )
            )
    return found


def _p_value(result: Result, difference: float) -> float:
    """Return sacreBLEU's number, but 1 if there is no difference.

    It counts the draws that differ more, of which equal outputs have none, and would call them
    different.
    """
    assert result.p_value is not None
    return float(result.p_value) if difference else 1.0


class _Tested(NamedTuple):
    """What sacreBLEU says of all systems by one metric."""

    metric: str
    results: list[Any]
    signature: str


def _test(outputs: Sequence[SystemOutput], metric: Metric, kind: str, num_samples: int) -> _Tested:
    """Run a test: bs is the paired bootstrap, ar randomisation; 0 is sacreBLEU's number."""
    systems: list[tuple[str, Sequence[str]]] = [(own.name, own.hypotheses) for own in outputs]
    test = PairedTest(systems, {"": metric}, None, test_type=kind, n_samples=num_samples)
    signatures, results = test()
    (name,) = signatures
    return _Tested(name, results[name], str(signatures[name]))
