"""Test whether systems differ by more than chance, by sacreBLEU's paired tests.

Approximate randomisation: Clark et al. 2011, Riezler and Maxwell 2005. Paired bootstrap: Koehn
2004. Independent of run folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from mtrain.evaluation.comet import NUM_TRIALS, paired_p_values
from mtrain.evaluation.metrics import Scorer, format_score

P_LIMIT = 0.05  # differences with a lower p-value are marked


@dataclass(frozen=True)
class SystemComparison:
    """A system beside the baseline, by one metric."""

    metric: str
    baseline: str  # the first system
    system: str
    difference: float  # the system's score less the baseline's
    p_bootstrap: float
    p_randomization: float
    bootstrap_signature: str  # sacreBLEU's
    randomization_signature: str

    def format_difference(self) -> str:
        """Return the difference with its sign."""
        text = format_score(self.metric, self.difference)
        return text if text.startswith("-") else f"+{text}"

    def format_p_values(self) -> list[str]:
        """Return the p-values of the bootstrap and of randomisation, a * after low ones."""
        p_values = (self.p_bootstrap, self.p_randomization)
        return [f"{p:.4f}{'*' if p < P_LIMIT else ' '}" for p in p_values]


def compare(scorer: Scorer, outputs: Mapping[str, list[str]]) -> list[SystemComparison]:
    """Compare each system with the first one, by every metric of `scorer`.

    Equal scores and test sets of one line get p = 1. sacreBLEU counts the draws with a greater
    difference; there are none then, so that its p-value would be close to 0.

    Args:
        scorer: of the test set; its `num_resamples` must not be 0.
        outputs: the translations by the baseline, and by at least one other system.
    """
    baseline, *systems = outputs
    comparisons: list[SystemComparison] = []
    is_paired = len(outputs[baseline]) > 1
    num_resamples, comet = scorer.options.num_resamples, scorer.options.comet
    for metric in scorer.metrics:
        metric.n_bootstrap = metric.seed = None  # else an interval stays in the signatures
        name, by_bs, bs_signature = _paired_test(outputs, metric, "bs", num_resamples)
        _, by_ar, ar_signature = _paired_test(outputs, metric, "ar", NUM_TRIALS)
        signatures = bs_signature, ar_signature
        for system, bs, ar in zip(systems, by_bs[1:], by_ar[1:], strict=True):
            difference = float(bs.score - by_bs[0].score)
            p_values = float(bs.p_value or 0.0), float(ar.p_value or 0.0)
            if not difference or not is_paired:
                p_values = 1.0, 1.0
            comparisons.append(
                SystemComparison(name, baseline, system, difference, *p_values, *signatures)
            )
    if comet is not None:
        signatures = comet.signature("bs", num_resamples), comet.signature("ar", NUM_TRIALS)
        before = scorer.comet_values(outputs[baseline])
        for system in systems:
            after = scorer.comet_values(outputs[system])
            difference = float(after.mean() - before.mean())
            p_values = 1.0, 1.0
            if difference and is_paired:
                p_values = paired_p_values(before, after, num_resamples)
            comparisons.append(
                SystemComparison("COMET", baseline, system, difference, *p_values, *signatures)
            )
    return comparisons


def _paired_test(
    outputs: Mapping[str, list[str]], metric: Metric, kind: str, num_samples: int
) -> tuple[str, list[Any], str]:
    """Return the metric's name, a result for each system, and the test's signature.

    `kind` is bs for the paired bootstrap, ar for approximate randomisation.
    """
    test = PairedTest(list(outputs.items()), {"": metric}, None, kind, num_samples)
    signatures, results = test()
    ((name, signature),) = signatures.items()
    return name, list(results[name]), str(signature)
