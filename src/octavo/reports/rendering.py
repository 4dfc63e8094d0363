"""Rendering of templates/ to HTML, and writing of pages with plotly's script beside them.

The engine is octavo.html's. Plotly's script has 4.8 MB; the pages of a folder share one
copy, ``plotly-VERSION.min.js``. A page that is moved without it shows its tables and names the missing file.
"""

import errno
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.files import write_atomically
from octavo.html.environment import environment

__all__ = ["check_library", "check_report_extra", "render", "write_page"]


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
    return environment("octavo.reports").get_template(f"{template}.html.jinja").render(values, script=_script_name())


def write_page(path: Path, page: str) -> None:
    """Write a page atomically, and before it plotly's script into the same folder unless it is there already.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    from plotly.offline import get_plotlyjs

    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    script, content = path.with_name(_script_name()), get_plotlyjs().encode()
    if not (script.is_file() and script.read_bytes() == content):
        write_atomically(script, content)
    write_atomically(path, page)


def _script_name() -> str:
    from plotly.offline import get_plotlyjs_version

    return f"plotly-{get_plotlyjs_version()}.min.js"
