"""From ideal seconds to seconds: the constants that are fitted on published measurements, and how parts combine.

A constant is the logarithm of how much longer a part takes than its ideal, or of a whole step's factor. They were
fitted by ``python -m benchmarks.planner_fit`` and stand in ``constants.json`` with their uncertainty. The fit starts
from priors, which were typed; a constant that no measurement moves is its prior, and the fit's report says which.

    gpu   = Σ exp(c) · part                                     GEMMs, attention, memory, casts, communication
    micro = (gpu⁴ + host⁴)^¼                                    the host launches kernels while the GPU computes
    pipe  = micro · micro-batches · (1 + bubble)
    step  = (pipe⁴ + fsdp⁴)^¼ + exposed communication + optimizer, times factors of framework and scale

The functions take floats or arrays, so that the fit and a single prediction are the same code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import stdev
from typing import Any

import numpy as np

from octavo.parsing import parse_json
from octavo.planning.gemm_costs import kernel_part
from octavo.planning.jobs import GemmJob, ServingJob, TrainingJob

__all__ = [
    "WORK",
    "Calibration",
    "Constants",
    "fitted_constants",
    "gemm_seconds",
    "kernel_constant",
    "prompt_seconds",
    "serving_seconds",
    "training_seconds",
]

Parts = Mapping[str, Any]
Values = Mapping[str, float]
# Kinds of work in a step's seconds (training_seconds), in the words of tables and legends.
WORK = {
    "gemm": "matrix multiplications",
    "attention": "attention",
    "elementwise": "norms and activations",
    "cast": "casts to FP8",
    "communication": "messages within a copy of the model",
    "host": "waiting for kernel launches",
    "bubble": "waiting for other pipeline stages",
    "data_parallel": "messages between copies and shards",
    "optimizer": "optimizer",
    "stragglers": "waiting for slower GPUs",
}
# Logarithm of the factor that 80 % of models.toml are within when their shape is guessed from the size in their name.
GUESSED = {
    "dense": {"train": 0.14, "infer": 0.75},
    "mixture": {"train": 0.26, "infer": 0.44},
}
# Student's t of two degrees of freedom: 80 % of a fourth value are within it, times the deviation of three others.
OF_THREE = 1.886 * (4 / 3) ** 0.5
INSIDE = ("tp", "tp_overlapped", "cp", "ep", "ep_network", "etp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurement of one's own GPU in place of a part of the fit.

    Attributes:
        file: its name.
        kernels: parts of :func:`octavo.planning.gemm_costs.kernel_part` that it timed.
    """

    file: str
    kernels: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Results of the fit.

    Attributes:
        values: logarithms by name.
        deviations: their standard deviations.
        intervals: by kind of prediction, the logarithm of the factor that 80 % of left-out rows were within.
        calibration: that some of the values are of; None for the fit alone.
    """

    values: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None

    def width(self, kind: str, job: TrainingJob | ServingJob | GemmJob) -> float:
        """Return the logarithm of the factor of a prediction's 80 % interval.

        What a guessed shape, and a kernel that no measurement is of, may be off by is added as if independent.
        """
        guess = "" if isinstance(job, GemmJob) else job.model.guess
        of_guess = GUESSED[guess].get(kind, 0.0) if guess else 0.0
        of_kernel = 0.0 if kind == "memory" else self._unmeasured(kind, job)
        return math.hypot(self.intervals.get(kind, 0.3), of_guess, of_kernel)

    def _unmeasured(self, kind: str, job: TrainingJob | ServingJob | GemmJob) -> float:
        """Error of a kernel that was not measured on a generation, from what the measured generations differ.

        Times on a new generation are off by what BF16's constants differ. Speed-ups there, and kernels that were
        measured on others alone, are off by what the distance of FP8's constant from BF16's differs.
        """
        prefix = "gemm_bf16_"
        bf16 = {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}
        is_new = job.hardware.generation not in bf16
        if is_new and kind != "speedup":
            return OF_THREE * stdev(bf16.values())
        precision = job.precision
        is_known = kernel_part(precision.kernel, job.hardware) in self.values
        if is_known and not (is_new or precision.integer or precision.weight_bits):
            return 0.0
        fp8 = {each: self.values.get(f"gemm_tensor_{each}") for each in bf16}
        return OF_THREE * stdev(value - bf16[each] for each, value in fp8.items() if value is not None)


@cache
def fitted_constants() -> Constants:
    """Return the constants that come with octavo."""
    text = resources.files("octavo.planning").joinpath("constants.json").read_text(encoding="utf-8")
    record = parse_json(text)
    return Constants(values=record["values"], deviations=record["deviations"], intervals=record["intervals"])


def _part(parts: Parts, values: Values, name: str, constant: str | None = None) -> Any:
    """Seconds of a part: its ideal seconds, longer by the exponential of its constant."""
    return parts.get(name, 0.0) * np.exp(values.get(constant or name, 0.0))


def kernel_constant(part: str, values: Values) -> float:
    """Return the constant of a GEMM kernel on a generation.

    A kernel that was not measured there is as much slower than that generation's BF16 kernel as where it was measured:
    MX and FP4 on Blackwell, the others on Hopper.

    Example:
        >>> values = {"gemm_bf16_cdna": 0.8, "gemm_row_hopper": 0.7, "gemm_bf16_hopper": 0.3}
        >>> round(kernel_constant("gemm_row_cdna", values), 6)
        1.2
    """
    if part in values:
        return values[part]
    kernel, generation = part.removeprefix("gemm_").split("_")
    measured = "blackwell" if kernel in ("mx", "fp4") else "hopper"
    distance = values[f"gemm_{kernel}_{measured}"] - values[f"gemm_bf16_{measured}"]
    return values[f"gemm_bf16_{generation}"] + distance


def _gemms(parts: Parts, values: Values) -> Any:
    """Seconds of all GEMMs; a grouped one is slower by a factor of its own than the same kernel's."""
    total = _part(parts, values, "reading")
    for name in parts:
        if name.startswith("gemm_"):
            kernel = name.removesuffix("_grouped")
            grouped = values.get("grouped", 0.0) if name != kernel else 0.0
            total = total + parts[name] * np.exp(kernel_constant(kernel, values) + grouped)
    return total


