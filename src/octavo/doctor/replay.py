"""Replay of a captured layer's three GEMMs under other recipes: error and cost of each.

The GEMMs are computed on the captured tensors in float64, and then by :func:`octavo.functional.fp8_linear` under each
recipe. A delayed recipe computes its scales from the captured history, as it would have in that step. The first trial
is the layer as it ran.

*Error.* A ratio of total energies hides the loss of most tokens behind one large token, so each result is judged row by
row (rows of output and grad_input are tokens, those of grad_weight are output features), with equal weights:

    e(GEMM) = sqrt(mean over rows r of min(1, |actual_r - exact_r|² / |exact_r|²))
    error   = sqrt(mean of the three e²)

Trials also report the usual SQNR of each GEMM and, per role, the shares of nonzeros that the cast flushed to zero and
of elements that it saturated, neither of which the error shows.

*Ranking.* Healthy FP8 has an error of 0.06 (24.6 dB, measured on Gaussian data). Harm is measured in this unit, values
below 1 count as 1, and a recipe's cost is subtracted:

    harm  = error / 0.06;  for an underflow finding, the larger of that and the role's underflow / 0.05
    score = 1 - max(1, harm) / max(1, harm as it ran) - 0.05 · (log2(time ratio) + log2(bytes ratio))

Doubling the time or the bytes must remove a twentieth of the harm; of two recipes with equal harm, the cheaper ranks
first. Bytes are those of the GEMMs' operands and scales, each cast counted once. On a GPU the time is measured, with
the recipes taking turns. On a CPU the measured seconds are those of an emulation in which FP8 costs more than BF16, so
ranking assumes tensor cores that multiply FP8 twice as fast.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.doctor.candidates import Candidate, candidates_for
from octavo.doctor.capture import Capture
from octavo.doctor.rerun import OperandRecorder, Products, Rerun
from octavo.errors import DataError
from octavo.numerics.metrics import saturation_fraction, sqnr_db, underflow_fraction
from octavo.recipes import Recipe
from octavo.recipes.toml import GEMMS

__all__ = ["AS_IT_RAN", "Trial", "harm", "replay", "score", "synchronized_time"]

HEALTHY_ERROR, HEALTHY_UNDERFLOW = 0.06, 0.05
PRICE = 0.05  # of doubled time or doubled bytes
AS_IT_RAN = "as it ran"
MAX_TIMING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Replay of a captured layer under one recipe.

    Attributes:
        name: the candidate's name; "as it ran" for the first trial.
        recipe: the recipe that was replayed.
        error: error of the three GEMMs, 0 to 1; see the module.
        sqnr_db: SQNR of each GEMM's result.
        underflow: by role, the share of nonzeros whose code is zero, the largest of its casts; 0 without casts.
        saturation: by role, the share of elements beyond the scale's range.
        seconds: median time of forward and backward.
        is_on_gpu: whether the time was measured on a GPU.
        bytes: size of all operands and scales.
        error_removed: 1 - error / error as it ran; negative if this recipe is worse.
        time_ratio: ``time`` over that of the layer as it ran, used for ranking.
        bytes_ratio: ``bytes`` over those of the layer as it ran.
    """

    name: str
    recipe: Recipe
    error: float
    sqnr_db: Mapping[str, float]
    underflow: Mapping[str, float]
    saturation: Mapping[str, float]
    seconds: float
    is_on_gpu: bool
    bytes: int
    error_removed: float = 0.0
    time_ratio: float = 1.0
    bytes_ratio: float = 1.0

    @property
    def time(self) -> float:
        """Seconds on a GPU; elsewhere in units of one FP8 GEMM, with two units for a BF16 GEMM."""
        specs = (self.recipe.output, self.recipe.grad_input, self.recipe.grad_weight)
        return self.seconds if self.is_on_gpu else float(sum(2 if spec.a is None else 1 for spec in specs))


def replay(
    capture: Capture, candidates: Sequence[Candidate] | None = None, *, rounds: int = 3, device: str = "cpu"
) -> list[Trial]:
    """Replay a captured layer: first as it ran, then under the candidates, best score first.

    Tokens and output features with NaN or ±Inf are excluded: no recipe fixes them.

    Args:
        capture: the capture of one layer in one step.
        candidates: the recipes to try; None for :func:`candidates_for`.
        rounds: number of timings of each candidate; fewer once they take half a minute together.
        device: the device to compute on.

    Raises:
        DataError: no finite token or output feature is left.

    Example:
        >>> from octavo import recipes
        >>> x = torch.ones(8, 32).index_fill(0, torch.tensor(0), 1e6)  # one token of eight is large
        >>> capture = Capture(
        ...     path="0", step=1, recipe=recipes.get("tensorwise"), input=x, weight=torch.eye(32), grad_output=x
        ... )
        >>> ran, *trials = replay(capture)
        >>> trials[0].error < ran.error
        True
    """
    finite = _without_nonfinite(capture, torch.device(device))
    tried = candidates_for(capture) if candidates is None else candidates
    all_candidates = [Candidate(AS_IT_RAN, capture.recipe), *tried]
    runs = [Rerun(finite, one.recipe, ran=index == 0) for index, one in enumerate(all_candidates)]
    exact = _float64_gemms(finite)
    measured = [_measure(one, run, exact) for one, run in zip(all_candidates, runs, strict=True)]
    timed = [
        replace(one, seconds=seconds) for one, seconds in zip(measured, _median_seconds(runs, rounds), strict=True)
    ]
    ran, *others = [_relative_to(one, timed[0]) for one in timed]
    return [ran, *sorted(others, key=lambda one: -score(one, ran))]


