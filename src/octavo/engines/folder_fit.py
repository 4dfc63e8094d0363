"""Whether an engine that reads a folder in FP8 computes what its profile says.

The folder decides how a server runs it: inputs in high precision, with scales that are measured, or with those of a
calibration; and the scales of an FP8 cache, if it has them. Scales of weights are checked where codes are kept
(:class:`octavo.engines.EngineCopies`).
"""

from torch import nn

from octavo.errors import ConfigError
from octavo.language_model import LanguageModel
from octavo.nn.scaled_layer import ScaledLayer
from octavo.numerics import CastSpec, EngineCast, Scaling
from octavo.recipes.engines.profile import EngineProfile

__all__ = ["check_folder_fits"]


def check_folder_fits(model: LanguageModel | nn.Module, profile: EngineProfile) -> None:
    """Raise ConfigError for a model from a folder in FP8 whose inputs or cache a server casts otherwise.

    Args:
        model: any; those in high precision fit every profile.
        profile: the engine that serves.
    """
    decoder = model.model if isinstance(model, LanguageModel) else model
    for path, layer in decoder.named_modules():
        if isinstance(layer, ScaledLayer) and layer.stored_codes() is not None:
            ours, theirs = layer.recipe.output.a, profile.input
            if _scaling(ours) != _scaling(theirs):
                raise ConfigError(
                    f"this folder runs {path!r} {_inputs_in_words(ours)}, and {profile.name} "
                    f"{_inputs_in_words(theirs)}; name an engine that reads such a folder, or give the model in high "
                    "precision"
                )
    cache = profile.kv_cache
    if isinstance(model, LanguageModel) and model.has_kv_scales and cache and cache.scaling is Scaling.STATIC:
        raise ConfigError(
            f"this folder has scales of keys and values, and octavo computes {profile.name}'s cache with the scale 1 "
            "alone; give a folder without them, or name the engine without +fp8-cache for a cache in high precision"
        )


def _scaling(cast: CastSpec | EngineCast | None) -> Scaling | None:
    return None if cast is None else cast.scaling


def _inputs_in_words(cast: CastSpec | EngineCast | None) -> str:
    return "with inputs in high precision" if cast is None else f"with {cast.scaling} scales of inputs"
