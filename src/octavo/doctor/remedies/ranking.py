"""Ranking of remedies by replay of a captured layer."""

from collections.abc import Iterable
from dataclasses import replace

from octavo import recipes
from octavo.doctor.candidates import PRESETS, Candidate
from octavo.doctor.capture import Capture, Captures
from octavo.doctor.capture_selection import capture_for
from octavo.doctor.findings import Finding, Remedy
from octavo.doctor.recipe_changes import changed_recipe, same_casts
from octavo.doctor.remedies.context import RECIPE_PHRASES, fineness
from octavo.doctor.replay import Trial, harm, replay, score
from octavo.doctor.series import Series
from octavo.recipes import Recipe

__all__ = ["ranked"]

BY_KIND = ("sensitive-module", "slow-layer")  # found by the kind of layer, regardless of its tensors
UNDERFLOWS = ("gradient-underflow", "bulk-underflow")  # not visible in the error of a GEMM


def ranked(
    finding: Finding, captures: Captures | Iterable[Capture], *, series: Series, rounds: int = 3
) -> tuple[Remedy, ...]:
    """Rank a finding's remedies by replay and add their measured numbers.

    Every remedy that changes the recipe of the finding's layer is replayed on the capture of :func:`capture_for`, as
    are finer presets that no rule suggested. Effective remedies come first, then those that a replay cannot measure,
    such as a learning rate, then those without effect. The order does not change without a capture, if the captured
    layer is healthy under its own recipe (its tensors are then not the cause), for findings about the kind of layer,
    such as a head, and if no remedy changes the recipe.

    Args:
        finding: a finding with the remedies of :func:`remedies_for`.
        captures: a run's folder of captures, or some of them.
        series: the series of the finding's run.
        rounds: number of timings of each recipe.

    Raises:
        DataError: a capture of the layer is damaged, or the selected one has no finite token or output feature.

    Example:
        >>> from octavo.doctor import Severity, series_of
        >>> finding = Finding(code="saturation", severity=Severity.WARN, path="0", remedies=())
        >>> ranked(finding, [], series=series_of([]))
        ()
    """
    capture = _select_capture(finding, captures if isinstance(captures, Captures) else list(captures), series)
    if capture is None:
        return finding.remedies
    remedies = _with_presets(finding, capture)
    tried = {index: recipe for index, one in enumerate(remedies) if (recipe := _recipe_with(one, capture)) is not None}
    if not tried:
        return finding.remedies
    ran, *trials = replay(capture, [Candidate(str(index), recipe) for index, recipe in tried.items()], rounds=rounds)
    role = finding.role if finding.code in UNDERFLOWS else None
    by_index = {int(trial.name): trial for trial in trials}
    measured = [_with_measurements(remedy, by_index.get(index), ran, role) for index, remedy in enumerate(remedies)]
    if harm(ran, role) <= 1 or finding.code in BY_KIND:
        return tuple(measured[: len(finding.remedies)])
    scores = {index: score(trial, ran, role) for index, trial in by_index.items()}
    return tuple(
        measured[index] for index in sorted(range(len(measured)), key=lambda index: _sort_key(scores.get(index)))
    )


def _select_capture(finding: Finding, captures: Captures | list[Capture], series: Series) -> Capture | None:
    """Select a capture of the finding's layer, or for a module of a layer that a remedy overrides."""
    overridden = [path for remedy in finding.remedies for path in remedy.changes.get("overrides", {})]
    paths = (finding.path, *finding.places, *overridden)
    candidates = (capture_for(finding, path, captures, series=series) for path in paths)
    return next((one for one in candidates if one is not None), None)


def _recipe_with(remedy: Remedy, capture: Capture) -> Recipe | None:
    """Recipe of the layer with the remedy; None if it does not change."""
    found = changed_recipe(capture.recipe, capture.path, remedy.changes)
    return None if same_casts(found, capture.recipe) else found


def _with_presets(finding: Finding, capture: Capture) -> list[Remedy]:
    """The finding's remedies and overrides with finer presets that are not among them."""
    suggested = [recipe for one in finding.remedies if (recipe := _recipe_with(one, capture)) is not None]
    remedies = list(finding.remedies)
    target, pattern = ("all layers", "*") if finding.places else (capture.path, capture.path)
    for name in PRESETS if suggested else ():
        is_new = not any(same_casts(recipes.get(name), one) for one in suggested)
        if is_new and fineness(name) > fineness(capture.recipe.name):
            changes = {"overrides": {pattern: name}}
            remedies.append(Remedy(text=f"Run {target} {RECIPE_PHRASES[name]}.", changes=changes))
    return remedies


def _with_measurements(remedy: Remedy, trial: Trial | None, ran: Trial, role: str | None) -> Remedy:
    if trial is None:
        return remedy
    removed = 1 - harm(trial, role) / harm(ran, role) if harm(ran, role) else 0.0
    return replace(
        remedy,
        error_removed=removed,
        time_ratio=trial.time_ratio,
        is_time_measured=trial.is_on_gpu,
        bytes_ratio=trial.bytes_ratio,
    )


def _sort_key(score: float | None) -> tuple[int, float]:
    """Sort key: effective remedies by score, then remedies without a replay, then ineffective ones."""
    if score is None:
        return 1, 0.0
    return (0, -score) if score > 0 else (2, -score)
