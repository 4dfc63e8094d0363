"""Former name of :mod:`octavo.onnx`; works for one release, with a DeprecationWarning."""

import warnings
from typing import Any

from octavo import onnx

__all__ = list(onnx.__all__)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """A public name of :mod:`octavo.onnx`."""
    if name not in onnx.__all__:
        raise AttributeError(f"module 'octavo.export.onnx' has no attribute {name!r}")
    warnings.warn("octavo.export.onnx is octavo.onnx now; import from there", DeprecationWarning, stacklevel=2)
    return getattr(onnx, name)
