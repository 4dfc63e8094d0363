"""Checkpoint format whose codes and scales an engine multiplies as the folder has them."""

from dataclasses import replace

from octavo.checkpoints.schemes import Inputs, scheme_of
from octavo.errors import ConfigError
from octavo.numerics import EngineCast
from octavo.numerics.fnuz import OCP_FORMATS
from octavo.recipes.engines import EngineProfile, forward_recipe, get

__all__ = ["engine_to_write_for", "format_of_engine"]

FAMILIES = {
    "vllm": "vllm-token",
    "sglang": "sglang-block",
    "transformers": "transformers-fp8",
    "tensorrt-llm": "modelopt",
}
TRAINERS = ("te-", "torchao-")
BY_INPUTS = {
    Inputs.TOKEN: "compressed-tensors",
    Inputs.STATIC: "compressed-tensors",
    Inputs.GROUP: "hf-fp8",
    Inputs.HIGH_PRECISION: "compressed-tensors",
}


def engine_to_write_for(name: str) -> EngineProfile:
    """Profile of an engine, or of a family such as "vllm" by what it runs if nothing else is said.

    That of an engine with FNUZ codes has the OCP codes that it reads and makes its own of: the same bytes, with twice
    the scale.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> engine_to_write_for("sglang").name
        'sglang-block'
    """
    try:
        family, plus, setting = name.partition("+")
        engine = get(f"{FAMILIES.get(family, family)}{plus}{setting}")
    except ConfigError as error:
        raise ConfigError(f"{error}; or of {', '.join(FAMILIES)}") from error
    return replace(engine, weight=_in_ocp(engine.weight), input=None if engine.input is None else _in_ocp(engine.input))


def _in_ocp(cast: EngineCast) -> EngineCast:
    """The cast whose codes are the same bytes, of twice the value, with half the scale."""
    if cast.format not in OCP_FORMATS:
        return cast
    return replace(cast, format=OCP_FORMATS[cast.format], limit=2 * cast.largest, scale_floor=cast.scale_floor / 2)


def format_of_engine(engine: EngineProfile) -> str:
    """Name of the format.

    Raises:
        ConfigError: the engine reads no FP8 checkpoint, or no format holds its codes, scales and casts.

    Example:
        >>> format_of_engine(engine_to_write_for("vllm")), format_of_engine(engine_to_write_for("sglang"))
        ('compressed-tensors', 'hf-fp8')
    """
    if engine.name.startswith(TRAINERS):
        raise ConfigError(f"{engine.name} trains, and reads no checkpoint in FP8; name the engine that serves")
    try:
        scheme = scheme_of(forward_recipe(engine))
    except ConfigError as error:
        raise ConfigError(f"no format holds what {engine.name} multiplies: {error}") from error
    return "modelopt" if engine.name.startswith("modelopt") else BY_INPUTS[scheme.inputs]
