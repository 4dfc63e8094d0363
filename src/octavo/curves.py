"""Losses: curves over a run's steps, as reports draw and compare them, and their exponential, the perplexity."""

import math

__all__ = [
    "MOST_PLAIN",
    "Curve",
    "difference",
    "perplexity",
    "perplexity_change",
    "perplexity_text",
    "smoothed",
    "thinned",
]

Curve = tuple[tuple[int, float], ...]  # (step, value), ascending in step
MOST_PLAIN = 1e6  # beyond it numbers are shown in scientific notation


def perplexity(nats: float) -> float:
    """exp(nats); infinite beyond 709.78 nats, where float64 ends.

    Example:
        >>> perplexity(0.0), perplexity(710.0)
        (1.0, inf)
    """
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def perplexity_change(nats: float) -> float:
    """The share by which perplexity grows with a loss that grows by ``nats``: exp(nats) - 1; infinite beyond 709.78.

    Example:
        >>> perplexity_change(0.0), perplexity_change(710.0)
        (0.0, inf)
    """
    try:
        return math.expm1(nats)
    except OverflowError:
        return math.inf


def perplexity_text(nats: float, decimals: int = 3) -> str:
    """The perplexity as text.

    Example:
        >>> perplexity_text(2.0), perplexity_text(20.0), perplexity_text(710.0)
        ('7.389', '4.85e+08', 'inf')
    """
    value = perplexity(nats)
    return f"{value:.{decimals}f}" if value < MOST_PLAIN else f"{value:.3g}"


def smoothed(curve: Curve, span: float) -> Curve:
    """Exponential moving average with the mean's weights corrected at the start.

    A value that is not finite has no weight and shows as it is.

    Example:
        >>> smoothed(((0, 4.0), (1, 2.0)), span=1.0)
        ((0, 4.0), (1, 2.0))
    """
    keep = 1.0 - 2.0 / (span + 1.0)
    total = weight = 0.0
    points = []
    for step, value in curve:
        if not math.isfinite(value):
            points.append((step, value))
            continue
        total, weight = keep * total + value, keep * weight + 1.0
        points.append((step, total / weight))
    return tuple(points)


def difference(curve: Curve, base: Curve) -> Curve:
    """Curve minus base where both have a point.

    Example:
        >>> difference(((1, 3.0), (2, 2.5)), ((2, 2.0), (3, 1.0)))
        ((2, 0.5),)
    """
    at = dict(base)
    return tuple((step, value - at[step]) for step, value in curve if step in at)


def thinned(curve: Curve, most: int) -> Curve:
    """At most ``most`` points, the smallest and the largest of each stretch, so that no spike is lost.

    Example:
        >>> thinned(((0, 1.0), (1, 9.0), (2, 2.0), (3, 1.5), (4, 0.5), (5, 1.0)), most=4)
        ((0, 1.0), (1, 9.0), (3, 1.5), (4, 0.5))
    """
    if len(curve) <= most:
        return curve
    length = -(-2 * len(curve) // most)
    stretches = (curve[start : start + length] for start in range(0, len(curve), length))
    return tuple(point for stretch in stretches for point in _ends(stretch))


def _ends(stretch: Curve) -> Curve:
    ends = {min(stretch, key=_height), max(stretch, key=_height)}
    return tuple(sorted(ends, key=lambda point: point[0]))


def _height(point: tuple[int, float]) -> float:
    """Value for comparison; NaN counts as the largest, so that it is kept."""
    return math.inf if math.isnan(point[1]) else point[1]
