"""Default candidates for the replay of a captured layer."""

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
MAX_EMULATED_MULTIPLICATIONS = 1 << 29  # of a GEMM


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe to try and its display name."""

    name: str
    recipe: Recipe


def candidates_for(capture: Capture) -> tuple[Candidate, ...]:
    """Default candidates: the presets, both gradient formats, other history lengths, and Hopper accumulation.

    History lengths are tried for layers with an amax history, and Hopper accumulation where its emulation takes a few
    seconds at most. Static recipes are not tried: their scales come from a calibration.
    """
    ran = capture.recipe
    candidates = [Candidate(name, _preset(name, ran)) for name in PRESETS]
    others = (_preset(name, ran).with_gradients_in(fmt) for name, fmt in OTHER_GRADIENTS.items())
    candidates += [Candidate(recipe.name, recipe) for recipe in others]
    if ran.history is not None:
        candidates += _history_variants(ran)
    if ran.emulate_tensor_cores:
        candidates.append(Candidate(f"{ran.name}, FP32 sums", replace(ran, emulate_tensor_cores=False)))
    elif _can_emulate(capture):
        candidates.append(Candidate(f"{ran.name}, Hopper's sums", replace(ran, emulate_tensor_cores=True)))
    return tuple(candidate for candidate in candidates if ran.is_delayed or not same_casts(candidate.recipe, ran))


def _preset(name: str, ran: Recipe) -> Recipe:
    """A preset with the accumulation of ``ran``, where the preset supports it."""
    emulates = ran.emulate_tensor_cores and name not in ("bf16", "mxfp8")
    return recipes.get(name, emulate_tensor_cores=True) if emulates else recipes.get(name)


def _history_variants(ran: Recipe) -> list[Candidate]:
    """Shorter windows of the same history, the unchanged window, and one more binade of margin."""
    assert ran.history is not None
    options: dict[str, dict[str, Any]]
    options = {f"window {length}": {"history_length": length} for length in WINDOWS if length < ran.history.length}
    margin = max(cast.margin for cast in ran.casts) + 1
    options |= {"its own window": {}, f"margin {margin}": {"margin": margin}}
    if ran.history.statistic != Statistic.MAX:
        options["maximum of its window"] = {"statistic": "max"}
    return [Candidate(f"{ran.name}, {name}", with_options(ran, changes)) for name, changes in options.items()]


def _can_emulate(capture: Capture) -> bool:
    multiplications = capture.input.numel() * capture.weight.shape[0]
    if capture.recipe.is_high_precision or multiplications > MAX_EMULATED_MULTIPLICATIONS:
        return False
    try:
        replace(capture.recipe, emulate_tensor_cores=True)
    except ConfigError:  # a format or block size that Hopper's tensor cores do not support
        return False
    return True
