"""Histograms of captured tensors' magnitudes on their format's grid: what is flushed, rounded and saturated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from octavo.doctor.capture import Capture, Captures
from octavo.doctor.capture_selection import capture_for
from octavo.doctor.findings import Finding
from octavo.doctor.rerun import OperandRecorder, Rerun
from octavo.doctor.series import Series
from octavo.errors import ConfigError, DataError
from octavo.formats import Format
from octavo.numerics import QuantizedTensor
from octavo.scaling import ROLES

__all__ = ["CAST_IN", "Histogram", "histograms_of"]

BARS_A_BINADE = 4
MOST_BINADES = 48
MOST_HISTOGRAMS = 8
CAST_IN = {"input": ("output", 0), "weight": ("output", 1), "grad_output": ("grad_input", 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Magnitudes of one tensor and the grid of values of its codes.

    Attributes:
        path: the layer's path.
        role: the tensor's role, such as "grad_output".
        values: the tensor before its cast, of any shape.
        format: the codes' format, one with subnormals.
        scale: decode scale of the whole tensor.
        step: the step of the capture; None if unknown.

    Raises:
        ConfigError: ``scale`` is not positive and finite, or the format has no zero.

    Example:
        >>> import torch
        >>> from octavo.formats import E4M3
        >>> x = torch.tensor([0.0, 1e-4, 1.0, 448.0, 1000.0])
        >>> facts = Histogram(path="proj", role="input", values=x, format=E4M3, scale=1.0).facts()
        >>> facts["zeros"], facts["flushed"], facts["saturated"]
        (0.2, 0.25, 0.25)
    """

    path: str
    role: str
    values: Tensor
    format: Format
    scale: float
    step: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf"):
            raise ConfigError(f"a histogram's scale must be positive and finite, not {self.scale!r}")
        if self.format.min_subnormal is None:
            raise ConfigError(f"{self.format} has no zero, so a histogram has no grid to be drawn on; use E4M3 or E5M2")

    def facts(self) -> dict[str, Any]:
        """Plain data for a page: shares of the nonzeros in bars of a quarter binade, and ends of the format's ranges.

        Magnitudes are log2. A value is flushed at half the smallest subnormal or below, which ties to the even code 0,
        and saturated beyond the largest value.
        """
        magnitudes = np.abs(self.values.detach().float().cpu().numpy().ravel())
        magnitudes = magnitudes[np.isfinite(magnitudes)]
        nonzero = magnitudes[magnitudes > 0].astype(np.float64)
        form = self.format
        assert form.min_subnormal is not None
        low, normal, high = np.log2(self.scale * np.array([form.min_subnormal / 2, form.min_normal, form.max])).tolist()
        grid = np.log2([self.scale * form.magnitude(code) for code in range(1, form.max_code + 1)])
        exponents = np.log2(nonzero)
        first, counts = _bars(exponents)
        count = max(1, nonzero.size)
        return {
            "title": f"{self.path or 'the model'} · {self.role}"
            + ("" if self.step is None else f", step {self.step:,}"),
            "path": self.path,
            "first": first,
            "width": 1 / BARS_A_BINADE,
            "shares": [float(f"{share:.4g}") for share in counts / count],
            "ends": [low, normal, high],
            "grid": [round(float(x), 4) for x in grid],
            "format": str(form),
            "zeros": (magnitudes.size - nonzero.size) / max(1, magnitudes.size),
            "flushed": float((exponents <= low).sum() / count),
            "saturated": float((exponents > high).sum() / count),
        }


def _bars(exponents: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, np.ndarray[Any, np.dtype[np.int64]]]:
    """Left end of the first bar and the count of each bar; smaller values are counted in the first."""
    if not exponents.size:
        return 0.0, np.zeros(0, dtype=np.int64)
    places = np.floor(exponents * BARS_A_BINADE).astype(np.int64)
    first = max(int(places.min()), int(places.max()) - MOST_BINADES * BARS_A_BINADE)
    return first / BARS_A_BINADE, np.bincount(np.maximum(places, first) - first)


def histograms_of(findings: Iterable[Finding], captures: Captures, *, series: Series) -> list[Histogram]:
    """Histograms of the tensors that findings are about, from their layers' captures; all roles where none is named.

    Damaged captures are left out, as are tensors with a scale for each row or block, which lie on many grids. At most 8
    histograms are made, of the worst findings.

    Args:
        findings: worst first.
        captures: the run's captures.
        series: the run's series.

    Example:
        >>> from octavo.doctor import series_of
        >>> histograms_of([], Captures("/nowhere/captures"), series=series_of([]))
        []
    """
    finding_by_tensor: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        for role in (finding.role,) if finding.role else ROLES:
            finding_by_tensor.setdefault((finding.path, role), finding)
    histograms = (
        one for (_, role), finding in finding_by_tensor.items() for one in _histogram(finding, role, captures, series)
    )
    return list(islice(histograms, MOST_HISTOGRAMS))


def _histogram(finding: Finding, role: str, captures: Captures, series: Series) -> Iterator[Histogram]:
    path = finding.path
    try:
        capture = capture_for(finding, path, captures, series=series)
    except DataError:  # the page is written without it; the ranking of remedies reports the file
        return
    operand = None if capture is None else _operand(capture, role)
    if capture is not None and operand is not None and operand.scale.numel() == 1:
        values, scale = capture.tensors[role], float(operand.fp32_scale)
        if 0 < scale < float("inf"):
            yield Histogram(path=path, role=role, values=values, format=operand.format, scale=scale, step=capture.step)


def _operand(capture: Capture, role: str) -> QuantizedTensor | None:
    """Codes of a role in its GEMM; None if it stayed in high precision."""
    recorder = OperandRecorder()
    Rerun(capture, capture.recipe, ran=True)(recorder)
    gemm, side = CAST_IN[role]
    operand = recorder.by_gemm[gemm][side]
    return operand if isinstance(operand, QuantizedTensor) else None
