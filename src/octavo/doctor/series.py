"""What was measured, step after step: the lines that a watched run leaves behind, read back as arrays.

A run's metrics.jsonl holds, beside its steps and evaluations, two kinds of lines of the doctor's:

    {"kind": "watched", "step": 10, "casts": [["layers.0.q_proj", "input", "output"], …], "products": [[path, gemm], …],
     "parameters": [name, …], "layers": {path: {"recipe": "delayed", "in_features": 128, …}}}
    {"kind": "statistics", "step": 10, "casts": {"amax": [3.1, …], …}, "products": {…}, "parameters": {…},
     "modules": {"alignment": {path: 0.31}, "batch_norm": {}}, "gradient_to_noise": 21.4, …}

A "watched" line names the columns of the "statistics" lines that follow it; another one stands where they change. A
number that does not exist is null; so is the loss of a step where it was NaN or infinite, which JSON has not.
"""

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from octavo.doctor.statistics import CAST_FIELDS, PRODUCT_FIELDS
from octavo.doctor.tables import CurveRows, Floats, Table, TableRows
from octavo.errors import TrainingError

__all__ = ["OPERANDS", "PARAMETER_FIELDS", "CastKey", "Period", "ProductKey", "Sample", "Series", "series_of"]

PARAMETER_FIELDS = ("grad_norm", "gradient_variance", "update_ratio")
OPERANDS = {  # roles of a GEMM's operands, left and right
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
DIGITS = 5  # of a number in a file
LATER_FIELDS = ("least_stale_ratio",)  # which older files do not have
_NEEDED = {"overflow": ("loss_scale",)}  # of a line of a kind, beside its step
_READ: dict[str, Any] = {
    "step": int | float,
    "loss_scale": int | float | None,
    "loss": int | float | None,
    "tensor": str | None,
}
_FACTS: dict[str, Any] = {"recipe": str, "in_features": int, "out_features": int, "casts": Mapping}  # of a layer
_LAYER_OPTIONS: dict[str, Any] = {"history_length": 1, "statistic": str, "update_interval": 1, "device": str}
_CAST_OPTIONS: dict[str, Any] = {
    "format": str,
    "scaling": str,
    "scale_rounding": str,
    "margin": 0,
    "amax_floor": 0.0,
    "rounding": str,
}


class CastKey(NamedTuple):
    """A cast: the layer's path, the tensor's role, and the GEMM whose operand it becomes first."""

    path: str
    role: str
    gemm: str


class ProductKey(NamedTuple):
    """A GEMM of a layer."""

    path: str
    gemm: str


class Period(NamedTuple):
    """Since when a layer has had which facts.

    Attributes:
        step: of the first look that saw them.
        look: its number among the run's looks, from 0 on: a step that was made again may be looked at under both.
        facts: the recipe's name, its casts, the layer's shape.
    """

    step: float
    look: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one step's look at a model found.

    Attributes:
        step: its number.
        casts: numbers of each cast, CAST_FIELDS, in the order in which the casts ran.
        products: of each GEMM, PRODUCT_FIELDS.
        parameters: of each matrix that is trained, PARAMETER_FIELDS.
        modules: other numbers by name, then by module path: "alignment", "batch_norm", "batch_norm_rows",
            "rank_scale_ratio".
        scalars: numbers of the whole step: "gradient_to_noise".
        layers: facts of each watched layer: its recipe's name, its casts, its shape, its device's kind.
    """

    step: int
    casts: dict[CastKey, Floats]
    products: dict[ProductKey, Floats]
    parameters: dict[str, Floats]
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """The "watched" line's fields."""
        return {
            "casts": [list(key) for key in self.casts],
            "products": [list(key) for key in self.products],
            "parameters": list(self.parameters),
            "layers": self.layers,
        }

    def values(self) -> dict[str, Any]:
        """The "statistics" line's fields."""
        return {
            "casts": _columns(CAST_FIELDS, self.casts.values()),
            "products": _columns(PRODUCT_FIELDS, self.products.values()),
            "parameters": _columns(PARAMETER_FIELDS, self.parameters.values()),
            "modules": {name: {path: _plain(x) for path, x in found.items()} for name, found in self.modules.items()},
            **{name: _plain(x) for name, x in self.scalars.items()},
        }

    def scalars_by_name(self) -> Iterator[tuple[str, float]]:
        """Every finite number under a name with slashes, for TensorBoard."""
        tables: tuple[tuple[str, Mapping[Any, Floats], tuple[str, ...]], ...] = (
            ("casts", self.casts, CAST_FIELDS),
            ("products", self.products, PRODUCT_FIELDS),
            ("parameters", self.parameters, PARAMETER_FIELDS),
        )
        for table, rows, names in tables:
            for key, numbers in rows.items():
                place = key if isinstance(key, str) else "/".join(key)
                for name, value in zip(names, numbers.tolist(), strict=True):
                    if math.isfinite(value):
                        yield f"{table}/{name}/{place}", value
        for name, found in self.modules.items():
            yield from ((f"modules/{name}/{path}", value) for path, value in found.items() if math.isfinite(value))
        yield from ((f"step/{name}", value) for name, value in self.scalars.items() if math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A run as the rules read it.

    Attributes:
        casts: numbers of every cast.
        products: numbers of every GEMM.
        parameters: numbers of every trained matrix.
        modules: by name, what ``Sample.modules`` held, by module path.
        curves: (steps, values) of a number that steps or samples have: "loss", "lr", "grad_norm", "loss_scale",
            "gradient_to_noise", "nats". A loss that was not finite is NaN; elsewhere such steps are left out.
        layers: the newest facts of each layer.
        periods: of each layer, oldest first.
        events: lines of other kinds ("overflow", "failure", "precision", "autopilot"), as they stand in the file.
        unigram_nats: the entropy of the training text's token frequencies, where the text is known.
    """

    casts: Table[CastKey]
    products: Table[ProductKey]
    parameters: Table[str]
    modules: dict[str, Table[str]]
    curves: dict[str, tuple[Floats, Floats]]
    layers: dict[str, dict[str, Any]]
    periods: dict[str, list[Period]]
    events: tuple[dict[str, Any], ...]
    unigram_nats: float | None = None

    def curve(self, name: str) -> tuple[Floats, Floats]:
        """Steps and values; empty where nothing has that number."""
        return self.curves.get(name, (np.empty(0), np.empty(0)))


def series_of(lines: Iterable[Mapping[str, Any]], samples: Sequence[Sample] = ()) -> Series:
    """The series of a run's lines, or of samples in memory.

    Args:
        lines: of metrics.jsonl, in order; "watched" and "statistics" lines among them become samples.
        samples: those that were taken without a file.

    Raises:
        TrainingError: a "statistics" line has other columns than its "watched" line names, or is not later than the one
            before it; a line has no kind; or what a rule reads of it is missing or no number.
    """
    reading = _Reading()
    for sample in samples:
        reading.add(_look_of(sample))
    columns: _Columns | None = None
    watched: Mapping[str, Any] = {}
    for line in lines:
        if "kind" not in line:
            raise TrainingError(
                f"a line of step {line.get('step')} says no kind; it was edited: put the file back as it was"
            )
        if line["kind"] == "watched":
            watched, columns = line, None
        elif line["kind"] == "statistics":
            look, columns = _look(watched, columns, line)
            reading.add(look)
        else:
            _check_line(line)
            reading.add_line(line)
    _check_order(reading.steps[len(samples) :], {line["step"] for line in reading.events if line["kind"] == "failure"})
    return reading.series()


class _Columns(NamedTuple):
    """What a "watched" line names, read once for all looks that follow it."""

    casts: tuple[CastKey, ...]
    products: tuple[ProductKey, ...]
    parameters: tuple[str, ...]
    layers: dict[str, dict[str, Any]]


class _Look(NamedTuple):
    """A look at the model: of casts, products and parameters the numbers, [F, C]."""

    step: int
    columns: _Columns
    casts: Floats
    products: Floats
    parameters: Floats
    modules: Mapping[str, Mapping[str, float]]
    scalars: Mapping[str, float]


class _Reading:
    """A series while its lines are read, one after the other: only numbers are kept of them, and events."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.events: list[dict[str, Any]] = []
        self._casts: TableRows[CastKey] = TableRows(CAST_FIELDS)
        self._products: TableRows[ProductKey] = TableRows(PRODUCT_FIELDS)
        self._parameters: TableRows[str] = TableRows(PARAMETER_FIELDS)
        self._modules: dict[str, TableRows[str]] = {}
        self._of_lines, self._of_looks = CurveRows(), CurveRows()
        self._periods: dict[str, list[Period]] = {}
        self._newest: _Columns | None = None

    def add(self, look: _Look) -> None:
        """A look; later than those before it."""
        if look.columns is not self._newest:
            self._newest = look.columns
            self._note_facts(look)
        self._casts.add(look.columns.casts, look.casts)
        self._products.add(look.columns.products, look.products)
        self._parameters.add(look.columns.parameters, look.parameters)
        for name in look.modules.keys() - self._modules.keys():
            self._modules[name] = TableRows((name,), absent=len(self.steps))
        for name, rows in self._modules.items():
            found = look.modules.get(name, {})
            rows.add(tuple(found), np.array([list(found.values())], dtype=np.float64))
        _add_numbers(self._of_looks, look.step, look.scalars)
        self.steps.append(look.step)

    def add_line(self, line: Mapping[str, Any]) -> None:
        """A line of another kind."""
        if line["kind"] in ("step", "evaluation"):
            _add_numbers(self._of_lines, line["step"], line)
        else:
            self.events.append(dict(line))

    def series(self) -> Series:
        """All of it."""
        return Series(
            casts=self._casts.table(self.steps),
            products=self._products.table(self.steps),
            parameters=self._parameters.table(self.steps),
            modules={name: self._modules[name].table(self.steps) for name in sorted(self._modules)},
            curves=self._of_lines.curves() | self._of_looks.curves(),
            layers={path: known[-1].facts for path, known in self._periods.items()},
            periods=self._periods,
            events=tuple(self.events),
        )

    def _note_facts(self, look: _Look) -> None:
        for path, facts in look.columns.layers.items():
            known = self._periods.setdefault(path, [])
            if not known or known[-1].facts != facts:
                known.append(Period(float(look.step), len(self.steps), facts))


def _add_numbers(curves: CurveRows, step: float, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        number = math.nan if name == "loss" and value is None else value
        if name not in ("kind", "step") and isinstance(number, int | float):
            curves.add(name, step, number)


def _columns(names: tuple[str, ...], rows: Iterable[Floats]) -> dict[str, list[float | None]]:
    table = [row.tolist() for row in rows]
    return {name: [_plain(row[index]) for row in table] for index, name in enumerate(names)}


def _plain(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _check_order(steps: Sequence[int], failed: Collection[int]) -> None:
    """Refuse looks that do not rise; one that broke may come again, in its replay and where it is repeated."""
    for before, step in pairwise(steps):
        if step < before or (step == before and step not in failed):
            raise TrainingError(
                f"the statistics of step {step} stand after those of step {before}; two runs were put together or "
                "lines were copied: leave each step once, in order"
            )


def _check_line(line: Mapping[str, Any]) -> None:
    """Refuse a line without what the rules read of it; numbers that are unknown are null."""
    for name in ("step", *_NEEDED.get(line["kind"], ())):
        if name not in line:
            raise TrainingError(
                f"the {line['kind']} line of step {line.get('step')} has no {name}; it was edited: put the file "
                "back as it was"
            )
    for name, kinds in _READ.items():
        if not isinstance(line.get(name), kinds):
            raise TrainingError(
                f"the {line['kind']} line of step {line['step']} has {name} = {line[name]!r}, which no run writes; "
                "it was edited: put the file back as it was"
            )


def _look_of(sample: Sample) -> _Look:
    return _Look(
        sample.step,
        _Columns(tuple(sample.casts), tuple(sample.products), tuple(sample.parameters), sample.layers),
        casts=_stacked(sample.casts),
        products=_stacked(sample.products),
        parameters=_stacked(sample.parameters),
        modules=sample.modules,
        scalars=sample.scalars,
    )


def _stacked(rows: Mapping[Any, Floats]) -> Floats:
    """[F, C]; of no things no numbers."""
    return np.stack(list(rows.values()), axis=1) if rows else np.empty(0)


def _look(watched: Mapping[str, Any], columns: _Columns | None, line: Mapping[str, Any]) -> tuple[_Look, _Columns]:
    """The look of a "statistics" line, and what the line ``watched`` names, which is read where ``columns`` is None."""
    known = {"kind", "step", "casts", "products", "parameters", "modules"}
    try:
        columns = columns or _read_columns(watched)
        look = _Look(
            int(line["step"]),
            columns,
            casts=_rows(columns.casts, CAST_FIELDS, line["casts"]),
            products=_rows(columns.products, PRODUCT_FIELDS, line["products"]),
            parameters=_rows(columns.parameters, PARAMETER_FIELDS, line["parameters"]),
            modules={name: {path: _number(x) for path, x in found.items()} for name, found in line["modules"].items()},
            scalars={name: _number(value) for name, value in line.items() if name not in known},
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"the statistics of step {line.get('step')} do not fit the names before them ({error}); "
            "they are another model's or were edited: put the file back as it was"
        ) from error
    return look, columns


def _read_columns(watched: Mapping[str, Any]) -> _Columns:
    return _Columns(
        casts=tuple(CastKey(*key) for key in watched["casts"]),
        products=tuple(ProductKey(*key) for key in watched["products"]),
        parameters=tuple(watched["parameters"]),
        layers={path: _facts(path, facts) for path, facts in watched["layers"].items()},
    )


def _facts(path: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's facts, as the rules and the report read them."""
    for name, kind in _FACTS.items():
        if not isinstance(facts[name], kind):
            raise ValueError(f"{path}'s {name} is {facts[name]!r}")
    if not all(isinstance(cast, Mapping) for cast in facts["casts"].values()):
        raise ValueError(f"{path}'s casts are {facts['casts']!r}")
    _check_options(path, facts, _LAYER_OPTIONS)
    for place, cast in facts["casts"].items():
        _check_options(f"{path}'s {place}", cast, _CAST_OPTIONS)
    return dict(facts)


def _check_options(place: str, facts: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse facts that may be missing, but not be anything else than text, or than a number of at least so much."""
    for name in facts.keys() & known.keys():
        value, wanted = facts[name], known[name]
        if wanted is str:
            fits = isinstance(value, str)
        else:
            kinds = int if isinstance(wanted, int) else (int, float)
            fits = isinstance(value, kinds) and not isinstance(value, bool) and wanted <= value < math.inf
        if not fits:
            raise ValueError(f"{place}'s {name} is {value!r}")


def _rows(keys: Sequence[Any], names: tuple[str, ...], columns: Mapping[str, Sequence[float | None]]) -> Floats:
    """[F, C]."""
    unknown = {name: [None] * len(keys) for name in LATER_FIELDS}
    table = np.array([[_number(x) for x in {**unknown, **columns}[name]] for name in names]).reshape(len(names), -1)
    if table.shape[1] != len(keys):
        raise ValueError(f"{table.shape[1]} columns for {len(keys)} names")
    if len(set(keys)) != len(keys):
        raise ValueError("a name stands there twice")
    return table


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
