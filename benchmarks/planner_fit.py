"""Fit the planner's constants on published measurements, and judge them on models that the fit has not seen.

``python -m benchmarks.planner_fit`` prints the constants with their uncertainty, the signed error of every source, the
worst rows and the bars; ``--write`` also writes octavo/planning/constants.json.

Every measurement gives one residual, the logarithm of predicted over measured seconds; a row with a BF16 value also one
of its speed-up. The constants minimise Huber's loss of the residuals and the squared distance to a prior, in units of
its deviation. A group of rows that differ in the number of GPUs only counts like its square root. For every bar the
rows of one model family are left out of the fit that predicts them: a family is a model and its size (all Llama 70B
are one), a layer's or a GEMM's the page it stands on. ``--by-page`` leaves whole pages out for models too, which is
stricter: a page is often all that is known of a program or a kernel. ``--neutral`` gives all GEMM kernels one wide
prior, which shows how much of the result the priors carry.
"""

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.errors import OctavoError
from octavo.planning import constants as model
from octavo.planning.gemm_costs import gemm_parts
from octavo.planning.jobs import GemmJob, ServingJob, TrainingJob
from octavo.planning.prediction import Problem, problem_of
from octavo.planning.rows import Row, read_rows
from octavo.planning.serving_costs import serving_parts
from octavo.planning.training_costs import training_parts
from octavo.planning.training_memory import planned_memory

ROWS = Path(__file__).parent / "planner_rows.csv"
CONSTANTS = Path(model.__file__).parent / "constants.json"
HUBER = 0.12  # residuals beyond it count linearly
SPREAD = 0.07  # of a residual of the model, the unit of Huber's loss

