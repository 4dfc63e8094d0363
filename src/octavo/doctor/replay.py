"""A captured layer's three GEMMs again, under other recipes: what each would have lost, and what it costs.

The products of the captured tensors are computed in float64, and then as :func:`octavo.functional.fp8_linear` computes
them under each recipe. A delayed recipe makes its scales from the captured history, as it would have made them in that
step. The first trial is the layer as it ran.

*Error.* A ratio of energies does not see that one loud token drowns all others, so a product is judged row by row
(rows of output and grad_input are tokens, those of grad_weight are output features), every row alike:

    e(product) = sqrt(mean over its rows r of min(1, |found_r - exact_r|² / |exact_r|²))
    error      = sqrt(mean of the three e²)

A row that is lost or worse counts 1. Beside it stand the usual SQNRs of the whole products, and per role the share of
nonzeros that the cast flushed to zero and of elements that it cut off, which no product's error shows.

*Ranking.* FP8 that works as it should leaves an error of 0.06 (24.6 dB, measured on Gaussian data), and nobody leaves
FP8 for less. Harm is counted in such units, what is below 1 counts as 1, and a recipe must buy what it costs:

    harm  = error / 0.06;  where a role's underflow is in question, the larger of that and underflow / 0.05
    score = 1 - max(1, harm) / max(1, harm as it ran) - 0.05 · (log2(time ratio) + log2(bytes ratio))

Twice the time, or twice the bytes, must remove a twentieth of the harm; of two recipes that remove the same, the
cheaper comes first. Bytes are those of the GEMMs' operands with their scales, each cast counted once. The time is what
is measured on a GPU, one recipe after the other, round after round. A CPU's seconds are measured too, but they are the
emulation's, in which FP8 costs more than BF16; there the time is that of a tensor core's GEMMs, which multiplies FP8
twice as fast.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.doctor.candidates import Candidate, candidates_for
from octavo.doctor.capture import Capture
from octavo.doctor.rerun import Products, Rerun, SeenOperands
from octavo.errors import DataError
from octavo.numerics.metrics import saturation_fraction, sqnr_db, underflow_fraction
from octavo.recipes import Recipe

__all__ = ["AS_IT_RAN", "Trial", "harm", "replay", "score"]

HEALTHY_ERROR, HEALTHY_UNDERFLOW = 0.06, 0.05
PRICE = 0.05  # of a doubled time, or of doubled bytes
AS_IT_RAN = "as it ran"
GEMMS = ("output", "grad_input", "grad_weight")
LONG_ENOUGH = 30.0  # seconds of timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one recipe made of a captured layer.

    Attributes:
        name: of the candidate; "as it ran" for the first.
        recipe: what ran.
        error: of the three products, 0 to 1; see the module.
        sqnr_db: of each whole product, by GEMM.
        underflow: by role, the share of nonzeros whose code is zero, the largest of its casts; 0 where none is cast.
        saturation: by role, the share of elements beyond what the scale provides for.
        seconds: of forward and backward, the median.
        is_on_gpu: whether a GPU took them.
        bytes: of all operands and scales.
        error_removed: 1 - error / error as it ran; below 0 where this is worse.
        time_ratio: ``time`` over that as it ran, by which trials are ranked.
        bytes_ratio: bytes over those as it ran.
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
        """Seconds on a GPU; elsewhere the GEMMs' in units of one in FP8, of which one in BF16 takes two."""
        specs = (self.recipe.output, self.recipe.grad_input, self.recipe.grad_weight)
        return self.seconds if self.is_on_gpu else float(sum(2 if spec.a is None else 1 for spec in specs))


def replay(
    capture: Capture, candidates: Sequence[Candidate] | None = None, *, rounds: int = 3, device: str = "cpu"
) -> list[Trial]:
    """Run a captured layer again: as it ran first, then the candidates, best score first.

    Tokens and output features that hold NaN or ±Inf are left out: no recipe mends them.

    Args:
        capture: of one layer, in one step.
        candidates: None for :func:`candidates_for`; two with the same recipe are two trials.
        rounds: in each, every candidate is timed once; fewer where they take half a minute together.
        device: where to compute.

    Raises:
        DataError: nothing finite is left.

    Example:
        >>> from octavo import recipes
        >>> x = torch.ones(8, 32).index_fill(0, torch.tensor(0), 1e6)  # one token of eight is loud
        >>> capture = Capture(
        ...     path="0", step=1, recipe=recipes.get("tensorwise"), input=x, weight=torch.eye(32), grad_output=x
        ... )
        >>> ran, *trials = replay(capture)
        >>> trials[0].error < ran.error
        True
    """
    finite = _finite(capture, torch.device(device))
    given = candidates_for(capture) if candidates is None else candidates
    chosen = [Candidate(AS_IT_RAN, capture.recipe), *given]
    runs = [Rerun(finite, one.recipe, ran=index == 0) for index, one in enumerate(chosen)]
    exact = _exact(finite)
    measured = [_measured(one, run, exact) for one, run in zip(chosen, runs, strict=True)]
    timed = [replace(one, seconds=seconds) for one, seconds in zip(measured, _seconds(runs, rounds), strict=True)]
    ran, *others = [_beside(one, timed[0]) for one in timed]
    return [ran, *sorted(others, key=lambda one: -score(one, ran))]


