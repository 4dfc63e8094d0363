"""Intervals and tests for differences of losses between recipes that share seeds and held-out windows.

Run s of a recipe starts from the weights of seed s and reads its batches, as the baseline's run s does; both are
evaluated on windows w of the same text. Their difference d[s, w] has an effect of the seed, one of the window, and a
rest:

    d[s, w] = gap + a[s] + b[w] + e[s, w]          s < S seeds, w < W windows

    MS_a = W · Σ_s (d[s, ·] − d[·, ·])² / (S − 1)                   mean squares of the two-way layout
    MS_b = S · Σ_w (d[·, w] − d[·, ·])² / (W − 1)
    MS_e = Σ_s Σ_w (d[s, w] − d[s, ·] − d[·, w] + d[·, ·])² / ((S − 1)(W − 1))

    Var(d[·, ·]) ≈ (MS_a + MS_b − MS_e) / (S·W)

and the interval is d[·, ·] ± t · √Var, with Student's t at Satterthwaite's degrees of freedom. It holds for other seeds
and for other text of the same kind. With two to four seeds MS_a may be small by chance, so that the wider of
this interval and Student's over the means of seeds is taken. Student's alone holds a known gap in as few as 44 % of
studies, because it counts no effect of windows; a bootstrap of both in 95 to 99.9 % of those with five or eight seeds,
where this one has 93.7 to 97.4 % (``python -m benchmarks.study_intervals``).

Sources: F. E. Satterthwaite, Biometrics Bulletin 2 (1946); S. Holm, Scandinavian Journal of Statistics 6 (1979);
A. B. Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1 (2007).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.errors import ConfigError

__all__ = [
    "CONFIDENCE",
    "Interval",
    "facts_with_ends",
    "holm",
    "paired_interval",
    "paired_p_value",
    "seeds_needed",
    "slope",
    "student_interval",
]

CONFIDENCE = 0.95
FEW_SEEDS = 5  # below it, Student's interval over seeds is a lower bound
POWER = 0.8  # chance to see a difference that is there, in seeds_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval.

    Attributes:
        estimate: the mean.
        error: its standard error; NaN from a single number.
        freedom: degrees of freedom of the error.
    """

    estimate: float
    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Student's quantile times the standard error; 0 for an error of 0."""
        if not self.error:
            return 0.0
        return float(_t().ppf((1 + CONFIDENCE) / 2, self.freedom)) * self.error

    @property
    def low(self) -> float:
        """Lower end."""
        return self.estimate - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.estimate + self.half_width

    @property
    def p_value(self) -> float:
        """Two-sided probability of an estimate at least this far from 0 if the truth is 0."""
        if not self.error:  # equal in every run: nothing was measured against chance
            return 1.0 if self.estimate == 0 else 0.0
        return float(2 * _t().sf(abs(self.estimate) / self.error, self.freedom))

    @property
    def p_above_zero(self) -> float:
        """One-sided probability of an estimate this high if the truth is 0 or less."""
        return self.p_value / 2 if self.estimate > 0 else 1 - self.p_value / 2


def facts_with_ends(result: Any) -> dict[str, Any]:
    """A dataclass as a dict, where each interval has its ends "low" and "high" too.

    Example:
        >>> facts_with_ends(Interval(estimate=0.5, error=0.0, freedom=4))
        {'estimate': 0.5, 'error': 0.0, 'freedom': 4, 'low': 0.5, 'high': 0.5}
    """

    def with_ends(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        facts = dict(pairs)
        if facts.keys() != Interval.__dataclass_fields__.keys():
            return facts
        interval = Interval(**facts)
        return facts | {"low": interval.low, "high": interval.high}

    return asdict(result, dict_factory=with_ends)


def paired_interval(differences: ArrayLike) -> Interval:
    """Interval of the gap from differences of paired runs on the same windows.

    Args:
        differences: [S, W] nats, run − baseline, for S seeds and W windows. With one seed the interval speaks of
            windows alone; with one window, of seeds alone.

    Raises:
        ValueError: not two dimensions, empty, or a number that is not finite.

    Example:
        >>> gap = paired_interval([[0.01, 0.03, 0.02], [0.02, 0.04, 0.04]])
        >>> round(gap.estimate, 4), round(gap.low, 4), round(gap.high, 4)
        (0.0267, -0.058, 0.1114)
    """
    table = np.asarray(differences, dtype=np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise ValueError(f"differences must be finite numbers of shape [seeds, windows], not {table.shape}")
    seeds, windows = table.shape
    if seeds == 1 or windows == 1:
        return student_interval(table.ravel())
    mean, by_seed, by_window = table.mean(), table.mean(axis=1), table.mean(axis=0)
    rest = table - by_seed[:, None] - by_window + mean
    squares = np.array(
        [
            windows * np.square(by_seed - mean).sum() / (seeds - 1),
            seeds * np.square(by_window - mean).sum() / (windows - 1),
            np.square(rest).sum() / ((seeds - 1) * (windows - 1)),
        ]
    )
    freedoms = np.array([seeds - 1, windows - 1, (seeds - 1) * (windows - 1)])
    total = squares[0] + squares[1] - squares[2]
    larger = int(squares[1] > squares[0])
    if total <= squares[larger]:  # the rest is as large as the smaller effect: the larger one is all there is
        total, freedom = squares[larger], freedoms[larger]
    else:
        freedom = total**2 / (np.square(squares) / freedoms).sum()
    crossed = Interval(estimate=float(mean), error=math.sqrt(total / (seeds * windows)), freedom=float(freedom))
    return max(crossed, student_interval(by_seed), key=lambda each: each.half_width) if seeds < FEW_SEEDS else crossed


def paired_p_value(differences: ArrayLike, truth: float = 0.0) -> float:
    """Two-sided probability of a gap at least this far from the truth.

    The larger one of two: by the interval of :func:`paired_interval`, and by Student's over the means of seeds. Far
    from 0.05, where a correction for many comparisons asks, the first one's tail is too light for the seeds' few
    degrees of freedom.

    Args:
        differences: as for :func:`paired_interval`, of at least two seeds.
        truth: the gap that is tested.

    Example:
        >>> round(paired_p_value([[0.01, 0.03, 0.02], [0.02, 0.04, 0.04]]), 3)
        0.156
    """
    table = np.asarray(differences, dtype=np.float64)
    both = (paired_interval(table), student_interval(table.mean(axis=1)))
    return max(replace(each, estimate=each.estimate - truth).p_value for each in both)


def student_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Interval of the mean of independent numbers; its error is NaN for a single one.

    Example:
        >>> round(student_interval([1.0, 2.0, 3.0]).half_width, 3)
        2.484
    """
    count = len(values)
    if count == 1:
        return Interval(estimate=float(values[0]), error=math.nan, freedom=math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(estimate=float(np.mean(values)), error=error, freedom=count - 1)


def slope(steps: ArrayLike, values: ArrayLike) -> float:
    """Least-squares slope of the values over the steps, in values a step.

    Raises:
        ValueError: fewer than two different steps.

    Example:
        >>> round(slope([0, 100, 200], [0.0, 0.1, 0.2]), 4)
        0.001
    """
    at = np.asarray(steps, dtype=np.float64)
    if len(np.unique(at)) < 2:
        raise ValueError(f"a slope needs two different steps, not {len(np.unique(at))}")
    centred = at - at.mean()
    return float(centred @ np.asarray(values, dtype=np.float64) / (centred @ centred))


def holm(p_values: Mapping[str, float], *, tests: int = 0) -> dict[str, float]:
    """Holm's adjusted p-values: reject those below 0.05, and the chance of any false rejection is at most 0.05.

    Args:
        p_values: of each test.
        tests: number of tests, if some have no p-value yet; they count as 1.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[str, float] = {}
    largest, count = 0.0, max(tests, len(p_values))
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (count - rank) * p_values[key]))
        adjusted[key] = largest
    return adjusted


def seeds_needed(spread: float, difference: float, *, level: float = 1 - CONFIDENCE, most: int = 100_000) -> int:
    """Number of paired seeds that see a difference with a chance of 80 %.

    The smallest n ≥ 2 with P(T² > t²) ≥ 0.8, where T² has the noncentral F distribution of 1 and n − 1 degrees of
    freedom and noncentrality (difference / spread)² · n, and t is Student's two-sided quantile.

    Args:
        spread: standard deviation of the paired difference over seeds, nats.
        difference: the true difference, nats.
        level: p-value below which a difference counts as seen; divided by the number of tests where there are many.
        most: the answer if more would be needed.

    Example:
        >>> seeds_needed(spread=0.005, difference=0.005), seeds_needed(spread=0.001, difference=0.005)
        (10, 3)
    """
    if not spread:
        return 2
    few, many = 1, 2
    while many < most and _power(many, spread, difference, level) < POWER:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _power(middle, spread, difference, level) >= POWER else (middle, many)
    return min(many, most)


def _power(seeds: int, spread: float, difference: float, level: float) -> float:
    from scipy.stats import ncf  # of T²: scipy's own noncentral t is NaN for some shifts

    bound = _t().isf(level / 2, seeds - 1)
    return float(ncf.sf(bound**2, 1, seeds - 1, (difference / spread) ** 2 * seeds))


def _t() -> Any:
    """Student's t distribution.

    Raises:
        ConfigError: scipy is not installed.
    """
    try:
        from scipy.stats import t
    except ImportError as error:
        raise ConfigError(
            "intervals over several seeds need scipy, which is not installed; pip install 'octavo[study]'"
        ) from error
    return t
