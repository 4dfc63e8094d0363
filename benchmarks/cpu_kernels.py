"""Speed of the native CPU kernels against memory bandwidth and torch's GEMMs of the same shape.

    python -m benchmarks.cpu_kernels [--rounds 15] [--no-write]

Casts and one-row GEMMs move far more bytes than a last-level cache holds, so memory bounds them. They are compared with
a plain copy of as many bytes, read and written together, or with a pure read if nothing is written. A cast that
measures one scale per tensor reads its input twice and is compared with a read followed by such a copy. "given" is
preallocated output memory. "fresh" is new memory, which the system clears page by page, so that written bytes cost
most; such a cast must also reach its bar against a second copy, which writes as many bytes as the cast. Scales are not
counted as bytes.

GEMMs are compared with torch's GEMM of the same numbers. A CPU without BF16 instructions runs a BF16 GEMM as a scalar
loop, so that of FP32 is shown too. The sums of Hopper's tensor cores must reach a fixed speed.

A speed is work divided by the median time; a comparison is the median of the rounds' ratios, with quartiles.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import Ratio, bf16_note, hardware, interleaved, markdown_table, publish, ratio, verdict
from octavo import E4M3, PerBlock, PerRow, PerTensor, QuantizedTensor, quantize, scaled_mm
from octavo.kernels import CastResult
from octavo.kernels import native_bindings as cpu
from octavo.numerics import Accumulate, CastSpec, Granularity

SHAPE = (6144, 8192)  # 48 Mi codes; glibc takes fresh memory for every tensor above 32 MiB
DTYPES = (torch.float32, torch.bfloat16)
GRANULARITIES: dict[str, Granularity] = {
    "rowwise": PerRow(),
    "1x128": PerBlock(1, 128),
    "128x128": PerBlock(128, 128),
    "1x32": PerBlock(1, 32),
}
GEMMS = ((256, 2048, 2048), (512, 4096, 4096))  # M, N, K
ROW_WIDTH, ROW_MATRICES = 4096, 8  # 128 MiB of codes
HOPPER_SIDE = 512
COPY = "copy of a {} cast's bytes, {}"
WRITE = "copy that writes as {} {} does, fresh"
READ = "read {}"

COPY_BAR, DYNAMIC_BAR, COMPILE_BAR = 0.85, 0.8, 3.0
GEMM_BAR, READ_BAR, ROW_BAR, HOPPER_BAR = 0.85, 0.85, 2.8, 2000.0
HEADER = ["timed", "speed", "beside", "times its speed", "bar", "verdict"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Comparison of a contestant with others, run one after the other, and the share of their speed to reach."""

    names: tuple[str, ...]
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """A timed call.

    Attributes:
        run: the call.
        work: amount of work of a call, in ``unit`` without its "/s".
        unit: unit of the speed.
        bounds: its comparisons.
        least: speed that it must reach, or None.
    """

    run: Callable[[], object]
    work: float
    unit: str = "GB/s"
    bounds: tuple[Bound, ...] = ()
    least: float | None = None


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    if (absence := cpu.why_absent()) is not None:
        parser.exit(2, f"there are no native kernels to time: {absence}\n")
    machine = f"{hardware()}, kernels for {cpu.levels()[-1]}"
    entered = contestants()
    seconds = interleaved({name: entry.run for name, entry in entered.items()}, rounds=arguments.rounds)
    rows = list(result_rows(entered, seconds))
    judged = [row[-1] for row in rows if row[-1]]
    lines = markdown_table(HEADER, rows)
    lines += ["", f"{sum(word.startswith('met') for word in judged)} of {len(judged)} bars met."]
    lines += ["", f"Median of {arguments.rounds} interleaved rounds (quartiles). {bf16_note()}"]
    publish("cpu_kernels", lines, title="Native CPU kernels", machine=machine, write=not arguments.no_write)


