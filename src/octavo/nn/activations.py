"""The functions between the two linear layers of an MLP, by name.

A gated activation reads twice the width that it returns: the **first** half of the last dimension is the gate, which
goes through the function, the second half is multiplied by it. One linear layer makes both halves, so that their
common input is quantized once.

| name                                                         | y                           | gated |
|--------------------------------------------------------------|-----------------------------|-------|
| `gelu`, `gelu_tanh`, `qgelu`, `relu`, `silu`                 | f(x)                        | no    |
| `srelu`                                                      | relu(x)²                    | no    |
| `geglu`, `geglu_tanh`, `qgeglu`, `reglu`, `sreglu`, `swiglu` | f(first half) · second half | yes   |

`gelu` is x·Φ(x); `gelu_tanh` approximates Φ(x) by a tanh, as GPT-2 does, `qgelu` by sigmoid(1.702 x).

References: Hendrycks and Gimpel, arXiv 1606.08415 (GELU); Shazeer, arXiv 2002.05202, equations 5 and 6 (gated ones); So
et al., arXiv 2109.08668 (squared ReLU).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "Activation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A function of every element, and whether its input carries a gate.

    Attributes:
        function: of every element, or of the gate.
        gated: whether the input's first half is a gate for its second.

    Example:
        >>> ACTIVATIONS["reglu"](torch.tensor([[-1.0, 2.0, 5.0, 7.0]])).tolist()
        [[0.0, 14.0]]
    """

    function: Callable[[Tensor], Tensor]
    gated: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[..., F] to the same shape; [..., 2F] to [..., F] where gated. In ``x``'s dtype."""
        if not self.gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS = {
    "gelu": Activation(function=F.gelu),
    "gelu_tanh": Activation(function=_gelu_tanh),
    "qgelu": Activation(function=_quick_gelu),
    "relu": Activation(function=F.relu),
    "silu": Activation(function=F.silu),
    "srelu": Activation(function=_squared_relu),
    "geglu": Activation(function=F.gelu, gated=True),
    "geglu_tanh": Activation(function=_gelu_tanh, gated=True),
    "qgeglu": Activation(function=_quick_gelu, gated=True),
    "reglu": Activation(function=F.relu, gated=True),
    "sreglu": Activation(function=_squared_relu, gated=True),
    "swiglu": Activation(function=F.silu, gated=True),
}
