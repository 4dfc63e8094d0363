"""Rules for attention in FP8."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import module_tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["attention_gradient", "attention_logits"]


def attention_logits(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find attention whose logits have grown until FP8's steps change its probabilities.

    In ``persistent_looks`` samples, a divergence of ``attention_divergence`` nats or more from the probabilities of the
    uncast queries and keys; it fails above ``attention_divergence_fail``.
    """
    logits = {path: values for path, _, values in module_tracks(series, "attention_logit")}
    for path, steps, nats in module_tracks(series, "attention_divergence"):
        high = nats >= limits.attention_divergence
        if high.sum() < limits.persistent_looks:
            continue
        first, last = np.flatnonzero(high)[[0, -1]]
        largest = logits[path]
        yield Finding(
            code="attention-logits",
            severity=Severity.FAIL if nats[last] >= limits.attention_divergence_fail else Severity.WARN,
            path=path,
            first_step=int(steps[first]),
            last_step=int(steps[last]),
            evidence={"logit": largest[last], "first_logit": largest[0], "divergence": nats[last]},
            cause=f"attention's logits reach {largest[last]:.3g}, from {largest[0]:.3g} in the first sample, and FP8 "
            f"changes its probabilities by {nats[last]:.2g} nats",
            weight=nats[last],
        )


def attention_gradient(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find attention whose gradients of the scores do not add up to zero as codes.

    In ``persistent_looks`` samples, ``score_imbalance`` or more of their magnitude; it fails above
    ``score_imbalance_fail``.
    """
    for path, steps, shares in module_tracks(series, "attention_gradient_imbalance"):
        high = shares >= limits.score_imbalance
        if high.sum() < limits.persistent_looks:
            continue
        first, last = np.flatnonzero(high)[[0, -1]]
        yield Finding(
            code="attention-gradient",
            severity=Severity.FAIL if shares[last] >= limits.score_imbalance_fail else Severity.WARN,
            path=path,
            first_step=int(steps[first]),
            last_step=int(steps[last]),
            evidence={"imbalance": shares[last]},
            cause=f"the rows of the scores' gradient as codes add up to {shares[last]:.0%} of their magnitude in place "
            "of zero: small elements of one sign become zero, and the gradients of queries and keys are biased",
            weight=shares[last],
        )