def harm(trial: Trial, role: str | None = None) -> float:
    """Error relative to healthy FP8; with ``role`` also its underflow, "" for the worst of all roles."""
    error = trial.error / HEALTHY_ERROR
    if role is None:
        return error
    flushed = trial.underflow[role] if role else max(trial.underflow.values())
    return max(error, flushed / HEALTHY_UNDERFLOW)


def score(trial: Trial, ran: Trial, role: str | None = None) -> float:
    """Benefit of a recipe over the one that ran, minus its cost; see the module."""
    removed = 1 - max(1.0, harm(trial, role)) / max(1.0, harm(ran, role))
    return removed - PRICE * (math.log2(trial.time / ran.time) + math.log2(trial.bytes_ratio))


def _without_nonfinite(capture: Capture, device: torch.device) -> Capture:
    """The capture on its device, without tokens and output features that hold NaN or ±Inf."""
    tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in capture.tensors.items()}
    x, weight, grad_output = tensors["input"], tensors["weight"], tensors["grad_output"]
    outputs = weight.isfinite().all(dim=1)
    rows = x.isfinite().all(dim=1) & grad_output[:, outputs].isfinite().all(dim=1)
    if not outputs.any() or not rows.any():
        raise DataError(
            f"the capture of layer {capture.path!r} at step {capture.step} has NaN or infinity in every token; "
            "no recipe fixes that: find where it comes from"
        )
    tensors |= {"input": x[rows], "weight": weight[outputs], "grad_output": grad_output[rows][:, outputs]}
    return replace(capture, **tensors)


def _float64_gemms(capture: Capture) -> Products:
    """Results of the three GEMMs in float64."""
    x, weight, grad_output = (one.double() for one in (capture.input, capture.weight, capture.grad_output))
    return x @ weight.t(), grad_output @ weight, grad_output.t() @ x


def _measure(candidate: Candidate, run: Rerun, exact: Products) -> Trial:
    """Run one candidate and measure everything except the time."""
    operands = OperandRecorder()
    results = run(operands)
    errors = [_row_error(result, reference) for result, reference in zip(results, exact, strict=True)]
    return Trial(
        name=candidate.name,
        recipe=candidate.recipe,
        error=math.sqrt(statistics.fmean(error**2 for error in errors)),
        sqnr_db={
            gemm: sqnr_db(reference, result) for gemm, result, reference in zip(GEMMS, results, exact, strict=True)
        },
        underflow=operands.worst(run.capture, underflow_fraction),
        saturation=operands.worst(run.capture, saturation_fraction),
        seconds=math.nan,
        is_on_gpu=run.capture.input.is_cuda,
        bytes=operands.bytes(),
    )


def _row_error(actual: Tensor, exact: Tensor) -> float:
    signal = exact.square().sum(dim=1)
    noise = (actual.double() - exact).square().sum(dim=1)
    ratio = (noise / signal)[signal > 0].nan_to_num(nan=1.0).clamp(max=1.0)
    return math.sqrt(float(ratio.mean())) if ratio.numel() else 0.0


def _median_seconds(runs: Sequence[Rerun], rounds: int) -> list[float]:
    """Median seconds of each run, measured in turns after a first untimed run."""
    seconds_by_run: list[list[float]] = [[] for _ in runs]
    started = time.perf_counter()
    for _ in range(rounds):
        for run, seconds in zip(runs, seconds_by_run, strict=True):
            seconds.append(_time_run(run))
        if time.perf_counter() - started > MAX_TIMING_S:
            break
    return [statistics.median(seconds) for seconds in seconds_by_run]


def _time_run(run: Rerun) -> float:
    started = synchronized_time(run.capture.input.device)
    run()
    return synchronized_time(run.capture.input.device) - started


def synchronized_time(device: torch.device) -> float:
    """Seconds of a monotonic clock, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _relative_to(trial: Trial, ran: Trial) -> Trial:
    removed = 1 - trial.error / ran.error if ran.error else 0.0
    spent, size = trial.time / ran.time, trial.bytes / ran.bytes
    return replace(trial, error_removed=removed, time_ratio=spent, bytes_ratio=size)