def _factor(parts: Parts, values: Values, prefix: str) -> Any:
    """Product of the factors of everything that a row is marked with."""
    marks = [name for name in parts if name.startswith(prefix)]
    return np.exp(sum(parts[name] * values.get(name, 0.0) for name in marks)) if marks else 1.0


def training_seconds(parts: Parts, values: Values) -> dict[str, Any]:
    """Return the seconds of a step by kind; ``total`` is the step.

    Args:
        parts: as of :func:`octavo.planning.training_costs.training_parts`.
        values: logarithms by name.
    """
    again = parts["micro_batches"]
    slow = _factor(parts, values, "framework_") * np.exp(values.get("sustained", 0.0))
    inside = {name: _part(parts, values, name) for name in INSIDE}
    inside["collectives"] = 1e-6 * _part(parts, values, "collectives")
    attention = _part(parts, values, "attention") * _factor(parts, values, "attention_")
    seconds = {
        "gemm": _gemms(parts, values) * slow,
        "attention": attention * slow,
        "elementwise": _part(parts, values, "memory") * slow,
        "cast": _part(parts, values, "cast", "cast_training") * slow
        + 1e-6 * _part(parts, values, "cast_gaps", "launch"),
        "communication": sum(inside.values()),
    }
    gpu = sum(seconds.values())
    release = np.exp(values.get("expert_release", 0.0) * parts.get("years", 0.0))
    host = 1e-6 * (
        _part(parts, values, "launches", "host") * _factor(parts, values, "host_")
        + _part(parts, values, "expert_launches", "expert_host") * release
    )
    micro = (gpu**4 + host**4) ** 0.25
    seconds["host"] = micro - gpu
    seconds = {name: value * again for name, value in seconds.items()}
    seconds["bubble"] = micro * again * parts["bubble"] * np.exp(values.get("bubble", 0.0))
    pipe = sum(seconds.values())
    gather = _part(parts, values, "fsdp")
    exposed = (pipe**4 + gather**4) ** 0.25 - pipe + _part(parts, values, "fsdp", "fsdp_exposed")
    seconds["data_parallel"] = exposed + _part(parts, values, "dp")
    seconds["optimizer"] = _part(parts, values, "optimizer")
    total = sum(seconds.values())
    seconds["stragglers"] = total * (np.exp(np.exp(values.get("scale", -9.0)) * parts["scale"]) - 1.0)
    seconds["total"] = total + seconds["stragglers"]
    return seconds


def gemm_seconds(parts: Parts, values: Values) -> dict[str, Any]:
    """Return the seconds of linear layers, or of a transformer layer, by kind; ``total`` is their sum."""
    seconds = {
        "gemm": _gemms(parts, values),
        "cast": _part(parts, values, "cast"),
        "attention": _part(parts, values, "attention"),
        "elementwise": _part(parts, values, "memory"),
        "launch": 1e-6 * _part(parts, values, "launches", "launch"),
    }
    seconds["total"] = sum(seconds.values())
    return seconds


def serving_seconds(parts: Parts, values: Values) -> dict[str, Any]:
    """Return the seconds of one generated token of all requests together, by kind; ``total`` is their sum."""
    slow = _factor(parts, values, "framework_")
    works = ("gemm", "memory", "exchange")
    kinds = [f"{phase}_{work}" for phase in ("decode", "prompt") for work in works]
    kinds += ["decode_keys", "prompt_attention"]
    seconds = {name: _part(parts, values, name) * slow for name in kinds}
    seconds["steps"] = (
        1e-6
        * slow
        * (
            _part(parts, values, "decode_launches")
            + _part(parts, values, "prompt_launches")
            + _part(parts, values, "exchanges")
        )
    )
    seconds["scheduler"] = 1e-6 * slow * _part(parts, values, "scheduler")
    seconds["total"] = sum(seconds.values())
    return seconds


def prompt_seconds(parts: Parts, values: Values) -> float:
    """Return what prompts take of the seconds of one generated token; times its tokens, what one prompt takes."""
    return sum(float(value) for name, value in serving_seconds(parts, values).items() if name.startswith("prompt"))
