"""Comparison of runs in a study of precisions: measures of one run, and gaps between runs.

All runs have the same initial weights, batches and held-out windows, so differences are *paired*: the loss difference
is taken per window, and its standard error is that of those differences. It is far smaller than the spread of the
losses, because windows that are hard for one precision are hard for all.

    gap          d = mean_i (run_i - base_i)                       nats a token, over windows i
    its error    sqrt(sum_i (d_i - d)^2 / (n - 1)) / sqrt(n)
    in percent   exp(d) - 1                                        of perplexity
    target       the baseline's validation loss at 90 % of its steps
    steps        where a run's validation curve first falls to the target, linear between its points
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.checksums import sealed, unsealed
from octavo.curves import Curve, perplexity, perplexity_change
from octavo.errors import DataError
from octavo.parsing import parse_json
from octavo.training.config_values import section

__all__ = [
    "GAP_BAR_NATS",
    "TARGET_FRACTION",
    "Gap",
    "RunMeasures",
    "Study",
    "paired_gap",
    "run_from_json",
    "steps_to",
    "value_at",
]

TARGET_FRACTION = 0.9
GAP_BAR_NATS = 0.0050  # FP8 training at 126M to 175B parameters cost 0.0038 to 0.0052 (arXiv 2209.05433, table 4)

HIGH_PRECISION = ("fp32", "bf16")
STUDY_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasures:
    """Measures of one run of a study.

    ``window_nats`` holds the mean loss of each held-out window, in the same order in every run. ``gradient_variance``
    is the trace of the covariance of micro-batch gradients, ``gradient_error`` the root mean square distance of those
    gradients to the baseline's, relative to the baseline's root mean square; both None until measured. ``threads`` are
    the numbers of CPU threads of its steps, several if it was resumed with another number, empty if unknown.
    """

    recipe: str
    steps: int
    train_curve: Curve
    validation_curve: Curve
    window_nats: tuple[float, ...]
    tokens_per_second: float
    peak_memory_bytes: int | None
    gradient_variance: float | None = None
    gradient_error: float | None = None
    threads: tuple[int, ...] = ()

    @property
    def nats(self) -> float:
        """Mean held-out loss, nats a token."""
        return math.fsum(self.window_nats) / len(self.window_nats)

    @property
    def perplexity(self) -> float:
        """Exponential of the held-out loss; infinite on overflow."""
        return perplexity(self.nats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Difference of the losses of two runs on the same windows."""

    nats: float
    standard_error: float

    @property
    def percent(self) -> float:
        """Gap as a change of perplexity, in percent."""
        return 100.0 * perplexity_change(self.nats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The runs of one study and what they share.

    The baseline is the first run, FP32 by default. ``facts`` describe hardware, versions and corpus; ``samples`` are
    the texts that the final models generated after ``prompt``.
    """

    runs: tuple[RunMeasures, ...]
    config: Mapping[str, Any]
    facts: Mapping[str, str]
    unigram_nats: float
    prompt: str
    samples: Mapping[str, str]

    def run(self, recipe: str) -> RunMeasures:
        """The run of that recipe.

        Raises:
            KeyError: the study has no such run.
        """
        return {run.recipe: run for run in self.runs}[recipe]

    @property
    def baseline(self) -> RunMeasures:
        """The run the others are measured against."""
        return self.runs[0]

    @property
    def fp8_runs(self) -> tuple[RunMeasures, ...]:
        """The runs whose recipe quantizes to FP8."""
        return tuple(run for run in self.runs if run.recipe not in HIGH_PRECISION)

    @property
    def target_nats(self) -> float:
        """The loss every run must reach: the baseline's at ``TARGET_FRACTION`` of its steps."""
        return value_at(self.baseline.validation_curve, TARGET_FRACTION * self.baseline.steps)

    def steps_to_target(self, recipe: str) -> float | None:
        """Steps until the run reached the target loss; None if it did not."""
        return steps_to(self.run(recipe).validation_curve, self.target_nats)

    def gap(self, recipe: str, base: str) -> Gap:
        """Gap of ``recipe`` over ``base`` on the held-out windows."""
        return paired_gap(self.run(recipe).window_nats, self.run(base).window_nats)

    def relative_variance(self, recipe: str) -> float | None:
        """The run's gradient variance as a multiple of the baseline's."""
        variance, base = self.run(recipe).gradient_variance, self.baseline.gradient_variance
        return None if variance is None or not base else variance / base

    def to_json(self) -> str:
        """The study as text that ``from_json`` reads back to an equal study."""
        return json.dumps(sealed({"format": STUDY_FORMAT, **asdict(self)}), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Study":
        """Read what ``to_json`` wrote.

        Raises:
            DataError: the text is not a study of this version, or a value was changed.
        """
        try:
            fields = unsealed(parse_json(text))
            if fields.pop("format") != STUDY_FORMAT:
                raise KeyError("format")
            return section(cls, fields, "")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"this is not a study of octavo (format {STUDY_FORMAT}): {error}; delete it and run the study again"
            ) from error


def run_from_json(fields: dict[str, Any]) -> RunMeasures:
    """Read measures from the dict of ``dataclasses.asdict``.

    Raises:
        ConfigError: a value is missing, unknown or of another type, by name.
    """
    return section(RunMeasures, fields, "")


def paired_gap(run: Sequence[float], base: Sequence[float]) -> Gap:
    """Mean of run - base over paired windows, with its standard error (NaN for a single window).

    Raises:
        ValueError: the runs were evaluated on different numbers of windows.

    Example:
        >>> gap = paired_gap([3.1, 4.2, 5.3], [3.0, 4.0, 5.0])
        >>> round(gap.nats, 4), round(gap.standard_error, 4)
        (0.2, 0.0577)
    """
    if len(run) != len(base) or not run:
        raise ValueError(f"paired runs need the same windows, at least one; got {len(run)} and {len(base)}")
    differences = [a - b for a, b in zip(run, base, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    if count == 1:
        return Gap(nats=mean, standard_error=math.nan)
    variance = math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1)
    return Gap(nats=mean, standard_error=math.sqrt(variance / count))


def value_at(curve: Curve, step: float) -> float:
    """The curve at ``step``, linear between its points and flat beyond its ends.

    Example:
        >>> value_at(((0, 4.0), (10, 3.0), (20, 2.5)), 15)
        2.75
    """
    if step <= curve[0][0]:
        return curve[0][1]
    for (left, high), (right, low) in itertools.pairwise(curve):
        if step <= right:
            return high + (low - high) * (step - left) / (right - left)
    return curve[-1][1]


def steps_to(curve: Curve, target: float) -> float | None:
    """First step at which the curve is at or below ``target``, linear between points; None if there is none.

    Example:
        >>> steps_to(((0, 4.0), (10, 3.0), (20, 2.5)), 2.75), steps_to(((0, 4.0), (10, 3.0)), 2.0)
        (15.0, None)
    """
    if curve[0][1] <= target:
        return float(curve[0][0])
    for (left, high), (right, low) in itertools.pairwise(curve):
        if low <= target:
            return left + (right - left) * (high - target) / (high - low)
    return None
