"""Rules for weights: codes that belong to another tensor, and jumps that no update explains."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import STEP_BEFORE, Finding, Severity
from octavo.doctor.rules.tracks import tracks, weights
from octavo.doctor.series import Series
from octavo.doctor.tables import Floats
from octavo.doctor.thresholds import Thresholds

__all__ = ["stale_weight", "weight_jump"]

DAMAGED = 1e5  # weight of a finding: above its consequences, below NaN


def stale_weight(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find codes that do not match their tensor under their own scale; stochastic rounding is skipped.

    One sample with more than ``code_mismatch`` of the codes is enough.
    """
    for track in tracks(series):
        if track.spec("rounding") == "stochastic":
            continue
        mismatch = track.of("code_mismatch")
        wrong = np.flatnonzero(mismatch > limits.code_mismatch)
        if not wrong.size:
            continue
        worst = mismatch[wrong].max()
        yield track.finding(
            slice(int(wrong[0]), int(wrong[-1]) + 1),
            "stale-weight",
            Severity.FAIL,
            cause=f"{worst:.2%} of the codes that the {track.key.gemm} GEMM multiplies are not those of the "
            f"{track.key.role} of that step: they were computed from another tensor, such as that of an earlier step",
            weight=worst,
            code_mismatch=worst,
            cosine=np.nanmin(np.append(track.of("cosine")[wrong], np.inf)),
            samples=wrong.size,
        )


def weight_jump(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a weight whose amax changes ``weight_jump`` times between two samples, and beyond what updates can change.

    The optimizer's updates can change it by ``update_peak`` times the sum of their rms over the steps between.
    """
    for path, steps, amax, rms in weights(series):
        reach = limits.update_peak * _reach_of_updates(series, path, steps, rms)
        binades = np.abs(np.diff(np.log2(np.where(amax > 0, amax, np.nan))))
        is_beyond = (np.abs(np.diff(amax)) > reach) & (reach > 0)
        jumps = np.flatnonzero((binades >= np.log2(limits.weight_jump)) & is_beyond)
        if jumps.size:
            at = int(jumps[np.argmax(binades[jumps])])
            yield _jump(path, steps[at : at + 2], amax[at : at + 2], float(reach[at]))


def _jump(path: str, steps: Floats, amax: Floats, reach: float) -> Finding:
    """A jump between two samples."""
    ratio = amax[1] / amax[0]
    return Finding(
        code="weight-jump",
        severity=Severity.FAIL,
        path=path,
        role="weight",
        first_step=int(steps[0]) + 1,
        last_step=int(steps[1]),
        evidence={STEP_BEFORE: float(steps[0]), "amax_before": amax[0], "amax_after": amax[1], "reach": reach},
        cause=f"the weight's amax is multiplied by {ratio:.3g} between steps {steps[0]:.0f} and {steps[1]:.0f}; "
        f"updates can change it by {reach:.2g} at most, so something else wrote to it, such as a damaged checkpoint",
        weight=DAMAGED,
    )


def _reach_of_updates(series: Series, path: str, steps: Floats, rms: Floats) -> Floats:
    """Sum of the updates' rms from each sample to the next, [T - 1]; 0 if it is unknown.

    A sample has the weight before its own update. Further updates are as large as the larger of both samples', or as
    the first with another learning rate.
    """
    table, name = series.parameters, f"{path}.weight".removeprefix(".")
    if name not in table.keys or len(steps) < 2:
        return np.zeros(max(0, len(steps) - 1))
    updates = table.of("update_ratio")[np.searchsorted(table.steps, steps), table.keys.index(name)] * rms
    by_size: Floats = updates[:-1] + (np.diff(steps) - 1) * np.fmax(updates[:-1], updates[1:])
    rate_steps, rates = series.curve("lr")
    if not rates.size:
        return by_size
    sums = np.concatenate([[0.0], np.cumsum(rates)])[np.searchsorted(rate_steps, steps)]
    reach: Floats = np.fmax(by_size, updates[:-1] * np.diff(sums) / np.interp(steps[:-1], rate_steps, rates))
    return reach