# Mean and deviation of each constant's prior: what is known before the rows. 0.3 is 74 % of a limit reached.
PRIORS: dict[str, tuple[float, float]] = {
    "gemm_bf16_hopper": (0.30, 0.15),
    "gemm_tensor_hopper": (0.45, 0.15),
    "gemm_row_hopper": (0.55, 0.2),
    "gemm_block_hopper": (0.55, 0.2),
    "gemm_triton_hopper": (1.0, 0.5),
    "gemm_deepgemm_hopper": (0.3, 0.2),
    "gemm_bf16_blackwell": (0.35, 0.15),
    "gemm_tensor_blackwell": (0.5, 0.15),
    "gemm_mx_blackwell": (0.5, 0.15),
    "gemm_fp4_blackwell": (0.8, 0.3),
    "gemm_bf16_cdna": (0.6, 0.2),
    "gemm_tensor_cdna": (0.8, 0.3),
    "grouped": (0.2, 0.2),
    "reading": (0.4, 0.2),
    "sustained": (0.1, 0.1),
    "attention": (0.7, 0.3),
    "memory": (0.3, 0.3),
    "cast": (0.3, 0.3),
    "cast_training": (0.3, 0.3),
    "launch": (1.6, 0.5),
    "tp": (0.2, 0.5),
    "tp_overlapped": (-0.7, 0.5),
    "cp": (-0.7, 0.5),
    "ep": (0.3, 0.4),
    "ep_network": (0.0, 0.4),
    "etp": (0.3, 0.4),
    "pp": (-1.0, 0.4),
    "collectives": (2.7, 0.5),
    "bubble": (0.0, 0.3),
    "fsdp": (0.3, 0.4),
    "fsdp_exposed": (-1.5, 0.6),
    "dp": (-0.7, 0.6),
    "optimizer": (0.3, 0.4),
    "scale": (-5.3, 0.7),
    "host": (1.6, 0.4),
    "expert_host": (1.6, 0.6),
    "expert_release": (-0.3, 0.3),
    "framework_fused_experts": (-0.2, 0.15),
    "framework_torchtitan": (0.0, 0.1),
    "framework_megatron": (0.0, 0.1),
    "framework_jax": (0.0, 0.1),
    "framework_composer": (0.0, 0.1),
    "framework_eager": (0.1, 0.15),
    "framework_megatron_blackwell": (0.0, 0.1),
    "framework_megatron_experts": (0.0, 0.1),
    "framework_torchtitan_blackwell": (0.0, 0.1),
    "framework_torchtitan_experts": (0.2, 0.2),
    "attention_composer": (0.2, 0.2),
    "attention_eager": (0.2, 0.2),
    "attention_blackwell": (0.2, 0.2),
    "host_composer": (0.7, 0.4),
    "host_eager": (0.7, 0.4),
    "decode_gemm": (0.3, 0.3),
    "decode_keys": (0.4, 0.3),
    "decode_memory": (0.3, 0.4),
    "decode_exchange": (0.3, 0.4),
    "decode_launches": (0.7, 0.5),
    "prompt_gemm": (0.4, 0.3),
    "prompt_attention": (0.7, 0.4),
    "prompt_memory": (0.3, 0.4),
    "prompt_exchange": (0.3, 0.4),
    "prompt_launches": (0.7, 0.5),
    "exchanges": (2.5, 0.7),
    "scheduler": (2.0, 1.0),
    "framework_tensorrt-llm": (0.0, 0.1),
    "framework_divided_experts": (0.2, 0.2),
    "framework_vllm": (0.2, 0.2),
}
NEUTRAL = {name: (0.5, 0.5) for name in PRIORS if name.startswith("gemm_")}
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement: what it costs at the limits, and the logarithm of the seconds that it took."""

    row: Row
    problem: Problem
    family: str
    weight: float
    parts: Mapping[str, float]
    seconds: float
    bf16_parts: Mapping[str, float] | None
    bf16_seconds: float


def family_of(row: Row, problem: Problem, *, by_page: bool) -> str:
    """Return the model and its size; of GEMMs and layers, the page they stand on."""
    if by_page or isinstance(problem.job, GemmJob):
        return f"{row.source} {row['source_path_or_url']}"
    name = problem.job.model.name.split(",")[0]
    return {"llama-2-70b": "llama-70b", "llama-3-70b": "llama-70b"}.get(name, name)


def parts_of(job: TrainingJob | ServingJob | GemmJob) -> Mapping[str, float]:
    """Return the ideal seconds of a job by kind."""
    if isinstance(job, TrainingJob):
        return training_parts(job)
    return serving_parts(job) if isinstance(job, ServingJob) else gemm_parts(job)


def seconds_of(measured: float, measure: Callable[[float], float] | None) -> float:
    """Return the seconds that give a measured value, whether it rises or falls with them."""
    assert measure is not None
    one, two = measure(1.0), measure(2.0)
    return measured / one if two > one else one / measured


def read_points(
    path: Path, *, by_page: bool = False
) -> tuple[list[Point], list[tuple[Row, Problem]], list[tuple[Row, str]]]:
    """Return the timed rows as points, the rows of memory, and the rows that are refused with the reason."""
    points: list[Point] = []
    memory, refused = [], []
    rows = read_rows(path)
    groups: Counter[str] = Counter(_group(row) for row in rows)
    for row in rows:
        try:
            problem = problem_of(row)
        except OctavoError as error:
            refused.append((row, str(error)))
            continue
        if problem.memory is not None:
            memory.append((row, problem))
            continue
        if problem.of_prompts:
            refused.append((row, "the fit is of whole services, and this row times prompts alone"))
            continue
        bf16 = row.number("bf16_value") if problem.bf16 is not None and not problem.job.precision.is_bf16 else 0.0
        points.append(
            Point(
                row,
                problem,
                family_of(row, problem, by_page=by_page),
                groups[_group(row)] ** -0.25,
                parts_of(problem.job),
                seconds_of(row.number("value"), problem.measure),
                parts_of(problem.bf16) if bf16 and problem.bf16 else None,
                seconds_of(bf16, problem.bf16_measure) if bf16 else 0.0,
            )
        )
    return points, memory, refused


def _group(row: Row) -> str:
    return row["notes"].split(";")[0] + row["precision"] if "group=" in row["notes"] else row["id"]


def table(parts: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Return the parts of several rows as arrays, 0 where a row does not have a part."""
    names = sorted({name for each in parts for name in each})
    return {name: np.array([float(each.get(name, 0.0)) for each in parts]) for name in names}


