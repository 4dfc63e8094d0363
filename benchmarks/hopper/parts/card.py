"""Ceilings of this card: bandwidth of a copy, and throughput of its tensor cores."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.hopper.session import Session, Variant
from benchmarks.hopper.tables import section_of, speed
from octavo.bench.results import Section
from octavo.formats import E4M3
from octavo.kernels import quantize

__all__ = ["driver_version", "measure"]

COPY, BF16 = "copy", "bf16, torch.mm"
ANSWERS_WITHIN = 20.0  # seconds
FP8 = {True: "FP8, fast accumulation", False: "FP8, torch._scaled_mm's own accumulation"}


def measure(session: Session) -> Iterator[Section]:
    """Copy bandwidth, then the GEMM ceilings; both are kept for later parts."""
    yield _memory(session)
    session.forget()
    yield _ceilings(session)


def _memory(session: Session) -> Section:
    copied = session.compare({COPY: _copy(session)}, kernels=True)
    if COPY in copied.seconds:
        session.speeds["copy"] = speed(copied, COPY)
    return section_of("Memory", copied, notes=["Bytes read and bytes written, together."])


def _ceilings(session: Session) -> Section:
    variants = {BF16: _product(session, _bf16)}
    variants |= {name: _product(session, partial(_fp8, fast=fast)) for fast, name in FP8.items()}
    products = session.compare(variants, kernels=True)
    if BF16 in products.seconds:
        session.speeds["bf16"] = speed(products, BF16)
    if found := [speed(products, name) for name in FP8.values() if name in products.seconds]:
        session.speeds["fp8"] = max(found)
    side = session.sizes.ceiling
    note = "One scale a tensor, BF16 results. The faster of the two FP8 figures is the ceiling of what follows."
    return section_of(f"GEMM, {side}³", products, base=BF16, notes=[note])


def driver_version() -> str:
    """Version of NVIDIA's driver by nvidia-smi; "unknown" without it or after a timeout."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWERS_WITHIN)
    except subprocess.TimeoutExpired:
        return f"unknown: nvidia-smi did not answer in {ANSWERS_WITHIN:g} s"
    except OSError as error:
        return f"unknown: nvidia-smi cannot be run: {error.strerror}"
    return result.stdout.strip().split("\n")[0] or "unknown"


def _copy(session: Session) -> Variant:
    count = session.sizes.copy

    def build() -> Callable[[], object]:
        source = session.randn(count)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Variant(build=build, work=2 * count * torch.bfloat16.itemsize / 1e9, unit="GB")


def _product(session: Session, multiply: Callable[[Tensor, Tensor], Callable[[], object]]) -> Variant:
    side = session.sizes.ceiling

    def build() -> Callable[[], object]:
        inputs = session.rotation(lambda: multiply(session.randn(side, side), session.randn(side, side)), 2 * side**2)

        def run() -> object:
            return inputs()()

        return run

    return Variant(build=build, work=2 * side**3 / 1e12, unit="TFLOP")


def _bf16(a: Tensor, b: Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b.t())


def _fp8(a: Tensor, b: Tensor, *, fast: bool) -> Callable[[], object]:
    left, right = quantize(a, E4M3), quantize(b, E4M3)
    return lambda: torch._scaled_mm(
        left.data,
        right.data.t(),
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
