"""Tables of statistics over steps, built sample by sample.

Long runs have millions of numbers. They are appended to one flat float64 buffer, 8 bytes each: Python objects for each
number, line or sample would need several times as much, plus a second copy for the array.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["CurveRows", "Floats", "Key", "StatisticsTable", "TableRows"]

Floats = NDArray[np.float64]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class StatisticsTable(Generic[Key]):
    """Statistics of several casts, GEMMs, parameters or modules at several steps.

    Attributes:
        steps: [T], ascending.
        keys: the C columns, such as casts.
        fields: names of the F numbers of each column.
        values: [T, C, F] float64; NaN for missing numbers.
    """

    steps: Floats
    keys: tuple[Key, ...]
    fields: tuple[str, ...]
    values: Floats

    def of(self, name: str) -> Floats:
        """One field of all columns: [T, C]."""
        return self.values[:, :, self.fields.index(name)]


class TableRows(Generic[Key]):
    """Builder of a table, oldest sample first; consecutive samples with the same columns share a buffer.

    Args:
        fields: names of the numbers of each column.
        absent: number of earlier samples without any column.

    Example:
        >>> rows = TableRows(("amax",))
        >>> rows.add(("a",), np.array([[1.0]])), rows.add(("a", "b"), np.array([[2.0, 3.0]]))
        (None, None)
        >>> rows.table([10, 20]).of("amax").tolist()
        [[1.0, nan], [2.0, 3.0]]
    """

    def __init__(self, fields: tuple[str, ...], *, absent: int = 0) -> None:
        self.fields = fields
        self._parts: list[tuple[tuple[Key, ...], list[int], array[float]]] = []  # columns, [samples], [samples, F, C]
        if absent:
            self._parts.append(((), [absent], array("d")))

    def add(self, keys: tuple[Key, ...], numbers: Floats) -> None:
        """Add the numbers of one sample: [F, C]."""
        if not self._parts or self._parts[-1][0] != keys:
            self._parts.append((keys, [0], array("d")))
        _, samples, buffer = self._parts[-1]
        samples[0] += 1
        buffer.frombytes(np.asarray(numbers, dtype=np.float64).tobytes())

    def table(self, steps: Iterable[float]) -> StatisticsTable[Key]:
        """Table of all samples, taken at ``steps``; nothing may be added afterwards."""
        keys = tuple(dict.fromkeys(key for part, _, _ in self._parts for key in part))
        values = self._values_of_one_part() if len(self._parts) == 1 else self._values_of_all(keys)
        return StatisticsTable(np.array(list(steps), dtype=np.float64), keys, self.fields, values.transpose(0, 2, 1))

    def _values_of_one_part(self) -> Floats:
        """Values [T, F, C], without a copy."""
        keys, (samples,), buffer = self._parts[0]
        return np.asarray(buffer).reshape(samples, len(self.fields), len(keys))

    def _values_of_all(self, keys: Sequence[Key]) -> Floats:
        """Values [T, F, C]; NaN where a sample lacks a column."""
        position = {key: index for index, key in enumerate(keys)}
        values = np.full((sum(samples for _, (samples,), _ in self._parts), len(self.fields), len(keys)), np.nan)
        row = 0
        for part_keys, (samples,), buffer in self._parts:
            numbers = np.asarray(buffer).reshape(samples, len(self.fields), len(part_keys))
            values[row : row + samples, :, [position[key] for key in part_keys]] = numbers
            row += samples
        return values


class CurveRows:
    """Builder of several curves by name."""

    def __init__(self) -> None:
        self._points: dict[str, array[float]] = {}  # step, value, step, value, …

    def add(self, name: str, step: float, value: float) -> None:
        """Add one point to a curve."""
        self._points.setdefault(name, array("d")).extend((step, value))

    def curves(self) -> dict[str, tuple[Floats, Floats]]:
        """(steps, values) of each curve."""
        points = {name: np.array(rows).reshape(-1, 2) for name, rows in self._points.items()}
        return {name: (both[:, 0].copy(), both[:, 1].copy()) for name, both in points.items()}
