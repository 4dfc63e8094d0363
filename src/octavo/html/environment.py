"""The template engine: autoescape everywhere, no undefined names."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["environment"]


@cache
def environment(package: str) -> "Environment":
    """Environment of the folder ``templates`` in a package.

    Raises:
        ImportError: jinja2 is not installed.

    Example:
        >>> environment("octavo.html").from_string("{{ text }}").render(text="<b>")
        '&lt;b&gt;'
    """
    import jinja2

    engine = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # tojson escapes <, > and &, so that no text ends its script element.
    engine.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return engine