def result_rows(entered: Mapping[str, Contestant], seconds: Mapping[str, list[float]]) -> Iterator[list[str]]:
    """Yield a row for each comparison, and one for each contestant without comparisons."""
    for name, entry in entered.items():
        speed = entry.work / statistics.median(seconds[name])
        speed_cell = f"{speed:,.1f} {entry.unit}"
        if not entry.bounds:
            bar = "" if entry.least is None else f"{entry.least:,.0f} {entry.unit}"
            yield [name, speed_cell, "", "", bar, _verdict(speed, entry.least)]
        for bound in entry.bounds:
            measured = times_the_speed(seconds, name, bound)
            bar = "" if bound.least is None else f"{bound.least:g}"
            other = ", then ".join(bound.names)
            yield [name, speed_cell, other, str(measured), bar, _verdict(measured.median, bound.least, other)]


def times_the_speed(seconds: Mapping[str, list[float]], name: str, bound: Bound) -> Ratio:
    """Speed of a contestant over that of its bound, round by round."""
    together = [sum(times) for times in zip(*(seconds[other] for other in bound.names), strict=True)]
    return ratio({"bound": together, "own": seconds[name]}, "bound", "own")


def _verdict(value: float, least: float | None, beside: str = "") -> str:
    return "" if least is None else verdict(value >= least, beside)


def contestants() -> dict[str, Contestant]:
    """All contestants by name, in order."""
    entered: dict[str, Contestant] = {}
    for dtype in DTYPES:
        entered |= copies(dtype) | quantizing(dtype) | dequantizing(dtype)
    for shape in GEMMS:
        entered |= products(*shape)
    return entered | one_row() | hopper()


def copies(dtype: torch.dtype) -> dict[str, Contestant]:
    """Bounds of the casts of ``dtype``: plain copies and a pure read."""
    name, moved = _short(dtype), math.prod(SHAPE) * (dtype.itemsize + 1)
    source = torch.ones(moved // 8)  # read and written, these FP32 numbers are as many bytes as a cast moves
    target, x, codes = torch.ones_like(source), torch.ones(SHAPE, dtype=dtype), torch.ones(SHAPE, dtype=torch.uint8)
    return {
        COPY.format(name, "given"): _memory(lambda: target.copy_(source), moved),
        COPY.format(name, "fresh"): _memory(source.clone, moved),
        WRITE.format("quantize", name): _memory(codes.clone, 2 * codes.nbytes),
        WRITE.format("dequantize", name): _memory(x.clone, 2 * x.nbytes),
        READ.format(name): _memory(x.view(torch.int64).sum, x.nbytes),
    }


def quantizing(dtype: torch.dtype) -> dict[str, Contestant]:
    """Casts of ``dtype``: with a known amax, a measured one, and finer scales measured in the same pass."""
    name, x = _short(dtype), torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    amax, codes = x.abs().amax().float(), torch.ones(SHAPE).to(E4M3.torch_dtype)
    moved, copy_given = x.nbytes + codes.nbytes, COPY.format(name, "given")

    def cast(*, to: Tensor | None, known: Tensor | None = None) -> CastResult:
        return cpu.cast(x, CastSpec(format=E4M3), amax=known, out=to)

    def finer(of: Tensor, granularity: Granularity) -> Contestant:
        to = codes if of is x else codes.t()
        return _memory(
            lambda: cpu.cast(of, CastSpec(format=E4M3, granularity=granularity), out=to), moved, Bound((copy_given,))
        )

    fresh = [Bound((other,), COPY_BAR) for other in (COPY.format(name, "fresh"), WRITE.format("quantize", name))]
    return {
        f"quantize {name}, amax known, given": _memory(
            lambda: cast(to=codes, known=amax), moved, Bound((copy_given,), COPY_BAR)
        ),
        f"quantize {name}, amax known, fresh": _memory(lambda: cast(to=None, known=amax), moved, *fresh),
        f"quantize {name}, dynamic, given": _memory(
            lambda: cast(to=codes), moved + x.nbytes, Bound((READ.format(name), copy_given), DYNAMIC_BAR)
        ),
        **{f"quantize {name}, {label}, given": finer(x, groups) for label, groups in GRANULARITIES.items()},
        f"quantize {name} transposed, rowwise, given": finer(x.t(), PerRow()),
    }


def dequantizing(dtype: torch.dtype) -> dict[str, Contestant]:
    """Dequantization of codes with one scale to ``dtype``, and the same by torch.compile."""
    name, q = _short(dtype), quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), E4M3)
    out = torch.ones(SHAPE, dtype=dtype)
    moved = out.nbytes + q.data.nbytes
    compiled_fresh = torch.compile(lambda codes, scale: (codes.float() * scale).to(dtype))
    compiled_given = torch.compile(lambda codes, scale, to: to.copy_(codes.float() * scale))

    def cast(to: Tensor | None) -> Tensor:
        return cpu.dequantize(q.data, q.scale, PerTensor(), dtype, out=to)

    compiled = {kind: f"dequantize {name} by torch.compile, {kind}" for kind in ("given", "fresh")}
    given = [Bound((COPY.format(name, "given"),), COPY_BAR), Bound((compiled["given"],), COMPILE_BAR)]
    fresh = [Bound((other,), COPY_BAR) for other in (COPY.format(name, "fresh"), WRITE.format("dequantize", name))]
    return {
        compiled["given"]: _memory(lambda: compiled_given(q.data, q.scale, out), moved),
        compiled["fresh"]: _memory(lambda: compiled_fresh(q.data, q.scale), moved),
        f"dequantize {name}, given": _memory(lambda: cast(out), moved, *given),
        f"dequantize {name}, fresh": _memory(
            lambda: cast(None), moved, *fresh, Bound((compiled["fresh"],), COMPILE_BAR)
        ),
    }


