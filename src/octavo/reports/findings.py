"""Wording of findings on the doctor's page: a headline, counts, and the parts of each finding's card."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.doctor.findings import CAUSES, SIGNS, Finding, Remedy, Severity, capitalized
from octavo.doctor.losses import Plateau
from octavo.html.wording import counted, number

__all__ = [
    "SHOWN_AT_ONCE",
    "SIGNS",
    "RemedyBar",
    "bars",
    "counted",
    "counts",
    "headline",
    "number",
]

SHOWN_AT_ONCE = 6
SEVERAL_CAUSES = ("learning-rate", "loss-scale")  # CAUSES lists what they may be; the finding itself says which it is
COUNTED = {Severity.FAIL: "failure", Severity.WARN: "warning", Severity.NOTE: "note"}


@dataclass(frozen=True, slots=True)
class RemedyBar:
    """A cell of the remedies' table: its column's label, text, filled share and kind; "" for an unknown number."""

    label: str
    text: str = ""
    share: float = 0.0
    kind: str = ""


def headline(findings: Sequence[Finding], samples: int, layers: int, stalled: Plateau | None = None) -> str:
    """The worst finding in a sentence, or a statement that the run is healthy.

    Args:
        findings: worst first.
        samples: number of sampled steps.
        layers: number of layers that cast.
        stalled: a plateau of the loss that may be a stalled model's; such a run is not called healthy.

    Example:
        >>> headline([], samples=100, layers=29)
        'Healthy: 100 samples of 29 layers found nothing.'
        >>> headline([], samples=0, layers=0)
        'Nothing was measured in this run.'
    """
    if not findings and stalled is not None:
        return f"{capitalized(str(stalled))}; nothing else was found."
    if not findings:
        if not samples:
            return "Nothing was measured in this run."
        if not layers:
            return f"Nothing to judge yet: no layer has cast to FP8 in {counted(samples, 'sample')}."
        return f"Healthy: {counted(samples, 'sample')} of {counted(layers, 'layer')} found nothing."
    worst = findings[0]
    where = f" in {worst.path}" if worst.path else ""
    role = f" ({worst.role})" if worst.role else ""
    state = "Healthy" if stalled is None else capitalized(str(stalled))
    opening = f"{state}, with a note: " if worst.severity is Severity.NOTE else ""
    cause = worst.cause.partition(": ")[0] if worst.code in SEVERAL_CAUSES else ""
    return f"{opening}{capitalized(cause or CAUSES[worst.code])}{where}{role}, {worst.when}."


def counts(findings: Sequence[Finding]) -> str:
    """Number of findings of each severity, in words.

    Example:
        >>> counts([])
        'No findings.'
    """
    totals = {name: sum(one.severity is severity for one in findings) for severity, name in COUNTED.items()}
    return (", ".join(counted(total, name) for name, total in totals.items() if total) or "No findings") + "."


def bars(remedies: Sequence[Remedy]) -> list[tuple[str, tuple[RemedyBar, ...]]]:
    """Text and bars of each remedy; no bars if none of the remedies was replayed."""
    if all(one.error_removed is None for one in remedies):
        return [(one.text, ()) for one in remedies]
    # Without a measurement on a GPU the times come from a model of its GEMMs.
    time = "time" if any(one.is_time_measured for one in remedies) else "time, modelled"
    return [
        (one.text, (_share(one.error_removed), _ratio(time, one.time_ratio), _ratio("bytes", one.bytes_ratio)))
        for one in remedies
    ]


def _share(value: float | None) -> RemedyBar:
    if value is None:
        return RemedyBar("error removed")
    kind = "gain" if value > 0 else "loss"
    return RemedyBar("error removed", f"{100 * value:.0f} %".replace("-", "−"), max(0.0, min(1.0, value)), kind)


def _ratio(label: str, value: float | None) -> RemedyBar:
    """A bar whose middle is 1, the cost of the current recipe."""
    return (
        RemedyBar(label) if value is None else RemedyBar(label, f"{value:.2f}×", max(0.0, min(1.0, value / 2)), "cost")
    )
