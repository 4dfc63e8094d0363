"""Whether ranks whose weights are the same, as those of a data-parallel run are, cast alike.

Ranks need not run the same layers: an expert may be idle on some, a pipeline gives each its own. Nor need their weights
be the same: tensor parallelism gives ranks other rows under one name. So what is reduced has one place for every cast
that any of the ranks may make, and nothing is compared that differs by design.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from octavo.doctor.series import OPERANDS, CastKey
from octavo.doctor.statistics import CAST_FIELDS
from octavo.errors import ConfigError
from octavo.nn import Linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALONE", "RankComparison"]

ALONE = "alone"
CASTS = tuple((role, gemm) for gemm, roles in OPERANDS.items() for role in roles)  # that a layer may make
WEIGHTS = [index for index, (role, _) in enumerate(CASTS) if role == "weight"]


class RankComparison:
    """Compares the casts of a group's ranks, look after look, in one collective each.

    A layer is compared if its shape is the same on all ranks that have it and its weight's amax on all that run it;
    a cast among the ranks that made it in this step. Every rank of the group must look at the same steps.

    Args:
        layers: by path, those that are watched on this rank.
        group: None for the default group, where torch.distributed is running; "alone" compares nothing.

    Raises:
        ConfigError: another text than "alone".
    """

    def __init__(self, layers: Mapping[str, Linear], group: "ProcessGroup | str | None") -> None:
        if isinstance(group, str) and group != ALONE:
            raise ConfigError(
                f"watch's group must be a process group, None for the default one or {ALONE!r}: {group!r}"
            )
        self.shapes = {path: (layer.out_features, layer.in_features) for path, layer in layers.items()}
        self.device = next(iter(layers.values())).weight.device
        self.group = group
        self._places: dict[str, int] | None = None

    def ratios(self, casts: Mapping[CastKey, Any]) -> dict[str, dict[str, float]]:
        """By "path role gemm", the largest scale of any rank over the smallest: {"rank_scale_ratio": …}.

        Of the casts of this rank; nothing where there is no other.
        """
        if not self._has_others():
            return {}
        if self._places is None:
            self._places = self._agreed()
        # The largest and, negated, the smallest of all ranks; -inf where a rank has none.
        both = torch.full((2, 2, len(self._places), len(CASTS)), -torch.inf, dtype=torch.float64)
        for key, numbers in casts.items():
            if key.path in self._places:
                place = self._places[key.path], CASTS.index((key.role, key.gemm))
                for which, field in enumerate(("scale", "amax")):
                    value = float(numbers[CAST_FIELDS.index(field)])
                    if 0 <= value < torch.inf:
                        both[0, which, *place], both[1, which, *place] = value, -value
        found = both.to(self.device)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self._process_group())
        return {"rank_scale_ratio": self._of(casts, found.cpu())}

    def _of(self, casts: Mapping[CastKey, Any], found: Tensor) -> dict[str, float]:
        assert self._places is not None
        (scales, amaxes), (least_scales, least_amaxes) = found[0], -found[1]
        differs = (amaxes > least_amaxes)[:, WEIGHTS].any(dim=1)  # absent ones have -inf above and +inf below
        ratios = scales / least_scales
        return {
            " ".join(key): float(ratios[self._places[key.path], CASTS.index((key.role, key.gemm))])
            for key in casts
            if key.path in self._places and not differs[self._places[key.path]]
        }

    def _has_others(self) -> bool:
        if self.group == ALONE or not distributed.is_available() or not distributed.is_initialized():
            return False
        return distributed.get_world_size(self._process_group()) > 1  # -1 where this rank is not of the group

    def _process_group(self) -> "ProcessGroup | None":
        assert not isinstance(self.group, str)
        return self.group

    def _agreed(self) -> dict[str, int]:
        """Places of the layers that have one shape on all ranks that have them: the same on every rank."""
        everyones: list[Any] = [None] * distributed.get_world_size(self._process_group())
        distributed.all_gather_object(everyones, self.shapes, group=self._process_group())
        found: dict[str, set[tuple[int, int]]] = {}
        for shapes in everyones:
            for path, shape in shapes.items():
                found.setdefault(path, set()).add(shape)
        return {path: place for place, path in enumerate(sorted(p for p, shapes in found.items() if len(shapes) == 1))}
