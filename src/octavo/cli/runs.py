"""Which folders are runs, for the commands that take one."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.language_model import HF_CONFIG
from octavo.training.run_folder import CONFIG, has_run

__all__ = ["check_is_run", "is_run"]


def check_is_run(path: Path) -> None:
    """Point from a study's folder to its runs.

    Raises:
        ConfigError: the folder holds a study, which has several models.
    """
    inside = sorted(str(child.parent) for child in path.glob(f"*/{CONFIG}"))
    if inside:
        raise ConfigError(f"{str(path)!r} holds a study of several runs; name one of {', '.join(inside)}")


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, and not Hugging Face's, which has a tokenizer.json too."""
    return has_run(path) and not (path / HF_CONFIG).is_file()
