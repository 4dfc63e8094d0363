"""Histograms of the tensors that were captured where something was found."""

from collections.abc import Iterable, Iterator
from itertools import islice

from octavo.doctor.capture import Capture, Captures
from octavo.doctor.capture_choice import capture_for
from octavo.doctor.findings import Finding
from octavo.doctor.report.histogram import Histogram
from octavo.doctor.rerun import Rerun, SeenOperands
from octavo.doctor.series import Series
from octavo.errors import DataError
from octavo.numerics import QuantizedTensor
from octavo.scaling import ROLES

__all__ = ["histograms_of"]

MOST = 8
CAST_IN = {"input": ("output", 0), "weight": ("output", 1), "grad_output": ("grad_input", 0)}


def histograms_of(findings: Iterable[Finding], captures: Captures, *, series: Series) -> list[Histogram]:
    """One a tensor that a finding is about, of its layer's capture; all three roles where it names none.

    Tensors with a scale for each row or block are left out: they lie on many grids. At most 8 are drawn, of the worst
    findings. A damaged capture is left out.

    Args:
        findings: worst first.
        captures: the run's.
        series: that they were found in.

    Example:
        >>> from octavo.doctor import series_of
        >>> histograms_of([], Captures("/nowhere/captures"), series=series_of([]))
        []
    """
    wanted: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        for role in (finding.role,) if finding.role else ROLES:
            wanted.setdefault((finding.path, role), finding)
    found = (one for (_, role), finding in wanted.items() for one in _histogram(finding, role, captures, series))
    return list(islice(found, MOST))


def _histogram(finding: Finding, role: str, captures: Captures, series: Series) -> Iterator[Histogram]:
    path = finding.path
    try:
        capture = capture_for(finding, path, captures, series=series)
    except DataError:  # a page of all else is worth more than none; the ranking of the remedies names the file
        return
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
