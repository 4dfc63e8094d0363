"""Every cast, through the functions that users call, beside a plain copy of as many bytes.

Bytes are the fewest that have to move: the input once, or twice where one scale for all of it, or for each of its
columns, has to be measured first; the codes; the scales. A cast both ways writes its codes twice, once transposed.
torch.compile gets octavo's plain definition, octavo.numerics.quantize, and is counted by the same bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from benchmarks.hopper.bars import not_judged, why_absent
from benchmarks.hopper.session import Session, Timings, Variant
from benchmarks.hopper.tables import section_of, speed
from octavo.bench.results import Section, Verdict
from octavo.formats import E4M3, E5M2, E8M0, FP32, Format
from octavo.kernels import cast, quantize
from octavo.numerics import (
    AmaxRecord,
    CastSpec,
    Granularity,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    ScaleRounding,
    amax,
    dequantize,
)
from octavo.numerics import quantize as quantize_by_torch
from octavo.recipes import get

__all__ = ["bars", "measure"]

COPY_BAR = 0.85
BOTH_WAYS_BAR = 1.15
NO_COPY = "the card's copy has no time"
PUBLISHED = "Published for torchao's activation kernels: 85 to 94 % of the bandwidth that can be reached."
BOTH_WAYS, COMPILED, DELAYED = "both ways", "by torch.compile", "one scale, delayed: amax of past steps"
FINE: dict[str, Granularity] = {
    "a scale a row": PerRow(),
    "1x128": PerBlock(1, 128),
    "128x128": PerBlock(128, 128),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

Run = Callable[[Tensor], object]


def measure(session: Session) -> Iterator[Section]:
    """A section for every input dtype, then the way back."""
    for name, dtype in DTYPES.items():
        session.check_time(f"casting {name}")
        yield _quantizing(session, name, dtype)
        session.forget()
    session.check_time("dequantizing")
    yield _dequantizing(session)


def bars(session: Session) -> list[Verdict]:
    """Of every cast that is octavo's, and of every way back."""
    casting = [bar for name, dtype in DTYPES.items() for bar in _cast_bars(name, _casts(session, dtype)).values()]
    return [*casting, *_decode_bars(_decodes(session)).values()]


def _quantizing(session: Session, name: str, dtype: torch.dtype) -> Section:
    variants = _casts(session, dtype)
    found = session.compare(variants, kernels=True)
    copy = session.speeds.get("copy")
    rows, columns = session.sizes.cast
    title, verdicts = f"quantize, {name} {rows}×{columns}", _judged(_cast_bars(name, variants), found, copy)
    return section_of(title, found, limit=copy, limit_name="copy", verdicts=verdicts, notes=[PUBLISHED])


def _cast_bars(name: str, variants: Mapping[str, Variant]) -> dict[str, Verdict]:
    """Bars by variant."""
    bars = {}
    for what in variants:
        if BOTH_WAYS in what:
            bars[what] = Verdict(claim=f"{name}, {what}: time of its bytes' copy", bar=BOTH_WAYS_BAR, at_most=True)
        elif COMPILED not in what:
            bars[what] = Verdict(claim=f"{name}, {what}: share of copy", bar=COPY_BAR)
    return bars


def _judged(bars: Mapping[str, Verdict], timings: Timings, copy: float | None) -> list[Verdict]:
    """Judge the share of the copy's speed, or the time over that of a copy of as many bytes."""
    verdicts = []
    for what, bar in bars.items():
        if what not in timings.seconds:
            verdicts.append(not_judged(bar, why_absent([what], timings.failures)))
        elif copy is None:
            verdicts.append(not_judged(bar, NO_COPY))
        else:
            share = speed(timings, what) / copy
            verdicts.append(replace(bar, found=1 / share if bar.at_most else share))
    return verdicts


def _casts(session: Session, dtype: torch.dtype) -> dict[str, Variant]:
    """Casts by name; the most important first."""
    known_amax = cache(lambda: amax(session.randn(64, 64, dtype=dtype)) + 4.0)  # made when it is first needed

    def entry(run: Run, *, reads: int = 1, writes: int = 1, groups: Granularity | None = None) -> Variant:
        return _over(session, dtype, run, reads, writes, scales=_scale_bytes(session, groups))

    casts = {
        "one scale, measured": entry(lambda x: quantize(x, E4M3), reads=2),
        "one scale, amax known": entry(lambda x: quantize(x, E4M3, amax=known_amax())),
        DELAYED: entry(_delayed(session, known_amax)),
        f"one scale, measured, {BOTH_WAYS}": entry(_both_ways(PerTensor()), reads=2, writes=2),
        f"one scale, amax known, {BOTH_WAYS}": entry(_both_ways(PerTensor(), known_amax), writes=2),
        f"{DELAYED}, {BOTH_WAYS}": entry(_delayed(session, known_amax, transpose=True), writes=2),
    }
    for what, groups in FINE.items():
        casts[what] = entry(_fine(groups), groups=groups)
        if dtype is not torch.float16:
            reads = 2 if groups == PerRow() else 1  # a column of the input has to be measured first, and is long
            casts[f"{what}, {BOTH_WAYS}"] = entry(_both_ways(groups), reads=reads, writes=2, groups=groups)
            casts[f"{what}, of the transpose"] = entry(_fine(groups, transposed=True), reads=reads, groups=groups)
    if dtype is torch.bfloat16:
        casts["1x32, E8M0"] = entry(_fine(PerBlock(1, 32), scale_format=E8M0), groups=PerBlock(1, 128))  # as many bytes
        casts["E5M2, one scale, measured"] = entry(lambda x: quantize(x, E5M2), reads=2)
        casts["E5M2, one scale, amax known"] = entry(lambda x: quantize(x, E5M2, amax=known_amax()))
        casts[f"one scale, measured, {COMPILED}"] = entry(_plain(session, PerTensor()), reads=2)
        for what in ("a scale a row", "1x128"):
            casts[f"{what}, {COMPILED}"] = entry(_plain(session, FINE[what]), groups=FINE[what])
    return casts