@dataclass(frozen=True, slots=True)
class Batch:
    """Points of one kind as arrays, for the fit."""

    kind: str
    parts: dict[str, np.ndarray]
    measured: np.ndarray
    weights: np.ndarray
    pairs: tuple[np.ndarray, np.ndarray]  # positions of a row and of its BF16 measurement

    def residuals(self, values: Values) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of predicted over measured seconds, and of speed-ups."""
        function = {"train": model.training_seconds, "infer": model.serving_seconds, "gemm": model.gemm_seconds}
        predicted = np.log(function[self.kind](self.parts, values)["total"])
        errors = predicted - self.measured
        fast, slow = self.pairs
        return errors, errors[slow] - errors[fast]


def batch_of(kind: str, points: Sequence[Point]) -> Batch:
    """Return the points of one kind with their BF16 measurements behind them."""
    paired = [place for place, point in enumerate(points) if point.bf16_parts is not None]
    parts = [point.parts for point in points] + [points[place].bf16_parts or {} for place in paired]
    seconds = [point.seconds for point in points] + [points[place].bf16_seconds for place in paired]
    weights = [point.weight for point in points] + [points[place].weight for place in paired]
    pairs = np.array(paired, dtype=int), len(points) + np.arange(len(paired))
    return Batch(kind, table(parts), np.log(seconds), np.array(weights), pairs)


def fit(points: Sequence[Point], start: Values | None = None) -> tuple[Values, Values]:
    """Return the constants that fit the points best, and their standard deviations; ``start`` saves iterations."""
    by_kind: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_kind[point.problem.kind].append(point)
    batches = [batch_of(kind, each) for kind, each in by_kind.items()]
    names = list(PRIORS)
    means, deviations = (np.array(each) for each in zip(*PRIORS.values(), strict=True))
    theta = np.array([start[name] for name in names]) if start else means.copy()
    for _ in range(12):
        errors, weights = _errors(batches, dict(zip(names, theta, strict=True)))
        jacobian = _jacobian(batches, names, theta, errors)
        scaled = np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-9)) * weights**2 / SPREAD**2
        normal = (jacobian * scaled[:, None]).T @ jacobian + np.diag(deviations**-2.0)
        gradient = jacobian.T @ (scaled * errors) + (theta - means) / deviations**2
        step = np.linalg.solve(normal, gradient)
        theta = theta - np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 3e-3:
            break
    spread = np.sqrt(np.diag(np.linalg.inv(normal)))
    return dict(zip(names, theta.tolist(), strict=True)), dict(zip(names, spread.tolist(), strict=True))


def _errors(batches: Sequence[Batch], values: Values) -> tuple[np.ndarray, np.ndarray]:
    errors, weights = [], []
    for batch in batches:
        seconds, ratios = batch.residuals(values)
        errors += [seconds, ratios]
        weights += [batch.weights, 1.5 * batch.weights[batch.pairs[0]]]
    return np.concatenate(errors), np.concatenate(weights)


def _jacobian(batches: Sequence[Batch], names: Sequence[str], theta: np.ndarray, base: np.ndarray) -> np.ndarray:
    columns, small = [], 1e-4
    for place in range(len(names)):
        moved = theta.copy()
        moved[place] += small
        columns.append((_errors(batches, dict(zip(names, moved, strict=True)))[0] - base) / small)
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prediction of a row by a fit without its family: logarithms of predicted over measured."""

    point: Point
    error: float
    ratio_error: float | None

    @property
    def metric_error(self) -> float:
        """Relative error in the row's metric: of a rate, the inverse of the seconds' ratio."""
        measure = self.point.problem.measure
        assert measure is not None
        return math.expm1(-self.error if measure(2.0) < measure(1.0) else self.error)


def leave_families_out(points: Sequence[Point], values: Values) -> list[Outcome]:
    """Return every row's errors from a fit that has seen no row of its family."""
    found = []
    for family in sorted({point.family for point in points}):
        fitted, _ = fit([point for point in points if point.family != family], values)
        found += [outcome_of(point, fitted) for point in points if point.family == family]
    return found


def outcome_of(point: Point, values: Values) -> Outcome:
    """Return a row's errors under some constants."""
    error = math.log(point.problem.seconds(values) / point.seconds)
    if not point.bf16_seconds:
        return Outcome(point, error, None)
    of_bf16 = math.log(point.problem.seconds(values, bf16=True) / point.bf16_seconds)
    return Outcome(point, error, of_bf16 - error)


def shares(logarithms: Sequence[float]) -> list[float]:
    """Return relative errors, sorted by size: a metric is off by as much as its seconds."""
    return sorted(abs(math.expm1(each)) for each in logarithms)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def widths(outcomes: Sequence[Outcome], *, without: str = "") -> dict[str, float]:
    """Return by kind the logarithm of the factor that 80 % of left-out rows are within."""
    found: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.point.family != without:
            found[outcome.point.problem.kind].append(abs(outcome.error))
    return {kind: quantile(errors, 0.8) for kind, errors in found.items()}


