"""Saving of results that took hours, with other folders if the named one cannot be written."""

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from octavo.errors import ConfigError, OctavoError
from octavo.files import check_room, replacing_folder

__all__ = ["folder_to_fill", "save_or_keep"]


def save_or_keep(
    out: Path, save: Callable[[Path], object], *, command: str, nbytes: int
) -> tuple[Path | None, OSError | ConfigError | None]:
    """Write a result to ``out``, or to another folder if that fails.

    Args:
        out: the folder that the user named.
        save: writes the result as a folder, completely or not at all.
        command: the command, part of the other folder's name.
        nbytes: size of the result.

    Returns:
        The folder, None if every folder failed; and the error to raise after printing the results if it is not ``out``.
    """
    try:
        save(out)
    except (OSError, ConfigError) as error:
        reason = f"cannot use {str(out)!r}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        for find_place in (Path.cwd, Path.home, tempfile.gettempdir):  # the first two may fail, as in a container
            with suppress(OSError, RuntimeError, OctavoError):
                rescue_folder = Path(find_place()) / f"octavo-{command}-{secrets.token_hex(4)}"
                check_room(rescue_folder, nbytes)
                save(rescue_folder)
                return rescue_folder, ConfigError(
                    f"{reason}; the result is kept in {str(rescue_folder)!r}: move it to another --out"
                )
        return None, error
    return out, None


@contextmanager
def folder_to_fill(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` when the block ends, or ``out`` itself if it exists.

    Files of an existing folder are to be replaced one by one; others, which the user may have put there, stay.
    """
    with nullcontext(out) if out.exists() else replacing_folder(out) as folder:
        yield folder
