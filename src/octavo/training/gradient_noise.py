"""Gradient noise of each precision, at the same weights and on the same micro-batches.

With g_i the gradient of all parameters on micro-batch i of n, and g the mean of them:

    variance    tr cov(g_i) = sum_i |g_i - g|^2 / (n - 1)                      the spread between micro-batches
    error       sqrt( sum_i |g_i - h_i|^2 / sum_i |h_i|^2 )                    h_i: the baseline's gradient, same batch
    scale       variance / (|g|^2 - variance / n)                              micro-batches; B_simple, arXiv 1812.06162

The variance is sampling noise, which all precisions share, plus quantization noise. On a small model sampling noise
dominates, so the ratio of variances is near 1; the error is due to quantization alone. Sums are in float64, because the
variance is a small difference of large sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["MIN_BATCHES", "GradientNoise", "GradientProbe", "gradient_noise"]

MIN_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientProbe:
    """A model and its scalar loss, as a function of a batch."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """``variance`` is the trace of the gradients' covariance, ``error`` their relative distance to the baseline's.

    ``scale`` is the noise scale: from about that many micro-batches a step on, more of them add little. It is infinite
    if the mean gradient is within its own noise.
    """

    variance: float
    error: float
    scale: float


def gradient_noise(
    probes: Mapping[str, GradientProbe], batches: Sequence[Tensor], *, on_batch: Callable[[int], None] = lambda _: None
) -> dict[str, GradientNoise]:
    """Measure every probe on every batch; the first probe is the baseline of ``error``.

    Existing gradients of the models are cleared. Each probe runs the first batch once before the measurement, so that
    delayed scales exist.

    Raises:
        ValueError: no probe, or fewer than two batches.
    """
    if not probes or len(batches) < MIN_BATCHES:
        raise ValueError(f"gradient noise needs a probe and {MIN_BATCHES} batches, not {len(probes)}, {len(batches)}")
    for probe in probes.values():
        _gradient(probe, batches[0])
    sums = {name: _Sums() for name in probes}
    for done, batch in enumerate(batches, start=1):
        baseline: Tensor | None = None
        for name, probe in probes.items():
            gradient = _gradient(probe, batch)
            baseline = gradient if baseline is None else baseline
            sums[name].add(gradient, baseline)
        on_batch(done)
    return {name: total.noise(len(batches)) for name, total in sums.items()}


class _Sums:
    """Running sums over batches: of gradients, of their squares, and of squared distances to the baseline."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.squares = self.distances = self.baseline_squares = 0.0

    def add(self, gradient: Tensor, baseline: Tensor) -> None:
        """Add the gradient of one batch."""
        self.gradient = gradient.clone() if self.gradient is None else self.gradient.add_(gradient)
        self.squares += float(gradient @ gradient)
        self.baseline_squares += float(baseline @ baseline)
        distance = gradient - baseline
        self.distances += float(distance @ distance)

    def noise(self, count: int) -> GradientNoise:
        """The measures over ``count`` batches."""
        assert self.gradient is not None
        square_of_mean = float(self.gradient @ self.gradient) / count**2
        variance = max(0.0, self.squares - count * square_of_mean) / (count - 1)
        error = math.sqrt(self.distances / self.baseline_squares) if self.baseline_squares else 0.0
        signal = square_of_mean - variance / count
        return GradientNoise(variance=variance, error=error, scale=variance / signal if signal > 0 else math.inf)


def _gradient(probe: GradientProbe, batch: Tensor) -> Tensor:
    """Gradient of all parameters as one float64 vector, 0 for parameters that the loss does not reach."""
    probe.model.zero_grad(set_to_none=True)
    probe.loss(batch).backward()
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in probe.model.parameters()
        if parameter.requires_grad
    ]
    probe.model.zero_grad(set_to_none=True)
    return torch.cat([part.detach().reshape(-1).double() for part in parts])
