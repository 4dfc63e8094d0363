"""Selection of the capture that shows a finding."""

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
    """Return a capture of the layer under a recipe that it ran during the finding's steps; None without one.

    The layer may have changed its recipe after the finding, and captures under the new recipe do not show the problem.
    Captures of the finding's steps are preferred, then the latest.

    Args:
        finding: a finding about the layer or a module that contains it.
        path: the layer's path.
        captures: a run's folder of captures, or some of them.
        series: the run's series, which records the layer's recipe over time.

    Raises:
        DataError: a capture of the layer is damaged.

    Example:
        >>> from octavo.doctor import Severity, series_of
        >>> finding = Finding(code="saturation", severity=Severity.WARN, path="0")
        >>> capture_for(finding, "0", [], series=series_of([])) is None
        True
    """
    layer_captures = (
        captures.of(path) if isinstance(captures, Captures) else [one for one in captures if one.path == path]
    )
    recorded_facts = list(facts_during(finding, series.periods.get(path, [])))
    candidates = [one for one in layer_captures if any(_has_recipe(one, facts) for facts in recorded_facts)]

    def preference(capture: Capture) -> tuple[bool, int]:
        return finding.first_step <= capture.step <= finding.last_step, capture.step

    return max(candidates, key=preference, default=None)


def _has_recipe(capture: Capture, facts: dict[str, Any]) -> bool:
    """True if a capture's recipe agrees with the recorded facts of a layer."""
    return all(facts.get(name, value) == value for name, value in recipe_facts(capture.recipe).items())