def covered(outcomes: Sequence[Outcome], kind: str = "") -> float:
    """Return the share of rows, of one kind or all, within an 80 % interval that was made without their family."""
    families = {outcome.point.family for outcome in outcomes}
    intervals = {family: widths(outcomes, without=family) for family in families}
    inside = [
        abs(each.error) <= intervals[each.point.family].get(each.point.problem.kind, 0.3)
        for each in outcomes
        if kind in ("", each.point.problem.kind)
    ]
    return sum(inside) / len(inside)


@dataclass(frozen=True, slots=True)
class MemoryOutcome:
    """Logarithm of predicted over measured memory; ``in_sample`` on the page that gave what is reserved."""

    name: str
    error: float
    in_sample: bool


def memory_outcomes(rows: Sequence[tuple[Row, Problem]], points: Sequence[Point]) -> list[MemoryOutcome]:
    """Return the errors of rows of memory, and of the peaks that rows of other metrics name in their notes.

    The former are in-sample: training_memory.RESERVED was taken from what the same page leaves unexplained. The latter
    gave no constant, but the terms of the working memory were written when their errors were known. A figure that
    several rows repeat counts once.
    """
    found = []
    for row, problem in rows:
        assert problem.memory is not None
        for job, column in ((problem.job, "value"), (problem.bf16, "bf16_value")):
            if isinstance(job, TrainingJob) and row.number(column):
                predicted = problem.memory(planned_memory(job))
                name = f"{row['id']} {column}"
                found.append(MemoryOutcome(name, math.log(predicted / row.number(column)), in_sample=True))
    seen = set()
    for point in points:
        noted = re.search(r"(?:peak|max) mem ([\d.]+) GiB(?: vs ([\d.]+))?", point.row["notes"])
        jobs = (point.problem.job, point.problem.bf16)
        for job, figure in zip(jobs, noted.groups() if noted else (), strict=False):
            if figure and isinstance(job, TrainingJob) and (job, figure) not in seen:
                seen.add((job, figure))
                error = math.log(planned_memory(job).total / 1024**3 / float(figure))
                found.append(MemoryOutcome(f"{point.row['id']} {figure} GiB", error, in_sample=False))
    return found


def intervals_of(outcomes: Sequence[Outcome], memory: Sequence[MemoryOutcome]) -> dict[str, float]:
    """Return the widths of 80 % intervals that octavo.planning uses; memory's from figures that gave no constant."""
    speeds = [abs(each.ratio_error) for each in outcomes if each.ratio_error is not None]
    of_memory = [abs(each.error) for each in memory if not each.in_sample]
    return widths(outcomes) | {"memory": quantile(of_memory, 0.8), "speedup": quantile(speeds, 0.8)}


def bars(outcomes: Sequence[Outcome], memory: Sequence[MemoryOutcome], refused: int) -> list[tuple[str, str, bool]]:
    """Return what the planner must show: name, figures, and whether the bar is met."""
    speed = shares([each.ratio_error for each in outcomes if each.ratio_error is not None])
    training = [each for each in outcomes if each.point.problem.kind == "train" and each.ratio_error is not None]
    trained = shares([each.ratio_error or 0.0 for each in training])
    time = [abs(each.metric_error) for each in outcomes]
    of_steps = [abs(each.metric_error) for each in outcomes if each.point.problem.kind == "train"]
    inside = covered(outcomes)
    kinds = sorted({each.point.problem.kind for each in outcomes})
    of_kinds = ", ".join(f"{kind} {covered(outcomes, kind):.0%}" for kind in kinds)
    predicted = len(outcomes) + len({each.name.split()[0] for each in memory if each.in_sample})
    coverage = predicted / (predicted + refused)
    of_memory = shares([each.error for each in memory])
    new = shares([each.error for each in memory if not each.in_sample])
    middle, middle_of_new = quantile(of_memory, 0.5), quantile(new, 0.5)
    return [
        _bar("speed-up, training rows: median ≤ 7 %, 90 % within 15 %, none over 30 %", trained, (0.07, 0.15, 0.30)),
        _bar("speed-up, all rows: median ≤ 7 %, 90 % within 15 %, none over 30 %", speed, (0.07, 0.15, 0.30)),
        _bar("time or tokens/s: median ≤ 12 %, 90 % within 30 %", time, (0.12, 0.30, math.inf)),
        _bar("the same of training rows alone", of_steps, (0.12, 0.30, math.inf)),
        ("80 % intervals hold 75 to 90 % of rows", f"{inside:.1%} ({of_kinds})", 0.75 <= inside <= 0.90),
        ("at least 95 % of rows predicted", f"{coverage:.1%}", coverage >= 0.95),
        (
            "memory: median error ≤ 10 %",
            f"{middle:.1%} of {len(of_memory)} figures; {middle_of_new:.1%} of the {len(new)} that gave no constant",
            max(middle, middle_of_new) <= 0.10,
        ),
    ]


