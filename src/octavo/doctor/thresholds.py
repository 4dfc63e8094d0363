"""Every number that a finding hangs on, by name, with where it comes from."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.errors import ConfigError

__all__ = ["Source", "Thresholds", "source_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a threshold comes from: ``kind`` is "published" or "ours", ``why`` names the paper or the measurement."""

    kind: str
    why: str


def _published(value: float, why: str) -> Any:
    return field(default=value, metadata={"source": Source("published", why)})


def _ours(value: float, why: str) -> Any:
    return field(default=value, metadata={"source": Source("ours", why)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What the rules compare with; see :func:`source_of` for each one's origin.

    Raises:
        ConfigError: a value that is not a finite number.
    """

    saturation_fraction: float = _published(1e-5, "FP8-LM, arXiv 2310.18313 section 2.1: halve the scale above 0.001 %")
    gradient_to_noise: float = _published(math.sqrt(3), "arXiv 2505.19115: below sqrt(3) training stops improving")

    def __post_init__(self) -> None:
        for name in fields(self):
            value = getattr(self, name.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"threshold {name.name} must be a finite number, not {value!r}")


def source_of(name: str) -> Source:
    """Where a threshold comes from.

    Example:
        >>> source_of("saturation_fraction").kind
        'published'
    """
    found: Source = next(one for one in fields(Thresholds) if one.name == name).metadata["source"]
    return found
