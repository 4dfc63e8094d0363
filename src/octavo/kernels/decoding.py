"""Native kernels for generation: attention over a paged cache, and all layers of a Llama-style decoder in one call.

| tensor       | shape and dtype                                                                                     |
|--------------|-----------------------------------------------------------------------------------------------------|
| keys         | [pages, kv heads, D, PAGE], E4M3, bfloat16 or float32                                               |
| values       | [pages, kv heads, PAGE, D], the same dtype                                                          |
| scales       | [pages, kv heads, PAGE] uint8: E8M0 scale of every vector of codes; None in high precision          |
| table        | [sequences, P] int32: the page that holds positions PAGE·i … PAGE·i + PAGE - 1 of a sequence        |
| sequence     | [R] int64: the sequence of every row                                                                |
| position     | [R] int64: its position; a row sees the positions up to its own                                     |

What comes out is defined by octavo.serving.layers, in torch's operations; sums are FP32 in another order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import E4M3
from octavo.kernels import cpu
from octavo.numerics import QuantizedTensor
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = ["MAX_HEAD_DIM", "PAGE", "CacheTensors", "DecoderLayer", "DecoderShape", "NativeDecoder", "attend"]

PAGE = 64  # as in native/kernels.h
MAX_HEAD_DIM = 512
_CACHED = (E4M3.torch_dtype, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width inside the gated MLP.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of one head, even.
        norm_eps: of the norms.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with."""
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's tensors; weights are [N, K] codes with one scale a row.

    Attributes:
        attention_norm: float32 [hidden].
        qkv: rows for all query heads, then key heads, then value heads.
        out: [hidden, heads · D].
        mlp_norm: float32 [hidden].
        gate_up: rows of the gate, then of the other half.
        down: [hidden, intermediate].
    """

    attention_norm: Tensor
    qkv: QuantizedTensor
    out: QuantizedTensor
    mlp_norm: Tensor
    gate_up: QuantizedTensor
    down: QuantizedTensor


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """Keys and values of all layers: as in the table above, with the layers before the pages.

    Attributes:
        keys: [layers, pages, kv heads, D, PAGE].
        values: [layers, pages, kv heads, PAGE, D].
        key_scale: [layers, pages, kv heads, PAGE], or None.
        value_scale: the same of the values.
        table: the pages of every sequence.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None
    table: Tensor

    def of_layer(self, index: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values and their scales of one layer."""
        key_scale, value_scale = (None if s is None else s[index] for s in (self.key_scale, self.value_scale))
        return self.keys[index], self.values[index], key_scale, value_scale


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    table: Tensor,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    level: str | None = None,
) -> Tensor:
    """``softmax(queries · keysᵀ · scale) · values`` of every row over its sequence's cache.

    Args:
        queries: float32 [R, heads, D]; kv heads serve heads / kv_heads of them that stand side by side.
        keys: one layer's.
        values: one layer's.
        key_scale: the scales of codes, or None.
        value_scale: the same of the values.
        table: the pages of every sequence.
        sequence: of every row.
        position: of every row.
        scale: of the scores.
        level: an instruction-set level; None is the best.

    Returns:
        float32 [R, heads, D]. A row's numbers depend on its own sequence alone, and not on the number of threads.

    Raises:
        BackendError: shapes or dtypes that do not go together.
    """
    _check_cache(keys, values, key_scale, value_scale)
    rows, heads, head_dim = queries.shape
    if head_dim != keys.shape[2] or heads % keys.shape[1] or not (sequence.shape == position.shape == (rows,)):
        raise BackendError(
            f"queries [R, heads, D] meet keys [pages, kv heads, D, {PAGE}] with R sequences and positions, "
            f"not {tuple(queries.shape)}, {tuple(keys.shape)}, {tuple(sequence.shape)} and {tuple(position.shape)}"
        )
    _check_rows(table, sequence, position, keys.shape[0])
    queries = queries.float().contiguous()
    out = torch.empty_like(queries)
    _native().attend(
        cpu.level_number(level),
        queries.data_ptr(),
        heads,
        keys.shape[1],
        head_dim,
        cpu.element_number(keys.dtype),
        keys.data_ptr(),
        _address(key_scale),
        values.data_ptr(),
        _address(value_scale),
        table.data_ptr(),
        table.shape[1],
        rows,
        sequence.data_ptr(),
        position.data_ptr(),
        scale,
        out.data_ptr(),
    )
    return out


class NativeDecoder:
    """The layers of a decoder, ready to be run.

    Args:
        shape: their sizes.
        layers: their tensors, which are kept.
        cos: float32 [positions, D], the cosines of the rotary angles, the same in both halves.
        sin: their sines.
        level: an instruction-set level; None is the best.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        cos: Tensor,
        sin: Tensor,
        *,
        level: str | None = None,
    ) -> None:
        self._shape, self._kept = shape, [cos.contiguous(), sin.contiguous()]
        self._decoder = _native().Decoder(
            cpu.level_number(level),
            shape.hidden_size,
            shape.intermediate_size,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.norm_eps,
            shape.attention_scale,
            AMAX_FLOOR,
            *(table.data_ptr() for table in self._kept),
        )
        for layer in layers:
            norms = [norm.detach().float().contiguous() for norm in (layer.attention_norm, layer.mlp_norm)]
            self._kept += norms
            weights = [self._weight(weight) for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
            self._decoder.add_layer(*(norm.data_ptr() for norm in norms), *weights)

    def run(self, hidden: Tensor, cache: CacheTensors, sequence: Tensor, position: Tensor) -> None:
        """Pass rows of the residual stream through all layers, in place, and append their keys and values.

        Args:
            hidden: float32 [R, hidden], contiguous.
            cache: the tensors of all layers.
            sequence: of every row.
            position: of every row; of rows of one sequence, those that follow what is in the cache.
        """
        _check_cache(*cache.of_layer(0))
        _check_rows(cache.table, sequence, position, cache.keys.shape[1])
        self._decoder.run(
            hidden.data_ptr(),
            hidden.shape[0],
            sequence.data_ptr(),
            position.data_ptr(),
            cpu.element_number(cache.keys.dtype),
            cache.keys.data_ptr(),
            _address(cache.key_scale),
            cache.values.data_ptr(),
            _address(cache.value_scale),
            cache.keys.shape[1],
            cache.table.data_ptr(),
            cache.table.shape[1],
        )

    def _weight(self, weight: QuantizedTensor) -> tuple[int, ...]:
        data, scale = weight.data.contiguous(), weight.scale.float().contiguous()
        self._kept += [data, scale]
        per_row = scale.numel() > 1
        element = cpu.element_number(data.dtype)
        return (data.data_ptr(), element, data.stride(0), 1, scale.data_ptr(), per_row, data.shape[0], 0, 0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _native() -> ModuleType:
    if reason := cpu.why_absent():
        raise BackendError(f"there are no native kernels: {reason}")
    from octavo.kernels import _native as module  # absent where it could not be built

    return module


def _check_cache(keys: Tensor, values: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    pages, heads, dim = keys.shape[:3]
    fits = keys.shape == (pages, heads, dim, PAGE) and values.shape == (pages, heads, PAGE, dim) and dim <= MAX_HEAD_DIM
    codes, scales = keys.dtype == E4M3.torch_dtype, [scale for scale in (key_scale, value_scale) if scale is not None]
    fits &= len(scales) == (2 if codes else 0)
    fits &= all(scale.shape == (pages, heads, PAGE) and scale.dtype == torch.uint8 for scale in scales)
    if not (fits and keys.dtype == values.dtype and keys.dtype in _CACHED):
        raise BackendError(
            f"keys are [pages, kv heads, D, {PAGE}] and values [pages, kv heads, {PAGE}, D], D up to {MAX_HEAD_DIM}, "
            "in E4M3 with uint8 scales of every vector, or in bfloat16 or float32 without, "
            f"not {tuple(keys.shape)} {keys.dtype} and {tuple(values.shape)} {values.dtype}"
        )
    if not all(t is None or t.is_contiguous() for t in (keys, values, key_scale, value_scale)):
        raise BackendError("keys, values and their scales must be contiguous")


def _check_rows(table: Tensor, sequence: Tensor, position: Tensor, pages: int) -> None:
    """A kernel reads where it is told to."""
    dtypes = (table.dtype, sequence.dtype, position.dtype) == (torch.int32, torch.int64, torch.int64)
    if not (dtypes and table.ndim == 2 and all(t.is_contiguous() for t in (table, sequence, position))):
        raise BackendError("the table is int32 [sequences, P], sequences and positions are int64 [R], all contiguous")
    if not sequence.numel():
        return
    far = max(
        int(sequence.max()) - table.shape[0], int(position.max()) - table.shape[1] * PAGE, int(table.max()) - pages
    )
    if far >= 0 or min(int(t.min()) for t in (table, sequence, position)) < 0:
        raise BackendError(
            f"sequences, positions or page numbers reach beyond {table.shape[0]} sequences, "
            f"{table.shape[1] * PAGE} positions or {pages} pages"
        )
