"""Bindings of the native GEMMs: ``a @ b.T`` of codes, and the sums of Hopper's tensor cores.

Operands are passed as addresses, so they are checked here. The calls are those of native/gemm.h,
native/few_rows.h and native/hopper.h.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import octavo.kernels.native_bindings as native_bindings
from octavo.errors import BackendError
from octavo.numerics import Accumulate
from octavo.numerics.accumulate import CHAIN

__all__ = ["compare", "gemm", "gemm_each", "hopper_sums"]

_TENSOR_CORE = (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    block: int = 0,
    level: str | None = None,
) -> Tensor:
    """``(a @ b.T) · scales + bias``: products summed in FP32, scaled, rounded once.

    With few rows of ``a``, the codes of ``b`` are read once, in the order of memory.

    Args:
        a: [M, K], E4M3 or E5M2 codes, or float32, bfloat16 or float16; nothing is empty.
        b: [N, K], any of these too.
        a_scale: float32 [M or 1, blocks of K or 1]; None is 1.
        b_scale: float32 [N or 1, blocks of K or 1]; None is 1.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] or None; added in FP32.
        block: columns of K that share a scale, 0 if all do; the sums of a block are scaled before they are added.
        level: an instruction-set level; None is the best.

    Raises:
        BackendError: operands, scales or a bias of other dtypes or shapes.
    """
    if block < 0:
        raise BackendError(f"a block is 1 column wide or more, not {block}; 0 is one scale for all of K")
    if out_dtype not in native_bindings.DTYPES:
        raise BackendError(f"a product is {native_bindings.names(native_bindings.DTYPES)}, not {out_dtype}")
    _check(a, b, (*native_bindings.CODES, *native_bindings.DTYPES))
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, k, n):
        raise BackendError(f"an empty operand has no product: {tuple(a.shape)} and {tuple(b.shape)}")
    if bias is not None and bias.shape != (n,):
        raise BackendError(f"{n} columns and a bias {tuple(bias.shape)} do not go together; give one number for each")
    block = 0 if block >= k else block
    blocks = -(-k // block) if block else 1
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    a_scales = _scales(one if a_scale is None else a_scale, m, blocks)
    b_scales = _scales(one if b_scale is None else b_scale, n, blocks)
    a_matrix, b_matrix = _dense_one_way(a), _dense_one_way(b)
    fp32_bias = None if bias is None else native_bindings.in_memory(bias.float()).contiguous()
    out = native_bindings.fresh((m, n), out_dtype)
    native_bindings.extension().gemm(
        native_bindings.level_number(level),
        *_operand(a_matrix, a_scales),
        *_operand(b_matrix, b_scales),
        *(m, n, k, block),
        native_bindings.address(fp32_bias),
        out.data_ptr(),
        native_bindings.DTYPES.index(out_dtype),
    )
    return out


def gemm_each(
    a: Sequence[tuple[Tensor, Tensor]],
    b: Sequence[tuple[Tensor, Tensor]],
    outs: Sequence[Tensor],
    *,
    biases: Sequence[Tensor] | None,
    block: int,
) -> None:
    """:func:`gemm` of several pairs of codes, with their scales, in one call.

    Args:
        a: codes [M, K] and scales of each, as in :func:`gemm`.
        b: codes [N, K] and scales of each.
        outs: where to write, contiguous [M, N], of one dtype.
        biases: [N] each, or None.
        block: as in :func:`gemm`.

    Raises:
        BackendError: operands, scales or outputs of other dtypes or shapes.
    """
    products, alive = [], []
    for number, ((left, left_scale), (right, right_scale), out) in enumerate(zip(a, b, outs, strict=True)):
        _check(left, right, native_bindings.CODES)
        (m, k), n = left.shape, right.shape[0]
        if 0 in (m, k, n) or out.shape != (m, n) or out.dtype is not outs[0].dtype or not out.is_contiguous():
            raise BackendError(
                f"a product of {tuple(left.shape)} and {tuple(right.shape)} fills {tuple(out.shape)} not"
            )
        width = 0 if block >= k else block
        blocks = -(-k // width) if width else 1
        scales = _scales(left_scale, m, blocks), _scales(right_scale, n, blocks)
        matrices = _dense_one_way(left), _dense_one_way(right)
        bias = None if biases is None else native_bindings.in_memory(biases[number].float()).contiguous()
        operands = map(_operand, matrices, scales)
        products.append((*operands, m, n, k, width, native_bindings.address(bias), out.data_ptr()))
        alive.append((scales, matrices, bias))
    out_dtype = native_bindings.DTYPES.index(outs[0].dtype)
    native_bindings.extension().gemm_each(native_bindings.level_number(None), products, out_dtype)


def hopper_sums(
    a: Tensor,
    b: Tensor,
    *,
    accumulate: Accumulate,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """The sums of ``a @ b.T`` as Hopper's tensor cores make them: :func:`octavo.numerics.hopper_sums`, to the bit.

    Args:
        a: codes [M, K], E4M3 or E5M2.
        b: codes [N, K].
        accumulate: ``hopper-fast`` or ``hopper-slow``.
        a_scale: float32 [M or 1, chains or 1]; each chain of ``hopper-slow`` is multiplied by this and by ``b_scale``
            in FP64, rounded once, then added. None, in both, leaves the sums as they are.
        b_scale: float32 [N or 1, chains or 1], or None.
        level: an instruction-set level; None is the best.

    Raises:
        BackendError: operands or scales of other dtypes or shapes, or another way to sum.
    """
    if accumulate not in _TENSOR_CORE:
        raise BackendError(f"tensor cores sum {' or '.join(_TENSOR_CORE)}, not {accumulate!r}")
    scales_given = [scale is not None for scale in (a_scale, b_scale)]
    if any(scales_given) and not (all(scales_given) and accumulate == Accumulate.HOPPER_SLOW):
        raise BackendError("it is hopper-slow's chains that are scaled, by both operands; give both scales or neither")
    _check(a, b, native_bindings.CODES)
    (m, k), n = a.shape, b.shape[0]
    out = torch.zeros(m, n, dtype=torch.float32, device="cpu")
    if 0 in (m, k, n):
        return out
    chains = -(-k // CHAIN)
    a_scales = None if a_scale is None else _scales(a_scale, m, chains)
    b_scales = None if b_scale is None else _scales(b_scale, n, chains)
    a_matrix, b_matrix = (_dense_one_way(codes) for codes in (a, b))
    native_bindings.extension().hopper(
        native_bindings.level_number(level),
        *_operand(a_matrix, a_scales),
        *_operand(b_matrix, b_scales),
        *(m, n, k),
        accumulate == Accumulate.HOPPER_FAST,
        out.data_ptr(),
    )
    return out


def compare(
    originals: tuple[Tensor, Tensor],
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    *,
    block: int,
    accumulate: Accumulate,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One product ``left @ right.T`` three ways, float32 [3, M, N], and sums over its elements, float64 [4].

    w, the product of the originals; e, that of their codes, both with FP32 sums; and c, that of the codes with the sums
    of Hopper's tensor cores, NaN where ``accumulate`` is FP32 or scales change along K. The sums are Σ w², Σ (e - w)²,
    Σ |e| and Σ sign(e)·(c - e), in FP64.

    Args:
        originals: [M, K] and [N, K], float32, bfloat16 or float16; nothing is empty.
        codes: [M, K] and [N, K], E4M3 or E5M2.
        scales: float32 of the codes, as in :func:`gemm`.
        block: as in :func:`gemm`.
        accumulate: how a Hopper GPU would sum.
        level: an instruction-set level; None is the best.

    Raises:
        BackendError: operands or scales of other dtypes or shapes.
    """
    _check(*originals, native_bindings.DTYPES)
    _check(*codes, native_bindings.CODES)
    (m, k), n = codes[0].shape, codes[1].shape[0]
    original_shapes = [tuple(x.shape) for x in originals]
    if original_shapes != [(m, k), (n, k)] or 0 in (m, k, n):
        raise BackendError(
            f"codes {(m, k)} and {(n, k)} have originals of their shapes, not {original_shapes}, and none is empty"
        )
    sums = 0 if block or accumulate is Accumulate.FP32 else 1 + _TENSOR_CORE.index(accumulate)
    block = 0 if block >= k else block
    blocks = -(-k // block) if block else 1
    left, right, *code_matrices = (native_bindings.in_memory(matrix) for matrix in (*originals, *codes))
    code_scales = [_scales(scale, rows, blocks) for scale, rows in zip(scales, (m, n), strict=True)]
    out = native_bindings.fresh((3, m, n), torch.float32)
    total = native_bindings.fresh((native_bindings.extension().COMPARISON_SUMS,), torch.float64)
    native_bindings.extension().compare_products(
        native_bindings.level_number(level),
        *(_operand(left, None), _operand(right, None)),
        *(_operand(matrix, scale) for matrix, scale in zip(code_matrices, code_scales, strict=True)),
        *(m, n, k, block, sums),
        *(out.data_ptr(), total.data_ptr()),
    )
    return out, total


def _check(a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check shapes and dtypes before a kernel reads memory: operators can be called by name, past every other check."""
    if not (a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1]):
        raise BackendError(f"a product takes [M, K] and [N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype not in dtypes or b.dtype not in dtypes:
        allowed, passed = native_bindings.names(dtypes), native_bindings.names([a.dtype, b.dtype])
        raise BackendError(f"a product takes operands of {allowed}, not {passed}")


def _scales(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales [1 or rows, blocks] of an operand."""
    if scale.ndim != 2 or scale.shape[0] not in (1, rows) or scale.shape[1] not in (1, blocks):
        raise BackendError(
            f"{rows} rows in {blocks} blocks and scales {tuple(scale.shape)} do not go together; give [{rows} or 1, "
            f"{blocks} or 1]"
        )
    scales = native_bindings.in_memory(scale.float())
    return (scales if scales.shape[1] == blocks else scales.expand(-1, blocks)).contiguous()


def _dense_one_way(matrix: Tensor) -> Tensor:
    """A matrix whose rows or columns lie side by side."""
    matrix = native_bindings.in_memory(matrix)
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _operand(matrix: Tensor, scale: Tensor | None) -> tuple[int, int, int, int, int, bool]:
    """A GEMM's operand as the kernels take it; both tensors must outlive the call."""
    layout = (matrix.data_ptr(), native_bindings.element_number(matrix.dtype), matrix.stride(0), matrix.stride(1))
    return (*layout, native_bindings.address(scale), scale is not None and scale.shape[0] > 1)
