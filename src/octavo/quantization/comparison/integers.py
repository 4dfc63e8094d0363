"""INT8 beside FP8: torchao's dynamic activations and weights, its integer products taken fast and exactly.

torchao's ``Int8DynamicActivationInt8WeightConfig`` casts each token of the input with a scale of its own and each row
of the weight with another, multiplies int8 by int8 (``torch._int_mm``) and applies both scales. On a CPU without
integer dot-product instructions that product is a scalar loop, 30 times slower than one in FP32. The same integers come
out of FP32 exactly while no sum exceeds 2^24: 1,024 products of at most 128 · 128 do not, so K is cut there and the
parts are added as int32. Casts and scales stay torchao's own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import ConfigError

__all__ = ["ExactIntegerProducts", "quantize_to_int8"]

EXACT_IN_FP32 = 2**24  # every integer up to here is an FP32 number
LARGEST_PRODUCT = 128 * 128
CUT = EXACT_IN_FP32 // LARGEST_PRODUCT  # of K


def quantize_to_int8(model: nn.Module, paths: Collection[str]) -> None:
    """Let the layers at ``paths`` run torchao's INT8, in place; their inputs are rounded to BF16 first.

    Args:
        model: in BF16, which torchao takes its scales from.
        paths: of plain ``nn.Linear`` layers.

    Raises:
        ConfigError: torchao is not installed, or too old.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            "int8 is torchao's, which is not installed; pip install 'torchao>=0.18', or leave int8 out"
        ) from error
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda _, path: path in paths)
    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(_in_bf16)


def _in_bf16(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What autocast does to the input of a plain linear layer, and not to one whose weight is torchao's."""
    return (inputs[0].to(torch.bfloat16), *inputs[1:])


INT_MM = torch.ops.aten._int_mm.default  # noqa: SLF001 (torch's only integer product)


class ExactIntegerProducts(TorchDispatchMode):
    """Inside, ``torch._int_mm`` on a CPU is computed in FP32, to the same integers.

    Example:
        >>> a = torch.full((32, 16), -128, dtype=torch.int8)
        >>> with ExactIntegerProducts():
        ...     int(torch._int_mm(a, a.T)[0, 0])
        262144
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take integer products over; let everything else pass."""
        if func is INT_MM and args[0].device.type == "cpu":
            return _exact_product(*args)
        return func(*args, **(kwargs or {}))


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """``a`` [M, K] int8 or uint8 times ``b`` [K, N] int8, int32."""
    step = CUT if a.dtype == torch.int8 else CUT // 2
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for left, right in zip(a.split(step, dim=1), b.split(step, dim=0), strict=True):
        total += (left.float() @ right.float()).to(torch.int32)
    return total
