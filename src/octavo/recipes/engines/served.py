"""Recipes whose forward pass is the one of an engine, so that a model trains with the numbers that will serve it."""

from dataclasses import replace

from octavo.errors import ConfigError
from octavo.numerics import Accumulate, CastSpec, EngineCast, Nonfinite, ScaleRounding, Scaling
from octavo.numerics.engine_cast import PowerOfTwo, Saturation
from octavo.recipes.engines.catalog import resolved
from octavo.recipes.engines.profile import EngineProfile, Products
from octavo.recipes.presets import get
from octavo.recipes.specs import GemmSpec, Recipe

__all__ = ["forward_recipe", "served_recipe"]

_PLAIN = GemmSpec(a=None, b=None)


def served_recipe(profile: str | EngineProfile, gradients: str | Recipe = "bf16") -> Recipe:
    """Recipe with an engine's casts and sums in the output GEMM, and another recipe's gradients.

    Gradients pass straight through the casts. Around the layers the model has to compute as the engine does too:
    :func:`octavo.engines.convert_as_served` and its context do both.

    Args:
        profile: the engine or its name.
        gradients: recipe of grad_input and grad_weight; "bf16" leaves them in high precision.

    Raises:
        ConfigError: an unknown profile; training cannot reproduce a property of it, which the message names; or its
            sums are those of tensor cores, which cannot be emulated for the casts of ``gradients``.

    Example:
        >>> from octavo import engines
        >>> recipe = engines.served_recipe(engines.get("vllm-block"), "blockwise")
        >>> recipe.name, recipe.output.a.engine.division == engines.get("vllm-block").input.division
        ('blockwise, as served by vllm-block', True)
    """
    profile = resolved(profile)
    for name, reason in _unreproduced(profile).items():
        raise ConfigError(f"training cannot compute as {profile.name}: its {name} is {reason}")
    recipe = get(gradients)
    forward = forward_recipe(profile)
    return replace(
        forward,
        name=forward.name if recipe.is_high_precision else f"{recipe.name}, {forward.name}",
        grad_input=recipe.grad_input,
        grad_weight=recipe.grad_weight,
        history=recipe.history if any(_is_delayed(gemm) for gemm in (recipe.grad_input, recipe.grad_weight)) else None,
        emulate_tensor_cores=profile.accumulate is not Accumulate.FP32,
    )


def forward_recipe(profile: EngineProfile) -> Recipe:
    """Recipe with the codes and scales of any engine, for writing them; see :func:`served_recipe` for training.

    Example:
        >>> from octavo import engines
        >>> forward_recipe(engines.get("vllm-token")).output.b.granularity
        PerRow()
    """
    output = GemmSpec(
        a=None if profile.input is None else _spec(profile.input.of_tensors_in(profile.activations)),
        b=_spec(profile.weight.of_tensors_in(profile.activations)),
        accumulate=profile.accumulate,
    )
    return Recipe(name=f"as served by {profile.name}", output=output, grad_input=_PLAIN, grad_weight=_PLAIN)


def _spec(cast: EngineCast) -> CastSpec:
    has_powers = cast.power_of_two != PowerOfTwo.NONE
    return CastSpec(
        format=cast.format,
        granularity=cast.granularity,
        scaling=cast.scaling,
        scale_rounding=ScaleRounding.RCEIL if has_powers else ScaleRounding.FP32,
        scale_format=cast.scale_format,
        amax_floor=cast.amax_floor,
        nonfinite=Nonfinite.PROPAGATE if cast.saturation == Saturation.PROPAGATE else Nonfinite.SATURATE,
        engine=cast,
    )


def _unreproduced(profile: EngineProfile) -> dict[str, str]:
    """Properties that training does not reproduce, with the reason."""
    reasons = {}
    if profile.fused_cast:
        reasons["fused_cast"] = "a cast of the norm's output before it is rounded, and layers here read it rounded"
    if profile.products is not Products.CODES:
        reasons["products"] = f"{profile.products}, and recipes multiply codes"
    for role, cast in (("weight", profile.weight), ("input", profile.input)):
        if cast is not None and cast.scaling is Scaling.DELAYED:
            reasons[f"{role}.scaling"] = "delayed, and a server has no past steps"
    if profile.output is not profile.activations:
        reasons["output"] = f"{profile.output}, and layers here return their input's dtype, {profile.activations}"
    if profile.kv_cache is not None and profile.kv_cache.scaling is Scaling.DELAYED:
        reasons["kv_cache.scaling"] = "delayed, and a server has no past steps"
    return reasons


def _is_delayed(gemm: GemmSpec) -> bool:
    return any(cast is not None and cast.scaling is Scaling.DELAYED for cast in (gemm.a, gemm.b))
