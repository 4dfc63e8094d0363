"""Curves: one number over a run's steps, as reports draw and compare it."""

import math

__all__ = ["Curve", "difference", "smoothed", "thinned"]

Curve = tuple[tuple[int, float], ...]  # (step, value), ascending in step


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
    """NaN counts as the largest: it is what broke."""
    return math.inf if math.isnan(point[1]) else point[1]
