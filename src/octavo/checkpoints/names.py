"""Names and shapes of scales in each checkpoint format.

| format             | weight             | input                | keys, values                       | one scale is |
|--------------------|--------------------|----------------------|------------------------------------|--------------|
| compressed-tensors | `weight_scale`     | `input_scale`        | `k_scale`, `v_scale`               | [1]          |
| hf-fp8             | `weight_scale_inv` | none: always dynamic | none                               | –            |
| modelopt           | `weight_scale`     | `input_scale`        | `k_proj.k_scale`, `v_proj.v_scale` | []           |
| octavo             | `weight_scale`     | `input_scale`        | `k_scale`, `v_scale`               | []           |

compressed-tensors is what vLLM and SGLang load; hf-fp8 is DeepSeek's, for transformers and vLLM; modelopt is for
TensorRT-LLM. Names follow the path of the layer, or of the attention for keys and values. **All are decode scales**:
high precision ≈ codes · scale, including `weight_scale_inv`, which DeepSeek named after the inverse of the encode
factor. In all formats scales per row are [N, 1] and scales per block [ceil(N/128), ceil(K/128)].

Scales are written in FP32, and read from BF16, FP16 or FP32, which are exact in FP32; a single scale may be [] or [1].
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.formats import E8M0, FP32, Format
from octavo.numerics import Granularity

__all__ = ["EXACT_IN_FP32", "NAMES", "ScaleNames", "checked_scale"]

EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleNames:
    """Names of a format's scales: a row of the module's table.

    Attributes:
        weight: suffix of a weight's scale, after the layer's path and a dot.
        input: suffix of a static input's scale; None if the format has none.
        key: suffix of the keys' scale, after the attention's path and a dot; None if the format has none.
        value: suffix of the values' scale.
        one: shape of a single scale for a whole tensor.
    """

    weight: str
    input: str | None = None
    key: str | None = None
    value: str | None = None
    one: tuple[int, ...] = ()

    def written(self, scale: Tensor) -> Tensor:
        """Reshape a scale to the format's shape."""
        return scale.reshape(self.one) if scale.ndim == 0 else scale


NAMES = MappingProxyType(
    {
        "compressed-tensors": ScaleNames(
            weight="weight_scale", input="input_scale", key="k_scale", value="v_scale", one=(1,)
        ),
        "hf-fp8": ScaleNames(weight="weight_scale_inv"),
        "modelopt": ScaleNames(
            weight="weight_scale", input="input_scale", key="k_proj.k_scale", value="v_proj.v_scale"
        ),
        "octavo": ScaleNames(weight="weight_scale", input="input_scale", key="k_scale", value="v_scale"),
    }
)


def checked_scale(
    name: str, stored: Tensor, granularity: Granularity, shape: torch.Size, scale_format: Format = FP32
) -> Tensor:
    """Validate a scale from a file; returns a decode scale, float32 or E8M0 bytes, in the granularity's shape.

    Args:
        name: name in the file, for error messages.
        stored: the file's tensor.
        granularity: granularity of the scaled tensor.
        shape: shape of the scaled tensor.
        scale_format: FP32, or E8M0 for bytes.

    Raises:
        CheckpointError: a wrong dtype or shape, or a scale that is NaN (byte 255), infinite, zero or negative.

    Example:
        >>> from octavo import PerTensor
        >>> checked_scale("q.weight_scale", torch.tensor([0.5]), PerTensor(), torch.Size([4, 8]))
        tensor(0.5000)
    """
    expected = granularity.scale_shape(shape)
    scale = _checked_bytes(name, stored) if scale_format == E8M0 else _checked_numbers(name, stored)
    if not expected and scale.shape == (1,):
        scale = scale.reshape(())
    if scale.shape != expected:
        raise CheckpointError(
            f"{name} is {list(stored.shape)}; a {granularity} scale of {list(shape)} is {list(expected)}"
        )
    return scale


def _checked_bytes(name: str, stored: Tensor) -> Tensor:
    (nan,) = E8M0.nan_codes
    if stored.dtype != torch.uint8:
        raise CheckpointError(f"{name} is {stored.dtype}; a scale of its recipe is an E8M0 byte, uint8")
    if (stored == nan).any():
        raise CheckpointError(f"{name} holds {nan}, which is NaN in E8M0; every scale is a number")
    return stored


def _checked_numbers(name: str, stored: Tensor) -> Tensor:
    if stored.dtype not in EXACT_IN_FP32:
        raise CheckpointError(f"{name} is {stored.dtype}; a scale is float32, bfloat16 or float16")
    scale = stored.float()
    if not ((scale > 0) & scale.isfinite()).all():
        invalid = scale[~((scale > 0) & scale.isfinite())][0].item()
        raise CheckpointError(f"{name} holds {invalid}; every scale is a positive, finite number")
    return scale
