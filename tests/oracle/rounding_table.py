"""Round-to-nearest-even of whole arrays by looking up a sorted table, and the inputs where a rounding can go wrong.

The table holds the values of ml_dtypes, not octavo's, and the midpoints between them, all exact in float64. It is
proven against the scalar reference in test_rounding_table.py; between two of the points compared there, rounding is
constant.
"""

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, Format
from octavo.numerics import Nonfinite, Overflow

ML_DTYPES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3_FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2_FNUZ: ml_dtypes.float8_e5m2fnuz,
}
FLOAT32_MAX = float(np.finfo(np.float32).max)

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RoundingTable:
    """Magnitudes of one format, ascending, so that the index is the code; midpoints[i] lies above values[i]."""

    values: NDArray[np.float64]
    midpoints: NDArray[np.float64]
    nan_code: int
    inf_code: int | None
    unsigned_zero: bool

    def overflows(self, product: NDArray[np.float32]) -> NDArray[np.bool_]:
        return np.asarray(self._magnitude_codes(product) == len(self.values))

    def nearest(self, product: NDArray[np.float32]) -> Codes:
        """Saturating: what rounds beyond the maximum, infinities included, becomes ±maximum."""
        return self._signed(np.minimum(self._magnitude_codes(product), len(self.values) - 1), product)

    def infinite(self, product: NDArray[np.float32]) -> Codes:
        """±Inf with the sign of ``product``; NaN without infinities."""
        code = self.nan_code if self.inf_code is None else self.inf_code
        return self._signed(np.full(product.shape, code), product)

    def _magnitude_codes(self, product: NDArray[np.float32]) -> NDArray[np.int64]:
        """Index of the nearest magnitude; one past the last where the value rounds beyond the maximum."""
        with np.errstate(invalid="ignore"):  # signalling NaNs
            magnitude = np.abs(product.astype(np.float64))
        below = np.searchsorted(self.midpoints, magnitude, side="left")
        is_tie = magnitude == np.append(self.midpoints, np.inf)[below]
        return below + (is_tie & np.isfinite(magnitude) & (below % 2 == 1))

    def _signed(self, codes: NDArray[np.int64], product: NDArray[np.float32]) -> Codes:
        negative = np.signbit(product)
        if self.unsigned_zero:
            negative &= (codes != 0) & (codes != self.nan_code)
        return np.where(np.isnan(product), self.nan_code, codes | (negative * 0x80)).astype(np.uint8)


@cache
def rounding_table(fmt: Format) -> RoundingTable:
    dtype = ML_DTYPES[fmt]
    magnitudes = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
    values = magnitudes[np.isfinite(magnitudes)]
    every_code = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    infinities = np.flatnonzero(np.isposinf(every_code))
    last_step = values[-1] - values[-2]
    return RoundingTable(
        values=values,
        midpoints=np.append((values[:-1] + values[1:]) / 2, values[-1] + last_step / 2),
        nan_code=int(np.flatnonzero(np.isnan(every_code))[0]),
        inf_code=int(infinities[0]) if infinities.size else None,
        unsigned_zero=0x80 in np.flatnonzero(np.isnan(every_code)),
    )


def expected_codes(
    x: NDArray[np.float32],
    fmt: Format,
    encode_scale: np.float32 | None = None,
    *,
    overflow: Overflow = Overflow.SATURATE,
    nonfinite: Nonfinite = Nonfinite.PROPAGATE,
) -> Codes:
    """What ``cast_nearest`` has to answer for every element of ``x``."""
    table = rounding_table(fmt)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = x if encode_scale is None else x * encode_scale
    codes = table.nearest(product)
    if overflow is Overflow.NONFINITE:
        codes = np.where(table.overflows(product) & np.isfinite(x), table.infinite(product), codes)
    if nonfinite is Nonfinite.PROPAGATE:
        codes = np.where(np.isinf(x), table.infinite(x), codes)
    return codes


def assert_same_codes(actual: torch.Tensor, expected: Codes, fmt: Format) -> None:
    """Bit for bit; only the sign (and, for E5M2, the payload) of a NaN code is free."""
    codes = actual.contiguous().view(torch.uint8).numpy()
    nans = np.isin(codes, fmt.nan_codes) & np.isin(expected, fmt.nan_codes)
    wrong = np.flatnonzero((codes != expected) & ~nans)
    assert codes.shape == expected.shape
    assert not wrong.size, f"{wrong.size} codes differ, first at {wrong[0]}: {codes.flat[wrong[0]]:#x}"


def all_16_bit(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of float16 or bfloat16."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def float32_edges(fmt: Format) -> NDArray[np.float32]:
    """Every value and midpoint of a format, 1 and 2 ulp to either side, both signs, and float32's own extremes."""
    table = rounding_table(fmt)
    points = np.concatenate([table.values, table.midpoints]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    up2, down2 = np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(-np.inf))
    tiny = np.array([1e-45, 3e-45, 1e-40, 1.1754942e-38, 1.1754944e-38, FLOAT32_MAX, np.inf, np.nan], np.float32)
    one_sign = np.concatenate([points, up, down, up2, down2, tiny])
    return np.concatenate([one_sign, -one_sign])
