"""A linear layer as an engine computes it: both casts, the GEMM, and the roundings around them."""

from dataclasses import replace

from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels import high_precision_mm, scaled_mm
from octavo.numerics import QuantizedTensor, Scaling, quantize_as
from octavo.numerics.quantized import check_scale_fits, check_scale_values
from octavo.recipes.engines.catalog import resolved
from octavo.recipes.engines.profile import EngineProfile, Products

__all__ = [
    "check_input_scale",
    "gemm_as",
    "input_as",
    "linear_as",
    "linear_of_codes",
    "needs_calibration",
    "weight_as",
]


def weight_as(weight: Tensor | QuantizedTensor, profile: str | EngineProfile) -> QuantizedTensor:
    """A weight's codes in an engine.

    Args:
        weight: [N, K] in high precision, as the engine has it before its cast, or codes of a file.
        profile: the engine or its name.
    """
    profile = resolved(profile)
    measured = replace(profile.weight, scaling=Scaling.DYNAMIC)  # past steps had the amax of a weight that stays
    if not isinstance(weight, QuantizedTensor):
        return quantize_as(weight, measured)
    return quantize_as(weight.dequantize().float(), measured) if profile.requantizes else weight


def linear_as(
    x: Tensor,
    weight: Tensor | QuantizedTensor,
    profile: str | EngineProfile,
    *,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    input_amax: Tensor | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` as an engine does.

    Args:
        x: [..., K], rounded to the engine's activations first, unless it casts a norm's output before that rounding.
        weight: as in :func:`weight_as`.
        profile: the engine or its name.
        bias: [N] or None.
        input_scale: float32 [], where the input's scale is from calibration.
        input_amax: float32 [], where it is from past steps, or the calibration's scale has to be made.

    Returns:
        [..., N] in the profile's ``output``, without a gradient.

    Raises:
        ConfigError: an unknown profile, one that does not measure inputs without their scale or amax, or a scale or
            amax of another shape or that no tensor has.

    Example:
        >>> from octavo.engines import get
        >>> linear_as(torch.ones(2, 256), torch.full((3, 256), 0.5), get("vllm-token"))[0]
        tensor([128., 128., 128.], dtype=torch.bfloat16)
    """
    profile = resolved(profile)
    codes = weight_as(weight, profile)
    return linear_of_codes(x, codes, profile, bias=bias, input_scale=input_scale, input_amax=input_amax)


def linear_of_codes(
    x: Tensor,
    codes: QuantizedTensor,
    profile: EngineProfile,
    *,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    input_amax: Tensor | None = None,
) -> Tensor:
    """:func:`linear_as` of a weight that :func:`weight_as` has cast already."""
    y = gemm_as(input_as(x, profile, scale=input_scale, amax=input_amax), codes, profile, bias=bias)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def input_as(
    x: Tensor, profile: EngineProfile, *, scale: Tensor | None = None, amax: Tensor | None = None
) -> QuantizedTensor | Tensor:
    """A layer's input as the GEMM of an engine has it: [rows, K], codes or, where the engine casts none, numbers."""
    check_input_scale(profile, scale, amax)
    rows = x.detach().reshape(-1, x.shape[-1])
    rows = rows if profile.fused_cast else rows.to(profile.activations)
    if profile.input is None:
        return rows
    for name, tensor in (("input_scale", scale), ("input_amax", amax)):
        if tensor is not None:
            check_scale_fits(name, tensor, rows, profile.input.granularity)
            check_scale_values(name, tensor, zero_allowed=name == "input_amax")
    return quantize_as(rows, profile.input, scale=scale, amax=amax)


def gemm_as(
    operand: QuantizedTensor | Tensor, codes: QuantizedTensor, profile: EngineProfile, *, bias: Tensor | None = None
) -> Tensor:
    """The GEMM of an engine on operands as it has them: [rows, K] and [N, K] to [rows, N] in its ``output``."""
    bias = None if bias is None else bias.detach()
    if isinstance(operand, QuantizedTensor) and profile.products == Products.CODES:
        return scaled_mm(operand, codes, out_dtype=profile.output, bias=bias, accumulate=profile.accumulate)
    rows = operand.dequantize() if isinstance(operand, QuantizedTensor) else operand
    decoded = QuantizedTensor(codes.data, codes.scale, codes.granularity, rows.dtype).dequantize()
    return high_precision_mm(rows, decoded, None if bias is None else bias.to(rows.dtype)).to(profile.output)


def needs_calibration(profile: EngineProfile) -> bool:
    """Whether a profile's scales of inputs are not those of the inputs themselves."""
    return profile.input is not None and profile.input.scaling != Scaling.DYNAMIC


def check_input_scale(profile: EngineProfile, scale: Tensor | None, amax: Tensor | None) -> None:
    """Raise ConfigError if a profile does not measure inputs, and there is neither a scale nor an amax of them."""
    if needs_calibration(profile) and scale is None and amax is None:
        raise ConfigError(
            f"{profile.name} does not measure inputs; give input_scale, or an input_amax such as input_amaxes() "
            "measures"
        )
