"""LayerNorm and RMSNorm over the last dimension, in FP32 whatever comes in.

The result has the input's dtype, also under ``torch.autocast``: a 16-bit input is normalised in FP32 and rounded once.
An FP32 residual stream gives FP32, which a linear layer behind the norm rounds once to autocast's dtype before it casts
to FP8. A norm that rounded by itself would hand that layer the same bits and take precision from everything else that
reads the result.

A zero-centred norm stores its weight as w - 1. Weight decay then pulls w to 1 instead of 0, and a 16-bit weight near 1
is stored more finely.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.errors import ConfigError
from octavo.kernels.casting import fake_quantize
from octavo.nn.arguments import check_eps, check_sizes
from octavo.numerics import CastSpec
from octavo.numerics.cast import check_float

__all__ = ["NORMALIZATIONS", "LayerNorm", "RMSNorm", "norm_layer"]

NORMALIZATIONS = ("layernorm", "rmsnorm", "none")


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension.

    Args:
        size: of the last dimension.
        eps: added to the variance, which divides by ``size``.
        bias: whether there is a bias.
        zero_centered: store the weight as w - 1, initially 0.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigError: a size below 1 or an ``eps`` that is not positive; in forward, another last dimension or no float.

    Example:
        >>> LayerNorm(2, bias=False, eps=1e-12)(torch.tensor([[3.0, 5.0]])).tolist()
        [[-1.0, 1.0]]

    Reference: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450, equation 4.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(size=size)
        check_eps(eps)
        super().__init__()
        self.size, self.eps, self.zero_centered = size, eps, zero_centered
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity after normalising."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        _check_input(x, self.size)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), (self.size,), _gain(self), bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.size}, eps={self.eps}, bias={self.bias is not None}, zero_centered={self.zero_centered}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        zero_centered: store the weight as w - 1, initially 0.
        device: of the parameter.
        dtype: of the parameter.

    Raises:
        ConfigError: a size below 1 or an ``eps`` that is not positive; in forward, another last dimension or no float.

    Example:
        >>> RMSNorm(2, zero_centered=True, eps=1e-12)(torch.tensor([[3.0, -3.0]])).tolist()
        [[1.0, -1.0]]

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, equation 4.
    """

    weight_cast: CastSpec | None = None  # of a weight that is cast to FP8 and decoded, as one row

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(size=size)
        check_eps(eps)
        super().__init__()
        self.size, self.eps, self.zero_centered = size, eps, zero_centered
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity after normalising."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        _check_input(x, self.size)
        return F.rms_norm(x.float(), (self.size,), self._gain(), self.eps).to(x.dtype)

    def _gain(self) -> Tensor:
        gain, spec = _gain(self), self.weight_cast
        if spec is None:
            return gain
        row = fake_quantize(gain[None], spec.format, granularity=spec.granularity, scale_rounding=spec.scale_rounding)
        return row[0]

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.size}, eps={self.eps}, zero_centered={self.zero_centered}"


def norm_layer(
    size: int,
    *,
    normalization: str,
    eps: float,
    zero_centered: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    """The norm of that name, one of :data:`NORMALIZATIONS`; "none" hands its input on."""
    if normalization == "none":
        return nn.Identity()
    kind = LayerNorm if normalization == "layernorm" else RMSNorm
    return kind(size, eps=eps, zero_centered=zero_centered, device=device, dtype=dtype)


def _gain(norm: LayerNorm | RMSNorm) -> Tensor:
    weight = norm.weight.float()
    return weight + 1 if norm.zero_centered else weight


def _check_input(x: Tensor, size: int) -> None:
    check_float(x, "the input of a norm")
    if x.ndim == 0 or x.shape[-1] != size:
        raise ConfigError(f"this norm takes inputs [..., {size}], not {tuple(x.shape)}")
