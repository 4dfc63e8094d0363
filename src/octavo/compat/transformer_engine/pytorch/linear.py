"""Transformer Engine's linear layers and norms, in the recipe of the surrounding ``autocast``; without one in BF16."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo import nn as octavo_nn
from octavo.compat.transformer_engine.pytorch.arguments import (
    Initializer,
    activation_name,
    check_others,
    initialize,
    normalization_name,
)
from octavo.compat.transformer_engine.pytorch.checkpoint_names import linear_rows, mlp_rows, read_names
from octavo.compat.transformer_engine.pytorch.microbatches import micro_batch
from octavo.compat.transformer_engine.pytorch.tensor_parallel import COLUMN, ROW, ParallelModule, TensorParallel
from octavo.errors import ConfigError

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]


def _alias(path: str, shape: str) -> Any:
    """Property of a module: the parameter at ``path`` inside it, with this shape; None if there is none."""
    layer, _, name = path.rpartition(".")
    return property(lambda module: getattr(module.get_submodule(layer), name, None), doc=shape)


class Linear(ParallelModule):
    """``y = x @ weight.T + bias``.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias [N].
        init_method: fills the weight; None is a normal distribution of standard deviation 0.023.
        params_dtype: of the parameters.
        device: of the parameters; None is torch's default, not "cuda".
        others: see ``arguments.py``.

    Example:
        >>> Linear(16, 8, params_dtype=torch.bfloat16)(torch.zeros(2, 16, dtype=torch.bfloat16)).shape
        torch.Size([2, 8])
    """

    weight = _alias("linear.weight", "[N, K].")
    bias = _alias("linear.bias", "[N] or None.")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Initializer | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        tensor_parallel = TensorParallel.taken(others)
        check_others("Linear", others)
        mode = others.get("parallel_mode")
        super().__init__()
        self.linear: nn.Linear = octavo_nn.Linear(
            tensor_parallel.share("in_features", in_features) if mode == ROW else in_features,
            tensor_parallel.share("out_features", out_features) if mode == COLUMN else out_features,
            bias,
            recipe="bf16",
            device=device,
            dtype=params_dtype,
        )
        if mode is not None:
            self.divide_layers(tensor_parallel, positions=0, mode=mode)
        initialize(self.linear, init_method)
        read_names(self, linear_rows("linear.", ""))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Tensor:
        """[..., K] to [..., N]."""
        check_others("Linear", others)
        with micro_batch(self, is_first_microbatch):
            y: Tensor = self.linear(inp)
        return y


class _Norm(nn.Module):
    """Transformer Engine's arguments for the norm that follows in the order of base classes."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        check_others(type(self).__name__, others)
        sizes = [size for size in (normalized_shape, hidden_size) if size is not None]
        if len(sizes) != 1:
            raise ConfigError(f"a norm takes one of normalized_shape and hidden_size, not {len(sizes)}")
        super().__init__(sizes[0], eps=eps, zero_centered=zero_centered_gamma, device=device, dtype=params_dtype)
        read_names(self, [])


class LayerNorm(_Norm, octavo_nn.LayerNorm):
    """LayerNorm over the last dimension.

    Args:
        normalized_shape: its size.
        eps: added to the variance.
        zero_centered_gamma: store the weight as w - 1.
        hidden_size: ``normalized_shape`` by its older name; one of the two.
        params_dtype: of the parameters.
        device: of the parameters.
        others: see ``arguments.py``.

    Example:
        >>> LayerNorm(2, eps=1e-12)(torch.tensor([[3.0, 5.0]])).tolist()
        [[-1.0, 1.0]]
    """


class RMSNorm(_Norm, octavo_nn.RMSNorm):
    """RMSNorm over the last dimension; arguments as :class:`LayerNorm`.

    Example:
        >>> RMSNorm(2, eps=1e-12)(torch.tensor([[3.0, -3.0]])).tolist()
        [[1.0, -1.0]]
    """


