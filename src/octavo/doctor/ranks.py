"""Statistics of all ranks, and comparison of their scales, by two collectives a sampled step.

A page shows the casts of all ranks' micro-batches: the sums of a step (CAST_SUMS, PRODUCT_SUMS) are added over the
ranks, and of amaxes, scales and stale ratios the extremes are taken. Ranks with identical weights, as in data-parallel
training, should also have equal scales.

Ranks need not run the same layers (idle experts, pipeline stages) or hold the same weights (tensor parallelism gives
ranks different rows under one name). The reduced tensors therefore have an entry for every cast of any rank. Layers of
other shapes on other ranks are left as they are; layers whose weights differ are added, and their scales not compared.

A maximum does not tell whose it is. Scales and amaxes are float32, which leaves 29 bits of a float64 unused: the last
28 have the rank's number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from octavo.doctor.series import OPERANDS, CastKey, ProductKey
from octavo.doctor.statistics import CAST_SUMS, PRODUCT_SUMS
from octavo.errors import ConfigError
from octavo.nn.scaled_layer import ScaledLayer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ALONE", "RankComparison"]

ALONE = "alone"
CASTS = tuple((role, gemm) for gemm, roles in OPERANDS.items() for role in roles)  # of one layer
GEMMS = tuple(OPERANDS)
WEIGHTS = [index for index, (role, _) in enumerate(CASTS) if role == "weight"]
COMPARED = ("scale", "amax")
STALE = ("largest", "largest of the least", "least", "several groups")  # stale ratios, and whether they differ
ABSENT, RANK_BITS = -(2.0**200), (1 << 28) - 1
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extremes:
    """Extremes of all ranks.

    Attributes:
        of_casts: scale, amax, stale ratio and least stale ratio of all ranks' casts, [4, layers, casts]; not finite
            where no rank has a finite one.
        smallest: of COMPARED, [fields, layers, casts]; +inf where no rank has the cast.
        ranks: the ranks with the largest and with the smallest scale, [2, layers, casts].
    """

    of_casts: Floats
    smallest: Floats
    ranks: NDArray[np.int64]


class RankComparison:
    """Reduces a sampled step's sums over a group's ranks, and compares their scales.

    A layer takes part if its shape is the same on all ranks that have it. Its scales are compared if its weight's amax
    is the same on all that run it, each cast among the ranks that made it in this step. Every rank of the group must
    sample the same steps.

    Args:
        layers: the watched layers of this rank, by path.
        group: None for the default group of torch.distributed, if initialized; "alone" reduces and compares nothing.

    Raises:
        ConfigError: ``group`` is a string other than "alone".
    """

    def __init__(self, layers: Mapping[str, ScaledLayer], group: "ProcessGroup | str | None") -> None:
        if isinstance(group, str) and group != ALONE:
            raise ConfigError(
                f"watch's group must be a process group, None for the default one or {ALONE!r}, not {group!r}"
            )
        self.shapes = {path: (layer.out_features, layer.in_features) for path, layer in layers.items()}
        self.device = next((layer.stored_weight.device for layer in layers.values()), torch.device("cpu"))
        self.group = group
        self._layer_index: dict[str, int] | None = None

    def reduce(
        self, casts: dict[CastKey, Floats], products: dict[ProductKey, Floats]
    ) -> tuple[dict[CastKey, Floats], dict[ProductKey, Floats], dict[str, dict[str, float]]]:
        """Reduce CAST_SUMS of casts and PRODUCT_SUMS of GEMMs over the ranks.

        Returns:
            The sums of all ranks' casts and GEMMs of this rank's layers; and numbers of ``Sample.modules`` by
            "path role gemm" of this rank's casts: "rank_scale_ratio", the largest scale over the smallest, and the
            ranks of both. Without other ranks, what was given and nothing.
        """
        if not self._has_other_ranks():
            return casts, products, {}
        if self._layer_index is None:
            self._layer_index = self._index_common_layers()
        if not self._layer_index:  # of no rank
            return casts, products, {}
        shared_casts = {key: sums for key, sums in casts.items() if key.path in self._layer_index}
        shared_products = {key: sums for key, sums in products.items() if key.path in self._layer_index}
        extremes = self._extremes(shared_casts)
        added_casts, added_products = self._added(shared_casts, shared_products)
        for field, values in zip((*COMPARED, "stale_ratio", "least_stale_ratio"), extremes.of_casts, strict=True):
            column = CAST_SUMS.index(field)
            added_casts[:, :, column] = np.where(np.isfinite(values), values, added_casts[:, :, column])
        found_casts, found_products = dict(casts), dict(products)
        for path in filter(self._layer_index.__contains__, self.shapes):
            at = self._layer_index[path]
            rows = zip(CASTS, added_casts[at], strict=True)
            found_casts |= {CastKey(path, *cast): row for cast, row in rows if row[0] > 0}  # elements
            gemms = zip(GEMMS, added_products[at], strict=True)
            found_products |= {ProductKey(path, gemm): row[:-1] for gemm, row in gemms if row[-1] > 0}
        return found_casts, found_products, self._comparison(shared_casts, extremes)

    def _added(self, casts: Mapping[CastKey, Floats], products: Mapping[ProductKey, Floats]) -> tuple[Floats, Floats]:
        """Sums of all ranks: [layers, casts, fields]; [layers, GEMMs, fields and the number of ranks that ran it]."""
        assert self._layer_index is not None
        of_casts = np.zeros((len(self._layer_index), len(CASTS), len(CAST_SUMS)))
        of_products = np.zeros((len(self._layer_index), len(GEMMS), len(PRODUCT_SUMS) + 1))
        for key, sums in casts.items():
            of_casts[self._place(key)] = sums
        for product, sums in products.items():
            of_products[self._layer_index[product.path], GEMMS.index(product.gemm)] = [*sums, 1.0]
        flat = torch.from_numpy(np.concatenate([of_casts.ravel(), of_products.ravel()])).to(self.device)
        distributed.all_reduce(flat, group=self._process_group())
        first, second = np.split(flat.cpu().numpy(), [of_casts.size])
        return first.reshape(of_casts.shape), second.reshape(of_products.shape)

    def _extremes(self, casts: Mapping[CastKey, Floats]) -> "_Extremes":
        """Largest and smallest numbers of all ranks, by one MAX reduction: the smallest are negated."""
        assert self._layer_index is not None
        shape = (len(self._layer_index), len(CASTS))
        compared, stale = np.full((2, len(COMPARED), *shape), ABSENT), np.full((len(STALE), *shape), ABSENT)
        for key, sums in casts.items():
            place = self._place(key)
            for index, field in enumerate(COMPARED):
                value = float(np.float32(sums[CAST_SUMS.index(field)]))
                if 0 <= value < np.inf:
                    compared[0, index, *place], compared[1, index, *place] = value, -value
            largest, least = (float(sums[CAST_SUMS.index(field)]) for field in ("stale_ratio", "least_stale_ratio"))
            if np.isfinite([largest, least]).all():
                stale[:, *place] = largest, least, -least, float(largest != least)
        compared.view(np.int64)[...] |= distributed.get_rank()
        flat = torch.from_numpy(np.concatenate([compared.ravel(), stale.ravel()])).to(self.device)
        distributed.all_reduce(flat, op=distributed.ReduceOp.MAX, group=self._process_group())
        first, second = np.split(flat.cpu().numpy(), [compared.size])
        bits = first.view(np.int64).reshape(compared.shape)
        values, stale = (bits & ~RANK_BITS).view(np.float64), second.reshape(stale.shape)
        values, stale = (np.where(each <= ABSENT, -np.inf, each) for each in (values, stale))
        return _Extremes(
            # One scaling group lies on all ranks; of several, each has its own.
            of_casts=np.stack([*values[0], stale[0], np.where(stale[3] > 0, -stale[2], stale[1])]),
            smallest=-values[1],
            ranks=bits[:, COMPARED.index("scale")] & RANK_BITS,
        )

    def _comparison(self, casts: Mapping[CastKey, Floats], extremes: "_Extremes") -> dict[str, dict[str, float]]:
        scale, amax = map(COMPARED.index, ("scale", "amax"))
        differs = (extremes.of_casts[amax] > extremes.smallest[amax])[:, WEIGHTS].any(axis=1)  # absent: -inf and +inf
        with np.errstate(all="ignore"):
            ratios = extremes.of_casts[scale] / extremes.smallest[scale]
        numbers = {
            "rank_scale_ratio": ratios,
            "rank_of_largest_scale": extremes.ranks[0],
            "rank_of_smallest_scale": extremes.ranks[1],
        }
        compared = {key: self._place(key) for key in casts if not differs[self._place(key)[0]]}
        return {
            name: {" ".join(key): float(table[place]) for key, place in compared.items()}
            for name, table in numbers.items()
        }

    def _place(self, key: CastKey) -> tuple[int, int]:
        assert self._layer_index is not None
        return self._layer_index[key.path], CASTS.index((key.role, key.gemm))

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
