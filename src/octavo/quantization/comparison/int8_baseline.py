"""INT8 baseline: torchao's dynamic INT8 quantization, with its integer GEMM computed exactly in FP32.

torchao's ``Int8DynamicActivationInt8WeightConfig`` casts the input with one scale per token and the weight with one
scale per row, multiplies int8 by int8 (``torch._int_mm``) and applies both scales. On a CPU without integer dot-product
instructions that GEMM is a scalar loop, 30 times slower than FP32. FP32 gives the same integers exactly while no sum
exceeds 2^24, which 1,024 products of at most 128 · 128 do not, so K is split into chunks of that length and the chunks
are added as int32. Casts and scales are torchao's own.
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
K_CHUNK = EXACT_IN_FP32 // LARGEST_PRODUCT


def quantize_to_int8(model: nn.Module, paths: Collection[str]) -> None:
    """Quantize the layers at ``paths`` with torchao's INT8, in place; their inputs are rounded to BF16 first.

    Args:
        model: in BF16, the source of torchao's scales.
        paths: paths of plain ``nn.Linear`` layers.

    Raises:
        ConfigError: torchao is not installed, or too old.
    """
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            "int8 needs torchao, which is not installed; pip install 'torchao>=0.18', or leave int8 out"
        ) from error
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda _, path: path in paths)
    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(_in_bf16)


def _in_bf16(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the input to BF16: autocast does so for a plain linear layer, but not for torchao's weights."""
    return (inputs[0].to(torch.bfloat16), *inputs[1:])


INT_MM = torch.ops.aten._int_mm.default  # noqa: SLF001 (torch has no public integer GEMM)


class ExactIntegerProducts(TorchDispatchMode):
    """Dispatch mode that computes ``torch._int_mm`` on a CPU in FP32, with identical results.

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
        """Intercept ``_int_mm`` on a CPU; pass everything else through."""
        if func is INT_MM and args[0].device.type == "cpu":
            return _exact_product(*args)
        return func(*args, **(kwargs or {}))


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of ``a`` [M, K] int8 or uint8 and ``b`` [K, N] int8: int32 [M, N]."""
    step = K_CHUNK if a.dtype == torch.int8 else K_CHUNK // 2
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for left, right in zip(a.split(step, dim=1), b.split(step, dim=0), strict=True):
        total += (left.float() @ right.float()).to(torch.int32)
    return total
