"""Numbers of FP8 training for a Trainer's logs: a summary, and a bounded number of tensors by name."""

import heapq
from collections import defaultdict
from typing import NamedTuple

from torch import nn

from octavo.convert import owner_name
from octavo.doctor.series import Sample
from octavo.doctor.statistics import CAST_FIELDS
from octavo.nn.scaling_state import nonfinite_counts, scaling_state
from octavo.scaling import EMPTY

__all__ = ["FP8Numbers"]

AMAX = CAST_FIELDS.index("amax")


class _Key(NamedTuple):
    path: str
    role: str


class FP8Numbers:
    """Numbers of a model by name.

    | name                          | number                                                                  |
    |-------------------------------|-------------------------------------------------------------------------|
    | fp8/nonfinite                 | NaN and infinite elements in training so far                            |
    | fp8/ROLE_amax_min, _max       | range over the layers of the amaxes that scales are computed from       |
    | fp8/amax/PATH.ROLE            | amax of the tensors of a role that have the largest at the first log    |
    | fp8/nonfinite/PATH.ROLE       | count of the tensors that are the first to have such elements           |

    An amax is that of the history with delayed scaling, and of the doctor's newest sample with dynamic scaling.

    Args:
        tensors: number of tensors of each role that are logged by name, and of those with non-finite elements.
    """

    def __init__(self, tensors: int) -> None:
        self.tensors = tensors
        self._named: dict[str, list[_Key]] = {}
        self._nonfinite: dict[str, None] = {}

    def of(self, model: nn.Module, sample: Sample | None) -> dict[str, float]:
        """Numbers of a model and of the doctor's newest sample."""
        amaxes = _amaxes(model, sample)
        counts = {owner_name(name): count for name, count in nonfinite_counts(model).items()}
        numbers = {"fp8/nonfinite": float(sum(counts.values()))}
        for role, by_key in amaxes.items():
            numbers |= {f"fp8/{role}_amax_min": min(by_key.values()), f"fp8/{role}_amax_max": max(by_key.values())}
            named = self._named.setdefault(role, heapq.nlargest(self.tensors, by_key, key=lambda key: by_key[key]))
            numbers |= {f"fp8/amax/{'.'.join(filter(None, key))}": by_key[key] for key in named if key in by_key}
        for name in counts:
            if len(self._nonfinite) < self.tensors:
                self._nonfinite.setdefault(name)
        return numbers | {f"fp8/nonfinite/{name}": float(counts.get(name, 0)) for name in self._nonfinite}


def _amaxes(model: nn.Module, sample: Sample | None) -> dict[str, dict[_Key, float]]:
    """Amaxes from which scales are computed, by role and tensor."""
    amaxes: dict[str, dict[_Key, float]] = defaultdict(dict)
    for cast, values in (sample.casts if sample is not None else {}).items():
        amaxes[cast.role][_Key(cast.path, cast.role)] = float(values[AMAX])
    for name, tensor in scaling_state(model).items():
        path, role, kind = f".{owner_name(name)}".rsplit(".", 2)
        if kind == "amax_history" and (tensor > EMPTY).any():  # a weight of FP8 codes records none
            amaxes[role][_Key(path.removeprefix("."), role)] = float(tensor.max())
    return amaxes
