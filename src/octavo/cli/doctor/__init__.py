"""``octavo doctor``: one file per subcommand."""

from octavo.cli.doctor.group import doctor

__all__ = ["doctor"]
