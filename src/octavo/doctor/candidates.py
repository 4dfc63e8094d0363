"""What a captured layer is tried with where nobody says what."""

from dataclasses import dataclass, replace
from typing import Any

from octavo import recipes
from octavo.doctor.capture import Capture
from octavo.doctor.recipe_changes import same_casts, with_options
from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2
from octavo.recipes import Recipe, Statistic

__all__ = ["PRESETS", "Candidate", "candidates_for"]

PRESETS = ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "bf16")
OTHER_GRADIENTS = {"tensorwise": E4M3, "rowwise": E5M2, "blockwise": E5M2}
WINDOWS = (1, 4, 16)
MOST_EMULATED = 1 << 29  # products of a GEMM


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe to try, and what to call it."""

    name: str
    recipe: Recipe


def candidates_for(capture: Capture) -> tuple[Candidate, ...]:
    """What is tried where nobody says what: the presets, both formats of the gradient, other windows, Hopper's sums.

    Windows are tried where the layer has a history. A static recipe is not, since its scale comes from a calibration;
    Hopper's sums are where their emulation takes seconds at most.
    """
    ran = capture.recipe
    found = [Candidate(name, _preset(name, ran)) for name in PRESETS]
    found += [_named(_preset(name, ran).with_gradients_in(fmt)) for name, fmt in OTHER_GRADIENTS.items()]
    if ran.history is not None:
        found += _windows(ran)
    if ran.emulate_tensor_cores:
        found.append(Candidate(f"{ran.name}, FP32 sums", replace(ran, emulate_tensor_cores=False)))
    elif _can_emulate(capture):
        found.append(Candidate(f"{ran.name}, Hopper's sums", replace(ran, emulate_tensor_cores=True)))
    return tuple(one for one in found if ran.is_delayed or not same_casts(one.recipe, ran))


def _preset(name: str, ran: Recipe) -> Recipe:
    """A preset that sums as ``ran`` does, where it can."""
    emulates = ran.emulate_tensor_cores and name not in ("bf16", "mxfp8")
    return recipes.get(name, emulate_tensor_cores=True) if emulates else recipes.get(name)


def _named(recipe: Recipe) -> Candidate:
    return Candidate(recipe.name, recipe)


def _windows(ran: Recipe) -> list[Candidate]:
    """Shorter windows of the same history, its own once more, and a binade of margin."""
    assert ran.history is not None
    options: dict[str, dict[str, Any]]
    options = {f"window {length}": {"history_length": length} for length in WINDOWS if length < ran.history.length}
    margin = max(cast.margin for cast in ran.casts) + 1
    options |= {"its own window": {}, f"margin {margin}": {"margin": margin}}
    if ran.history.statistic != Statistic.MAX:
        options["maximum of its window"] = {"statistic": "max"}
    return [Candidate(f"{ran.name}, {name}", with_options(ran, changes)) for name, changes in options.items()]


def _can_emulate(capture: Capture) -> bool:
    products = capture.input.numel() * capture.weight.shape[0]
    if capture.recipe.is_high_precision or products > MOST_EMULATED:
        return False
    try:
        replace(capture.recipe, emulate_tensor_cores=True)
    except ConfigError:  # a format or a block that Hopper's tensor cores do not take
        return False
    return True
