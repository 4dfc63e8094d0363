"""Time series of a watched run's statistics, read from its metrics.jsonl as arrays.

Besides steps and evaluations, the file has two kinds of lines written by the doctor:

    {"kind": "watched", "step": 10, "casts": [["layers.0.q_proj", "input", "output"], …], "products": [[path, gemm], …],
     "parameters": [name, …], "layers": {path: {"recipe": "delayed", "in_features": 128, …}}}
    {"kind": "statistics", "step": 10, "casts": {"amax": [3.1, …], …}, "products": {…}, "parameters": {…},
     "modules": {"alignment": {path: 0.31}, "batch_norm": {}}, "gradient_to_noise": 21.4, …}

A "watched" line names the columns of the "statistics" lines after it; a new one is written whenever they change.
Undefined numbers are null, as are losses that are NaN or infinite, which JSON does not support.
"""

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from octavo.doctor.statistics import CAST_FIELDS, PRODUCT_FIELDS
from octavo.doctor.tables import CurveRows, Floats, StatisticsTable, TableRows
from octavo.errors import TrainingError
from octavo.recipes.specs import OPERANDS

__all__ = ["OPERANDS", "PARAMETER_FIELDS", "CastKey", "Period", "ProductKey", "Sample", "Series", "series_of"]

PARAMETER_FIELDS = ("grad_norm", "gradient_variance", "update_ratio")
DIGITS = 5  # significant digits of the numbers in a file
LATER_FIELDS = ("least_stale_ratio",)  # missing in older files
_REQUIRED = {"overflow": ("loss_scale",)}  # keys of a kind of line, besides its step
_TYPES: dict[str, Any] = {
    "step": int | float,
    "loss_scale": int | float | None,
    "loss": int | float | None,
    "tensor": str | None,
}
_LAYER_FACTS: dict[str, Any] = {"recipe": str, "in_features": int, "out_features": int, "casts": Mapping}
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
    """A cast: the layer's path, the tensor's role, and the first GEMM that uses its result."""

    path: str
    role: str
    gemm: str


class ProductKey(NamedTuple):
    """A GEMM of a layer."""

    path: str
    gemm: str


