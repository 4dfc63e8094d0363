"""The one table of foreign names: what each checkpoint format calls a scale, and the shape it writes it in.

| format             | weight             | input                | keys, values                       | one scale is |
|--------------------|--------------------|----------------------|------------------------------------|--------------|
| compressed-tensors | `weight_scale`     | `input_scale`        | `k_scale`, `v_scale`               | [1]          |
| hf-fp8             | `weight_scale_inv` | none: always dynamic | none                               | –            |
| modelopt           | `weight_scale`     | `input_scale`        | `k_proj.k_scale`, `v_proj.v_scale` | []           |
| octavo             | `weight_scale`     | `input_scale`        | `k_scale`, `v_scale`               | []           |

Names follow the path of the layer, or of the attention for keys and values. **All of them decode**: high precision ≈
codes · scale. `weight_scale_inv` does too: DeepSeek named it after the inverse of the encode factor. A scale for each
row is [N, 1] and one for each block [ceil(N/128), ceil(K/128)] in all of them.

Files are written in FP32. Read are BF16, FP16 and FP32, which are exact in FP32; one scale as [] or as [1].
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
    """A row of the table.

    Attributes:
        weight: of a weight's scale, after its layer's path and a dot.
        input: of a static input's; None where the format has none.
        key: of the keys', after the attention's path and a dot; None where the format has none.
        value: of the values'.
        one: the shape in which one scale for a whole tensor is written.
    """

    weight: str
    input: str | None = None
    key: str | None = None
    value: str | None = None
    one: tuple[int, ...] = ()

    def written(self, scale: Tensor) -> Tensor:
        """A scale in the shape that the format writes."""
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
    name: str, given: Tensor, granularity: Granularity, shape: torch.Size, scale_format: Format = FP32
) -> Tensor:
    """A scale of a file as octavo has it: decoding, float32 (E8M0 bytes stay bytes), in the granularity's shape.

    Args:
        name: in the file, for the error's sentence.
        given: the file's tensor.
        granularity: which elements of the scaled tensor share a scale.
        shape: of the scaled tensor.
        scale_format: FP32, or E8M0 for bytes.

    Raises:
        CheckpointError: another dtype or shape, or a number that no scale is: NaN (byte 255), infinite, zero or
            negative.

    Example:
        >>> from octavo import PerTensor
        >>> checked_scale("q.weight_scale", torch.tensor([0.5]), PerTensor(), torch.Size([4, 8]))
        tensor(0.5000)
    """
    expected = granularity.scale_shape(shape)
    scale = _checked_bytes(name, given) if scale_format == E8M0 else _checked_numbers(name, given)
    if not expected and scale.shape == (1,):
        scale = scale.reshape(())
    if scale.shape != expected:
        raise CheckpointError(
            f"{name} is {list(given.shape)}; a {granularity} scale of {list(shape)} is {list(expected)}"
        )
    return scale


def _checked_bytes(name: str, given: Tensor) -> Tensor:
    (nan,) = E8M0.nan_codes
    if given.dtype != torch.uint8:
        raise CheckpointError(f"{name} is {given.dtype}; a scale of its recipe is an E8M0 byte, uint8")
    if (given == nan).any():
        raise CheckpointError(f"{name} holds {nan}, which is NaN in E8M0; every scale is a number")
    return given


def _checked_numbers(name: str, given: Tensor) -> Tensor:
    if given.dtype not in EXACT_IN_FP32:
        raise CheckpointError(f"{name} is {given.dtype}; a scale is float32, bfloat16 or float16")
    scale = given.float()
    if not ((scale > 0) & scale.isfinite()).all():
        wrong = scale[~((scale > 0) & scale.isfinite())][0].item()
        raise CheckpointError(f"{name} holds {wrong}; every scale is a positive, finite number")
    return scale
