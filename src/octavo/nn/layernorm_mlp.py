"""``octavo.nn.LayerNormMLP``: a norm and the two linear layers of a transformer's MLP."""

import torch
from torch import Tensor, nn

from octavo.nn.activations import ACTIVATIONS
from octavo.nn.arguments import check_choice, check_eps, check_sizes, linear_options
from octavo.nn.fused import activation_then_linear, norm_then_linear
from octavo.nn.linear import Linear
from octavo.nn.norms import NORMALIZATIONS, norm_layer
from octavo.recipes import Recipe

__all__ = ["LayerNormMLP"]


class LayerNormMLP(nn.Module):
    """``fc2(activation(fc1(norm(x))))``.

    With a gated activation fc1 has 2 · ``ffn_hidden_size`` outputs, first the gate's, then those that it multiplies:
    the norm's result is quantized once for both. Where octavo.nn.fused has kernels for it, only the codes of the norm's
    and the activation's results are written.

    Args:
        hidden_size: of input and output, H.
        ffn_hidden_size: between the two layers, F.
        activation: a name of ``octavo.nn.activations``: gelu, gelu_tanh, qgelu, relu, silu, srelu, geglu, geglu_tanh,
            qgeglu, reglu, sreglu, swiglu.
        bias: whether the linear layers have biases.
        normalization: "layernorm", "rmsnorm" or "none".
        eps: of the norm.
        zero_centered: store the norm's weight as w - 1.
        recipe: of the linear layers, a preset's name or a recipe.
        manual_scale_updates: see ``octavo.nn.Linear``.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ConfigError: a size below 1, an unknown ``activation``, ``normalization`` or recipe, an ``eps`` that is not
            positive.

    Example:
        >>> mlp = LayerNormMLP(8, 16, activation="swiglu", normalization="rmsnorm", bias=False)
        >>> mlp(torch.randn(2, 3, 8)).shape, mlp.fc1.weight.shape
        (torch.Size([2, 3, 8]), torch.Size([32, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        normalization: str = "layernorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        recipe: str | Recipe = "tensorwise",
        manual_scale_updates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_eps(eps)
        options = linear_options(recipe, manual_scale_updates, device, dtype)
        super().__init__()
        self.activation = activation
        self.norm = norm_layer(
            hidden_size, normalization=normalization, eps=eps, zero_centered=zero_centered, device=device, dtype=dtype
        )
        halves = 2 if ACTIVATIONS[activation].gated else 1
        self.fc1 = Linear(hidden_size, halves * ffn_hidden_size, bias, **options)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same; every position by itself."""
        return activation_then_linear(self.activation, self.fc2, norm_then_linear(self.norm, self.fc1, x))

    def extra_repr(self) -> str:
        """The activation's name."""
        return f"activation={self.activation}"
