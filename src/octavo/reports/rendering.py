"""Rendering of templates/ to HTML: autoescape everywhere, no undefined names, plotly's script (about 5 MB) inlined."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["check_report_extra", "render"]


def check_report_extra(page: str, *, then: str = "") -> None:
    """Raise unless the libraries that pages need are installed.

    Args:
        page: subject of the error's sentence.
        then: what to do after installing, if repeating the command is not enough.

    Raises:
        ConfigError: plotly or jinja2 is missing; names the extra.
    """
    for library, module in (("plotly", "plotly.offline"), ("jinja2", "jinja2")):
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"{page} needs {library}, which is not installed; pip install 'octavo[report]'{then}"
            ) from error


def render(template: str, /, **values: Any) -> str:
    """HTML of ``templates/TEMPLATE.html.jinja``; call :func:`check_report_extra` first."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    return _environment().get_template(f"{template}.html.jinja").render(values, plotly=Markup(get_plotlyjs()))


@cache
def _environment() -> "Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("octavo.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # tojson escapes <, > and &, so that no text ends its script element.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment
