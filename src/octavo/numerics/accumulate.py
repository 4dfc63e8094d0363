"""Accumulation of a GEMM: in FP32, or as Hopper's FP8 tensor cores do it.

A tensor core does not round after every addition. It takes 32 products and the running total at once, aligns them all
to the largest exponent among them, cuts each to 13 fraction bits below it and adds what is left:

    E     = max(exponent of the total, exponents of the nonzero products)        q = 2^(E - 13)
    total = cut(q · (trunc(total / q) + Σ_{k < 32} trunc(a_k · b_k / q)))        cut: towards zero, to 13 fraction bits

A product's exponent is the sum of its factors'; a factor's is floor(log2 |x|), or the format's smallest if subnormal.
One such chain over all of K is ``hopper-fast``. With fast accumulation off, every 128 of K start a fresh chain and the
chains are added in FP32: ``hopper-slow``.

Every operation here is exact, so neither the tiling nor the order of additions matters: a product of two FP8 values has
at most 8 significant bits, q is a power of two, and the 33 terms are integers below 2^15. E comes from an ordinary
matrix product: with 256^exponent in place of every element, the 32 products add up to less than 256 times the largest,
so the exponent of that sum shows the largest exponent.

Source: Xie et al., "MMA-Sim", arXiv 2511.10909; Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores",
arXiv 2512.07004 (a running total that takes part in the alignment, truncation, subnormals).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, FP32, format_of

__all__ = ["CHAIN", "Accumulate", "hopper_chains", "hopper_sums"]

CHAIN = 128  # of K: where hopper-slow starts a fresh chain
_STEP = 32  # of K: what one instruction adds
_FRACTION_BITS = 13
_TILE = (128, 256)  # of the output; 33 terms for each of its sums are 4 MiB, which a processor's cache holds

_EXPONENT_ONE = 1 << FP32.mantissa_bits  # the lowest bit of an FP32's exponent field
_EXPONENT_FIELD = ((1 << FP32.exponent_bits) - 1) * _EXPONENT_ONE
_FP64_FRACTION_BITS, _FP64_BIAS = 52, 1023
_DROPPED_BITS = (1 << (FP32.mantissa_bits - _FRACTION_BITS)) - 1


class Accumulate(StrEnum):
    """Accumulation of a GEMM's products."""

    FP32 = "fp32"
    HOPPER_FAST = "hopper-fast"
    HOPPER_SLOW = "hopper-slow"


def hopper_sums(a: Tensor, b: Tensor, *, accumulate: Accumulate) -> Tensor:
    """The FP32 sums of ``a @ b.T`` as Hopper's tensor cores make them, before any scale.

    Args:
        a: E4M3 or E5M2 codes, [M, K].
        b: E4M3 or E5M2 codes, [N, K]; not necessarily of ``a``'s format.
        accumulate: ``hopper-fast``, one chain over K, or ``hopper-slow``, chains of 128 added in FP32.

    Returns:
        [M, N], float32. Where the exact sum is NaN or ±Inf, so is the result; a zero is +0. A K that 32 does not divide
        counts as padded with zeros, which changes nothing.

    Raises:
        ConfigError: operands that are not FP8 matrices of equal K, or ``accumulate`` is ``fp32``.

    Example:
        >>> ones = torch.ones(1, 33).to(torch.float8_e4m3fn)
        >>> column = torch.cat([torch.tensor([[256.0]]), torch.full((1, 32), 2.0**-6)], dim=1)
        >>> hopper_sums(ones, column.to(torch.float8_e4m3fn), accumulate=Accumulate.HOPPER_FAST)  # exact: 256.5
        tensor([[256.]])
    """
    left, right = _operands(a, b)
    if accumulate == Accumulate.HOPPER_FAST:
        return _tiled_chain(left, right)
    if accumulate != Accumulate.HOPPER_SLOW:
        raise ConfigError(
            f"hopper_sums adds as 'hopper-fast' or 'hopper-slow', not {accumulate!s}; a.float() @ b.float().t() is fp32"
        )
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for chain in _chains(left, right):
        total += chain
    return total


