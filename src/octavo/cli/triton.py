"""``octavo triton setup``: the virtual environment that Triton's server runs in."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import stdout
from octavo.cli.progress import Display, open_display
from octavo.cli.serve import check_server_packages
from octavo.cli.serve_triton import default_environment

__all__ = ["triton"]

triton = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@triton.callback()
def describe() -> None:
    """Triton Inference Server without a container."""


@triton.command(
    name="setup",
    short_help="Make the environment that Triton runs in.",
    epilog="Example: octavo triton setup",
)
def setup(
    *,
    folder: Annotated[
        Path | None, typer.Option("--env", metavar="FOLDER", help="Where. [default: ~/.cache/octavo/triton]")
    ] = None,
) -> None:
    """Make a virtual environment with Triton's server, NumPy 1 and onnxruntime, and this octavo in it."""
    check_server_packages()
    from octavo.server.triton.environment import make_environment

    with open_display() as display:
        made = make_environment(folder or default_environment(), on_step=lambda step: _open(display, step))
    line = f"{made.folder}: Triton can be started; octavo serve REPO --engine triton"
    stdout().print(line, markup=False, soft_wrap=True)


def _open(display: Display, step: str) -> None:
    display.phase(step, None)
