"""Rendering of templates/ to HTML by octavo.html's engine, with plotly's script (about 5 MB) inlined."""

from importlib import import_module
from typing import Any

from octavo.errors import ConfigError
from octavo.html.environment import environment

__all__ = ["check_library", "check_report_extra", "render"]


def check_report_extra(page: str, *, then: str = "") -> None:
    """Raise unless the libraries that pages need are installed.

    Args:
        page: subject of the error's sentence.
        then: what to do after installing, if repeating the command is not enough.

    Raises:
        ConfigError: plotly or jinja2 is missing; names the extra.
    """
    for library, module in (("plotly", "plotly.offline"), ("jinja2", "jinja2")):
        check_library(page, library, module, then=then)


def check_library(what: str, library: str, module: str, *, then: str = "") -> None:
    """Raise unless a module of the extra ``report`` can be imported.

    Args:
        what: subject of the error's sentence.
        library: its name for pip.
        module: the module.
        then: what to do after installing.

    Raises:
        ConfigError: it cannot; names the extra.
    """
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {library}, which is not installed; pip install 'octavo[report]'{then}"
        ) from error


def render(template: str, /, **values: Any) -> str:
    """HTML of ``templates/TEMPLATE.html.jinja``; call :func:`check_report_extra` first."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    return (
        environment("octavo.reports")
        .get_template(f"{template}.html.jinja")
        .render(values, plotly=Markup(get_plotlyjs()))
    )
