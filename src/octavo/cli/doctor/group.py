"""``octavo doctor``: a group of commands whose first word may also be a run's folder.

``octavo doctor RUN`` and ``octavo doctor --env`` run a hidden command EXAMINE, which takes every line that does not
begin with a subcommand's name. Write ``./bisect`` for a folder with the name of a subcommand.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from octavo.cli.doctor.bisect import bisect
from octavo.cli.doctor.examine import examine
from octavo.cli.doctor.preflight import preflight
from octavo.cli.removed_commands import add_moved

__all__ = ["doctor"]

EXAMINE = "examine"


class DoctorGroup(TyperGroup):
    """Command group that runs EXAMINE for a line without a subcommand and shows its options as the group's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Prepend the hidden command's name to a line without a subcommand."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [EXAMINE, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage with a run and with a subcommand."""
        formatter.write_usage(ctx.command_path, "[RUN] [OPTIONS]")
        formatter.write_usage(ctx.command_path, self.subcommand_metavar)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the hidden command's arguments and options, then the subcommands."""
        self.commands[EXAMINE].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


doctor = typer.Typer(cls=DoctorGroup, no_args_is_help=True, rich_markup_mode=None)
doctor.command(name=EXAMINE, hidden=True, epilog="Example: octavo doctor runs/mine")(examine)
doctor.command(
    name="bisect",
    short_help="Find the layers that account for the gap to BF16.",
    epilog="Example: octavo doctor bisect runs/mine --steps 40",
)(bisect)
doctor.command(
    name="preflight",
    short_help="Try a configuration before a long run.",
    epilog="Example: octavo doctor preflight long.toml",
)(preflight)
add_moved(doctor, "selftest", "octavo doctor selftest", "benchmarks.doctor_selftest")


@doctor.callback()
def describe() -> None:
    """Find what goes wrong in a run's FP8 training, and why; the exit code is 1 if a finding fails."""
