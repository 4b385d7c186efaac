"""Is the difference of two systems more than chance? By sacreBLEU's paired tests.

Approximate randomisation: Clark et al. 2011, Riezler and Maxwell 2005. Paired bootstrap: Koehn
2004. Knows lines, no runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from mtrain.evaluate.comet import NUM_TRIALS, paired_p_values
from mtrain.evaluate.metrics import Scorer, SystemOutput


@dataclass(frozen=True)
class SystemComparison:
    """A system beside the baseline, by one metric.

    Attributes:
        metric: its name.
        baseline: the first system.
        system: the other one.
        difference: the system's score less the baseline's.
        p_bootstrap: the p-value of the paired bootstrap.
        p_randomization: the p-value of approximate randomisation.
        bootstrap_signature: sacreBLEU's, of the first.
        randomization_signature: sacreBLEU's, of the second.
    """

    metric: str
    baseline: str
    system: str
    difference: float
    p_bootstrap: float
    p_randomization: float
    bootstrap_signature: str
    randomization_signature: str


def compare(scorer: Scorer, outputs: Sequence[SystemOutput]) -> list[SystemComparison]:
    """Compare each system with the first one, by every metric of `scorer`.

    Equal scores have p = 1: sacreBLEU counts the draws that differ more, of which equal outputs
    have none, and would call them different.

    Args:
        scorer: of the test set; its `num_resamples` must not be 0.
        outputs: the baseline, and at least one other; their names differ.
    """
    options, comparisons = scorer.options, []
    baseline, *others = outputs
    for metric in scorer.metrics:
        metric.n_bootstrap = metric.seed = None  # else an interval stays in the signatures
        name, bs_signature, bs_results = _paired_test(outputs, metric, "bs", options.num_resamples)
        _, ar_signature, ar_results = _paired_test(outputs, metric, "ar", NUM_TRIALS)
        for output, by_bs, by_ar in zip(others, bs_results[1:], ar_results[1:], strict=True):
            difference = float(by_bs.score - bs_results[0].score)
            p_values = (float(by_bs.p_value or 0.0), float(by_ar.p_value or 0.0))
            signatures = (bs_signature, ar_signature)
            comparisons.append(
                _comparison(name, baseline, output, difference, p_values, signatures)
            )
    if options.comet is not None:
        signatures = (
            options.comet.signature("bs", options.num_resamples),
            options.comet.signature("ar", NUM_TRIALS),
        )
        values = scorer.comet_values(baseline.hypotheses)
        for output in others:
            other = scorer.comet_values(output.hypotheses)
            difference = float(other.mean() - values.mean())
            p_values = paired_p_values(values, other, options.num_resamples)
            comparisons.append(
                _comparison("COMET", baseline, output, difference, p_values, signatures)
            )
    return comparisons


def _comparison(
    metric: str,
    baseline: SystemOutput,
    system: SystemOutput,
    difference: float,
    p_values: tuple[float, float],
    signatures: tuple[str, str],
) -> SystemComparison:
    if not difference:
        p_values = (1.0, 1.0)
    return SystemComparison(metric, baseline.name, system.name, difference, *p_values, *signatures)


def _paired_test(
    outputs: Sequence[SystemOutput], metric: Metric, kind: str, num_samples: int
) -> tuple[str, str, list[Any]]:
    """Return the metric's name, the test's signature and a result for each system.

    Args:
        outputs: the systems, the baseline first.
        metric: with its references.
        kind: bs is the paired bootstrap, ar approximate randomisation.
        num_samples: resamples or trials.
    """
    systems: list[tuple[str, Sequence[str]]] = [(*output,) for output in outputs]
    test = PairedTest(systems, {"": metric}, None, test_type=kind, n_samples=num_samples)
    signatures, results = test()
    (name,) = signatures
    return name, str(signatures[name]), list(results[name])