def harm(trial: Trial, role: str | None = None) -> float:
    """Error over that of healthy FP8; with ``role`` its underflow too, "" for the worst of all roles."""
    error = trial.error / HEALTHY_ERROR
    if role is None:
        return error
    flushed = trial.underflow[role] if role else max(trial.underflow.values())
    return max(error, flushed / HEALTHY_UNDERFLOW)


def score(trial: Trial, ran: Trial, role: str | None = None) -> float:
    """What a recipe is worth beside the one that ran; see the module."""
    removed = 1 - max(1.0, harm(trial, role)) / max(1.0, harm(ran, role))
    return removed - PRICE * (math.log2(trial.time / ran.time) + math.log2(trial.bytes_ratio))


def _finite(capture: Capture, device: torch.device) -> Capture:
    """The capture on its device, without tokens and output features that hold NaN or ±Inf."""
    x, weight, grad_output = (one.to(device) for one in (capture.input, capture.weight, capture.grad_output))
    outputs = weight.isfinite().all(dim=1)
    rows = x.isfinite().all(dim=1) & grad_output[:, outputs].isfinite().all(dim=1)
    if not outputs.any() or not rows.any():
        raise DataError(
            f"the capture of layer {capture.path!r} at step {capture.step} has NaN or infinity in every token; "
            "no recipe mends that: find where it comes from"
        )
    return replace(
        capture,
        input=x[rows],
        weight=weight[outputs],
        grad_output=grad_output[rows][:, outputs],
        amax=None if capture.amax is None else capture.amax.to(device),
        window=None if capture.window is None else capture.window.to(device),
        input_scale=None if capture.input_scale is None else capture.input_scale.to(device),
    )


def _exact(capture: Capture) -> Products:
    """The products in float64."""
    x, weight, grad_output = (one.double() for one in (capture.input, capture.weight, capture.grad_output))
    return x @ weight.t(), grad_output @ weight, grad_output.t() @ x


def _measured(candidate: Candidate, run: Rerun, exact: Products) -> Trial:
    """All but the time."""
    seen = SeenOperands()
    found = run(seen)
    errors = [_row_error(product, wanted) for product, wanted in zip(found, exact, strict=True)]
    return Trial(
        name=candidate.name,
        recipe=candidate.recipe,
        error=math.sqrt(statistics.fmean(error**2 for error in errors)),
        sqnr_db={gemm: sqnr_db(wanted, product) for gemm, product, wanted in zip(GEMMS, found, exact, strict=True)},
        underflow=seen.worst(run.capture, underflow_fraction),
        saturation=seen.worst(run.capture, saturation_fraction),
        seconds=math.nan,
        is_on_gpu=run.capture.input.is_cuda,
        bytes=seen.bytes(),
    )


def _row_error(found: Tensor, exact: Tensor) -> float:
    signal = exact.square().sum(dim=1)
    noise = (found.double() - exact).square().sum(dim=1)
    ratio = (noise / signal)[signal > 0].nan_to_num(nan=1.0).clamp(max=1.0)
    return math.sqrt(float(ratio.mean())) if ratio.numel() else 0.0


def _seconds(runs: Sequence[Rerun], rounds: int) -> list[float]:
    """Median of each, run in turns; every run has run once before."""
    taken: list[list[float]] = [[] for _ in runs]
    started = time.perf_counter()
    for _ in range(rounds):
        for run, seconds in zip(runs, taken, strict=True):
            seconds.append(_time(run))
        if time.perf_counter() - started > LONG_ENOUGH:
            break
    return [statistics.median(seconds) for seconds in taken]


def _time(run: Rerun) -> float:
    _wait(run.capture.input.device)
    started = time.perf_counter()
    run()
    _wait(run.capture.input.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _beside(trial: Trial, ran: Trial) -> Trial:
    removed = 1 - trial.error / ran.error if ran.error else 0.0
    spent, size = trial.time / ran.time, trial.bytes / ran.bytes
    return replace(trial, error_removed=removed, time_ratio=spent, bytes_ratio=size)
