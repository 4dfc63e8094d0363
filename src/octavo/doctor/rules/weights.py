"""Rule for codes that belong to another tensor, such as those of a weight before its last update."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["stale_weight"]


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
