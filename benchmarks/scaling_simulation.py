"""Discrete simulation of a training step on many ranks under FSDP2, with the collectives that FP8 adds or shrinks.

Every rank has a compute queue and two communication queues, for gathers and for reductions, as FSDP2 has. A gather is
issued one layer ahead; a collective begins when the last rank has issued it and the one before it in its queue has
ended, and ends on all ranks at once. A layer's compute takes each rank a random share longer (stragglers), so that the
more ranks there are, the longer the slowest of them takes.

    all-gather, reduce-scatter of B bytes on P ranks:   latency * log2(P) + B / bandwidth * (P - 1) / P
    all-reduce:                                         reduce_latency * log2(P) + 2 * B / bandwidth * (P - 1) / P

Gathers and reductions do not share the bandwidth. The one all-reduce of amaxes at the end of a step follows each rank's
own work of collecting and handing out them, which grows with the number of scales.
"""

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Amaxes", "Network", "TrainingStep", "Work", "simulate"]

Amaxes = str  # "none", "one a step" or "one a tensor"
TENSORS = 3  # scales of a layer that ranks share: input, weight, gradient of the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Cost of a collective.

    Attributes:
        latency: seconds a doubling of the ranks, of a gather or a reduce-scatter.
        reduce_latency: seconds a doubling of the ranks, of an all-reduce.
        bandwidth: bytes a second of a rank.
    """

    latency: float
    reduce_latency: float
    bandwidth: float

    def gather(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``size`` bytes in all."""
        return self.latency * math.log2(ranks) + size / self.bandwidth * (ranks - 1) / ranks

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes."""
        return self.reduce_latency * math.log2(ranks) + 2 * size / self.bandwidth * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A rank's own work around the one all-reduce of a step.

    Attributes:
        step: seconds a step.
        scale: seconds a scale.
    """

    step: float = 0.0
    scale: float = 0.0

    def seconds(self, scales: int) -> float:
        """Seconds of a step of so many scales."""
        return self.step + self.scale * scales


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """A step of equal layers.

    Attributes:
        layers: number of layers, each a group of FSDP2.
        forward: seconds of a layer's forward pass on an undisturbed rank; backward takes twice as long.
        weights: elements of a layer's weights.
        gathered: bytes of an element in a gather; 2 in BF16, 1 in FP8.
        reduced: bytes of an element in a reduce-scatter.
        amaxes: how ranks agree on scales: "none", "one a step" (an all-reduce of all amaxes at its end) or
            "one a tensor" (an all-reduce before each cast, which waits for it).
        linears: linear layers in a layer, each with three scales.
        work: each rank's own work around "one a step".
        jitter: mean of the exponentially distributed share by which a layer takes a rank longer.
    """

    layers: int
    forward: float
    weights: float
    gathered: float
    reduced: float = 2.0
    amaxes: Amaxes = "none"
    linears: int = 1
    work: Work = Work()
    jitter: float = 0.0


def simulate(step: TrainingStep, network: Network, ranks: int, *, seed: int = 0, repeats: int = 3) -> float:
    """Median seconds of a step.

    Example:
        >>> step = TrainingStep(layers=4, forward=1.0, weights=0, gathered=2)
        >>> simulate(step, Network(latency=0.0, reduce_latency=0.0, bandwidth=1.0), ranks=1)
        12.0
    """
    generator = np.random.default_rng(seed)
    return float(np.median([_simulated(step, network, ranks, generator) for _ in range(repeats)]))


def _simulated(step: TrainingStep, network: Network, ranks: int, generator: np.random.Generator) -> float:
    gather = network.gather(step.weights * step.gathered, ranks)
    reduce = network.gather(step.weights * step.reduced, ranks)
    one_amax = network.all_reduce(4, ranks) if step.amaxes == "one a tensor" else 0.0
    computed = np.zeros(ranks)  # when each rank's compute queue is free
    gathers = reduces = previous_start = 0.0
    for index in range(2 * step.layers):
        is_backward = index >= step.layers
        gathers = max(gathers, previous_start) + gather
        begun = np.maximum(computed, gathers)
        if one_amax:  # each of the pass's casts waits for all ranks
            casts = step.linears * (1 if is_backward else TENSORS - 1)
            begun = np.full(ranks, begun.max() + casts * one_amax)
        slowed = 1 + generator.exponential(step.jitter, ranks) if step.jitter else 1.0
        computed = begun + (2 if is_backward else 1) * step.forward * slowed
        previous_start = float(begun.max())
        if is_backward:
            reduces = max(reduces, float(computed.max())) + reduce
    end = max(float(computed.max()), reduces)
    if step.amaxes == "one a step":
        scales = TENSORS * step.linears * step.layers
        end += step.work.seconds(scales) + network.all_reduce(4 * scales, ranks)
    return end
