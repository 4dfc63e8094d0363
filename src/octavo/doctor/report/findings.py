"""Findings as the page has them: a headline, and a card each, worst first."""

from collections.abc import Mapping, Sequence
from html import escape

from octavo.doctor.findings import CAUSES, Finding, Remedy, Severity

__all__ = ["cards", "counts", "headline", "number"]

SHOWN_AT_ONCE = 6
SIGNS = {Severity.FAIL: "■", Severity.WARN: "▲", Severity.NOTE: "●"}  # so that colour is not all that tells them apart


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
            return f"Nothing to judge yet: no layer has cast to FP8 at {_counted(looks, 'look')}."
        return f"Healthy: {_counted(looks, 'look')} at {_counted(layers, 'layer')} found nothing."
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
    names = {Severity.FAIL: "failure", Severity.WARN: "warning", Severity.NOTE: "note"}
    found = [sum(one.severity is severity for one in findings) for severity in names]
    said = [_counted(count, name) for count, name in zip(found, names.values(), strict=True) if count]
    return (", ".join(said) or "No findings") + "."


def cards(findings: Sequence[Finding], shown: Sequence[bool]) -> str:
    """The list of findings as HTML; what is beyond the first few is folded away.

    Args:
        findings: worst first.
        shown: of each, whether the map or the loss has a place to link to.
    """
    if not findings:
        return ""
    items = [_card(index, one, shown[index]) for index, one in enumerate(findings)]
    first, rest = items[:SHOWN_AT_ONCE], items[SHOWN_AT_ONCE:]
    folded = f"<details><summary>{_counted(len(rest), 'more finding')}</summary><ol>{''.join(rest)}</ol></details>"
    return f"<ol>{''.join(first)}</ol>{folded if rest else ''}"


def number(value: float) -> str:
    """Three digits, plain where that is short.

    Example:
        >>> number(0.62154), number(41000.0), number(2.5e-7), number(float("inf"))
        ('0.622', '41,000', '2.5e-07', 'inf')
    """
    if value == int(value) if abs(value) < 1e9 else False:
        return f"{int(value):,}"
    return f"{value:.3g}"


def _card(index: int, one: Finding, is_shown: bool) -> str:
    place = f"<code>{_breakable(one.path)}</code>" if one.path else "the whole run"
    role = f" · {escape(one.role)}" if one.role else ""
    link = f'<a class="show" href="#map" data-finding="{index}">Show where</a>' if is_shown else ""
    return (
        f'<li class="finding {one.severity}" id="finding-{index}">'
        f'<p class="kind"><span class="severity"><i aria-hidden="true">{SIGNS[one.severity]}</i> {one.severity}</span>'
        f"<b>{escape(one.code)}</b>{link}</p>"
        f'<p class="place">{place}{role} · {_steps(one)}</p>'
        f'<p class="cause">{escape(_sentence(one.cause or CAUSES[one.code]))}</p>'
        f"{_evidence(one.evidence)}{_remedies(one.remedies)}</li>"
    )


def _evidence(evidence: Mapping[str, float]) -> str:
    if not evidence:
        return ""
    rows = (f"<div><dt>{escape(_words(name))}</dt><dd>{number(value)}</dd></div>" for name, value in evidence.items())
    return f'<dl class="evidence">{"".join(rows)}</dl>'


def _remedies(remedies: Sequence[Remedy]) -> str:
    if not remedies:
        return ""
    is_replayed = any(one.error_removed is not None for one in remedies)
    titles = ("error removed", _time(remedies), "bytes")
    head = "".join(f"<th>{title}</th>" for title in titles) if is_replayed else ""
    rows = "".join(_remedy(one, is_replayed) for one in remedies)
    note = ", by replay of captured tensors" if is_replayed else ""
    head = f'<thead><tr><th scope="col">remedy{note}</th>{head}</tr></thead>'
    return f'<table class="remedies">{head}<tbody>{rows}</tbody></table>'


def _remedy(one: Remedy, is_replayed: bool) -> str:
    bars = (
        _share(one.error_removed),
        _ratio(_time([one]), one.time_ratio),
        _ratio("bytes", one.bytes_ratio),
    )
    return f'<tr><th scope="row">{escape(one.text)}</th>{"".join(bars) if is_replayed else ""}</tr>'


def _time(remedies: Sequence[Remedy]) -> str:
    """What a bar of time shows: of a GPU, or of a model of its GEMMs."""
    return "time" if any(one.is_time_measured for one in remedies) else "time, modelled"


def _share(value: float | None) -> str:
    if value is None:
        return _missing("error removed")
    return _bar(
        "error removed",
        f"{100 * value:.0f} %".replace("-", "−"),
        max(0.0, min(1.0, value)),
        "gain" if value > 0 else "loss",
    )


def _ratio(label: str, value: float | None) -> str:
    """A bar of which the mark in the middle is 1: no dearer than what runs now."""
    if value is None:
        return _missing(label)
    return _bar(label, f"{value:.2f}×", max(0.0, min(1.0, value / 2)), "cost")


def _bar(label: str, text: str, share: float, kind: str) -> str:
    return (
        f'<td data-label="{label}"><span class="bar {kind}"><i style="width:{100 * share:.1f}%"></i></span>'
        f"<span>{text}</span></td>"
    )


def _missing(label: str) -> str:
    return f'<td data-label="{label}">–</td>'


def _words(name: str) -> str:
    return name.replace("_", " ").replace("sqnr", "SQNR").replace(" db", ", dB")


def _breakable(path: str) -> str:
    """A line may break after a dot."""
    return escape(path).replace(".", ".<wbr>")


def _sentence(text: str) -> str:
    return _capital(text if text.endswith((".", "!", "?")) else f"{text}.")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _steps(one: Finding) -> str:
    same = one.first_step == one.last_step
    return f"step {one.first_step:,}" if same else f"steps {one.first_step:,} to {one.last_step:,}"


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}" + ("" if count == 1 else "s")
