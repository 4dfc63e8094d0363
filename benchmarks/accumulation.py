"""Sums of Hopper's tensor cores: their speed on a CPU, and their error against exact sums.

    python -m benchmarks.accumulation [--rounds 15] [--no-write]

Speed: E4M3 operands of 512 x 512 x 512, by torch's operations and by the native kernel, compared with a plain FP32 GEMM
of the same codes and, if installed, mmaemu's CPU model. Error: 64 x 64 sums of normally distributed numbers and
of their absolute values, quantized with one scale per tensor.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import hardware, interleaved, markdown_table, publish, ratio
from octavo import E4M3, quantize
from octavo.kernels import native_bindings as cpu
from octavo.kernels import native_gemm as products
from octavo.numerics.accumulate import Accumulate, hopper_sums

SIDE = 512
HOPPER = (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW)
ERROR_HEADER = ["K", "sums", "zero-mean: error / result (rms)", "same sign: bias"]


def main() -> None:
    """Time, measure errors, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    lines = [*markdown_table(["sums", "million products a second", "time × fp32"], speed_rows(arguments.rounds)), ""]
    lines += [f"{SIDE} x {SIDE} x {SIDE}, median of {arguments.rounds} interleaved rounds (quartiles).", ""]
    lines += markdown_table(ERROR_HEADER, error_rows())
    publish("accumulation", lines, title="Sums as Hopper makes them", machine=machine, write=not arguments.no_write)


def speed_rows(rounds: int) -> Iterator[list[str]]:
    """Yield a row for each kind of sum."""
    seconds = interleaved(contestants(), rounds=rounds)
    for name, times in seconds.items():
        yield [name, f"{SIDE**3 / statistics.median(times) / 1e6:,.0f}", str(ratio(seconds, name, "fp32"))]


def contestants() -> dict[str, Callable[[], Tensor]]:
    """Timed calls by name."""
    a, b = (_codes(SIDE, SIDE, seed=seed) for seed in (0, 1))
    ways: dict[str, Callable[[], Tensor]] = {"fp32": lambda: a.float() @ b.float().t()}
    ways |= {f"{how} by torch": partial(hopper_sums, a, b, accumulate=how) for how in HOPPER}
    if cpu.why_absent() is None:
        ways |= {f"{how}, native": partial(products.hopper_sums, a, b, accumulate=how) for how in HOPPER}
    if importlib.util.find_spec("mmaemu") is not None:
        import mmaemu

        ways["hopper-fast by mmaemu"] = lambda: mmaemu.accumulate(
            a, b, use_fast_accum=True, profile="hopper", splitk=1, backend="reference"
        )
    return ways


def error_rows() -> Iterator[list[str]]:
    """Yield a row for each K and kind of sum: errors on zero-mean data and on data of one sign."""
    for k in (1024, 4096, 16384):
        for how in HOPPER:
            error, exact = _errors(k, how, one_sign=False)
            bias, total = _errors(k, how, one_sign=True)
            rms = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
            yield [f"{k:,}", str(how), f"{rms:.1e}", f"{float(bias.sum() / total.sum()):+.2%}"]


def _codes(rows: int, k: int, *, seed: int, one_sign: bool = False) -> Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    return quantize(x.abs() if one_sign else x, E4M3).data


def _errors(k: int, how: Accumulate, *, one_sign: bool) -> tuple[Tensor, Tensor]:
    """Difference to the exact sums, and the exact sums."""
    a, b = (_codes(64, k, seed=seed, one_sign=one_sign) for seed in (0, 1))
    exact = a.double() @ b.double().t()
    return hopper_sums(a, b, accumulate=how).double() - exact, exact


if __name__ == "__main__":
    main()
