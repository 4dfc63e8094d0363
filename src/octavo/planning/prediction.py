"""Predictions of published rows, in the metric that each row has.

A prediction is the fitted model's value with an interval that held 80 % of rows of models that the fit had not seen.
A row that cannot be predicted has a reason instead: one sentence.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from octavo.errors import OctavoError
from octavo.planning.constants import Constants, gemm_seconds, serving_seconds, training_seconds
from octavo.planning.gemm_costs import gemm_parts
from octavo.planning.jobs import GemmJob, GemmPass, ServingJob, TrainingJob
from octavo.planning.precision import BF16
from octavo.planning.rows import Row, gemm_job, serving_job, training_job
from octavo.planning.serving_costs import requests_in_flight, serving_parts
from octavo.planning.training_costs import training_parts
from octavo.planning.training_memory import Memory, planned_memory

__all__ = ["Prediction", "Problem", "predict_row", "problem_of"]

GB = 1e9
MEMORY_METRICS: dict[str, Callable[[Memory], float]] = {
    "optimizer_mem": lambda memory: memory.moments,
    "activation_mem": lambda memory: memory.activations,
    "peak_mem": lambda memory: memory.total,
    "memory": lambda memory: memory.total,
}


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
        measure: from seconds (of a step, a token or a product) to the metric; None for memory.
        bf16_measure: the same for the BF16 job, whose batch may differ.
        memory: from the memory of a step to the metric; None for times.
    """

    job: TrainingJob | ServingJob | GemmJob
    bf16: TrainingJob | ServingJob | GemmJob | None
    measure: Callable[[float], float] | None
    bf16_measure: Callable[[float], float] | None = None
    memory: Callable[[Memory], float] | None = None

    @property
    def kind(self) -> str:
        """Name of the interval that holds for it."""
        if self.memory is not None:
            return "memory"
        if isinstance(self.job, ServingJob):
            return "infer"
        return "train" if isinstance(self.job, TrainingJob) else "gemm"

    def seconds(self, values: Mapping[str, float], *, bf16: bool = False) -> float:
        """Seconds of a step, of a token or of the products."""
        job = self.bf16 if bf16 else self.job
        if isinstance(job, TrainingJob):
            return float(training_seconds(training_parts(job), values)["total"])
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
    if row["kind"] in ("gemm", "layer"):
        products = gemm_job(row)
        of_products = _product_measure(row, products)
        return Problem(products, replace(products, precision=BF16), of_products, of_products)
    if row["kind"] == "infer":
        service = serving_job(row)
        measure = _service_measure(row, service)
        in_bf16 = replace(service, precision=BF16)
        try:
            requests_in_flight(in_bf16)
        except OctavoError:
            return Problem(service, None, measure)
        return Problem(service, in_bf16, measure, measure)
    step = training_job(row)
    for name, part in MEMORY_METRICS.items():
        if name in row["metric"].lower():
            return Problem(step, _bf16_step(row, step), None, memory=part)
    bf16 = _bf16_step(row, step)
    return Problem(step, bf16, _step_measure(row, step), _step_measure(row, bf16))


def predict_row(row: Row, constants: Constants) -> Prediction:
    """Return the prediction of a row; one that cannot be made has a reason, and nothing is raised."""
    with np.errstate(all="ignore"):  # absurd sizes overflow, and are refused as not finite
        return _predicted(row, constants)


def _predicted(row: Row, constants: Constants) -> Prediction:
    try:
        problem = problem_of(row)
        if problem.memory is not None:
            return _of_memory(row, problem, constants)
        assert problem.measure is not None
        if re.search(r"speed-?up|ratio", row["metric"].lower()):
            return _of_ratio(row, problem, constants)
        value = problem.measure(problem.seconds(constants.values))
        bf16 = None
        if problem.bf16 is not None and problem.bf16_measure is not None:
            bf16 = problem.bf16_measure(problem.seconds(constants.values, bf16=True))
    except (OctavoError, ValueError, ArithmeticError) as error:
        return Prediction(id=row["id"], reason=str(error))
    return _with_interval(row["id"], value, bf16, constants.intervals.get(problem.kind, 0.3))


def _of_ratio(row: Row, problem: Problem, constants: Constants) -> Prediction:
    """Prediction of a speed-up over BF16, whose own is 1."""
    if problem.bf16 is None:
        return Prediction(id=row["id"], reason="BF16 does not fit there, so there is no speed-up over it")
    gain = problem.seconds(constants.values, bf16=True) / problem.seconds(constants.values)
    return _with_interval(row["id"], gain, 1.0, constants.intervals.get("speedup", 0.15))


def _of_memory(row: Row, problem: Problem, constants: Constants) -> Prediction:
    assert problem.memory is not None
    jobs = (problem.job, problem.bf16)
    unit = 1024**3 if "gib" in row["metric"].lower() else GB
    value, bf16 = (problem.memory(planned_memory(job)) / unit for job in jobs if isinstance(job, TrainingJob))
    return _with_interval(row["id"], value, bf16, constants.intervals.get("memory", 0.15))


