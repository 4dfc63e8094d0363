"""Which folders are runs, for the commands that take one."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.training.run_folder import CONFIG

__all__ = ["check_is_run"]


def check_is_run(path: Path) -> None:
    """Point from a study's folder to its runs.

    Raises:
        ConfigError: the folder holds a study, which has several models.
    """
    inside = sorted(str(child.parent) for child in path.glob(f"*/{CONFIG}"))
    if inside:
        raise ConfigError(f"{str(path)!r} holds a study of several runs; name one of {', '.join(inside)}")
