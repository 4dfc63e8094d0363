"""Former name of :mod:`octavo.inference`; works for one release, with a DeprecationWarning."""

import warnings
from typing import Any

from octavo import inference

__all__ = list(inference.__all__)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """A public name of :mod:`octavo.inference`."""
    if name not in inference.__all__:
        raise AttributeError(f"module 'octavo.serving' has no attribute {name!r}")
    warnings.warn("octavo.serving is octavo.inference now; import from there", DeprecationWarning, stacklevel=2)
    return getattr(inference, name)