def _with_interval(name: str, value: float, bf16: float | None, width: float) -> Prediction:
    if not math.isfinite(value) or value <= 0:
        return Prediction(id=name, reason="the prediction is not a finite number above 0; check the row's sizes")
    factor = math.exp(width)
    return Prediction(id=name, value=value, low=value / factor, high=value * factor, bf16_value=bf16)


def _refusal(row: Row) -> str | None:
    """Return why a row is not a problem the planner models."""
    metric, kind, text = row["metric"].lower(), row["kind"], row.notes
    if kind not in ("train", "infer", "gemm", "layer"):
        return f"kind {kind!r} is not one of train, infer, gemm and layer"
    if "rl_step" in metric or "grpo" in text:
        return "a step of reinforcement learning is training and generation together, whose shares the row does not say"
    if "hours_for" in metric and not row["global_batch"]:
        return "hours of a run need its global batch, which the row leaves out"
    if "max-seq-length" in text:
        return "the row gives the most tokens of a sequence, not how many its sequences have"
    return None


def _bf16_step(row: Row, job: TrainingJob) -> TrainingJob:
    """The step that the row's BF16 value measured: in BF16, with the batch that the notes name."""
    found = job.at(BF16)
    micro = re.search(r"bf16 (?:row uses|ran at) micro batch (\d+)", row.notes)
    if micro is None and "bf16 and fp8 70b differ in batch (1 vs 4)" in row.notes:
        micro = re.search(r"\((1) vs 4\)", row.notes)
    if micro is None or not int(micro.group(1)):
        return found
    batch = re.search(r"gbs (\d+)", row.notes.split("bf16 row uses")[-1])
    size = int(micro.group(1))
    steps = job.micro_batches * job.layout.dp
    return replace(found, micro_batch=size, global_batch=int(batch.group(1)) if batch else size * steps)


def _step_measure(row: Row, job: TrainingJob) -> Callable[[float], float]:
    """From seconds of a step to the row's metric."""
    metric, gpus = row["metric"].lower(), job.layout.gpus
    tokens = job.micro_batches * job.micro_batch * job.layout.dp * job.seq
    if "tflop" in metric:
        flops = tokens * job.model.training_flops(job.seq) / gpus / 1e12
        return lambda seconds: flops / seconds
    if "mfu" in metric:
        peak = job.hardware.peak(16) * gpus / (tokens * job.model.training_flops(job.seq))
        return lambda seconds: 1.0 / (seconds * peak)
    if "token" in metric:
        # torchtitan logs tokens of one GPU
        shown = tokens / gpus if re.search(r"per_gpu|/gpu|as logged", metric) else tokens
        return lambda seconds: shown / seconds
    if "sample" in metric or "sequence" in metric:
        shown = tokens / job.seq / (gpus if "per_gpu" in metric else 1)
        return lambda seconds: shown / seconds
    steps = re.search(r"hours_for_(\d+)", metric)
    unit = 1000.0 if "ms" in metric else float(steps.group(1)) / 3600 if steps else 1.0
    return lambda seconds: seconds * unit


def _service_measure(row: Row, job: ServingJob) -> Callable[[float], float]:
    """From seconds of a generated token to the row's metric; "tokens" that are not "output" count prompts too."""
    metric = row["metric"].lower()
    counted = 1.0
    if (
        "output" not in metric
        and "vllm" in row.notes + row["source_path_or_url"] + row["id"]
        and "amd" not in row["id"]
    ):
        counted = (job.prompt + job.answer) / job.answer
    if "per_gpu" in metric:
        counted /= job.gpus
    if "ms" in metric or "latency" in metric or "time" in metric:
        requests = requests_in_flight(job)
        unit = 1000.0 if "ms" in metric else 1.0
        if "tpot" in metric or "itl" in metric:
            return lambda seconds: seconds * requests * unit
        return lambda seconds: seconds * requests * job.answer * unit
    return lambda seconds: counted / seconds


def _product_measure(row: Row, job: GemmJob) -> Callable[[float], float]:
    """From seconds of products to the row's metric."""
    metric = row["metric"].lower()
    if "tflop" in metric:
        passes = 3.0 if job.passes in (GemmPass.ALL, GemmPass.SUM) else 1.0
        flops = passes * sum(2.0 * m * n * k for m, n, k in job.shapes) * job.groups / 1e12
        return lambda seconds: flops / seconds
    if "token" in metric:
        return lambda seconds: job.shapes[0][0] * job.groups / seconds
    microseconds = "_us" in metric or "µs" in metric or metric.startswith("us")
    unit = 1e6 if microseconds else 1e3 if "ms" in metric else 1.0
    return lambda seconds: seconds * unit
