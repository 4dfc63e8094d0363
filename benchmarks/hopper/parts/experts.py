"""Grouped GEMMs of a mixture's experts: one launch for all, against a GEMM an expert, in FP8 and BF16."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch

from benchmarks.hopper.bars import judged_by_speed
from benchmarks.hopper.session import Session, Variant
from benchmarks.hopper.sizes import ExpertCase
from benchmarks.hopper.tables import section_of
from octavo.bench.results import Section, Verdict
from octavo.formats import E4M3
from octavo.kernels import quantize, scaled_grouped_mm, scaled_mm
from octavo.numerics import Granularity, PerBlock, PerRow, QuantizedTensor

__all__ = ["bars", "measure"]

BASE, TORCH_BF16, TORCH = "bf16, one by one", "bf16, torch._grouped_mm", "rowwise, torch._scaled_grouped_mm"
SCALES: dict[str, tuple[Granularity, Granularity]] = {
    "rowwise": (PerRow(), PerRow()),
    "1x128 times 128x128": (PerBlock(1, 128), PerBlock(128, 128)),
}

Operands = tuple[QuantizedTensor, QuantizedTensor]


def measure(session: Session) -> Iterator[Section]:
    """Yield a section for every number of tokens."""
    for case in session.sizes.experts:
        session.check_time(case.name)
        found = session.compare(_variants(session, case))
        verdicts = [judged_by_speed(bar, found, [name], [f"{name}, one by one"]) for name, bar in _bars(case).items()]
        yield section_of(case.name, found, base=BASE, verdicts=verdicts)
        session.forget()


def bars(session: Session) -> list[Verdict]:
    """Bars of all cases."""
    return [bar for case in session.sizes.experts for bar in _bars(case).values()]


def _bars(case: ExpertCase) -> dict[str, Verdict]:
    return {name: Verdict(claim=f"{case.name}, {name}, × one by one", bar=case.bar) for name in SCALES}


def _variants(session: Session, case: ExpertCase) -> dict[str, Variant]:
    builds: dict[str, Callable[[], Callable[[], object]]] = {BASE: partial(_bf16_each, session, case)}
    for name, scales in SCALES.items():
        builds[name] = partial(_grouped, session, case, *scales)
        builds[f"{name}, one by one"] = partial(_each, session, case, *scales)
    builds |= {TORCH_BF16: partial(_torch_bf16, session, case), TORCH: partial(_torch_rowwise, session, case)}
    work = 2 * case.experts * case.tokens * case.k * case.n / 1e12
    return {name: Variant(build=build, work=work, unit="TFLOP") for name, build in builds.items()}


def _bounds(case: ExpertCase) -> Sequence[int]:
    return range(0, case.experts * case.tokens + 1, case.tokens)


def _bf16(session: Session, case: ExpertCase) -> tuple[torch.Tensor, torch.Tensor]:
    return session.randn(case.experts * case.tokens, case.k), session.randn(case.experts, case.n, case.k)


def _fp8(session: Session, case: ExpertCase, left: Granularity, right: Granularity) -> Operands:
    rows, weights = _bf16(session, case)
    each = [quantize(weight, E4M3, granularity=right) for weight in weights]
    data, scale = torch.stack([q.data for q in each]), torch.stack([q.scale for q in each])
    return quantize(rows, E4M3, granularity=left), QuantizedTensor(data, scale, right, torch.bfloat16)


def _bf16_each(session: Session, case: ExpertCase) -> Callable[[], object]:
    rows, weights = _bf16(session, case)
    out = rows.new_empty(rows.shape[0], case.n)

    def run() -> object:
        for weight, (start, end) in zip(weights, pairwise(_bounds(case)), strict=True):
            torch.mm(rows[start:end], weight.t(), out=out[start:end])
        return out

    return run


def _each(session: Session, case: ExpertCase, left: Granularity, right: Granularity) -> Callable[[], object]:
    rows, weights = _fp8(session, case, left, right)
    operands = [
        (
            QuantizedTensor(rows.data[start:end], rows.scale[start:end], left, torch.bfloat16),
            QuantizedTensor(weights.data[expert], weights.scale[expert], right, torch.bfloat16),
        )
        for expert, (start, end) in enumerate(pairwise(_bounds(case)))
    ]
    return lambda: [scaled_mm(a, b, fast_accumulation=True) for a, b in operands]


def _grouped(session: Session, case: ExpertCase, left: Granularity, right: Granularity) -> Callable[[], object]:
    rows, weights = _fp8(session, case, left, right)
    offsets = torch.tensor(_bounds(case), device=session.device, dtype=torch.int32)
    return lambda: scaled_grouped_mm(rows, weights, offsets)


def _torch_bf16(session: Session, case: ExpertCase) -> Callable[[], object]:
    rows, weights = _bf16(session, case)
    ends = torch.tensor(_bounds(case)[1:], device=session.device, dtype=torch.int32)
    return lambda: torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)  # noqa: SLF001 (torch 2.11 has no other)


def _torch_rowwise(session: Session, case: ExpertCase) -> Callable[[], object]:
    rows, weights = _fp8(session, case, PerRow(), PerRow())
    ends = torch.tensor(_bounds(case)[1:], device=session.device, dtype=torch.int32)
    return lambda: torch._scaled_grouped_mm(  # noqa: SLF001 (the same)
        *(rows.data, weights.data.transpose(-2, -1), rows.scale.flatten(), weights.scale.flatten(1)),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
