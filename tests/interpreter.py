"""Triton's interpreter where its version and NumPy's have parted, and without work that it repeats."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["prepare_interpreter"]


def prepare_interpreter() -> None:
    """Let Triton before 3.7 take arrays as indices, and change its language once a launch instead of once a call.

    Imports that Triton, so that TRITON_INTERPRET has to be set before.
    """
    try:
        installed = tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return
    if installed < (3, 7):
        _let_indices_be_arrays()
    _change_the_language_once()
    _remember_dtypes()


def _let_indices_be_arrays() -> None:
    """An array of one element is an index, which NumPy makes no number of since 2.4."""
    from triton.runtime import interpreter

    own = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _change_the_language_once() -> None:
    """Functions that a kernel calls find the language as its launch made it; each would do all of that again."""
    from triton import language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # versions in which launches change it otherwise
    own, unchanged = interpreter._patch_lang, interpreter._LangPatchScope

    def patched(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        kept = any(tl.core.is_builtin(function) for function in [tl.tensor.__add__, *(m.load for m in modules)])
        return own(fn) if kept or not modules else unchanged()

    interpreter._patch_lang = patched


def _remember_dtypes() -> None:
    """NumPy's dtype of Triton's, which is looked up several times an operation in a table built anew each time."""
    from triton.runtime import interpreter

    own, known = interpreter._get_np_dtype, dict[str, Any]()

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = own(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered
