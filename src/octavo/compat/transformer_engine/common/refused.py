"""Names of Transformer Engine's that octavo cannot serve: they can be imported, and refuse to be called."""

from functools import cache
from typing import Any, NoReturn

from octavo.errors import ConfigError

__all__ = ["refused"]


@cache
def refused(name: str, advice: str) -> Any:
    """A class of this name that cannot be built; a program that only asks ``isinstance`` is answered False.

    Args:
        name: Transformer Engine's.
        advice: what to use instead.

    Example:
        >>> refused("GroupedLinear", "use one Linear for each expert")()
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: octavo has no GroupedLinear: use one Linear for each expert
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConfigError(f"octavo has no {name}: {advice}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in octavo: {advice}.", "__module__": __name__})
