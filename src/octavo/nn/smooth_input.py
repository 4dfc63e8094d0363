"""A linear layer of an input whose channels are scaled to one magnitude, and its weight by the inverse.

    y = (x · s) @ (weight / s).T + bias        s_k = 2^-e_k, with 2^(e_k - 1) <= max |x[..., k]| < 2^e_k

Without casts, the result is that of the layer to the last bit: powers of two do not round. With one scale a tensor, an
outlier channel no longer takes the precision of all others.

Source: Smooth-SwiGLU of Fishman et al., arXiv 2409.12517, section 4.4, whose factors are no powers of two.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["smooth_linear"]

MOST_BINADES = 64  # of a channel's scale, so that neither product leaves FP32's range


def smooth_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Call ``layer`` with smoothed channels of ``x`` [..., K] and its weight [N, K] scaled by the inverse.

    A channel of zeros keeps its scale; NaN and ±Inf propagate. The scales carry no gradient.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 1000.0]])
        >>> torch.equal(smooth_linear(layer, x), layer(x))
        True
    """
    amax = x.detach().abs().flatten(0, -2).amax(0).float()
    exponents = torch.frexp(amax.nan_to_num(posinf=1.0)).exponent.clamp(-MOST_BINADES, MOST_BINADES)
    scales, inverse = torch.ldexp(torch.ones_like(amax), -exponents), torch.ldexp(torch.ones_like(amax), exponents)
    weight = layer.weight * inverse.to(layer.weight.dtype)
    out: Tensor = functional_call(layer, {"weight": weight}, (x * scales.to(x.dtype),))
    return out
