"""Sliding means and medians with a cost independent of the window's width.

Materializing every window of a tenth of the run would need 80 GB for a run of a million steps. Means come from one
cumulative sum; medians from a wavelet tree (Grossi, Gupta, Vitter: High-Order Entropy-Compressed Text Indexes, SODA
2003) that all windows descend together, one binary digit of the ranks per level.
"""

import numpy as np
from numpy.typing import NDArray

from octavo.doctor.tables import Floats

__all__ = ["sliding_means", "sliding_medians"]

Indices = NDArray[np.int64]


def sliding_means(values: Floats, window: int) -> Floats:
    """Mean of every ``window`` consecutive values: [N - window + 1].

    Args:
        values: [N], finite.
        window: from 1 to N.

    Example:
        >>> sliding_means(np.array([1.0, 2.0, 6.0]), 2).tolist()
        [1.5, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.longdouble)])  # equal beginnings have equal sums
    means: Floats = ((sums[window:] - sums[:-window]) / window).astype(np.float64)
    return means


def sliding_medians(values: Floats, window: int) -> Floats:
    """Median of every ``window`` consecutive values, as by ``numpy.median``: [N - window + 1].

    Args:
        values: [N], finite.
        window: from 1 to N.

    Example:
        >>> sliding_medians(np.array([3.0, 1.0, 2.0, 9.0]), 3).tolist()
        [2.0, 2.0]
    """
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values))
    below, above = (values[order[_select_rank(ranks, window, place)]] for place in ((window - 1) // 2, window // 2))
    medians: Floats = (below + above) / 2
    return medians


def _select_rank(ranks: Indices, window: int, place: int) -> Indices:
    """The ``place``-th smallest rank of each window, counted from 0.

    Args:
        ranks: [N], a permutation of 0 … N - 1.
        window: from 1 to N.
        place: below ``window``.
    """
    start = np.arange(len(ranks) - window + 1)
    end, remaining = start + window, np.full(len(start), place)
    result = np.zeros(len(start), dtype=np.int64)
    for digit in reversed(range(len(ranks).bit_length())):
        is_one = ((ranks >> digit) & 1).astype(bool)
        zeros = np.concatenate([[0], np.cumsum(~is_one)])  # number of zeros before each position
        zeros_start, zeros_end = zeros[start], zeros[end]
        is_among_ones = remaining >= zeros_end - zeros_start
        remaining -= np.where(is_among_ones, zeros_end - zeros_start, 0)
        result |= is_among_ones.astype(np.int64) << digit
        start = np.where(is_among_ones, zeros[-1] + start - zeros_start, zeros_start)
        end = np.where(is_among_ones, zeros[-1] + end - zeros_end, zeros_end)
        ranks = np.concatenate([ranks[~is_one], ranks[is_one]])
    return result
