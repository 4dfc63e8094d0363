"""Rules for the experts of a mixture."""

from collections.abc import Iterator

import numpy as np

from octavo.doctor.findings import Finding, Severity
from octavo.doctor.rules.tracks import module_tracks
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["starved_experts"]


def starved_experts(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find layers with an expert that gets less than ``starved_share`` of an even share of the tokens.

    Counted over all sampled steps, of which there are ``persistent_looks`` or more; a note, or a warning where an
    expert got none at all.
    """
    least = {path: values for path, _, values in module_tracks(series, "least_expert")}
    idle = {path: values for path, _, values in module_tracks(series, "idle_experts")}
    for path, all_steps, all_shares in module_tracks(series, "least_expert_share"):
        known = np.isfinite(all_shares)
        steps, shares = all_steps[known], all_shares[known]
        if len(shares) < limits.persistent_looks or shares[-1] >= limits.starved_share:
            continue
        expert, count = int(least[path][known][-1]), int(idle[path][known][-1])
        others = f"; {count} experts got none" if count else ""
        yield Finding(
            code="starved-experts",
            severity=Severity.WARN if count else Severity.NOTE,
            path=path,
            first_step=int(steps[shares < limits.starved_share][0]),
            last_step=int(steps[-1]),
            evidence={"expert": float(expert), "share": float(shares[-1]), "idle_experts": float(count)},
            cause=f"expert {expert} got {shares[-1]:.1%} of an even share of the tokens of {len(shares)} sampled steps"
            f"{others}: its weights learn little, and its scales come from few tokens",
            weight=1 - shares[-1],
        )
