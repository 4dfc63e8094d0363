"""Predictions of published rows, in the metric that each row has.

A prediction is the fitted model's value with an interval that held 80 % of rows of models that the fit had not seen.
A row that cannot be predicted has a reason instead: one sentence.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.planning.constants import Constants, gemm_seconds, prompt_seconds, serving_seconds, training_seconds
from octavo.planning.gemm_costs import gemm_parts
from octavo.planning.gemm_rows import gemm_job
from octavo.planning.jobs import GemmJob, Recompute, ServingJob, TrainingJob
from octavo.planning.metrics import (
    GPUS,
    is_of_prompts,
    is_speedup,
    memory_measure,
    product_measure,
    prompt_measure,
    service_measure,
    step_measure,
    words_of,
)
from octavo.planning.precision import BF16, unsupported_reason
from octavo.planning.row_words import numbers_of
from octavo.planning.rows import Row, serving_job, training_job
from octavo.planning.serving_costs import requests_in_flight, serving_parts
from octavo.planning.training_costs import training_parts
from octavo.planning.training_memory import Memory, planned_memory, training_memory

__all__ = ["Prediction", "Problem", "predict_row", "problem_of"]

GB = 1e9
NEEDED = {"batch": ("global_batch", "micro_batch"), "sequence length": ("seq",)}
NOT_FINITE = "the prediction is not a finite number above 0; check the row's sizes"
MOST_OF_MEMORY = 1.3  # share of a GPU's memory beyond which a step is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of one row.

    Attributes:
        id: the row's.
        value: in the row's metric; None with a reason.
        low: lower end of the 80 % interval; ``high``: the upper one.
        bf16_value: what BF16 would do in the same metric; None where it cannot be said.
        reason: why there is no value.
    """

    id: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bf16_value: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A row as the model sees it.

    Attributes:
        job: what was measured.
        bf16: the same in BF16; None if BF16 cannot run it.
        measure: from seconds (of a step, a token or a product) to the metric; None for memory and for a speed-up.
        bf16_measure: the same for the BF16 job, whose batch may differ.
        memory: from the memory of a step to the metric; None for times.
        of_prompts: whether seconds are those of one prompt instead of a generated token.
    """

    job: TrainingJob | ServingJob | GemmJob
    bf16: TrainingJob | ServingJob | GemmJob | None
    measure: Callable[[float], float] | None
    bf16_measure: Callable[[float], float] | None = None
    memory: Callable[[Memory], float] | None = None
    of_prompts: bool = False

    @property
    def kind(self) -> str:
        """Name of the interval that holds for it."""
        if self.memory is not None:
            return "memory"
        if self.measure is None:
            return "speedup"
        if isinstance(self.job, ServingJob):
            return "infer"
        return "train" if isinstance(self.job, TrainingJob) else "gemm"

    def width(self, constants: Constants) -> float:
        """Logarithm of the factor of its 80 % interval."""
        return constants.width(self.kind, self.job)

    def seconds(self, values: Mapping[str, float], *, bf16: bool = False) -> float:
        """Seconds of a step, of a token, of a prompt or of the products."""
        job = self.bf16 if bf16 else self.job
        if isinstance(job, TrainingJob):
            return float(training_seconds(training_parts(job), values)["total"])
        if isinstance(job, ServingJob) and self.of_prompts:
            return prompt_seconds(serving_parts(job), values) * job.answer
        if isinstance(job, ServingJob):
            return float(serving_seconds(serving_parts(job), values)["total"])
        assert job is not None
        return float(gemm_seconds(gemm_parts(job), values)["total"])


def problem_of(row: Row) -> Problem:
    """Return the problem that a row poses.

    Raises:
        ConfigError: the planner cannot predict it; the message is the reason.
    """
    reason = _refusal(row)
    if reason:
        raise OctavoError(reason)
    if row.kind in ("gemm", "layer"):
        products = gemm_job(row)
        _refuse_unsupported(products)
        of_products = None if is_speedup(row) else product_measure(row, products)
        return Problem(products, replace(products, precision=BF16), of_products, of_products)
    if row.kind == "infer":
        return _problem_of_service(row)
    row = _on_enough_gpus(row)
    step = training_job(row)
    _refuse_unsupported(step)
    _refuse_what_cannot_fit(step, row)
    of_memory = memory_measure(row)
    if of_memory is not None:
        if not row["micro_batch"]:
            raise ConfigError("the memory of a step needs its micro-batch, which the row leaves out")
        return Problem(step, _bf16_step(row, step), None, memory=of_memory)
    _refuse_an_unknown_step(row)
    bf16 = _bf16_step(row, step)
    if is_speedup(row):
        return Problem(step, bf16, None)
    return Problem(step, bf16, step_measure(row, step), step_measure(row, bf16))


def _problem_of_service(row: Row) -> Problem:
    service = serving_job(row)
    _refuse_unsupported(service)
    of_prompts = is_of_prompts(row)
    if not of_prompts and numbers_of("seq", row["seq"])[1] < 1:
        raise ConfigError(f"seq {row['seq'][:40]!r} has an answer of no tokens, whose rate is not predicted")
    if is_speedup(row):
        measure = None
    elif of_prompts:
        measure = prompt_measure(row, service)
        service = replace(service, requests=service.requests or 1)
    else:
        measure = service_measure(row, service)
    in_bf16 = replace(service, precision=BF16)
    try:
        requests_in_flight(in_bf16)
    except OctavoError:
        return Problem(service, None, measure, of_prompts=of_prompts)
    return Problem(service, in_bf16, measure, measure, of_prompts=of_prompts)


def _refuse_unsupported(job: TrainingJob | ServingJob | GemmJob) -> None:
    reason = unsupported_reason(job.precision, job.hardware)
    if reason is not None:
        raise ConfigError(reason)


def _on_enough_gpus(row: Row) -> Row:
    """The row, or if it leaves out its GPUs and its figure hardly depends on them, the row on the fewest that do."""
    if row.integer("gpus") or not (words_of(row) & (GPUS | {"tflops", "mfu"}) or is_speedup(row)):
        return row
    ranks = math.prod(max(1, row.integer(name, 1)) for name in ("tp", "pp", "cp"))
    tried = (Row(row.cells | {"gpus": str(ranks << doublings)}) for doublings in range(11))
    return next((each for each in tried if _needed_gb(job := training_job(each)) <= job.hardware.memory), row)


def _needed_gb(job: TrainingJob) -> float:
    """Memory of a step with every block recomputed."""
    return training_memory(job, Recompute.FULL).total / GB


def _refuse_what_cannot_fit(job: TrainingJob, row: Row) -> None:
    """Refuse a step that needs far more memory than there is with every block recomputed, whatever its row says."""
    left_out = "" if row.integer("gpus") else "; the row leaves out its number of GPUs"
    needed = _needed_gb(job)
    if needed > MOST_OF_MEMORY * job.hardware.memory:
        raise ConfigError(
            f"{job.model.name} would need {needed:,.0f} GB of each of {job.layout.gpus:,} × {job.hardware.memory:g} GB "
            f"with all activations recomputed{left_out}; use more GPUs, or divide it among more of them"
        )


def _refuse_an_unknown_step(row: Row) -> None:
    """Refuse the time of a step whose size the row leaves out; rates hardly depend on it."""
    if (
        not re.search(r"hours_for|step|iter|time|s/it", row["metric"].lower())
        or is_speedup(row)
        or "nanochat" in row.notes
    ):
        return
    left_out = [name for name, columns in NEEDED.items() if not any(row.number(column) for column in columns)]
    if left_out:
        raise ConfigError(f"the time of a step depends on its {' and its '.join(left_out)}, which the row leaves out")


def predict_row(row: Row, constants: Constants) -> Prediction:
    """Return the prediction of a row; one that cannot be made has a reason, and nothing is raised."""
    with np.errstate(all="ignore"):  # absurd sizes overflow, and are refused as not finite
        return _predicted(row, constants)


def _predicted(row: Row, constants: Constants) -> Prediction:
    try:
        problem = problem_of(row)
        if problem.memory is not None:
            return _of_memory(row, problem, constants)
        if problem.measure is None:
            return _of_ratio(row, problem, constants)
        value = problem.measure(problem.seconds(constants.values))
        bf16 = None
        if problem.bf16 is not None and problem.bf16_measure is not None:
            bf16 = problem.bf16_measure(problem.seconds(constants.values, bf16=True))
    except OctavoError as error:
        return Prediction(id=row["id"], reason=str(error))
    except (ValueError, ArithmeticError):  # of numbers that floats cannot hold
        return Prediction(id=row["id"], reason=NOT_FINITE)
    return _with_interval(row["id"], value, bf16, problem.width(constants))


def _of_ratio(row: Row, problem: Problem, constants: Constants) -> Prediction:
    """Prediction of a speed-up over BF16, whose own is 1."""
    if problem.bf16 is None:
        return Prediction(id=row["id"], reason="BF16 does not fit there, so there is no speed-up over it")
    gain = problem.seconds(constants.values, bf16=True) / problem.seconds(constants.values)
    return _with_interval(row["id"], gain, 1.0, problem.width(constants))


def _of_memory(row: Row, problem: Problem, constants: Constants) -> Prediction:
    """Prediction of memory, with an interval of everything that the row leaves open.

    Without a word on recomputation that is anything from all to nothing; of activations in FP8, anything from codes of
    all to codes of linear layers' inputs alone.
    """
    measure, job = problem.memory, problem.job
    assert measure is not None
    assert isinstance(job, TrainingJob)
    bf16 = measure(planned_memory(problem.bf16)) if isinstance(problem.bf16, TrainingJob) else None
    planned = planned_memory(job)
    found = _with_interval(row["id"], measure(planned), bf16, problem.width(constants))
    if found.low is None or found.high is None:
        return found
    open_ends = []
    if job.recompute is None:
        open_ends += [measure(training_memory(job, policy)) for policy in (Recompute.FULL, Recompute.NONE)]
    if job.precision.stores_codes:
        plain = planned_memory(job.at(replace(job.precision, stores_codes=False)))
        open_ends.append(measure(replace(planned, activations=plain.activations)))
    return replace(found, low=min(found.low, *open_ends), high=max(found.high, *open_ends)) if open_ends else found


def _with_interval(name: str, value: float, bf16: float | None, width: float) -> Prediction:
    if not math.isfinite(value) or value <= 0:
        return Prediction(id=name, reason=NOT_FINITE)
    factor = math.exp(width)
    return Prediction(id=name, value=value, low=value / factor, high=value * factor, bf16_value=bf16)


def _refusal(row: Row) -> str | None:
    """Return why a row is not a problem the planner models."""
    metric, kind, text = row["metric"].lower(), row.kind, row.notes
    if kind not in ("train", "infer", "gemm", "layer"):
        return f"kind {kind!r} is not one of train, infer, gemm and layer"
    if "rl_step" in metric or "grpo" in text:
        return "a step of reinforcement learning is training and generation together, whose shares the row does not say"
    if "max-seq-length" in text:
        return "the row gives the most tokens of a sequence, not how many its sequences have"
    return None


def _bf16_step(row: Row, job: TrainingJob) -> TrainingJob:
    """The step that the row's BF16 value measured: in BF16, with the batch that the notes name."""
    found = job.at(BF16)
    micro = re.search(r"bf16 (?:row uses|ran at) micro batch (\d+)", row.notes)
    micro = micro or re.search(r"bf16 and fp8[^;]* differ in batch \((\d+) vs \d+\)", row.notes)
    if micro is None or not int(micro.group(1)):
        return found
    batch = re.search(r"gbs (\d+)", row.notes.split("bf16 row uses")[-1])
    size = int(micro.group(1))
    steps = job.micro_batches * job.layout.dp
    return replace(found, micro_batch=size, global_batch=int(batch.group(1)) if batch else size * steps)
