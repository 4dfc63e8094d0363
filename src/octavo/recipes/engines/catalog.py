"""Profiles by name."""

from types import MappingProxyType

from octavo.errors import ConfigError
from octavo.parsing import did_you_mean
from octavo.recipes.engines.huggingface import HUGGINGFACE
from octavo.recipes.engines.modelopt import MODELOPT
from octavo.recipes.engines.own import OWN
from octavo.recipes.engines.profile import EngineProfile
from octavo.recipes.engines.sglang import SGLANG
from octavo.recipes.engines.torchao import TORCHAO
from octavo.recipes.engines.transformer_engine import TRANSFORMER_ENGINE
from octavo.recipes.engines.vllm import VLLM

__all__ = ["PROFILES", "get", "names"]

PROFILES = MappingProxyType(
    {
        profile.name: profile
        for profile in (*TRANSFORMER_ENGINE, *TORCHAO, *HUGGINGFACE, *VLLM, *SGLANG, *MODELOPT, *OWN)
    }
)


def get(name: str) -> EngineProfile:
    """A profile by name.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> get("sglang-block").engine
        'SGLang, DeepGEMM with float scales'
    """
    if name not in PROFILES:
        raise ConfigError(f"there is no engine {name!r}{did_you_mean(name, names())}; use one of {', '.join(PROFILES)}")
    return PROFILES[name]


def names() -> tuple[str, ...]:
    """The profiles' names."""
    return tuple(PROFILES)