class Period(NamedTuple):
    """Facts about a layer, with the sample from which they hold.

    Attributes:
        step: step of the first sample with these facts.
        sample_index: index of that sample in the run; a repeated step may have samples with different facts.
        facts: the recipe's name and casts, and the layer's shape.
    """

    step: float
    sample_index: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Statistics of one sampled step.

    Attributes:
        step: the step's number.
        casts: CAST_FIELDS of each cast, in the order in which the casts ran.
        products: PRODUCT_FIELDS of each GEMM.
        parameters: PARAMETER_FIELDS of each trained matrix.
        modules: other numbers by name, then by module path: "alignment", "batch_norm", "batch_norm_rows",
            "rank_scale_ratio", "rank_of_largest_scale", "rank_of_smallest_scale", and those of
            :mod:`octavo.doctor.expert_statistics` and :mod:`octavo.doctor.attention_statistics`.
        scalars: numbers of the whole step: "gradient_to_noise".
        layers: facts about each watched layer: its recipe's name and casts, its shape, its device type.
    """

    step: int
    casts: dict[CastKey, Floats]
    products: dict[ProductKey, Floats]
    parameters: dict[str, Floats]
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """Fields of the "watched" line."""
        return {
            "casts": [list(key) for key in self.casts],
            "products": [list(key) for key in self.products],
            "parameters": list(self.parameters),
            "layers": self.layers,
        }

    def values(self) -> dict[str, Any]:
        """Fields of the "statistics" line."""
        return {
            "casts": _columns_by_name(CAST_FIELDS, self.casts.values()),
            "products": _columns_by_name(PRODUCT_FIELDS, self.products.values()),
            "parameters": _columns_by_name(PARAMETER_FIELDS, self.parameters.values()),
            "modules": {
                name: {path: _round_or_none(x) for path, x in numbers.items()} for name, numbers in self.modules.items()
            },
            **{name: _round_or_none(x) for name, x in self.scalars.items()},
        }

    def scalars_by_name(self) -> Iterator[tuple[str, float]]:
        """Yield every finite number with a slash-separated name, for TensorBoard."""
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
        for name, by_path in self.modules.items():
            yield from ((f"modules/{name}/{path}", value) for path, value in by_path.items() if math.isfinite(value))
        yield from ((f"step/{name}", value) for name, value in self.scalars.items() if math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A run's statistics over time, as input of the rules.

    Attributes:
        casts: numbers of every cast.
        products: numbers of every GEMM.
        parameters: numbers of every trained matrix.
        modules: the numbers of ``Sample.modules`` by name, each by module path.
        curves: (steps, values) by name of the scalars in steps and samples: "loss", "lr", "grad_norm", "loss_scale",
            "gradient_to_noise", "nats". A non-finite loss is NaN; other non-finite values are left out.
        layers: the newest facts of each layer.
        periods: the facts of each layer over time, oldest first.
        events: lines of other kinds ("overflow", "failure", "precision", "autopilot"), unchanged.
        unigram_nats: entropy of the training text's token frequencies in nats; None if the text is unknown.
        kept_from: step of the oldest sample if earlier ones were dropped; None if all are here.
    """

    casts: StatisticsTable[CastKey]
    products: StatisticsTable[ProductKey]
    parameters: StatisticsTable[str]
    modules: dict[str, StatisticsTable[str]]
    curves: dict[str, tuple[Floats, Floats]]
    layers: dict[str, dict[str, Any]]
    periods: dict[str, list[Period]]
    events: tuple[dict[str, Any], ...]
    unigram_nats: float | None = None
    kept_from: int | None = None

    def curve(self, name: str) -> tuple[Floats, Floats]:
        """Steps and values of a scalar; empty if it was not recorded."""
        return self.curves.get(name, (np.empty(0), np.empty(0)))


def series_of(lines: Iterable[Mapping[str, Any]], samples: Sequence[Sample] = ()) -> Series:
    """Build the series of a run from its lines and from samples in memory.

    Args:
        lines: lines of metrics.jsonl, in order; "watched" and "statistics" lines become samples.
        samples: samples in memory.

    Raises:
        TrainingError: the columns of a "statistics" line do not match its "watched" line, or its step is not later than
            the previous one; a line has no kind; or a value that a rule reads is missing or not a number.
    """
    builder = _SeriesBuilder()
    for sample in samples:
        builder.add(_arrays_of(sample))
    columns: _WatchedColumns | None = None
    watched: Mapping[str, Any] = {}
    for line in lines:
        if "kind" not in line:
            raise TrainingError(
                f"a line of step {line.get('step')} has no kind; it was edited: put the file back as it was"
            )
        if line["kind"] == "watched":
            watched, columns = line, None
        elif line["kind"] == "statistics":
            sample_arrays, columns = _parse_statistics(watched, columns, line)
            builder.add(sample_arrays)
        else:
            _check_line(line)
            builder.add_line(line)
    _check_order(builder.steps[len(samples) :], {line["step"] for line in builder.events if line["kind"] == "failure"})
    return builder.series()


class _WatchedColumns(NamedTuple):
    """Columns named by a "watched" line, parsed once for all samples after it."""

    casts: tuple[CastKey, ...]
    products: tuple[ProductKey, ...]
    parameters: tuple[str, ...]
    layers: dict[str, dict[str, Any]]


class _SampleArrays(NamedTuple):
    """One sample with the numbers of casts, GEMMs and parameters as arrays [F, C]."""

    step: int
    columns: _WatchedColumns
    casts: Floats
    products: Floats
    parameters: Floats
    modules: Mapping[str, Mapping[str, float]]
    scalars: Mapping[str, float]