def products(m: int, k: int, n: int) -> dict[str, Contestant]:
    """GEMM of FP8 codes with one scale per row and FP32 results, and torch's GEMMs of the same numbers."""
    a, b = (_rowwise(rows, k, seed=rows) for rows in (m, n))
    left, right = a.dequantize(), b.dequantize().t()
    low_left, low_right = left.bfloat16(), right.bfloat16()
    gflop, shape = 2 * m * k * n / 1e9, f"{m} x {k} x {n}"
    fp32, bf16 = f"fp32 GEMM {shape}", f"bf16 GEMM {shape}"
    bounds = (Bound((bf16,), GEMM_BAR), Bound((fp32,)))
    return {
        fp32: Contestant(lambda: left @ right, gflop, "GFLOP/s"),
        bf16: Contestant(lambda: low_left @ low_right, gflop, "GFLOP/s"),
        f"FP8 GEMM {shape}": Contestant(lambda: scaled_mm(a, b, out_dtype=torch.float32), gflop, "GFLOP/s", bounds),
    }


def one_row() -> dict[str, Contestant]:
    """One row times several weights in turn, which together exceed the caches."""
    a, weights = (
        _rowwise(1, ROW_WIDTH, seed=0),
        [_rowwise(ROW_WIDTH, ROW_WIDTH, seed=seed) for seed in range(ROW_MATRICES)],
    )
    low, low_weights = a.dequantize().bfloat16(), [w.dequantize().bfloat16() for w in weights]
    size, shape = ROW_MATRICES * ROW_WIDTH**2, f"{ROW_MATRICES} weights of {ROW_WIDTH}²"
    read, bf16 = f"read {shape}", f"one row x {shape}, bf16 F.linear"
    return {
        read: _memory(lambda: [w.data.view(torch.int64).sum() for w in weights], size),
        bf16: _memory(lambda: [torch.nn.functional.linear(low, w) for w in low_weights], 2 * size),
        f"one row x {shape}, FP8": _memory(
            lambda: [scaled_mm(a, w, out_dtype=torch.bfloat16) for w in weights],
            size,
            Bound((read,), READ_BAR),
            Bound((bf16,), ROW_BAR),
        ),
    }


def hopper() -> dict[str, Contestant]:
    """Sums of Hopper's tensor cores, in multiply-adds per second."""
    a, b = (_rowwise(HOPPER_SIDE, HOPPER_SIDE, seed=seed) for seed in (0, 1))

    def of(how: Accumulate) -> Contestant:
        return Contestant(
            lambda: scaled_mm(a, b, out_dtype=torch.float32, accumulate=how),
            HOPPER_SIDE**3 / 1e6,
            "million MAC/s",
            least=HOPPER_BAR,
        )

    return {f"{how}, {HOPPER_SIDE}³": of(how) for how in (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW)}


def _memory(run: Callable[[], object], moved: int, *bounds: Bound) -> Contestant:
    return Contestant(run, moved / 1e9, bounds=bounds)


def _rowwise(rows: int, k: int, *, seed: int) -> QuantizedTensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    return quantize(x, E4M3, granularity=PerRow())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
