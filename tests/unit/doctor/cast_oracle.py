"""What the doctor must find of a cast, in NumPy's float64 and from the bits of the codes alone."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.numerics import PerBlock, PerRow, QuantizedTensor

LAYOUTS = {E4M3.torch_dtype: (3, 7, 126), E5M2.torch_dtype: (2, 15, 123)}  # mantissa bits, bias, largest finite code


FORMAT_MAX = {E4M3.torch_dtype: 448.0, E5M2.torch_dtype: 57344.0}


def values_of(dtype: torch.dtype) -> NDArray[np.float64]:
    """All 256 values of a format, NaN and ±Inf included."""
    mantissa_bits, bias, largest = LAYOUTS[dtype]
    found = []
    for code in range(256):
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        hidden = 0 if exponent == 0 else 1 << mantissa_bits
        value = (hidden + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        if code & 0x7F > largest:
            value = np.inf if dtype is E5M2.torch_dtype and mantissa == 0 else np.nan
        found.append(-value if code & 0x80 else value)
    return np.array(found)


def scales_of(made: QuantizedTensor) -> NDArray[np.float32]:
    """The scale of every element, [M, K]."""
    rows, columns = made.shape
    scale = made.scale.numpy()
    if made.scale.dtype is torch.uint8:
        scale = np.exp2(scale.astype(np.float64) - 127).astype(np.float32)
    if isinstance(made.granularity, PerBlock):
        down, across = np.arange(rows) // made.granularity.rows, np.arange(columns) // made.granularity.columns
        return scale[down][:, across]
    return np.broadcast_to(scale if isinstance(made.granularity, PerRow) else scale.reshape(1, 1), (rows, columns))


def least_ratio(
    magnitudes: NDArray[np.float64], limits: NDArray[np.float64], made: QuantizedTensor, floor: float
) -> float:
    """The smallest amax over what its group's scale provides for, of groups that lie ten times above the floor."""
    rows, columns = made.shape
    height, width = {PerBlock: lambda g: (g.rows, g.columns), PerRow: lambda _: (1, columns)}.get(
        type(made.granularity), lambda _: (rows, columns)
    )(made.granularity)
    found = [np.nan]
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            amax = magnitudes[row : row + height, column : column + width].max()
            if amax > 10 * max(floor, FORMAT_MAX[made.data.dtype] / float(np.finfo(np.float32).max)):
                found.append(amax / limits[row, column])
    return float(np.nanmin(found)) if len(found) > 1 else np.nan


def numbers_of(
    x: Tensor, made: QuantizedTensor, sampled: tuple[slice, slice], *, floor: float = 0.0
) -> dict[str, float]:
    """CAST_FIELDS by name; the sampled ones from ``x[sampled]``."""
    given, scale, table = x.float().numpy().astype(np.float64), scales_of(made), values_of(made.data.dtype)
    codes = made.data.contiguous().view(torch.uint8).numpy()
    finite, largest = np.isfinite(given), np.nanmax(np.where(np.isfinite(table), table, np.nan))
    magnitudes = np.where(finite, np.abs(given), 0.0)
    half_step = (largest - np.sort(table[np.isfinite(table)])[-2]) / 2
    whole = {
        "amax": magnitudes.max(),
        "nonfinite": float((~finite).sum()),
        "saturation_fraction": float((magnitudes > scale.astype(np.float64) * (largest + half_step)).sum()) / x.numel(),
        "scale": float(scale.max()),
        "stale_ratio": float((magnitudes / (scale.astype(np.float64) * largest)).max()),
        "least_stale_ratio": least_ratio(magnitudes, scale.astype(np.float64) * largest, made, floor),
    }
    keep = finite[sampled]
    v, c, s = given[sampled][keep], codes[sampled][keep], np.broadcast_to(scale, given.shape)[sampled][keep]
    y = (table[c].astype(np.float32) * s).astype(np.float64)  # what a code decodes to is rounded to FP32
    nearest = np.full(v.shape, np.inf)
    for value in table[np.isfinite(table)]:
        nearest = np.minimum(nearest, np.abs(np.float64(np.float32(value) * s) - v))
    flushed, energy, noise = (v != 0) & (c & 0x7F == 0), (v**2).sum(), ((y - v) ** 2).sum()
    with np.errstate(all="ignore"):
        return whole | {
            "rms": np.sqrt(np.mean(v**2)),
            "kurtosis": np.mean(v**4) / np.mean(v**2) ** 2,
            "zero_fraction": np.mean(v == 0),
            "underflow_fraction": flushed.sum() / np.float64((v != 0).sum()),
            "flushed_energy": (v[flushed] ** 2).sum() / energy,
            "sqnr_db": 10 * np.log10(energy / noise) if noise and energy else np.nan,
            "cosine": (v * y).sum() / np.sqrt(energy * (y**2).sum()),
            "signed_error": (np.sign(v) * (y - v)).sum() / np.abs(v).sum(),
            "code_mismatch": np.mean(~(np.abs(y - v) <= 1.002 * nearest)),
        }
