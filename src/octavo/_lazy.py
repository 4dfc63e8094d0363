"""Public names from rows below the package itself, loaded on first use.

``import octavo`` brings torch and nothing else; quantization brings language models, tokenizers' readers and the
training loop's parts. ``octavo.calibrate`` is therefore looked up here (PEP 562: a module's ``__getattr__`` and
``__dir__``). Type checkers read the same names under ``TYPE_CHECKING`` in ``octavo/__init__.py``.
"""

import importlib
import importlib.metadata
import sys
from typing import Any

__all__ = ["LATER", "__dir__", "__getattr__", "own_version"]

LATER = {  # name → its module, or itself for a module
    **dict.fromkeys(("calibrate", "convert_qat", "load_calibration", "prepare_qat"), "quantization"),
    **dict.fromkeys(("load_quantized", "save_quantized"), "export"),
    "agree": "engines",
    "plot": "plot",
    "rl": "rl",
}


def __getattr__(name: str) -> Any:
    """Load ``octavo.name`` on first use."""
    if name == "__version__":
        return own_version()
    if name not in LATER:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    module = importlib.import_module(f"octavo.{LATER[name]}")
    return module if LATER[name] == name else getattr(module, name)


def __dir__() -> list[str]:
    """List the names of ``octavo``: those loaded, and those loaded on first use."""
    return sorted({*vars(sys.modules["octavo"]), *LATER, "__version__"})


def own_version() -> str:
    """The installed version, or "from a checkout" where the package is not installed."""
    try:
        return importlib.metadata.version("octavo")
    except importlib.metadata.PackageNotFoundError:
        return "from a checkout"