class LayerNormLinear(ParallelModule):
    """``linear(norm(x))``.

    Args:
        in_features: K.
        out_features: N.
        eps: of the norm.
        bias: whether the linear layer has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        return_layernorm_output: also return the norm's output.
        return_layernorm_output_gathered: has no effect.
        zero_centered_gamma: store the norm's weight as w - 1.
        init_method: see :class:`Linear`.
        params_dtype: of the parameters.
        device: of the parameters.
        others: see ``arguments.py``.

    Example:
        >>> LayerNormLinear(8, 24, normalization="RMSNorm")(torch.randn(2, 8)).shape
        torch.Size([2, 24])
    """

    weight = _alias("layer.linear.weight", "[N, K].")
    bias = _alias("layer.linear.bias", "[N] or None.")
    layer_norm_weight = _alias("layer.norm.weight", "[K].")
    layer_norm_bias = _alias("layer.norm.bias", "[K] or None.")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        init_method: Initializer | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        tensor_parallel = TensorParallel.taken(others)
        check_others("LayerNormLinear", others)
        mode = others.get("parallel_mode")
        if mode == ROW and tensor_parallel.size > 1:
            raise ConfigError("LayerNormLinear normalizes whole rows, which parallel_mode='row' divides; use 'column'")
        super().__init__()
        self.layer = octavo_nn.LayerNormLinear(
            in_features,
            tensor_parallel.share("out_features", out_features) if mode == COLUMN else out_features,
            bias=bias,
            normalization=normalization_name(normalization),
            eps=eps,
            zero_centered=zero_centered_gamma,
            return_norm_output=return_layernorm_output,
            recipe="bf16",
            device=device,
            dtype=params_dtype,
        )
        if mode is not None:
            self.divide_layers(tensor_parallel, positions=0, mode=mode)
        initialize(self.layer, init_method)
        read_names(self, linear_rows("layer.linear.", "", norm="layer.norm."))

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., K] to [..., N]; with ``return_layernorm_output`` a pair with the norm's [..., K]."""
        check_others("LayerNormLinear", others)
        with micro_batch(self, is_first_microbatch):
            y: Tensor | tuple[Tensor, Tensor] = self.layer(inp)
        return y


class LayerNormMLP(ParallelModule):
    """``fc2(activation(fc1(norm(x))))``.

    Args:
        hidden_size: of input and output.
        ffn_hidden_size: between the two layers.
        eps: of the norm.
        bias: whether the linear layers have biases.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu" and "geglu" (both by tanh), "qgelu", "qgeglu", "relu", "reglu", "silu", "swiglu", "srelu" or
            "sreglu".
        init_method: of the first layer's weight; see :class:`Linear`.
        output_layer_init_method: of the second's.
        return_layernorm_output: only False.
        return_layernorm_output_gathered: has no effect.
        zero_centered_gamma: store the norm's weight as w - 1.
        params_dtype: of the parameters.
        device: of the parameters.
        others: see ``arguments.py``.

    Example:
        >>> LayerNormMLP(8, 16, activation="swiglu")(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """

    fc1_weight = _alias("layer.fc1.weight", "[F or 2 F, H].")
    fc1_bias = _alias("layer.fc1.bias", "[F or 2 F] or None.")
    fc2_weight = _alias("layer.fc2.weight", "[H, F].")
    fc2_bias = _alias("layer.fc2.bias", "[H] or None.")
    layer_norm_weight = _alias("layer.norm.weight", "[H].")
    layer_norm_bias = _alias("layer.norm.bias", "[H] or None.")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        tensor_parallel = TensorParallel.taken(others)
        check_others("LayerNormMLP", others)
        tensor_parallel.check_mode("LayerNormMLP", set_parallel_mode=others.get("set_parallel_mode", False))
        if return_layernorm_output:
            raise ConfigError("octavo's LayerNormMLP does not support return_layernorm_output=True; leave it at False")
        super().__init__()
        self.layer = octavo_nn.LayerNormMLP(
            hidden_size,
            tensor_parallel.share("ffn_hidden_size", ffn_hidden_size),
            activation=activation_name(activation),
            bias=bias,
            normalization=normalization_name(normalization),
            eps=eps,
            zero_centered=zero_centered_gamma,
            recipe="bf16",
            device=device,
            dtype=params_dtype,
        )
        self.divide_layers(tensor_parallel, positions=0)
        initialize(self.layer, init_method, output_layer_init_method)
        read_names(self, mlp_rows("layer.", ""))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Tensor:
        """[..., H] to the same."""
        check_others("LayerNormMLP", others)
        with micro_batch(self, is_first_microbatch):
            y: Tensor = self.layer(inp)
        return y
