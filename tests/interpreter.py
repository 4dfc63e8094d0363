"""Triton's interpreter where its version and NumPy's have parted."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["let_indices_be_arrays"]


def let_indices_be_arrays() -> None:
    """Let Triton before 3.7 use an array of one element as an index, which NumPy makes no number of since 2.4.

    Imports that Triton, so that TRITON_INTERPRET has to be set before.
    """
    try:
        installed = tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return
    if installed >= (3, 7):
        return
    from triton.runtime import interpreter

    own = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
