"""Profiles by name."""

from types import MappingProxyType

from octavo.engines.profile import EngineProfile
from octavo.engines.profiles import HUGGINGFACE, MODELOPT, OWN, SGLANG, TORCHAO, TRANSFORMER_ENGINE, VLLM
from octavo.errors import ConfigError

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
        raise ConfigError(f"there is no engine {name!r}; use one of {', '.join(PROFILES)}")
    return PROFILES[name]


def names() -> tuple[str, ...]:
    """The profiles' names."""
    return tuple(PROFILES)
