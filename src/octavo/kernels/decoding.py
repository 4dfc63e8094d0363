"""Native kernels for generation: attention over a paged cache, and all layers of a Llama-style decoder in one call.

| tensor       | shape and dtype                                                                                     |
|--------------|-----------------------------------------------------------------------------------------------------|
| pages        | [pages, kv heads, PAGE, D], E4M3, bfloat16 or float32: keys or values                               |
| scale        | [pages, kv heads, PAGE] uint8: E8M0 scale of every vector of codes; None in high precision          |
| table        | [sequences, P] int32: the page that holds positions PAGE·i … PAGE·i + PAGE - 1 of a sequence        |
| sequence     | [R] int64: the sequence of every row                                                                |
| position     | [R] int64: its position; a row sees the positions up to its own                                     |

What comes out is defined by octavo.serving.layers, in torch's operations; sums are FP32 in another order.
"""

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

__all__ = ["MAX_HEAD_DIM", "PAGE", "DecoderLayer", "DecoderShape", "NativeDecoder", "attend"]

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
        return self.head_dim**-0.5


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
        keys: pages.
        values: pages like the keys'.
        key_scale: of codes, or None.
        value_scale: of codes, or None.
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
    if head_dim != keys.shape[3] or heads % keys.shape[1] or not (sequence.shape == position.shape == (rows,)):
        raise BackendError(
            f"queries [R, heads, D] meet pages [pages, kv heads, {PAGE}, D] with R sequences and positions, "
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
        0 if key_scale is None else key_scale.data_ptr(),
        values.data_ptr(),
        0 if value_scale is None else value_scale.data_ptr(),
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

    def run(
        self, hidden: Tensor, pages: Tensor, scale: Tensor | None, table: Tensor, sequence: Tensor, position: Tensor
    ) -> None:
        """Pass rows of the residual stream through all layers, in place, and append their keys and values.

        Args:
            hidden: float32 [R, hidden], contiguous.
            pages: [layers, 2, pages, kv heads, PAGE, D], keys and values.
            scale: [layers, 2, pages, kv heads, PAGE], or None.
            table: the pages of every sequence.
            sequence: of every row.
            position: of every row; of rows of one sequence, those that follow what is in the cache.
        """
        _check_cache(pages[0, 0], pages[0, 1], *((None, None) if scale is None else scale[0]))
        _check_rows(table, sequence, position, pages.shape[2])
        self._decoder.run(
            hidden.data_ptr(),
            hidden.shape[0],
            sequence.data_ptr(),
            position.data_ptr(),
            cpu.element_number(pages.dtype),
            pages.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            pages.shape[2],
            table.data_ptr(),
            table.shape[1],
        )

    def _weight(self, weight: QuantizedTensor) -> tuple[int, ...]:
        data, scale = weight.data.contiguous(), weight.scale.float().contiguous()
        self._kept += [data, scale]
        per_row = scale.numel() > 1
        element = cpu.element_number(data.dtype)
        return (data.data_ptr(), element, data.stride(0), 1, scale.data_ptr(), per_row, data.shape[0], 0, 0)


def _native() -> ModuleType:
    if reason := cpu.why_absent():
        raise BackendError(f"there are no native kernels: {reason}")
    from octavo.kernels import _native as module  # noqa: PLC0415 (absent where it could not be built)

    return module


def _check_cache(keys: Tensor, values: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    codes = keys.dtype == E4M3.torch_dtype
    scales_fit = all(
        (scale is None) != codes and (scale is None or (scale.shape == keys.shape[:3] and scale.dtype == torch.uint8))
        for scale in (key_scale, value_scale)
    )
    fits = keys.ndim == 4 and keys.shape == values.shape and keys.shape[2] == PAGE and keys.shape[3] <= MAX_HEAD_DIM
    if not (fits and scales_fit and keys.dtype == values.dtype and keys.dtype in _CACHED):
        raise BackendError(
            f"keys and values are pages [pages, kv heads, {PAGE}, D up to {MAX_HEAD_DIM}] in E4M3 with uint8 scales of "
            f"every vector, or in bfloat16 or float32 without, not {tuple(keys.shape)} {keys.dtype}"
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
    within = 0 <= int(sequence.min()) and int(sequence.max()) < table.shape[0]
    within &= 0 <= int(position.min()) and int(position.max()) < table.shape[1] * PAGE
    if not (within and 0 <= int(table.min()) and int(table.max()) < pages):
        raise BackendError(f"sequences, positions or page numbers reach beyond {table.shape[0]} sequences, "
                           f"{table.shape[1] * PAGE} positions or {pages} pages")
