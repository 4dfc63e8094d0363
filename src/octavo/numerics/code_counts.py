"""Histogram of FP8 codes: how often each of the 256 occurs, their order by value, and the shares that lost theirs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.html.wording import number, percent

__all__ = ["code_counts", "code_value", "codes_by_binade", "codes_by_value", "lost_shares"]

SIGN = 0x80


def code_counts(codes: Tensor) -> list[int]:
    """Count of each code, by its byte: 256 numbers.

    Args:
        codes: an FP8 dtype, any shape.

    Example:
        >>> counts = code_counts(torch.tensor([1.0, 1.0, -2.0]).to(torch.float8_e4m3fn))
        >>> {hex(code): count for code, count in enumerate(counts) if count}
        {'0x38': 2, '0xc0': 1}
    """
    counts: list[int] = codes.detach().view(torch.uint8).flatten().bincount(minlength=256).tolist()
    return counts


def codes_by_value(fmt: Format) -> list[int]:
    """Finite codes of an FP8 format from the lowest value to the highest; -0, where it exists, is left out.

    Example:
        >>> from octavo.formats import E4M3
        >>> [hex(code) for code in codes_by_value(E4M3)[::63]]
        ['0xfe', '0xbf', '0x0', '0x3f', '0x7e']
    """
    magnitudes = range(1, fmt.max_code + 1)
    return [*(SIGN | code for code in reversed(magnitudes)), 0, *magnitudes]


def codes_by_binade(fmt: Format) -> list[tuple[int, ...]]:
    """Finite codes by binade of their value, lowest first; subnormals are one binade, zeros the middle one.

    Example:
        >>> from octavo.formats import E5M2
        >>> groups = codes_by_binade(E5M2)
        >>> len(groups), groups[31], groups[32]
        (63, (0, 128), (1, 2, 3))
    """
    width = 1 << fmt.mantissa_bits
    codes = range(1, fmt.max_code + 1)
    positive = [tuple(code for code in codes if code // width == field) for field in range(fmt.max_code // width + 1)]
    negative = [tuple(SIGN | code for code in group) for group in positive]
    zeros = (0, SIGN) if SIGN not in fmt.nan_codes else (0,)
    return [*reversed(negative), zeros, *positive]


def code_value(code: int, fmt: Format) -> float:
    """Value of a finite code; +0 of both zeros.

    Example:
        >>> from octavo.formats import E4M3
        >>> code_value(0x38, E4M3), code_value(0xC0, E4M3), code_value(0x80, E4M3)
        (1.0, -2.0, 0.0)
    """
    magnitude = fmt.magnitude(code & ~SIGN)
    return -magnitude if code & SIGN and magnitude else magnitude


def lost_shares(counts: Sequence[int], fmt: Format) -> str:
    """Shares of zeros and of the largest code, which saturated values have; of NaN and ±Inf where there are any.

    Args:
        counts: result of :func:`code_counts`.
        fmt: an FP8 format.

    Example:
        >>> from octavo.formats import E4M3
        >>> lost_shares(code_counts(torch.tensor([448.0, 0.0, 1.0, float("nan")]).to(E4M3.torch_dtype)), E4M3)
        '25.0 % zero, 25.0 % at ±448, 25.0 % NaN'
    """
    total, zeros = sum(counts), {0, SIGN} - set(fmt.nan_codes)
    codes = {"zero": zeros, f"at ±{number(fmt.max)}": (fmt.max_code, SIGN | fmt.max_code)}
    special = {"NaN": fmt.nan_codes, "±Inf": fmt.inf_codes}
    codes |= {name: each for name, each in special.items() if any(counts[code] for code in each)}
    return ", ".join(f"{percent(sum(counts[code] for code in each), total)} {name}" for name, each in codes.items())
