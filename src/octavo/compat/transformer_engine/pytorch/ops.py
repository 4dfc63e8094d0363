"""Transformer Engine's ``ops``: the linear operations, not fused.

Its other operations can be imported and raise an error when created. The names ``basic_ops.0.weight`` and
``basic_ops.1.bias`` of a linear layer's parameters in checkpoints are supported.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.transformer_engine.common.placeholder import refused
from octavo.compat.transformer_engine.pytorch import linear as modules
from octavo.compat.transformer_engine.pytorch.arguments import check_others
from octavo.compat.transformer_engine.pytorch.checkpoint_names import ParameterRow, read_names

__all__ = ["BasicLinear", "Bias", "Identity", "Linear", "Sequential"]

GROUP = "tensor_parallel_group"


class Sequential(nn.Sequential):
    """Sequence of operations and modules.

    Example:
        >>> Sequential(Linear(8, 8), Linear(8, 4))(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """


class Linear(modules.Linear):
    """``y = x @ weight.T + bias`` under the surrounding ``autocast``'s recipe.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias [N].
        device: of the parameters; None is torch's default, not "cuda".
        dtype: of the parameters.
        others: see ``arguments.py``.

    Example:
        >>> Linear(16, 8, bias=False)(torch.zeros(2, 16)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        check_others("ops.Linear", {name: value for name, value in others.items() if name != GROUP})
        tensor_parallel = {theirs: others[name] for name, theirs in _TENSOR_PARALLEL.items() if name in others}
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            init_method=_uniform,
            device=device,
            params_dtype=dtype,
            **tensor_parallel,
        )
        rows = (("weight", "basic_ops.0.weight"), ("bias", "basic_ops.1.bias"))
        read_names(self, [ParameterRow(name=f"linear.{name}", sources=(source,)) for name, source in rows])


class BasicLinear(Linear):
    """:class:`Linear` without a bias.

    Example:
        >>> BasicLinear(16, 8).bias is None
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype, **others)


class Bias(nn.Module):
    """``y = x + bias``.

    Args:
        size: of the last dimension.
        device: of the parameter.
        dtype: of the parameter.
        others: see ``arguments.py``.

    Example:
        >>> Bias(2)(torch.ones(1, 2)).tolist()
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        check_others("ops.Bias", others)
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + bias``, [..., size]."""
        return x + self.bias


def _uniform(weight: Tensor) -> None:
    """Initialize as ``torch.nn.Linear``."""
    nn.init.kaiming_uniform_(weight, a=5**0.5)


Identity = nn.Identity
_TENSOR_PARALLEL = {
    "tensor_parallel_mode": "parallel_mode",
    GROUP: "tp_group",
    "sequence_parallel": "sequence_parallel",
}
_NORMS = "use te.LayerNorm, te.RMSNorm, or te.LayerNormLinear for a norm and a linear layer"
_ACTIVATIONS = "use torch.nn.functional, or te.LayerNormMLP for an MLP with it"
_ALONE = "Linear has tensor_parallel_mode and sequence_parallel; use torch.distributed elsewhere"
_PLAIN = "use torch.nn.Module"
_OTHERS = {
    **dict.fromkeys(("LayerNorm", "RMSNorm", "L2Normalization"), _NORMS),
    **dict.fromkeys(("GELU", "QGELU", "ReLU", "SReLU", "SiLU"), _ACTIVATIONS),
    **dict.fromkeys(("GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU"), _ACTIVATIONS),
    **dict.fromkeys(("ClampedSwiGLU", "ScaledSwiGLU", "ScaledClampedQGeGLU"), _ACTIVATIONS),
    **dict.fromkeys(("AllGather", "AllReduce", "ReduceScatter"), _ALONE),
    **dict.fromkeys(("AddExtraInput", "MakeExtraOutput", "ConstantScale", "Dropout", "Reshape"), _PLAIN),
    **dict.fromkeys(("FusibleOperation", "BasicOperation", "FusedOperation"), _PLAIN),
    **dict.fromkeys(
        ("register_forward_fusion", "register_backward_fusion"), "octavo does not fuse operations; leave it out"
    ),
    "GroupedLinear": "use one Linear for each group",
    "Quantize": "a recipe casts the operands of Linear; use octavo.fake_quantize for other tensors",
}


def __getattr__(name: str) -> Any:
    """Return a placeholder that raises when created, for an operation that octavo does not support."""
    if name not in _OTHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return refused(f"ops.{name}", _OTHERS[name])
