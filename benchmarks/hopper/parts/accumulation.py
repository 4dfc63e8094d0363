"""Sums of this GPU's tensor cores: FP32 results of ``torch._scaled_mm`` against octavo's models, bit by bit.

The models (octavo.numerics.accumulate) are chains of the tensor core's steps that are added in FP32 after intervals of
K: every 128 is "hopper-slow", never is "hopper-fast". Other intervals are compared too, and exact sums rounded once.
The operands' scales are 1, so that a result is the sum itself. A library may split K over several chains depending on
the shape, so the same rows are also multiplied within a larger GEMM.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.hopper.session import Session
from octavo.bench.results import Section
from octavo.formats import E4M3
from octavo.kernels import quantize
from octavo.numerics.accumulate import Accumulate, hopper_sums

__all__ = ["INTERVALS", "measure", "sums_with_interval"]

INTERVALS = (32, 64, 128, 256, 512, None)  # of K, after which a chain is added in FP32; None: one chain
EXACT = "exact, rounded once"
EXPLAINED = (
    "Equal bits: the share of outputs that the best fitting model gives exactly. Largest difference: to that model, "
    "over the root mean square of the sums. octavo's model: the share that hopper-fast (fast) or hopper-slow (not "
    "fast) gives exactly, of the product and of the same rows within a larger one, of 8 times as many rows and columns."
)
LARGER = 8  # times as many rows and columns


def measure(session: Session) -> Iterator[Section]:
    """Yield a section with a row for every K, kind of data and accumulation, and the best fit over all of them."""
    rows, raw = [], []
    for k in session.sizes.chain_lengths:
        if session.is_late():
            break
        session.on_progress(f"K = {k}")
        for one_sign in (False, True):
            found = list(_of_length(session, k, one_sign=one_sign))
            raw += found
            rows += [_row(each) for each in found]
    yield Section(
        title="Sums of tensor cores",
        columns=(
            "K",
            "data",
            "fast accumulation",
            "best fit",
            "equal bits",
            "largest difference",
            "octavo's model",
            "same in a larger product",
            "octavo's model, larger product",
        ),
        rows=tuple(rows),
        notes=(EXPLAINED, *_finding(raw)),
        raw={"products": raw},
    )


def sums_with_interval(a: Tensor, b: Tensor, interval: int | None) -> Tensor:
    """Tensor-core sums of codes [M, K] and [N, K], a chain every ``interval`` of K, the chains added in FP32."""
    width = a.shape[1] if interval is None else interval
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for left, right in zip(a.split(width, dim=1), b.split(width, dim=1), strict=True):
        total += hopper_sums(left, right, accumulate=Accumulate.HOPPER_FAST)
    return total


def _of_length(session: Session, k: int, *, one_sign: bool) -> Iterator[dict[str, Any]]:
    side = session.sizes.chain_side
    a, b = (_codes(session, LARGER * side, k, one_sign=one_sign) for _ in range(2))
    small_a, small_b = a[:side].contiguous(), b[:side].contiguous()
    models = {_label(interval): sums_with_interval(small_a, small_b, interval) for interval in _different(k)}
    models[EXACT] = (small_a.double() @ small_b.double().t()).float()
    for fast in (True, False):
        sums = _scaled_mm(small_a, small_b, fast=fast)
        equal = {name: float((sums == model).float().mean()) for name, model in models.items()}
        best = max(equal, key=lambda name: equal[name])
        rms = float(sums.square().mean().sqrt())
        ours = _label(None if fast or k <= 128 else 128)
        larger = _scaled_mm(a, b, fast=fast)[:side, :side]
        yield {
            "K": k,
            "data": "one sign" if one_sign else "zero mean",
            "fast": fast,
            "best": best,
            "equal": equal,
            "largest": {name: float((sums - model).abs().max()) / rms for name, model in models.items()},
            "ours": equal[ours],
            "larger_equal": float((larger == sums).float().mean()),
            "larger_ours": float((larger == models[ours]).float().mean()),
        }


def _different(k: int) -> list[int | None]:
    """Intervals that differ for this K: those of at least K are all one chain."""
    return [interval for interval in INTERVALS if interval is None or interval < k]


def _label(interval: int | None) -> str:
    return "one chain" if interval is None else f"every {interval}"


def _codes(session: Session, rows: int, k: int, *, one_sign: bool) -> Tensor:
    x = session.randn(rows, k, dtype=torch.float32)
    return quantize(x.abs() if one_sign else x, E4M3).data


def _scaled_mm(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    one = torch.ones((), device=a.device)
    sums: Tensor = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast)
    return sums


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    best = found["best"]
    return (
        f"{found['K']:,}",
        found["data"],
        "yes" if found["fast"] else "no",
        best,
        f"{found['equal'][best]:.1%}",
        f"{found['largest'][best]:.1e}",
        f"{found['ours']:.1%}",
        f"{found['larger_equal']:.1%}",
        f"{found['larger_ours']:.1%}",
    )


def _finding(raw: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each kind of accumulation, over the K at which all intervals differ."""
    for fast in (True, False):
        long = [each for each in raw if each["fast"] is fast and each["K"] > max(filter(None, INTERVALS))]
        if not long:
            continue
        names = long[0]["equal"]
        mean = {name: sum(each["equal"][name] for each in long) / len(long) for name in names}
        best = max(mean, key=lambda name: mean[name])
        yield (
            f"With{'' if fast else 'out'} fast accumulation, K above {max(filter(None, INTERVALS))}: the best fit is "
            f"{best}, equal in {mean[best]:.1%} of the outputs; "
            + ", ".join(f"{name} {share:.1%}" for name, share in mean.items() if name != best)
            + "."
        )
