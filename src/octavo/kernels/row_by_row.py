"""Sums of one row a call, so that a row's bits do not depend on its company.

Kernels choose the order of a sum by the shape of a call: the last bits of a matrix product, of attention and of a
vectorized function's tail change with the number of rows, and of a matrix product also with a row's address. Inside
:class:`RowByRow` each row is a call of its own, on a copy:

    matrix products                 a row of the first matrix
    octavo.scaled_mm                a row of codes, if sums are FP32; those of Hopper's tensor cores have one order
    attention                       a query of one text and the keys that it sees, as one token is decoded
    SiLU, GELU, sigmoid, sin, cos   a row
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octavo.numerics import PerBlock, QuantizedTensor

__all__ = ["RowByRow", "is_row_by_row", "rows_of"]

_contexts = threading.local()


class RowByRow(TorchFunctionMode):
    """Context in which those operations compute one row at a time, in this thread.

    Example:
        >>> rows, weight = torch.randn(5, 96), torch.randn(96, 32)
        >>> with RowByRow():
        ...     together, alone = torch.mm(rows, weight), torch.mm(rows[3:4], weight)
        >>> torch.equal(together[3:4], alone)
        True
    """

    def __enter__(self) -> "RowByRow":
        _contexts.open = getattr(_contexts, "open", 0) + 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _contexts.open -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _by_query(func, args[:3], {**dict(zip(OPTIONS, args[3:], strict=False)), **kwargs})
        if func is torch.addmm:
            bias, rows, *rest = args
            return _by_row(lambda row: func(bias, row, *rest, **kwargs), rows)
        if func in ROWS and args[0].ndim > 1:
            first, *rest = args
            return _by_row(lambda row: func(row, *rest, **kwargs), first)
        return func(*args, **kwargs)


PRODUCTS = (torch.mm, Tensor.mm, F.linear)
FUNCTIONS = (F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid, torch.cos, Tensor.cos, torch.sin, Tensor.sin)
OPTIONS = ("attn_mask", "dropout_p", "is_causal")  # of scaled_dot_product_attention, in its order
ROWS = frozenset({*PRODUCTS, *FUNCTIONS})


def is_row_by_row() -> bool:
    """Return whether this thread is inside :class:`RowByRow`."""
    return getattr(_contexts, "open", 0) > 0


def rows_of(x: QuantizedTensor) -> Iterator[QuantizedTensor]:
    """Each row [1, K] of a matrix of codes, with its scales.

    Example:
        >>> codes = QuantizedTensor(
        ...     torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(1, 2), PerBlock(2, 2), torch.float32
        ... )
        >>> [row.scale.tolist() for row in rows_of(codes)]
        [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    each, scale = x.granularity, x.scale
    height = each.rows if isinstance(each, PerBlock) else 1
    for index, row in enumerate(x.data.split(1)):
        own = scale if scale.ndim == 0 else scale[index // height][None]
        yield QuantizedTensor(row, own, each, x.hp_dtype)


def _by_row(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``compute`` of each [1, K] of [..., K], joined."""
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return compute(x)
    y = torch.cat([compute(row.clone()) for row in rows.split(1)])
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _by_query(attend: Callable[..., Tensor], operands: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Attention [B, heads, T, D] without a mask, a query of one text a call; with a mask, in one call."""
    is_causal, queries = options.pop("is_causal", False), operands[0]
    if options.get("attn_mask") is not None or not (is_causal or queries.shape[-2] == 1):
        return attend(*operands, is_causal=is_causal, **options)
    texts = []
    for query, key, value in zip(*(each.split(1) for each in operands), strict=True):
        positions = []
        for place, one in enumerate(query.split(1, dim=-2)):
            seen = place + 1 if is_causal else key.shape[-2]
            row = (each.contiguous() for each in (one, key[..., :seen, :], value[..., :seen, :]))
            positions.append(attend(*row, **options))
        texts.append(torch.cat(positions, dim=-2))
    return torch.cat(texts)
