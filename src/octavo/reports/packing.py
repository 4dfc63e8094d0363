"""Packing of every layer's numbers at every step into 16-bit codes for a page.

The step axis is divided into at most 400 columns of consecutive samples, and a cell keeps the worst of its samples, so
that one bad step in a million remains visible. A cell is 16 bits:

    code     linear numbers                      logarithmic numbers (positive over many binades)
    65535    missing                             missing
    65534    +Inf                                +Inf
    65533    -Inf                                never
    others   low + code/65532 · (high - low)     0: zero; else exp(low + (code - 1)/65531 · (high - low))

with low and high from the matrix itself: an error of at most 1e-5 of a linear number's range, 0.2 % of a logarithmic
number over 100 decades.
"""

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.doctor.series import CastKey, ProductKey, Series
from octavo.doctor.statistics_catalog import PageStatistic, StatisticKind, Worst

__all__ = [
    "MOST_COLUMNS",
    "CellMap",
    "Columns",
    "cell_maps",
    "columns_of",
    "encode",
    "layers_of",
    "other_experts",
    "sheets",
]

MOST_COLUMNS = 400
# Of Series.modules, those whose keys are casts: "path role gemm".
BY_CAST = {"rank_scale_ratio", "rank_of_largest_scale", "rank_of_smallest_scale"}
MISSING, INFINITE, NEGATIVE_INFINITE = 65535, 65534, 65533
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of consecutive samples.

    Attributes:
        starts: [B] index of each column's first sample.
        first: [B] its first step.
        last: [B] its last step.
    """

    starts: NDArray[np.int64]
    first: Floats
    last: Floats

    @property
    def edges(self) -> Floats:
        """Boundaries of the columns on the step axis, half-way between samples: [B + 1]."""
        between = (self.last[:-1] + self.first[1:]) / 2
        left = between[0] - self.first[0] if len(between) else 0.5
        right = self.last[-1] - between[-1] if len(between) else 0.5
        return np.array([self.first[0] - max(left, 0.5), *between, self.last[-1] + max(right, 0.5)])

    def worst(self, values: Floats, statistic: PageStatistic) -> Floats:
        """Reduce samples [T, C] to cells [B, C]; NaN only in a column of nothing but NaN."""
        largest, smallest = np.fmax.reduceat(values, self.starts), np.fmin.reduceat(values, self.starts)
        match statistic.worst:
            case Worst.LARGEST:
                return largest
            case Worst.SMALLEST:
                return smallest
            case Worst.FARTHEST:
                with np.errstate(divide="ignore", invalid="ignore"):
                    high, low = (np.log(x) if statistic.kind is StatisticKind.RATIO else x for x in (largest, smallest))
                return np.where(np.abs(low) > np.abs(high), smallest, largest)


def columns_of(steps: Floats, *, most: int = MOST_COLUMNS) -> Columns:
    """Group the samples at ``steps`` [T], T >= 1, into at most ``most`` columns of equal size.

    Example:
        >>> columns = columns_of(np.arange(10.0), most=4)
        >>> columns.first.tolist(), columns.last.tolist(), columns.edges.tolist()
        ([0.0, 3.0, 6.0, 9.0], [2.0, 5.0, 8.0, 9.0], [-2.5, 2.5, 5.5, 8.5, 9.5])
    """
    starts = np.arange(0, len(steps), -(-len(steps) // most))
    ends = np.append(starts[1:], len(steps)) - 1
    return Columns(starts, steps[starts], steps[ends])


def layers_of(series: Series, named: Collection[str] = ()) -> list[str]:
    """Rows of the maps: layers in the order of execution, then parameters and modules.

    Of a mixture's experts that are linear layers each, these are the expert with the lowest SQNR and those of ``named``
    layers: 128 experts would be hundreds of rows of each layer.
    """
    executed = _executed_layers(series)
    layers = set(executed)
    others = [_place(name, layers) for name in series.parameters.keys]
    modules = [key for name, table in series.modules.items() if name not in BY_CAST for key in table.keys]
    left_out = other_experts(series, named)
    rows = dict.fromkeys([*executed, *others, *modules])
    return [path for path in rows if left_out.isdisjoint(_with_modules_around(path))]


def other_experts(series: Series, named: Collection[str] = ()) -> set[str]:
    """Paths of the experts that :func:`layers_of` leaves out."""
    mixtures = series.modules.get("worst_expert")
    if mixtures is None:
        return set()
    lowest: dict[str, dict[str, float]] = {mixture: {} for mixture in mixtures.keys}
    for key, sqnr in zip(series.casts.keys, np.fmin.reduce(series.casts.of("sqnr_db")), strict=True):
        around = ["", *_with_modules_around(key.path)]
        for mixture, expert in pairwise(around):
            if mixture in lowest:
                lowest[mixture][expert] = float(np.fmin(lowest[mixture].get(expert, np.inf), sqnr))
    shown = {min(each, key=each.__getitem__) for each in lowest.values() if each}
    shown |= {module for path in named for module in _with_modules_around(path)}
    return {expert for each in lowest.values() for expert in each} - shown


def _with_modules_around(path: str) -> list[str]:
    """Paths of the modules around a layer, outermost first, and its own."""
    return [".".join(path.split(".")[: depth + 1]) for depth in range(path.count(".") + 1)]


@dataclass(frozen=True, slots=True)
class CellMap:
    """Map of a statistic for one role or GEMM.

    Attributes:
        name: the role or GEMM, or its second cast; "" for a parameter or module.
        role: the role or GEMM.
        rows: [R] places in the list of layers.
        cells: [R, B] the worst of each column's samples.
    """

    name: str
    role: str
    rows: list[int]
    cells: Floats


def sheets(series: Series, statistic: PageStatistic, columns: Columns, layers: Sequence[str]) -> list[dict[str, Any]]:
    """Maps of a statistic for the page: "name", "role", "rows" (of ``layers``), and the keys of ``encode``."""
    logarithmic = is_logarithmic(statistic.kind)
    return [
        {"name": one.name, "role": one.role, "rows": one.rows, **encode(one.cells, logarithmic)}
        for one in cell_maps(series, statistic, columns, layers)
    ]


def cell_maps(series: Series, statistic: PageStatistic, columns: Columns, layers: Sequence[str]) -> list[CellMap]:
    """Maps of a statistic by role or GEMM of :func:`layers_of`; those without a number are left out."""
    position = {path: index for index, path in enumerate(layers)}
    maps = []
    for name, role, found in _groups(series, statistic):
        places = {path: column for path, column in found.items() if path in position}
        table = series.modules[statistic.field] if statistic.table == "modules" else getattr(series, statistic.table)
        cells = columns.worst(table.of(statistic.field)[:, list(places.values())], statistic).T
        if np.isnan(cells).all():  # or there is no row
            continue
        rows = [position[path] for path in places]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        maps.append(CellMap(name, role, [rows[index] for index in order], cells[order]))
    return maps


def is_logarithmic(kind: StatisticKind) -> bool:
    """True if numbers of a kind keep their relative precision rather than their absolute one."""
    return kind not in (StatisticKind.SIGNED, StatisticKind.DECIBEL, StatisticKind.NUMBER)


def encode(cells: Floats, logarithmic: bool) -> dict[str, Any]:
    """Encode cells [R, B] as {"log", "span": [low, high], "data": base64 of little-endian 16-bit codes, row by row}.

    Example:
        >>> encode(np.array([[1.0, 2.0, np.nan]]), False)
        {'log': False, 'span': [1.0, 2.0], 'data': 'AAD8////'}
    """
    numbers = np.where(cells > 0, np.log(np.where(cells > 0, cells, 1.0)), np.nan) if logarithmic else cells
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    first, steps = (1, 65531) if logarithmic else (0, 65532)
    codes = np.full(cells.shape, MISSING, dtype=np.uint16)
    is_number = np.isfinite(numbers)
    codes[is_number] = first + np.rint((numbers[is_number] - low) / ((high - low) or 1.0) * steps).astype(np.uint16)
    if logarithmic:
        codes[cells == 0] = 0
    codes[np.isposinf(cells)] = INFINITE
    codes[np.isneginf(cells)] = NEGATIVE_INFINITE
    data = base64.b64encode(codes.astype("<u2").tobytes()).decode()
    return {"log": logarithmic, "span": [low, high], "data": data}


def _groups(series: Series, statistic: PageStatistic) -> list[tuple[str, str, dict[str, int]]]:
    """Maps of a statistic: (name, role, column of each path)."""
    if statistic.table == "parameters":
        layers = set(_executed_layers(series))
        return [("", "", {_place(name, layers): index for index, name in enumerate(series.parameters.keys)})]
    if statistic.table != "modules":
        return _groups_by_role(getattr(series, statistic.table).keys)
    keys = series.modules[statistic.field].keys
    if statistic.field in BY_CAST:
        return _groups_by_role([CastKey(*key.rsplit(" ", 2)) for key in keys])
    return [("", "", {path: index for index, path in enumerate(keys)})]


def _executed_layers(series: Series) -> list[str]:
    return [key.path for key in series.casts.keys] + [key.path for key in series.products.keys]


def _groups_by_role(keys: Sequence[CastKey | ProductKey]) -> list[tuple[str, str, dict[str, int]]]:
    """Groups of casts by role or of GEMMs; a layer's second cast of a role is separate, since most layers have none."""
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for index, key in enumerate(keys):
        path, role, *_ = key
        is_second = path in groups.get((role, role), {})
        groups.setdefault((f"{role}, again for {key.gemm}" if is_second else role, role), {})[path] = index
    return [(name, role, places) for (name, role), places in groups.items()]


def _place(name: str, layers: set[str]) -> str:
    """Row of a parameter: its layer's, if it has one."""
    path = name.removesuffix(".weight") if name != "weight" else ""
    return path if path in layers else name
