"""Comparison of the scales of ranks with identical weights, as in data-parallel training.

Ranks need not run the same layers (idle experts, pipeline stages) or hold the same weights (tensor parallelism gives
ranks different rows under one name). The reduced tensor therefore has an entry for every cast of any rank, and layers
that differ by design are not compared.
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
CASTS = tuple((role, gemm) for gemm, roles in OPERANDS.items() for role in roles)  # of one layer
WEIGHTS = [index for index, (role, _) in enumerate(CASTS) if role == "weight"]


class RankComparison:
    """Compares the casts of a group's ranks with one collective per sampled step.

    A layer is compared if its shape is the same on all ranks that have it and its weight's amax on all that run it; a
    cast is compared among the ranks that made it in this step. Every rank of the group must sample the same steps.

    Args:
        layers: the watched layers of this rank, by path.
        group: None for the default group of torch.distributed, if initialized; "alone" compares nothing.

    Raises:
        ConfigError: ``group`` is a string other than "alone".
    """

    def __init__(self, layers: Mapping[str, Linear], group: "ProcessGroup | str | None") -> None:
        if isinstance(group, str) and group != ALONE:
            raise ConfigError(
                f"watch's group must be a process group, None for the default one or {ALONE!r}, not {group!r}"
            )
        self.shapes = {path: (layer.out_features, layer.in_features) for path, layer in layers.items()}
        self.device = next(iter(layers.values())).weight.device
        self.group = group
        self._layer_index: dict[str, int] | None = None

    def ratios(self, casts: Mapping[CastKey, Any]) -> dict[str, dict[str, float]]:
        """Largest scale over smallest scale among the ranks: {"rank_scale_ratio": {"path role gemm": …}}.

        Covers the casts of this rank; empty without other ranks.
        """
        if not self._has_other_ranks():
            return {}
        if self._layer_index is None:
            self._layer_index = self._index_common_layers()
        # One MAX reduction for maximum and minimum: the minimum is negated; -inf where a rank has no such cast.
        extremes = torch.full((2, 2, len(self._layer_index), len(CASTS)), -torch.inf, dtype=torch.float64)
        for key, numbers in casts.items():
            if key.path in self._layer_index:
                place = self._layer_index[key.path], CASTS.index((key.role, key.gemm))
                for field_index, field in enumerate(("scale", "amax")):
                    value = float(numbers[CAST_FIELDS.index(field)])
                    if 0 <= value < torch.inf:
                        extremes[0, field_index, *place], extremes[1, field_index, *place] = value, -value
        reduced = extremes.to(self.device)
        distributed.all_reduce(reduced, op=distributed.ReduceOp.MAX, group=self._process_group())
        return {"rank_scale_ratio": self._ratio_by_cast(casts, reduced.cpu())}

    def _ratio_by_cast(self, casts: Mapping[CastKey, Any], reduced: Tensor) -> dict[str, float]:
        assert self._layer_index is not None
        (scales, amaxes), (least_scales, least_amaxes) = reduced[0], -reduced[1]
        differs = (amaxes > least_amaxes)[:, WEIGHTS].any(dim=1)  # absent casts have -inf and +inf
        ratios = scales / least_scales
        return {
            " ".join(key): float(ratios[self._layer_index[key.path], CASTS.index((key.role, key.gemm))])
            for key in casts
            if key.path in self._layer_index and not differs[self._layer_index[key.path]]
        }

    def _has_other_ranks(self) -> bool:
        if self.group == ALONE or not distributed.is_available() or not distributed.is_initialized():
            return False
        return distributed.get_world_size(self._process_group()) > 1  # -1 if this rank is not in the group

    def _process_group(self) -> "ProcessGroup | None":
        assert not isinstance(self.group, str)
        return self.group

    def _index_common_layers(self) -> dict[str, int]:
        """Index of each layer with the same shape on all ranks that have it, identical on every rank."""
        shapes_by_rank: list[Any] = [None] * distributed.get_world_size(self._process_group())
        distributed.all_gather_object(shapes_by_rank, self.shapes, group=self._process_group())
        shapes_by_path: dict[str, set[tuple[int, int]]] = {}
        for shapes in shapes_by_rank:
            for path, shape in shapes.items():
                shapes_by_path.setdefault(path, set()).add(shape)
        return {
            path: index
            for index, path in enumerate(sorted(p for p, shapes in shapes_by_path.items() if len(shapes) == 1))
        }
