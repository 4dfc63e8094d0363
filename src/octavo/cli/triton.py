"""``octavo triton setup``: create the virtual environment of Triton's server."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import print_lines
from octavo.cli.progress import open_display, phases
from octavo.cli.serve import check_server_packages
from octavo.cli.serve_triton import default_environment

__all__ = ["triton"]

triton = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@triton.callback()
def describe() -> None:
    """Set up Triton Inference Server without a container."""


@triton.command(
    name="setup",
    short_help="Create the environment of Triton's server.",
    epilog="Example: octavo triton setup",
)
def setup(
    *,
    folder: Annotated[
        Path | None,
        typer.Option("--env", metavar="FOLDER", help="Folder to create it in. [default: ~/.cache/octavo/triton]"),
    ] = None,
) -> None:
    """Create a virtual environment with Triton's server, NumPy 1, onnxruntime and this octavo."""
    check_server_packages()
    from octavo.server.triton.environment import make_environment

    with open_display() as display:
        show = phases(display)
        environment = make_environment(folder or default_environment(), on_step=lambda step: show(step, 0, None))
    line = f"{environment.folder} is ready; start Triton with: octavo serve REPO --engine triton"
    print_lines(line)
