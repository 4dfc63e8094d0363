"""Removed commands: each raises an error that names its replacement in the repository."""

import typer

from octavo.errors import ConfigError

__all__ = ["add_moved"]

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_moved(group: typer.Typer, name: str, command: str, module: str) -> None:
    """Register a hidden command that accepts any arguments and raises with its replacement."""

    @group.command(name=name, hidden=True, add_help_option=False, context_settings=ANY_ARGUMENTS)
    def refuse() -> None:
        raise ConfigError(
            f"{command} is no longer part of the installed package; in a checkout of octavo's repository, run "
            f"python -m {module} with the same options"
        )
