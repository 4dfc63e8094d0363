"""Placeholders for names of Transformer Engine that octavo does not support: importable, but they raise when called."""

from functools import cache
from typing import Any, NoReturn

from octavo.errors import ConfigError

__all__ = ["refused"]


@cache
def refused(name: str, advice: str) -> Any:
    """Create a class that cannot be instantiated; ``isinstance`` returns False for it.

    Args:
        name: name in Transformer Engine.
        advice: alternative, for the error message.

    Example:
        >>> refused("GroupedLinear", "use one Linear for each expert")()
        Traceback (most recent call last):
        ...
        octavo.errors.ConfigError: octavo has no GroupedLinear: use one Linear for each expert
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConfigError(f"octavo has no {name}: {advice}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in octavo: {advice}.", "__module__": __name__})