class _SeriesBuilder:
    """Accumulates a series line by line, keeping only numbers and events."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.events: list[dict[str, Any]] = []
        self._casts: TableRows[CastKey] = TableRows(CAST_FIELDS)
        self._products: TableRows[ProductKey] = TableRows(PRODUCT_FIELDS)
        self._parameters: TableRows[str] = TableRows(PARAMETER_FIELDS)
        self._modules: dict[str, TableRows[str]] = {}
        self._line_curves, self._sample_curves = CurveRows(), CurveRows()
        self._periods: dict[str, list[Period]] = {}
        self._newest: _WatchedColumns | None = None

    def add(self, sample: _SampleArrays) -> None:
        """Add a sample that is later than all before it."""
        if sample.columns is not self._newest:
            self._newest = sample.columns
            self._record_facts(sample)
        self._casts.add(sample.columns.casts, sample.casts)
        self._products.add(sample.columns.products, sample.products)
        self._parameters.add(sample.columns.parameters, sample.parameters)
        for name in sample.modules.keys() - self._modules.keys():
            self._modules[name] = TableRows((name,), absent=len(self.steps))
        for name, rows in self._modules.items():
            numbers = sample.modules.get(name, {})
            rows.add(tuple(numbers), np.array([list(numbers.values())], dtype=np.float64))
        _add_numbers(self._sample_curves, sample.step, sample.scalars)
        self.steps.append(sample.step)

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Add a line of another kind."""
        if line["kind"] in ("step", "evaluation"):
            _add_numbers(self._line_curves, line["step"], line)
        else:
            self.events.append(dict(line))

    def series(self) -> Series:
        """The series of everything added so far."""
        return Series(
            casts=self._casts.table(self.steps),
            products=self._products.table(self.steps),
            parameters=self._parameters.table(self.steps),
            modules={name: self._modules[name].table(self.steps) for name in sorted(self._modules)},
            curves=self._line_curves.curves() | self._sample_curves.curves(),
            layers={path: periods[-1].facts for path, periods in self._periods.items()},
            periods=self._periods,
            events=tuple(self.events),
        )

    def _record_facts(self, sample: _SampleArrays) -> None:
        for path, facts in sample.columns.layers.items():
            periods = self._periods.setdefault(path, [])
            if not periods or periods[-1].facts != facts:
                periods.append(Period(float(sample.step), len(self.steps), facts))


