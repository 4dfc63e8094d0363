"""``octavo doctor``: one file a subcommand."""

from octavo.cli.doctor.group import doctor

__all__ = ["doctor"]
