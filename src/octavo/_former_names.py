"""Module-level ``__getattr__`` and ``__dir__`` of modules that moved: old names work for one release, and warn."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["forward"]


def forward(
    former: str, target: str, submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[..., Any]]:
    """``__getattr__`` and ``__dir__`` for a module that moved; ``target`` is imported when a name is read.

    Args:
        former: the module's former name.
        target: the module whose public names are returned, each with a DeprecationWarning.
        submodules: modules of ``target`` that the former package had too.
    """

    def get(name: str) -> Any:
        if name in submodules:
            value = import_module(f"{target}.{name}")
        elif not name.startswith("__") and name in (module := import_module(target)).__all__:
            value = getattr(module, name)
        else:
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        warnings.warn(f"{former} is {target} now; import from there", DeprecationWarning, stacklevel=2)
        return value

    return get, lambda: [*import_module(target).__all__, *submodules]
