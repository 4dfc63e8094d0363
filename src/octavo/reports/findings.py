"""Wording of findings on the doctor's page: a headline, counts, and the parts of each finding's card."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.doctor.findings import CAUSES, Finding, Remedy, Severity

__all__ = [
    "SHOWN_AT_ONCE",
    "SIGNS",
    "RemedyBar",
    "bars",
    "counted",
    "counts",
    "headline",
    "number",
    "sentence",
    "steps",
]

SHOWN_AT_ONCE = 6
SIGNS = {Severity.FAIL: "■", Severity.WARN: "▲", Severity.NOTE: "●"}  # a second mark beside the colour
COUNTED = {Severity.FAIL: "failure", Severity.WARN: "warning", Severity.NOTE: "note"}


@dataclass(frozen=True, slots=True)
class RemedyBar:
    """A cell of the remedies' table: its column's label, text, filled share and kind; "" for an unknown number."""

    label: str
    text: str = ""
    share: float = 0.0
    kind: str = ""


def headline(findings: Sequence[Finding], samples: int, layers: int) -> str:
    """The worst finding in a sentence, or a statement that the run is healthy.

    Example:
        >>> headline([], samples=100, layers=29)
        'Healthy: 100 samples of 29 layers found nothing.'
        >>> headline([], samples=0, layers=0)
        'Nothing was measured in this run.'
    """
    if not findings:
        if not samples:
            return "Nothing was measured in this run."
        if not layers:
            return f"Nothing to judge yet: no layer has cast to FP8 in {counted(samples, 'sample')}."
        return f"Healthy: {counted(samples, 'sample')} of {counted(layers, 'layer')} found nothing."
    worst = findings[0]
    where = f" in {worst.path}" if worst.path else ""
    role = f" ({worst.role})" if worst.role else ""
    opening = "Healthy, with a note: " if worst.severity is Severity.NOTE else ""
    return f"{opening}{_capital(CAUSES[worst.code])}{where}{role}, {steps(worst)}."


def counts(findings: Sequence[Finding]) -> str:
    """Number of findings of each severity, in words.

    Example:
        >>> counts([])
        'No findings.'
    """
    totals = {name: sum(one.severity is severity for one in findings) for severity, name in COUNTED.items()}
    return (", ".join(counted(total, name) for name, total in totals.items() if total) or "No findings") + "."


def counted(count: int, name: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "sample"), counted(2000, "sample")
        ('1 sample', '2,000 samples')
    """
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def number(value: float) -> str:
    """Three digits, plain where that is short.

    Example:
        >>> number(0.62154), number(41000.0), number(2.5e-7), number(float("inf"))
        ('0.622', '41,000', '2.5e-07', 'inf')
    """
    if value == int(value) if abs(value) < 1e9 else False:
        return f"{int(value):,}"
    return f"{value:.3g}"


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


def sentence(finding: Finding) -> str:
    """The finding's cause as a sentence."""
    text = finding.cause or CAUSES[finding.code]
    return _capital(text if text.endswith((".", "!", "?")) else f"{text}.")


def steps(one: Finding) -> str:
    """The finding's steps in words."""
    same = one.first_step == one.last_step
    return f"step {one.first_step:,}" if same else f"steps {one.first_step:,} to {one.last_step:,}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