def _add_numbers(curves: CurveRows, step: float, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        number = math.nan if name == "loss" and value is None else value
        if name not in ("kind", "step") and isinstance(number, int | float):
            curves.add(name, step, number)


def _columns_by_name(names: tuple[str, ...], rows: Iterable[Floats]) -> dict[str, list[float | None]]:
    table = [row.tolist() for row in rows]
    return {name: [_round_or_none(row[index]) for row in table] for index, name in enumerate(names)}


def _round_or_none(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _check_order(steps: Sequence[int], failed: Collection[int]) -> None:
    """Raise unless steps ascend; a failed step may appear again as its replay and its repetition."""
    for before, step in pairwise(steps):
        if step < before or (step == before and step not in failed):
            raise TrainingError(
                f"the statistics of step {step} come after those of step {before}; two runs were joined or lines "
                "were copied: keep each step once, in order"
            )


def _check_line(line: Mapping[str, Any]) -> None:
    """Raise unless a line has the values that the rules read; unknown numbers are null."""
    for name in ("step", *_REQUIRED.get(line["kind"], ())):
        if name not in line:
            raise TrainingError(
                f"the {line['kind']} line of step {line.get('step')} has no {name}; it was edited: put the file "
                "back as it was"
            )
    for name, kinds in _TYPES.items():
        if not isinstance(line.get(name), kinds):
            raise TrainingError(
                f"the {line['kind']} line of step {line['step']} has {name} = {line[name]!r}, which no run writes; "
                "it was edited: put the file back as it was"
            )


def _arrays_of(sample: Sample) -> _SampleArrays:
    return _SampleArrays(
        sample.step,
        _WatchedColumns(tuple(sample.casts), tuple(sample.products), tuple(sample.parameters), sample.layers),
        casts=_stack(sample.casts),
        products=_stack(sample.products),
        parameters=_stack(sample.parameters),
        modules=sample.modules,
        scalars=sample.scalars,
    )


def _stack(rows: Mapping[Any, Floats]) -> Floats:
    """Stack the numbers of all rows: [F, C]; empty without rows."""
    return np.stack(list(rows.values()), axis=1) if rows else np.empty(0)


def _parse_statistics(
    watched: Mapping[str, Any], columns: _WatchedColumns | None, line: Mapping[str, Any]
) -> tuple[_SampleArrays, _WatchedColumns]:
    """Parse a "statistics" line, and the columns named by its ``watched`` line if ``columns`` is None."""
    table_keys = {"kind", "step", "casts", "products", "parameters", "modules"}
    try:
        columns = columns or _read_columns(watched)
        sample = _SampleArrays(
            int(line["step"]),
            columns,
            casts=_parse_rows(columns.casts, CAST_FIELDS, line["casts"]),
            products=_parse_rows(columns.products, PRODUCT_FIELDS, line["products"]),
            parameters=_parse_rows(columns.parameters, PARAMETER_FIELDS, line["parameters"]),
            modules={
                name: {path: _nan_if_none(x) for path, x in numbers.items()}
                for name, numbers in line["modules"].items()
            },
            scalars={name: _nan_if_none(value) for name, value in line.items() if name not in table_keys},
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"the statistics of step {line.get('step')} do not match the names before them ({error}); "
            "they belong to another model or were edited: put the file back as it was"
        ) from error
    return sample, columns


def _read_columns(watched: Mapping[str, Any]) -> _WatchedColumns:
    return _WatchedColumns(
        casts=tuple(CastKey(*key) for key in watched["casts"]),
        products=tuple(ProductKey(*key) for key in watched["products"]),
        parameters=tuple(watched["parameters"]),
        layers={path: _check_facts(path, facts) for path, facts in watched["layers"].items()},
    )


def _check_facts(path: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Check and copy the facts about a layer that the rules and the report read."""
    for name, kind in _LAYER_FACTS.items():
        if not isinstance(facts[name], kind):
            raise ValueError(f"{path}'s {name} is {facts[name]!r}")
    if not all(isinstance(cast, Mapping) for cast in facts["casts"].values()):
        raise ValueError(f"{path}'s casts are {facts['casts']!r}")
    _check_options(path, facts, _LAYER_OPTIONS)
    for place, cast in facts["casts"].items():
        _check_options(f"{path}'s {place}", cast, _CAST_OPTIONS)
    return dict(facts)


def _check_options(place: str, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless the optional facts have the type, and numbers the minimum, given by ``expected``."""
    for name in facts.keys() & expected.keys():
        value, type_or_minimum = facts[name], expected[name]
        if type_or_minimum is str:
            fits = isinstance(value, str)
        else:
            kinds = int if isinstance(type_or_minimum, int) else (int, float)
            fits = isinstance(value, kinds) and not isinstance(value, bool) and type_or_minimum <= value < math.inf
        if not fits:
            raise ValueError(f"{place}'s {name} is {value!r}")


def _parse_rows(keys: Sequence[Any], names: tuple[str, ...], columns: Mapping[str, Sequence[float | None]]) -> Floats:
    """Numbers of a "statistics" line: [F, C]."""
    unknown = {name: [None] * len(keys) for name in LATER_FIELDS}
    table = np.array([[_nan_if_none(x) for x in {**unknown, **columns}[name]] for name in names]).reshape(
        len(names), -1
    )
    if table.shape[1] != len(keys):
        raise ValueError(f"{table.shape[1]} columns for {len(keys)} names")
    if len(set(keys)) != len(keys):
        raise ValueError("a name appears twice")
    return table


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else float(value)
