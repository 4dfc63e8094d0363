"""Profiles by name."""

from dataclasses import replace
from types import MappingProxyType

from octavo.errors import ConfigError
from octavo.numerics import Accumulate, EngineCast, Scaling
from octavo.parsing import did_you_mean
from octavo.recipes.engines.huggingface import HUGGINGFACE
from octavo.recipes.engines.modelopt import MODELOPT
from octavo.recipes.engines.own import OWN
from octavo.recipes.engines.profile import EngineProfile
from octavo.recipes.engines.sglang import SGLANG
from octavo.recipes.engines.torchao import TORCHAO
from octavo.recipes.engines.transformer_engine import TRANSFORMER_ENGINE
from octavo.recipes.engines.vllm import VLLM

__all__ = ["FP8_CACHE", "PROFILES", "get", "names", "resolved"]

FP8_CACHE = EngineCast(scaling=Scaling.STATIC)  # of the scale 1
SUFFIX = "+fp8-cache"

PROFILES = MappingProxyType(
    {
        profile.name: profile
        for profile in (*TRANSFORMER_ENGINE, *TORCHAO, *HUGGINGFACE, *VLLM, *SGLANG, *MODELOPT, *OWN)
    }
)


def get(name: str) -> EngineProfile:
    """A profile by name; with ``+fp8-cache`` behind it, keys and values are cast to E4M3 with the scale 1.

    That is what servers do when they are told to keep their cache in FP8, as by vLLM's ``--kv-cache-dtype fp8``, and a
    folder has no scales for it.

    Raises:
        ConfigError: an unknown name, or no name.

    Example:
        >>> get("sglang-block").engine, get("vllm-token+fp8-cache").kv_cache.format.name
        ('SGLang, DeepGEMM with float scales', 'E4M3')
    """
    if not isinstance(name, str):
        raise ConfigError(f"an engine's name is text, such as 'vllm-token', not {name!r}")
    plain = name.removesuffix(SUFFIX)
    if plain not in PROFILES:
        raise ConfigError(
            f"there is no engine {name!r}{did_you_mean(plain, names())}; use one of {', '.join(PROFILES)}, each also "
            f"with {SUFFIX}"
        )
    profile = PROFILES[plain]
    if name == plain:
        return profile
    return replace(profile, name=name, engine=f"{profile.engine}, cache in FP8", kv_cache=FP8_CACHE)


def names() -> tuple[str, ...]:
    """The profiles' names."""
    return tuple(PROFILES)


def resolved(profile: str | EngineProfile, accumulate: Accumulate | None = None) -> EngineProfile:
    """A profile from its name, with other sums if they are given.

    Raises:
        ConfigError: an unknown name, or neither a profile nor a name.
    """
    found = get(profile) if isinstance(profile, str) else profile
    if not isinstance(found, EngineProfile):
        raise ConfigError(f"an engine is a profile or its name, such as 'vllm-token', not a {type(found).__name__}")
    return found if accumulate is None else replace(found, accumulate=accumulate)