def _bar(name: str, errors: Sequence[float], most: tuple[float, float, float]) -> tuple[str, str, bool]:
    found = quantile(errors, 0.5), quantile(errors, 0.9), max(errors, default=math.nan)
    figures = f"median {found[0]:.1%}, 90 % within {found[1]:.1%}, worst {found[2]:.0%} ({len(errors)} rows)"
    return name, figures, all(value <= limit for value, limit in zip(found, most, strict=True))


def report(
    values: Values, deviations: Values, outcomes: Sequence[Outcome], lines: Sequence[tuple[str, str, bool]]
) -> str:
    """Return everything as Markdown."""
    text = ["## Bars, left-one-family-out", ""]
    text += [f"- {'met' if is_met else 'missed'}: {name}: {figures}" for name, figures, is_met in lines]
    text += _table_of_errors("Signed error a source", outcomes, lambda row: row.source)
    text += _table_of_errors("Signed error a group of rows", outcomes, lambda row: _group(row).split("=")[-1][:48])
    text += ["", "## Worst rows", "", "| row | family | value off by | speed-up off by |", "| --- | --- | --- | --- |"]
    for each in sorted(outcomes, key=lambda outcome: -abs(outcome.metric_error))[:20]:
        ratio = "–" if each.ratio_error is None else f"{math.expm1(each.ratio_error):+.0%}"
        text.append(f"| {each.point.row['id']} | {each.point.family[:40]} | {each.metric_error:+.0%} | {ratio} |")
    text += ["", "## Constants: logarithms of time over its ideal", "", "| constant | prior | fitted |"]
    text += ["| --- | --- | --- |"]
    for name, value in values.items():
        mean, deviation = PRIORS[name]
        fitted = (
            f"{value:.2f} ± {deviations[name]:.2f}"
            if deviations[name] < 0.95 * deviation
            else "the prior: the rows do not say"
        )
        text.append(f"| {name} | {mean:.2f} ± {deviation:.2f} | {fitted} |")
    return "\n".join(text) + "\n"


def _table_of_errors(title: str, outcomes: Sequence[Outcome], name: Callable[[Row], str]) -> list[str]:
    """Mean and range of the errors, in the rows' metrics, by a name of the row."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        groups[name(outcome.point.row), outcome.point.problem.kind].append(outcome.metric_error)
    lines = ["", f"## {title}", "", "| | kind | rows | mean | least | most |", "| --- | --- | --- | --- | --- | --- |"]
    for (label, kind), errors in sorted(groups.items()):
        cells = " | ".join(f"{each:+.0%}" for each in (sum(errors) / len(errors), min(errors), max(errors)))
        lines.append(f"| {label} | {kind} | {len(errors)} | {cells} |")
    return lines


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description="Fit the planner's constants on published measurements.")
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of measurements")
    parser.add_argument("--write", action="store_true", help=f"write {CONSTANTS.name} of octavo.planning")
    parser.add_argument("--by-page", action="store_true", help="leave pages out instead of models")
    parser.add_argument("--neutral", action="store_true", help="one wide prior for all GEMM kernels")
    parser.add_argument("--report", type=Path, help="write the report as Markdown")
    options = parser.parse_args()
    if options.neutral:
        PRIORS.update(NEUTRAL)
    points, memory, refused = read_points(options.rows, by_page=options.by_page)
    values, deviations = fit(points)
    outcomes = leave_families_out(points, values)
    of_memory = memory_outcomes(memory, points)
    lines = bars(outcomes, of_memory, len(refused))
    text = report(values, deviations, outcomes, lines)
    print(text)
    for row, reason in refused:
        print(f"not predicted: {row['id']}: {reason}")
    for each in of_memory:
        print(f"memory: {each.name}: {math.expm1(each.error):+.1%}{', in-sample' if each.in_sample else ''}")
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    if options.write:
        intervals = intervals_of(outcomes, of_memory)
        rounded = [{name: round(value, 4) for name, value in each.items()} for each in (values, deviations, intervals)]
        record = dict(zip(("values", "deviations", "intervals"), rounded, strict=True))
        CONSTANTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
