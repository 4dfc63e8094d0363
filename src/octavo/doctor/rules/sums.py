"""Rule for the accumulation of tensor cores."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import length, longest
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["biased_accumulation"]


def biased_accumulation(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find GEMMs with biased sums because their terms have the same sign.

    Three samples with a bias of ``accumulation_bias`` or more.
    """
    table = series.products
    for column, key in enumerate(table.keys):
        bias = np.nan_to_num(table.of("accumulation_bias")[:, column])
        where = longest(np.abs(bias) >= limits.accumulation_bias)
        if length(where) < limits.persistent_looks:
            continue
        worst = float(bias[where][np.argmax(np.abs(bias[where]))])
        yield Finding(
            code="biased-accumulation",
            severity=Severity.FAIL if abs(worst) >= limits.accumulation_bias_fail else Severity.WARN,
            path=key.path,
            role=key.gemm,
            first_step=int(table.steps[where][0]),
            last_step=int(table.steps[where][-1]),
            evidence={"accumulation_bias": worst},
            cause=f"the {key.gemm} GEMM's products have the same sign, and a Hopper tensor core's sums of them are "
            f"{abs(worst):.1%} too {'small' if worst < 0 else 'large'}",
            weight=abs(worst),
        )
