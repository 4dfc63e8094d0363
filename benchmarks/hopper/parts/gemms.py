"""GEMMs over a grid of M, K, N: FP8 with each kind of scale against BF16 and the card's ceiling."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.hopper.session import Session, Variant
from benchmarks.hopper.tables import section_of
from octavo.bench.results import Section
from octavo.errors import BackendError
from octavo.formats import E4M3
from octavo.kernels import quantize, scaled_mm, selections
from octavo.numerics import Granularity, PerBlock, PerRow, PerTensor, ScaleRounding

__all__ = ["measure", "multiplied_by"]

BF16 = "bf16"
SCALES: dict[str, tuple[Granularity, Granularity, bool]] = {  # of both operands, and whether accumulation is fast
    "tensorwise": (PerTensor(), PerTensor(), True),
    "tensorwise, slow accumulation": (PerTensor(), PerTensor(), False),
    "rowwise": (PerRow(), PerRow(), True),
    "1x128 times 128x128": (PerBlock(1, 128), PerBlock(128, 128), False),
    "1x128 times 1x128": (PerBlock(1, 128), PerBlock(1, 128), False),
    "1x32 times 1x32": (PerBlock(1, 32), PerBlock(1, 32), False),
}

BOTH = ("1x128 times 128x128", "1x128 times 1x128")  # block scales that two backends may multiply
BACKENDS = {"cuBLAS": "torch_cuda", "octavo's Triton kernel": "triton"}


def measure(session: Session) -> Iterator[Section]:
    """Yield a section for every shape."""
    for m, k, n in session.sizes.gemms:
        session.check_time(f"{m}×{k}×{n}")
        yield _products(session, m, k, n)
        session.forget()
    yield Section(
        title="Backend of each GEMM",
        columns=("scales", "by", "passed over"),
        rows=tuple(multiplied_by(session)),
        notes=(
            "M×K×N: [M, K] times [N, K] transposed, BF16 results.",
            "Published: DeepGEMM, block scales, 4096×7168×16384: 1,520 TFLOP/s on an H800.",
        ),
    )


def _products(session: Session, m: int, k: int, n: int) -> Section:
    variants = {BF16: _bf16(session, m, k, n)}
    variants |= {name: _fp8(session, name, m, k, n) for name in SCALES}
    for label, backend in BACKENDS.items():
        variants |= {f"{name}, {label}": _fp8(session, name, m, k, n, backend=backend) for name in BOTH}
    found = session.compare(variants, kernels=True)
    limit = session.speeds.get("fp8")
    return section_of(f"{m}×{k}×{n}", found, base=BF16, limit=limit, limit_name="FP8's ceiling")


def multiplied_by(session: Session) -> list[tuple[str, str, str]]:
    """Rows of scales, selected backend, and the reasons against other backends, for GEMMs on this device so far."""
    rows: dict[tuple[str, str, str], None] = {}
    for selection in selections():
        problem = selection.problem
        if problem.device == session.device.type:
            scales = f"{problem.a_granularity} times {problem.b_granularity}"
            reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.rejected)
            rows[scales, selection.backend, reasons or "–"] = None
    return list(rows)


def _bf16(session: Session, m: int, k: int, n: int) -> Variant:
    def build() -> Callable[[], object]:
        inputs = session.rotation(lambda: (session.randn(m, k), session.randn(n, k)), 2 * (m + n) * k)

        def run() -> object:
            a, b = inputs()
            return torch.mm(a, b.t())

        return run

    return Variant(build=build, work=2 * m * k * n / 1e12, unit="TFLOP")


def _fp8(session: Session, name: str, m: int, k: int, n: int, *, backend: str = "auto") -> Variant:
    left, right, fast = SCALES[name]
    rounding = ScaleRounding.RCEIL

    def build() -> Callable[[], object]:
        inputs = session.rotation(
            lambda: (
                quantize(session.randn(m, k), E4M3, granularity=left, scale_rounding=rounding),
                quantize(session.randn(n, k), E4M3, granularity=right, scale_rounding=rounding),
            ),
            (m + n) * k,
        )

        def run() -> object:
            a, b = inputs()
            return scaled_mm(a, b, out_dtype=torch.bfloat16, fast_accumulation=fast, backend=backend)

        try:
            run()
        except BackendError as error:
            raise BackendError(f"not there: {error}") from error
        return run

    return Variant(build=build, work=2 * m * k * n / 1e12, unit="TFLOP")
