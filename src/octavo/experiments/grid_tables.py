"""Tables of a grid as text, for the command and the page."""

import math
from collections.abc import Sequence

from octavo.experiments.claims import Outcome
from octavo.experiments.grid_comparison import GridComparison, Group, Ranking, VariantMeasures
from octavo.experiments.intervals import Interval
from octavo.html.wording import counted

__all__ = [
    "CLAIM_COLUMNS",
    "GAP_COLUMNS",
    "RANKING_COLUMNS",
    "at",
    "claim_rows",
    "cost_columns",
    "cost_rows",
    "gap_rows",
    "notes",
    "perplexity",
    "ranking_rows",
    "signed",
]

NOTHING = "–"
GAP_COLUMNS = ("variant", "runs (diverged)", "nats", "gap [95 %], nats", "perplexity [95 %]", "verdict")
RANKING_COLUMNS = ("better", "worse", "by [95 %], nats", "p (Holm)")
CLAIM_COLUMNS = (
    "claim",
    "source",
    "worse − better [95 %], nats",
    "p (Holm)",
    "seeds for 0.005 nats",
    "gradient error: better, worse",
    "outcome",
)


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


def perplexity(gap: Interval | None) -> str:
    """Relative change of perplexity, exp(gap) − 1, with its interval.

    Example:
        >>> perplexity(Interval(estimate=0.0012, error=0.0002, freedom=1000))
        '+0.12 % [+0.08, +0.16]'
    """
    if gap is None:
        return NOTHING
    estimate, low, high = (100 * math.expm1(nats) for nats in (gap.estimate, gap.low, gap.high))
    return f"{estimate:+.2f} % " + ("[one run]" if math.isnan(gap.error) else f"[{low:+.2f}, {high:+.2f}]")


def gap_rows(comparison: GridComparison, measures: Sequence[VariantMeasures]) -> list[tuple[str, ...]]:
    """A row for each variant at each learning rate and warm-up."""
    return [
        (
            _name(one.group),
            f"{one.seeds} ({one.diverged})",
            _number(one.nats, ".4f"),
            signed(one.gap),
            perplexity(one.gap),
            comparison.verdict(one),
        )
        for one in measures
    ]


def cost_columns(targets: Sequence[float]) -> tuple[str, ...]:
    """Columns of :func:`cost_rows`."""
    reached = [f"{what} to {share:.0%}" for share in targets for what in ("steps", "time")]
    return (
        "variant",
        "tail slope [95 %]",
        *reached,
        "gradient variance",
        "gradient error",
        "noise scale",
        "spikes/1,000",
        "peak MiB",
    )


def cost_rows(measures: Sequence[VariantMeasures]) -> list[tuple[str, ...]]:
    """The gap's slope at the end, steps and time to the targets over the baseline's, and the noise, a row a group."""
    rows = []
    for one in measures:
        reached = [
            _relative(value)
            for pair in zip(one.steps_to_targets, one.seconds_to_targets, strict=True)
            for value in pair
        ]
        memory = None if one.peak_memory_bytes is None else one.peak_memory_bytes / 2**20
        rows.append(
            (
                _name(one.group),
                signed(one.tail_slope),
                *reached,
                _relative(one.gradient_variance),
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
            _number(one.p_value, ".2g"),
            NOTHING if one.seeds_needed is None else f"{one.seeds_needed:,}",
            ", ".join(_number(error, ".4f") for error in one.gradient_errors),
            one.verdict,
        )
        for one in outcomes
    ]


def notes(comparison: GridComparison, measures: Sequence[VariantMeasures]) -> list[str]:
    """Sentences that the gaps need: short runs, means over other seeds, and the number of seeds for 0.005 nats."""
    lines = []
    if untrained := comparison.untrained:
        lines.append(
            f"{counted(untrained, 'run')} of {sum(one.seeds for one in measures)} ended no better than token "
            f"frequencies ({comparison.unigram_nats:.4f} nats), which counts as diverged; if the loss still falls, "
            "train longer."
        )
    if len({one.seeds for one in measures}) > 1:
        lines.append(
            "Rows have different numbers of seeds: their nats are means over their own, their gaps over the seeds that "
            "the baseline has too."
        )
    known = [(one.seeds_needed, _name(one.group)) for one in measures if one.seeds_needed is not None]
    if known:
        count, name = max(known)
        lines.append(
            f"To see a difference of 0.005 nats at 5 % with a chance of 80 %, {name} needs {count} paired seeds, by "
            "the spread of its differences here, a rough guess from few seeds."
        )
    return lines


def _from_zero(interval: Interval) -> Interval:
    """The interval with a positive estimate."""
    return Interval(estimate=abs(interval.estimate), error=interval.error, freedom=interval.freedom)


def at(factors: tuple[float, float]) -> str:
    """Factors of learning rate and warm-up that are not 1, after a space.

    Example:
        >>> at((0.5, 1.0)), at((1.0, 1.0))
        (' lr ×0.5', '')
    """
    return "".join(
        f" {what} ×{factor:g}" for what, factor in zip(("lr", "warm-up"), factors, strict=True) if factor != 1
    )


def _name(group: Group) -> str:
    return f"{group[0]}{at(group[1:])}"


def _relative(ratio: Interval | None) -> str:
    """A ratio with the half width of its interval over seeds."""
    if ratio is None:
        return NOTHING
    return f"{ratio.estimate:.3f}" + ("" if math.isnan(ratio.error) else f" ± {ratio.half_width:.3f}")


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None or not math.isfinite(value) else format(value, form)
