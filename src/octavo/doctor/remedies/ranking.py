"""Remedies in the order in which a replay of the captured layer proves them."""

from collections.abc import Iterable
from dataclasses import replace

from octavo import recipes
from octavo.doctor.candidates import PRESETS, Candidate
from octavo.doctor.capture import Capture, Captures
from octavo.doctor.capture_choice import capture_for
from octavo.doctor.findings import Finding, Remedy
from octavo.doctor.recipe_changes import changed_recipe, same_casts
from octavo.doctor.remedies.case import WORDS, fineness
from octavo.doctor.replay import Trial, harm, replay, score
from octavo.doctor.series import Series
from octavo.recipes import Recipe

__all__ = ["ranked"]

BY_KIND = ("sensitive-module", "slow-layer")  # judged by what the layer is, whatever its tensors of one step show
UNDERFLOWS = ("gradient-underflow", "bulk-underflow")  # what no product's error shows


def ranked(
    finding: Finding, captures: Captures | Iterable[Capture], *, series: Series, rounds: int = 3
) -> tuple[Remedy, ...]:
    """A finding's remedies, ranked by replay, with their numbers.

    Every remedy that changes the recipe of the finding's layer is tried on the capture of :func:`capture_for`, and so
    are the presets that are finer than the layer's and that no rule named. What the replay shows to remove nothing
    comes last; what it cannot show, such as a learning rate, stands between. The order stays as it is where no such
    capture is there, where the captured layer is healthy under its own recipe (then its tensors are not to blame),
    where a layer is found for what it is, such as a head, and where the rules know nothing but words.

    Args:
        finding: with the remedies that :func:`remedies_for` gave it.
        captures: a run's folder of captures, or some of them.
        series: that the finding was found in.
        rounds: of timing.

    Raises:
        DataError: a capture of the layer is damaged, or the chosen one holds nothing finite.

    Example:
        >>> from octavo.doctor import Severity, series_of
        >>> finding = Finding(code="saturation", severity=Severity.WARN, path="0", remedies=())
        >>> ranked(finding, [], series=series_of([]))
        ()
    """
    capture = _chosen(finding, captures if isinstance(captures, Captures) else list(captures), series)
    if capture is None:
        return finding.remedies
    remedies = _with_presets(finding, capture)
    tried = {index: recipe for index, one in enumerate(remedies) if (recipe := _recipe(one, capture)) is not None}
    if not tried:
        return finding.remedies
    ran, *trials = replay(capture, [Candidate(str(index), recipe) for index, recipe in tried.items()], rounds=rounds)
    role = finding.role if finding.code in UNDERFLOWS else None
    by_index = {int(trial.name): trial for trial in trials}
    proven = [_proven(remedy, by_index.get(index), ran, role) for index, remedy in enumerate(remedies)]
    if harm(ran, role) <= 1 or finding.code in BY_KIND:
        return tuple(proven[: len(finding.remedies)])
    scores = {index: score(trial, ran, role) for index, trial in by_index.items()}
    return tuple(proven[index] for index in sorted(range(len(proven)), key=lambda index: _place(scores.get(index))))


def _chosen(finding: Finding, captures: Captures | list[Capture], series: Series) -> Capture | None:
    """Of the finding's layer; where it is about a module, of a layer that a remedy is about."""
    overridden = [path for remedy in finding.remedies for path in remedy.changes.get("overrides", {})]
    paths = (finding.path, *finding.places, *overridden)
    found = (capture_for(finding, path, captures, series=series) for path in paths)
    return next((one for one in found if one is not None), None)


def _recipe(remedy: Remedy, capture: Capture) -> Recipe | None:
    """What the layer would run; None where that is what it ran."""
    found = changed_recipe(capture.recipe, capture.path, remedy.changes)
    return None if same_casts(found, capture.recipe) else found


def _with_presets(finding: Finding, capture: Capture) -> list[Remedy]:
    """The remedies, and overrides by finer presets that are not among them."""
    known = [recipe for one in finding.remedies if (recipe := _recipe(one, capture)) is not None]
    found = list(finding.remedies)
    what, pattern = ("all layers", "*") if finding.places else (capture.path, capture.path)
    for name in PRESETS if known else ():
        is_new = not any(same_casts(recipes.get(name), one) for one in known)
        if is_new and fineness(name) > fineness(capture.recipe.name):
            changes = {"overrides": {pattern: name}}
            found.append(Remedy(text=f"Run {what} {WORDS[name]}.", changes=changes))
    return found


def _proven(remedy: Remedy, trial: Trial | None, ran: Trial, role: str | None) -> Remedy:
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


def _place(score: float | None) -> tuple[int, float]:
    """What removes something first, best first; then what was not replayed; then what removes nothing."""
    if score is None:
        return 1, 0.0
    return (0, -score) if score > 0 else (2, -score)
