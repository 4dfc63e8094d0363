"""Tables of a grid as text, for the command and the page."""

import math
from collections.abc import Sequence

from octavo.experiments.grid_comparison import GridComparison, Group, Ranking, VariantMeasures
from octavo.experiments.intervals import Interval
from octavo.experiments.presets import Outcome

__all__ = [
    "CLAIM_COLUMNS",
    "GAP_COLUMNS",
    "RANKING_COLUMNS",
    "claim_rows",
    "cost_columns",
    "cost_rows",
    "gap_rows",
    "ranking_rows",
    "seeds_note",
    "signed",
]

NOTHING = "–"
GAP_COLUMNS = ("variant", "runs", "diverged", "nats", "gap [95 %], nats", "tail slope [95 %]", "verdict")
RANKING_COLUMNS = ("better", "worse", "by [95 %], nats", "p (Holm)")
CLAIM_COLUMNS = ("claim", "source", "worse − better [95 %], nats", "gradient error: better, worse", "outcome")


def signed(interval: Interval | None) -> str:
    """An estimate with its interval.

    Example:
        >>> signed(Interval(estimate=0.0012, error=0.0002, freedom=1000))
        '+0.0012 [+0.0008, +0.0016]'
    """
    if interval is None:
        return NOTHING
    if math.isnan(interval.error):
        return f"{interval.estimate:+.4f} [one run]"
    return f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def gap_rows(comparison: GridComparison, measures: Sequence[VariantMeasures]) -> list[tuple[str, ...]]:
    """A row for each variant at each learning rate and warm-up."""
    return [
        (
            _name(one.group),
            str(one.seeds),
            str(one.diverged),
            _number(one.nats, ".4f"),
            signed(one.gap),
            signed(one.tail_slope),
            comparison.verdict(one),
        )
        for one in measures
    ]


def cost_columns(targets: Sequence[float]) -> tuple[str, ...]:
    """Columns of :func:`cost_rows`."""
    reached = [f"{what} to {share:.0%}" for share in targets for what in ("steps", "time")]
    return ("variant", *reached, "gradient variance", "gradient error", "noise scale", "spikes/1,000", "peak MiB")


def cost_rows(measures: Sequence[VariantMeasures]) -> list[tuple[str, ...]]:
    """Steps and time to the targets over the baseline's, and the noise, a row for each group."""
    rows = []
    for one in measures:
        reached = [
            _number(value, ".2f")
            for pair in zip(one.steps_to_targets, one.seconds_to_targets, strict=True)
            for value in pair
        ]
        memory = None if one.peak_memory_bytes is None else one.peak_memory_bytes / 2**20
        rows.append(
            (
                _name(one.group),
                *reached,
                _number(one.gradient_variance, ".3f"),
                _number(one.gradient_error, ".4f"),
                _number(one.noise_scale, ".1f"),
                _number(one.spikes, ".2f"),
                _number(memory, ",.0f"),
            )
        )
    return rows


def ranking_rows(ranking: Sequence[Ranking]) -> list[tuple[str, ...]]:
    """Pairs of variants that differ most surely first."""
    return [(pair.better, pair.worse, signed(_from_zero(pair.difference)), f"{pair.p_value:.2g}") for pair in ranking]


def claim_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A row for each claim."""
    return [
        (
            one.claim.text,
            one.claim.source,
            signed(one.difference),
            ", ".join(_number(error, ".4f") for error in one.gradient_errors),
            one.verdict,
        )
        for one in outcomes
    ]


def seeds_note(measures: Sequence[VariantMeasures]) -> str | None:
    """Number of seeds that 0.005 nats would need, for the variant with the most spread; None without two seeds."""
    known = [(one.seeds_needed, _name(one.group)) for one in measures if one.seeds_needed is not None]
    if not known:
        return None
    count, name = max(known)
    return (
        f"To see a difference of 0.005 nats at 5 % with a chance of 80 %, {name} needs {count} paired seeds, by the "
        "spread of its differences here."
    )


def _from_zero(interval: Interval) -> Interval:
    """The interval with a positive estimate."""
    return Interval(estimate=abs(interval.estimate), error=interval.error, freedom=interval.freedom)


def _name(group: Group) -> str:
    name, lr, warmup = group
    factors = [f"{what} ×{factor:g}" for what, factor in (("lr", lr), ("warm-up", warmup)) if factor != 1]
    return " ".join([name, *factors])


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None or not math.isfinite(value) else format(value, form)
