"""Numbers of several things at several steps, gathered look by look.

A run of a million steps has as many numbers as its file. They are appended to one flat buffer of float64, 8 bytes each:
a Python object for each number, line or look would need several times as much, and a second copy for the array.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["CurveRows", "Floats", "Key", "Table", "TableRows"]

Floats = NDArray[np.float64]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Table(Generic[Key]):
    """Numbers of several things at several steps.

    Attributes:
        steps: [T], rising.
        keys: the things, C of them.
        fields: the numbers, F of them.
        values: [T, C, F] float64; NaN where one does not exist.
    """

    steps: Floats
    keys: tuple[Key, ...]
    fields: tuple[str, ...]
    values: Floats

    def of(self, name: str) -> Floats:
        """One number of everything: [T, C]."""
        return self.values[:, :, self.fields.index(name)]


class TableRows(Generic[Key]):
    """The looks of a table, oldest first; as long as they have the same things, they share a buffer.

    Args:
        fields: names of the numbers.
        absent: looks so far, which had nothing.

    Example:
        >>> rows = TableRows(("amax",))
        >>> rows.add(("a",), np.array([[1.0]])), rows.add(("a", "b"), np.array([[2.0, 3.0]]))
        (None, None)
        >>> rows.table([10, 20]).of("amax").tolist()
        [[1.0, nan], [2.0, 3.0]]
    """

    def __init__(self, fields: tuple[str, ...], *, absent: int = 0) -> None:
        self.fields = fields
        self._parts: list[tuple[tuple[Key, ...], list[int], array[float]]] = []  # things, looks, [looks, F, C]
        if absent:
            self._parts.append(((), [absent], array("d")))

    def add(self, keys: tuple[Key, ...], numbers: Floats) -> None:
        """A look's numbers: [F, C]."""
        if not self._parts or self._parts[-1][0] != keys:
            self._parts.append((keys, [0], array("d")))
        _, looks, buffer = self._parts[-1]
        looks[0] += 1
        buffer.frombytes(np.asarray(numbers, dtype=np.float64).tobytes())

    def table(self, steps: Iterable[float]) -> Table[Key]:
        """All looks, at these steps; nothing may be added afterwards."""
        keys = tuple(dict.fromkeys(key for part, _, _ in self._parts for key in part))
        values = self._of_one_part() if len(self._parts) == 1 else self._of_all(keys)
        return Table(np.array(list(steps), dtype=np.float64), keys, self.fields, values.transpose(0, 2, 1))

    def _of_one_part(self) -> Floats:
        """[T, F, C], without a copy."""
        keys, (looks,), buffer = self._parts[0]
        return np.asarray(buffer).reshape(looks, len(self.fields), len(keys))

    def _of_all(self, keys: Sequence[Key]) -> Floats:
        """[T, F, C]; NaN where a look had no such thing."""
        position = {key: index for index, key in enumerate(keys)}
        values = np.full((sum(looks for _, (looks,), _ in self._parts), len(self.fields), len(keys)), np.nan)
        row = 0
        for part, (looks,), buffer in self._parts:
            numbers = np.asarray(buffer).reshape(looks, len(self.fields), len(part))
            values[row : row + looks, :, [position[key] for key in part]] = numbers
            row += looks
        return values


class CurveRows:
    """The points of several curves, by name."""

    def __init__(self) -> None:
        self._points: dict[str, array[float]] = {}  # step, value, step, value, …

    def add(self, name: str, step: float, value: float) -> None:
        """One point."""
        self._points.setdefault(name, array("d")).extend((step, value))

    def curves(self) -> dict[str, tuple[Floats, Floats]]:
        """(steps, values) of each."""
        points = {name: np.array(rows).reshape(-1, 2) for name, rows in self._points.items()}
        return {name: (both[:, 0].copy(), both[:, 1].copy()) for name, both in points.items()}
