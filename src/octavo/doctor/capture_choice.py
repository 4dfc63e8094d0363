"""Which of a layer's captures shows what a finding is about."""

from collections.abc import Iterable
from typing import Any

from octavo.doctor.capture import Capture, Captures
from octavo.doctor.facts import facts_during, recipe_facts
from octavo.doctor.findings import Finding
from octavo.doctor.series import Series

__all__ = ["capture_for"]


def capture_for(
    finding: Finding, path: str, captures: Captures | Iterable[Capture], *, series: Series
) -> Capture | None:
    """A capture of the layer under a recipe that it ran in the finding's steps; None where there is none.

    After the finding the layer may have been given another recipe, of which no capture shows what was wrong. A capture
    of one of the finding's steps goes before others, then the latest.

    Args:
        finding: of the layer, or of a module around it.
        path: the layer's.
        captures: a run's folder of captures, or some of them.
        series: that the finding was found in; says what the layer ran when.

    Raises:
        DataError: a capture of the layer is damaged.

    Example:
        >>> from octavo.doctor import Severity, series_of
        >>> finding = Finding(code="saturation", severity=Severity.WARN, path="0")
        >>> capture_for(finding, "0", [], series=series_of([])) is None
        True
    """
    own = captures.of(path) if isinstance(captures, Captures) else [one for one in captures if one.path == path]
    ran = list(facts_during(finding, series.periods.get(path, [])))
    fitting = [one for one in own if any(_is_of(one, facts) for facts in ran)]

    def place(capture: Capture) -> tuple[bool, int]:
        return finding.first_step <= capture.step <= finding.last_step, capture.step

    return max(fitting, key=place, default=None)


def _is_of(capture: Capture, facts: dict[str, Any]) -> bool:
    """Whether a capture's recipe is the one of a layer's facts, as far as these say it."""
    return all(facts.get(name, value) == value for name, value in recipe_facts(capture.recipe).items())
