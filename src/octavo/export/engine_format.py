"""Checkpoint format whose codes and scales an engine multiplies as the folder has them."""

from octavo.checkpoints.schemes import Inputs, scheme_of
from octavo.errors import ConfigError
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

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> engine_to_write_for("sglang").name
        'sglang-block'
    """
    try:
        return get(FAMILIES.get(name, name))
    except ConfigError as error:
        raise ConfigError(f"{error}; or of {', '.join(FAMILIES)}") from error


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