def _scale_bytes(session: Session, groups: Granularity | None) -> int:
    """Bytes of the FP32 scales of a granularity; None is one scale per tensor."""
    return 4 * math.prod((groups or PerTensor()).scale_shape(torch.Size(session.sizes.cast)))


def _fine(groups: Granularity, *, transposed: bool = False, scale_format: Format = FP32) -> Run:
    def run(x: Tensor) -> object:
        operand = x.t() if transposed else x
        return quantize(
            operand, E4M3, granularity=groups, scale_rounding=ScaleRounding.RCEIL, scale_format=scale_format
        )

    return run


def _both_ways(groups: Granularity, known: Callable[[], Tensor] | None = None) -> Run:
    """A matrix and its transpose, as training casts what two GEMMs read."""
    rounding = ScaleRounding.FP32 if groups == PerTensor() else ScaleRounding.RCEIL
    spec = CastSpec(format=E4M3, granularity=groups, scale_rounding=rounding)

    def run(x: Tensor) -> object:
        return cast(x, spec, amax=None if known is None else known(), transpose=True)

    return run


def _delayed(session: Session, known: Callable[[], Tensor], *, transpose: bool = False) -> Run:
    """Cast of a layer with the recipe "delayed": uses the amax of past steps unless it is 0, and records its own.

    The device checks for 0, which takes one more launch than a fixed amax.
    """
    spec = get("delayed").output.a
    assert spec is not None
    kinds = (torch.float32, torch.bool, torch.int64)  # the amax, whether and how many are NaN or infinite
    record = cache(lambda: [torch.zeros((), dtype=kind, device=session.device) for kind in kinds])

    def run(x: Tensor) -> object:
        return cast(x, spec, amax=known(), measure_if_zero=True, transpose=transpose, record=AmaxRecord(*record()))

    return run


def _plain(session: Session, groups: Granularity) -> Run:
    def define(x: Tensor) -> tuple[Tensor, Tensor]:
        q = quantize_by_torch(x, E4M3, granularity=groups)
        return q.data, q.scale

    return session.compiled(define)


def _over(session: Session, dtype: torch.dtype, run: Run, reads: int, writes: int, *, scales: int) -> Variant:
    """Variant of a cast with this many passes over its input and over its codes and scales."""
    rows, columns = session.sizes.cast
    moved = rows * columns * (reads * dtype.itemsize + writes) + writes * scales

    def build() -> Callable[[], object]:
        inputs = session.rotation(lambda: session.randn(rows, columns, dtype=dtype), rows * columns * dtype.itemsize)
        return lambda: run(inputs())

    return Variant(build=build, work=moved / 1e9, unit="GB")


def _dequantizing(session: Session) -> Section:
    rows, columns = session.sizes.cast
    variants = _decodes(session)
    found = session.compare(variants, kernels=True)
    copy = session.speeds.get("copy")
    verdicts = _judged(_decode_bars(variants), found, copy)
    return section_of(f"dequantize, {rows}×{columns}", found, limit=copy, limit_name="copy", verdicts=verdicts)


def _decodes(session: Session) -> dict[str, Variant]:
    return {
        f"{what}, to {name}": _decode(session, groups, dtype)
        for name, dtype in list(DTYPES.items())[:2]
        for what, groups in {"one scale": PerTensor(), **FINE}.items()
    }


def _decode_bars(variants: Mapping[str, Variant]) -> dict[str, Verdict]:
    """Bars by variant."""
    return {what: Verdict(claim=f"dequantize, {what}: share of copy", bar=COPY_BAR) for what in variants}


def _decode(session: Session, groups: Granularity, dtype: torch.dtype) -> Variant:
    rows, columns = session.sizes.cast

    def codes() -> QuantizedTensor:
        return quantize(session.randn(rows, columns, dtype=dtype), E4M3, granularity=groups)

    def build() -> Callable[[], object]:
        inputs = session.rotation(codes, rows * columns)
        return lambda: dequantize(inputs())

    moved = rows * columns * (dtype.itemsize + 1) + _scale_bytes(session, groups)
    return Variant(build=build, work=moved / 1e9, unit="GB")
