"""Warnings that name the line of the user's code, however many frames of octavo and torch called each other since.

A fixed ``stacklevel`` names torch's files where an optimizer's hook or a compiled graph warns.
"""

import sys
import warnings
from pathlib import Path

import torch

__all__ = ["warn_caller"]

_LIBRARIES = tuple(f"{Path(file).parent}/" for file in (__file__, str(torch.__file__)))


def warn_caller(message: str) -> None:
    """Warn at the innermost frame outside of octavo and torch.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_caller("look here")
        >>> caught[0].filename == __file__
        False
    """
    level, frame = 1, sys._getframe()  # noqa: SLF001 (Python 3.12 has warnings' skip_file_prefixes)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
