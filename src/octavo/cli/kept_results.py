"""Results of hours of work, written to another folder where the one that was named cannot take them."""

import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from octavo.errors import ConfigError, OctavoError
from octavo.files import check_room

__all__ = ["save_or_keep"]


def save_or_keep(
    out: Path, save: Callable[[Path], object], *, command: str, nbytes: int
) -> tuple[Path | None, OSError | ConfigError | None]:
    """Write a result; where ``out`` cannot take it any more, to another place.

    Args:
        out: the folder that the user named.
        save: writes the result as a folder, wholly or not at all.
        command: which made it; part of the other folder's name.
        nbytes: that it takes.

    Returns:
        Where it is, None where no place could take it; and what to raise where that is not ``out``, once the numbers
        are printed.
    """
    try:
        save(out)
    except (OSError, ConfigError) as error:
        why = f"cannot use {str(out)!r}: {error.strerror}" if isinstance(error, OSError) else str(error)
        for place in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())):
            kept = place / f"octavo-{command}-{secrets.token_hex(4)}"
            with suppress(OSError, OctavoError):
                check_room(kept, nbytes)
                save(kept)
                return kept, ConfigError(f"{why}; the result is kept in {str(kept)!r}: move it to another --out")
        return None, error
    return out, None
