"""Public names from rows below the package itself, loaded when somebody first asks for one.

``import octavo`` brings torch and nothing else; quantization brings language models, tokenizers' readers and the
training loop's parts. ``octavo.prepare_qat`` is therefore looked up here (PEP 562: a module's ``__getattr__``).
"""

import importlib
from typing import Any

__all__ = ["LATER", "__getattr__"]

LATER = {"convert_qat": "quantization", "prepare_qat": "quantization"}  # name → the part of octavo that defines it


def __getattr__(name: str) -> Any:
    """``octavo.name`` of a name that is loaded late."""
    if name not in LATER:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"octavo.{LATER[name]}"), name)
