"""Findings as the doctor's page words them: a headline, how many there are, and a card each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.doctor.findings import CAUSES, Finding, Remedy, Severity

__all__ = ["SHOWN_AT_ONCE", "Bar", "Card", "card_of", "counted", "counts", "headline", "number"]

SHOWN_AT_ONCE = 6
SIGNS = {Severity.FAIL: "■", Severity.WARN: "▲", Severity.NOTE: "●"}  # a second mark beside the colour
COUNTED = {Severity.FAIL: "failure", Severity.WARN: "warning", Severity.NOTE: "note"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell of the remedies' table: its column's label, text, filled share and kind; no kind where it is not known."""

    label: str
    text: str = ""
    share: float = 0.0
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A finding, and what the page says of it in words.

    Attributes:
        index: the finding's place, worst first.
        evidence: numbers by name.
        remedies: each with its bars, none of which there are where nothing was replayed.
        is_shown: whether the map or the loss has a place to link to.
    """

    index: int
    finding: Finding
    sign: str
    steps: str
    cause: str
    evidence: Mapping[str, str]
    remedies: Sequence[tuple[str, Sequence[Bar]]]
    is_shown: bool


def headline(findings: Sequence[Finding], looks: int, layers: int) -> str:
    """The worst finding in a sentence, or that there is none.

    Example:
        >>> headline([], looks=100, layers=29)
        'Healthy: 100 looks at 29 layers found nothing.'
        >>> headline([], looks=0, layers=0)
        'Nothing was measured in this run.'
    """
    if not findings:
        if not looks:
            return "Nothing was measured in this run."
        if not layers:
            return f"Nothing to judge yet: no layer has cast to FP8 at {counted(looks, 'look')}."
        return f"Healthy: {counted(looks, 'look')} at {counted(layers, 'layer')} found nothing."
    worst = findings[0]
    where = f" in {worst.path}" if worst.path else ""
    role = f" ({worst.role})" if worst.role else ""
    opening = "Healthy, with a note: " if worst.severity is Severity.NOTE else ""
    return f"{opening}{_capital(CAUSES[worst.code])}{where}{role}, {_steps(worst)}."


def counts(findings: Sequence[Finding]) -> str:
    """How many of each severity.

    Example:
        >>> counts([])
        'No findings.'
    """
    totals = {name: sum(one.severity is severity for one in findings) for severity, name in COUNTED.items()}
    return (", ".join(counted(total, name) for name, total in totals.items() if total) or "No findings") + "."


def counted(count: int, name: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "look"), counted(2000, "look")
        ('1 look', '2,000 looks')
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


def card_of(finding: Finding, index: int, *, is_shown: bool) -> Card:
    """The card of a finding."""
    remedies = finding.remedies
    is_replayed = any(one.error_removed is not None for one in remedies)
    # A GPU took the times, or a model of its GEMMs.
    time = "time" if any(one.is_time_measured for one in remedies) else "time, modelled"
    return Card(
        index=index,
        finding=finding,
        sign=SIGNS[finding.severity],
        steps=_steps(finding),
        cause=_sentence(finding.cause or CAUSES[finding.code]),
        evidence={_words(name): number(value) for name, value in finding.evidence.items()},
        remedies=[(one.text, _bars(one, time) if is_replayed else ()) for one in remedies],
        is_shown=is_shown,
    )


def _bars(remedy: Remedy, time: str) -> tuple[Bar, ...]:
    return (_share(remedy.error_removed), _ratio(time, remedy.time_ratio), _ratio("bytes", remedy.bytes_ratio))


def _share(value: float | None) -> Bar:
    if value is None:
        return Bar("error removed")
    kind = "gain" if value > 0 else "loss"
    return Bar("error removed", f"{100 * value:.0f} %".replace("-", "−"), max(0.0, min(1.0, value)), kind)


def _ratio(label: str, value: float | None) -> Bar:
    """A bar whose mark in the middle is 1: no dearer than what runs now."""
    return Bar(label) if value is None else Bar(label, f"{value:.2f}×", max(0.0, min(1.0, value / 2)), "cost")


def _words(name: str) -> str:
    return name.replace("_", " ").replace("sqnr", "SQNR").replace(" db", ", dB")


def _sentence(text: str) -> str:
    return _capital(text if text.endswith((".", "!", "?")) else f"{text}.")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _steps(one: Finding) -> str:
    same = one.first_step == one.last_step
    return f"step {one.first_step:,}" if same else f"steps {one.first_step:,} to {one.last_step:,}"
