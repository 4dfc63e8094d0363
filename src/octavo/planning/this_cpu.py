"""This machine's CPU as an accelerator, measured on the spot: one matrix product and one copy, under a second each."""

import os
import time
from collections.abc import Callable

import torch

from octavo.memory import memory_bytes
from octavo.planning.hardware import Hardware

__all__ = ["measure_cpu"]

SIDE = 1024  # of the product; it does not fit into caches
ROUNDS = 5


def measure_cpu() -> Hardware:
    """Return the CPU with the products, in BF16 if it has the instructions, and the bandwidth that it reaches now."""
    # Without BF16 instructions FP32 is faster, and is what a training on this CPU would use.
    dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32  # noqa: SLF001
    a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
    source = torch.zeros(1 << 24)
    target = torch.empty_like(source)
    product = _fastest(lambda: torch.mm(a, b))
    copy = _fastest(lambda: target.copy_(source))
    cores = os.cpu_count() or 1
    return Hardware(
        name="cpu",
        bf16=2 * SIDE**3 / product / 1e12,
        fp8=0.0,
        int8=0.0,
        memory=memory_bytes(torch.device("cpu")) / 1e9,
        bandwidth=2 * source.nbytes / copy / 1e9,
        link=1.0,
        domain=1,
        network=1.0,
        processors=cores,
        watts=0.0,
        generation="cpu",
        source=f"measured now: a product in {dtype} and a copy",
    )


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds, after one that warms up."""
    work()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
