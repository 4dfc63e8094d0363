"""Summary of a tensor in FP8 for notebooks: format, shape, scale, and a histogram of its codes by binade."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import Format, format_of
from octavo.html.notebook import Bar, summary
from octavo.html.wording import counted, number, percent, signed
from octavo.numerics.code_counts import code_counts, code_value, codes_by_binade, lost_shares
from octavo.numerics.granularity import Granularity, granularity_in_words
from octavo.numerics.scaling import scale_from_e8m0

__all__ = ["code_bars", "tensor_summary"]


def tensor_summary(codes: Tensor, scale: Tensor, granularity: Granularity, hp_dtype: torch.dtype) -> str | None:
    """HTML of a tensor's codes and scale; None without jinja2.

    Args:
        codes: an FP8 dtype, any shape; on the meta device they have no histogram.
        scale: float32, or uint8 for E8M0 bytes.
        granularity: which elements share a scale.
        hp_dtype: dtype of the decoded tensor.
    """
    fmt, has_values = format_of(codes.dtype), not codes.is_meta
    counts = code_counts(codes) if has_values and codes.numel() else []
    shape = " × ".join(map(str, codes.shape)) or "[]"
    stored = "E8M0 bytes" if scale.dtype is torch.uint8 else "float32"
    facts = {
        "shape": f"{shape}, decoded to {str(hp_dtype).removeprefix('torch.')}",
        "scale": f"{counted(scale.numel(), 'scale')}, one per {granularity_in_words(granularity)}, {stored}",
        "memory": f"{codes.nbytes + scale.nbytes:,} bytes on {codes.device}",
    }
    if has_values and scale.numel():
        facts["scale"] += f": {_range(scale_from_e8m0(scale) if scale.dtype is torch.uint8 else scale)}"
    return summary(
        f"QuantizedTensor, {fmt}",
        facts=facts | ({"codes": lost_shares(counts, fmt)} if counts else {}),
        bars=code_bars(counts, fmt) if counts else (),
        bars_title="codes by binade, values before the scale",
    )


def code_bars(counts: Sequence[int], fmt: Format) -> list[Bar]:
    """Histogram of codes by binade, for a summary.

    Args:
        counts: result of :func:`code_counts`.
        fmt: an FP8 format.

    Example:
        >>> from octavo.formats import E5M2
        >>> code_bars(code_counts(torch.tensor([1.0]).to(E5M2.torch_dtype)), E5M2)[47]
        Bar(height=1.0, title='1 to 1.75: 1 code, 100.0 %', tick='1')
    """
    groups = codes_by_binade(fmt)
    totals = [sum(counts[code] for code in group) for group in groups]
    largest = max(1, *totals)
    bars = []
    for index, (group, total) in enumerate(zip(groups, totals, strict=True)):
        values = sorted({code_value(code, fmt) for code in group})
        span = " to ".join(signed(value) for value in dict.fromkeys((values[0], values[-1])))
        bars.append(
            Bar(
                height=total / largest,
                title=f"{span}: {counted(total, 'code')}, {percent(total, sum(counts))}",
                tick=_tick(values, is_end=index in (0, len(groups) - 1)),
            )
        )
    return bars


def _tick(values: Sequence[float], *, is_end: bool) -> str:
    """Label of a binade with these values: the largest magnitude at both ends, and -1, 0 and 1."""
    if is_end:
        return signed(max(values, key=abs))
    marked = [value for value in values if value in (-1.0, 0.0, 1.0)]
    return signed(marked[0]) if marked else ""


def _range(scale: Tensor) -> str:
    low, high = scale.min().item(), scale.max().item()
    return number(low) if low == high else f"{number(low)} to {number(high)}, median {number(scale.median().item())}"
