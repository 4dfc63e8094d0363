"""``octavo.nn.LayerNormLinear``: a norm and the linear layer that reads it."""

import torch
from torch import Tensor, nn

from octavo.nn.arguments import check_choice, check_eps, check_sizes, linear_options
from octavo.nn.fused import norm_then_linear
from octavo.nn.linear import Linear
from octavo.nn.norms import NORMALIZATIONS, norm_layer
from octavo.recipes import Recipe

__all__ = ["LayerNormLinear"]


class LayerNormLinear(nn.Module):
    """``linear(norm(x))``.

    Outputs that read one input, such as queries, keys and values, are rows of one weight here: the norm's result is
    quantized once for all of them, in forward and for the weight's gradient. Where octavo.nn.fused has a kernel for it,
    only the codes of that result are written.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the linear layer has a bias.
        normalization: "layernorm", "rmsnorm" or "none".
        eps: of the norm.
        zero_centered: store the norm's weight as w - 1.
        return_norm_output: return the norm's result too.
        recipe: of the linear layer, a preset's name or a recipe.
        manual_scale_updates: see ``octavo.nn.Linear``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigError: a size below 1, an unknown ``normalization`` or recipe, an ``eps`` that is not positive.

    Example:
        >>> layer = LayerNormLinear(8, 24, normalization="rmsnorm", return_norm_output=True)
        >>> y, normed = layer(torch.randn(2, 3, 8))
        >>> y.shape, normed.shape
        (torch.Size([2, 3, 24]), torch.Size([2, 3, 8]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        normalization: str = "layernorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        return_norm_output: bool = False,
        recipe: str | Recipe = "tensorwise",
        manual_scale_updates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_eps(eps)
        options = linear_options(recipe, manual_scale_updates, device, dtype)
        super().__init__()
        self.return_norm_output = return_norm_output
        self.norm = norm_layer(
            in_features, normalization=normalization, eps=eps, zero_centered=zero_centered, device=device, dtype=dtype
        )
        self.linear = Linear(in_features, out_features, bias, **options)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[..., K] to [..., N]; with ``return_norm_output`` a pair with the norm's [..., K]."""
        if not self.return_norm_output:
            return norm_then_linear(self.norm, self.linear, x)
        normed: Tensor = self.norm(x)
        return self.linear(normed), normed