def hopper_chains(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The sums of every 128-wide slice of K, each a chain of its own: [M, N] in float32, in the order of K.

    They are what ``hopper-slow`` adds. A GEMM with a scale for every 128 of K multiplies them by its scales first.

    Raises:
        ConfigError: as :func:`hopper_sums`.

    Example:
        >>> ones = torch.ones(1, 200).to(torch.float8_e5m2)
        >>> [chain.item() for chain in hopper_chains(ones, ones)]
        [128.0, 72.0]
    """
    return _chains(*_operands(a, b))


@dataclass(frozen=True, slots=True)
class _Operand:
    """A decoded matrix, cut along K; both tensors [K / 32, 32, rows], zeros where K ends early."""

    values: Tensor  # float32
    weights: Tensor  # float64: 256^exponent / 8; 0 for zero, NaN and ±Inf, which have no exponent

    def steps(self, first: int, last: int) -> "_Operand":
        return _Operand(self.values[first:last], self.weights[first:last])

    def tiles(self, size: int) -> "Iterator[_Operand]":
        return map(_Operand, self.values.split(size, dim=2), self.weights.split(size, dim=2))


def _operands(a: Tensor, b: Tensor) -> tuple[_Operand, _Operand]:
    for name, codes in (("a", a), ("b", b)):
        if codes.dtype not in (E4M3.torch_dtype, E5M2.torch_dtype):
            raise ConfigError(f"Hopper multiplies E4M3 or E5M2 codes, and {name} is {codes.dtype}; quantize it first")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ConfigError(f"a must be [M, K] and b [N, K], not {tuple(a.shape)} and {tuple(b.shape)}; transpose one")
    return _decode(a), _decode(b)


def _decode(codes: Tensor) -> _Operand:
    rows, k = codes.shape
    steps = -(-k // _STEP)
    values = pad(codes.float(), (0, steps * _STEP - k)).t().reshape(steps, _STEP, rows)
    magnitudes = values.abs()
    exponents = torch.frexp(magnitudes.clamp(min=format_of(codes.dtype).min_normal)).exponent.long() - 1
    # The bits of 2^(8 · exponent - 3); the product of two such weights is explained at _quantum.
    weights = ((8 * exponents - 3 + _FP64_BIAS) << _FP64_FRACTION_BITS).view(torch.float64)
    return _Operand(values, weights.where((magnitudes > 0) & magnitudes.isfinite(), 0.0))


def _chains(a: _Operand, b: _Operand) -> Iterator[Tensor]:
    steps = CHAIN // _STEP
    for first in range(0, a.values.shape[0], steps):
        yield _tiled_chain(a.steps(first, first + steps), b.steps(first, first + steps))


def _tiled_chain(a: _Operand, b: _Operand) -> Tensor:
    rows, columns = _TILE
    bands = [torch.cat([_chain(tile, other) for other in b.tiles(columns)], dim=1) for tile in a.tiles(rows)]
    return torch.cat(bands)


def _chain(a: _Operand, b: _Operand) -> Tensor:
    """One chain over all steps of K: [M, N]."""
    m, n = a.values.shape[2], b.values.shape[2]
    terms = a.values.new_empty(_STEP + 1, m, n)  # 32 products and the total
    total = a.values.new_zeros(m, n)
    for step in range(a.values.shape[0]):
        quantum = _quantum(a.weights[step].t() @ b.weights[step], total)
        torch.mul(a.values[step, :, :, None], b.values[step, :, None, :], out=terms[:_STEP])
        terms[_STEP] = total
        torch.div(terms, quantum, rounding_mode="trunc", out=terms)
        total = _cut(terms.sum(0) * quantum)
    return total  # a zero is +0: the first total is, and x + (-x) is


def _quantum(weights: Tensor, total: Tensor) -> Tensor:
    """2^(E - 13): E is the largest exponent of 32 products, given the sum of their weights, and of the total.

    That sum lies in [1, 32] · 2^(8 · e - 6) for a largest product exponent e, so its FP64 exponent field is
    8 · e + 1017 to 8 · e + 1022. An eighth of it, rounded down, is e + 127: the FP32 exponent field of 2^e. It is 0
    where all products are zero, as it is for a total of zero; any normal quantum does then.
    """
    products = (weights.view(torch.int64) >> (_FP64_FRACTION_BITS + 3)).int() * _EXPONENT_ONE
    largest = torch.maximum(products, total.view(torch.int32) & _EXPONENT_FIELD)
    return (largest - _FRACTION_BITS * _EXPONENT_ONE).clamp(min=_EXPONENT_ONE).view(torch.float32)


def _cut(sums: Tensor) -> Tensor:
    """The sums cut to 13 fraction bits; NaN and ±Inf stay what they are."""
    return (sums.view(torch.int32) & ~_DROPPED_BITS).view(torch.float32)
