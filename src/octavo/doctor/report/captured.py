"""Histograms of the tensors that were captured where something was found."""

from collections.abc import Iterable, Iterator

from octavo.doctor.capture import Capture, Captures
from octavo.doctor.findings import Finding
from octavo.doctor.report.histogram import Histogram
from octavo.doctor.rerun import Rerun, SeenOperands
from octavo.numerics import QuantizedTensor
from octavo.observers import ROLES

__all__ = ["histograms_of"]

MOST = 8
CAST_IN = {"input": ("output", 0), "weight": ("output", 1), "grad_output": ("grad_input", 0)}


def histograms_of(findings: Iterable[Finding], captures: Captures) -> list[Histogram]:
    """One a tensor that a finding is about, of its layer's newest capture; all three roles where it names none.

    Tensors with a scale for each row or block are left out: they lie on many grids. At most 8 are drawn, of the worst
    findings.

    Args:
        findings: worst first.
        captures: the run's.

    Raises:
        DataError: a capture's file is damaged.

    Example:
        >>> histograms_of([], Captures("/nowhere/captures"))
        []
    """
    wanted = dict.fromkeys(
        (finding.path, role) for finding in findings for role in ((finding.role,) if finding.role else ROLES)
    )
    found = (histogram for place in wanted for histogram in _histogram(*place, captures))
    return [histogram for histogram, _ in zip(found, range(MOST), strict=False)]


def _histogram(path: str, role: str, captures: Captures) -> Iterator[Histogram]:
    capture = captures.of(path)
    made = None if capture is None else _operand(capture, role)
    if capture is not None and made is not None and made.scale.numel() == 1 and 0 < made.fp32_scale < float("inf"):
        values, scale = capture.tensors[role], float(made.fp32_scale)
        yield Histogram(path=path, role=role, values=values, format=made.format, scale=scale, step=capture.step)


def _operand(capture: Capture, role: str) -> QuantizedTensor | None:
    """The codes of a role, as its GEMM multiplied them; None where it stayed in high precision."""
    seen = SeenOperands()
    Rerun(capture, capture.recipe, ran=True)(seen)
    gemm, side = CAST_IN[role]
    operand = seen.by_gemm[gemm][side]
    return operand if isinstance(operand, QuantizedTensor) else None
