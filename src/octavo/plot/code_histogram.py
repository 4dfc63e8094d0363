"""Histogram of FP8 codes."""

import math
from typing import TYPE_CHECKING

from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import Format
from octavo.functional.saved_operands import quantize_operand
from octavo.html.wording import number, signed
from octavo.numerics import CastSpec, QuantizedTensor
from octavo.numerics.cast import check_float
from octavo.numerics.code_counts import code_counts, code_value, codes_by_value, lost_shares
from octavo.plot.style import in_light, notebook_figure, small_title
from octavo.reports.figures import PALETTE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["codes"]

SIGN = 0x80
BINADES_BETWEEN_TICKS = 4


def codes(tensor: QuantizedTensor | Tensor, spec: CastSpec | None = None) -> "Figure":
    """Histogram of a tensor's FP8 codes: the share of each finite code, ordered by value; both zeros are one bar.

    The horizontal axis has the codes' values before the scale; codes are equally far apart. The title gives the shares
    of zeros, of the largest code (saturated values have it) and of NaN and ±Inf.

    Args:
        tensor: codes, or float16, bfloat16, float32 or float64 values to cast by ``spec``.
        spec: how to cast values, such as ``recipes.get("tensorwise").output.a``. The scale is made from the tensor,
            also where a recipe would take it from finished steps or calibration.

    Raises:
        ConfigError: values without a spec, codes with one, a tensor without elements or on the meta device, or plotly
            is not installed.

    Example:
        >>> import torch
        >>> from octavo import recipes
        >>> figure = codes(torch.tensor([448.0, 1.0, 1.0, 0.0]), recipes.get("tensorwise").output.a)
        >>> [(value, share) for value, share in zip(figure.data[0].customdata, figure.data[0].y) if share]
        [('0, code 0x00', 0.25), ('1, code 0x38', 0.5), ('448, code 0x7e', 0.25)]
    """
    quantized = _quantized(tensor, spec)
    if not quantized.data.numel() or quantized.data.is_meta:
        raise ConfigError(
            f"a tensor of shape {tuple(quantized.shape)} on {quantized.data.device} has no codes to count"
        )
    fmt, counts = quantized.format, code_counts(quantized.data)
    ordered, total = codes_by_value(fmt), sum(counts)
    zeros = counts[0] + (0 if SIGN in fmt.nan_codes else counts[SIGN])
    shares = [(counts[code] if code else zeros) / total for code in ordered]
    places = [index - fmt.max_code for index in range(len(ordered))]
    figure = notebook_figure("share of the codes", x=f"{fmt} value, before the scale")
    figure.add_bar(
        x=places, y=shares, marker={"color": PALETTE["blue"], "line": {"width": 0}},
        customdata=[f"{signed(code_value(code, fmt))}, code 0x{code:02x}" for code in ordered],
        hovertemplate="%{customdata}: %{y:.3%}<extra></extra>",
    )  # fmt: skip
    tickvals, ticktext = _ticks(fmt)
    figure.update_xaxes(tickvals=tickvals, ticktext=ticktext, rangemode="normal", showgrid=False)
    figure.update_yaxes(tickformat="~%", rangemode="tozero")
    figure.update_layout(bargap=0, hovermode="closest", height=340, title=small_title(lost_shares(counts, fmt)))
    return in_light(figure)


def _quantized(tensor: QuantizedTensor | Tensor, spec: CastSpec | None) -> QuantizedTensor:
    if isinstance(tensor, QuantizedTensor):
        if spec is not None:
            raise ConfigError(
                "a QuantizedTensor is cast already; leave the spec out, or give the values before the cast"
            )
        return tensor
    if not isinstance(spec, CastSpec):
        raise ConfigError(
            "codes takes a QuantizedTensor, or values and a CastSpec such as octavo.recipes.get('tensorwise').output.a"
            f", not {type(tensor).__name__} and {spec!r}"
        )
    check_float(tensor, "the tensor to cast")
    return quantize_operand(tensor, spec)


def _ticks(fmt: Format) -> tuple[list[int], list[str]]:
    """0, both ends, and powers of two every four binades from 1."""
    powers = {
        code: round(math.log2(value))
        for code in range(1, fmt.max_code + 1)
        if math.frexp(value := fmt.magnitude(code))[0] == 1 / 2
    }
    marked = {code: f"2<sup>{power}</sup>" for code, power in powers.items() if power % BINADES_BETWEEN_TICKS == 0}
    near_end = {code for code in marked if fmt.max_code - code < BINADES_BETWEEN_TICKS << fmt.mantissa_bits}
    marked = {code: text for code, text in marked.items() if code not in near_end and powers[code] >= -fmt.bias}
    marked |= {fmt.max_code: number(fmt.max)}
    negative = {-code: f"−{text}" for code, text in marked.items()}
    ticks = negative | {0: "0"} | marked
    return list(ticks), list(ticks.values())
