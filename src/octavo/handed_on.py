"""Public names from rows below the package itself, loaded when somebody first asks for one.

``import octavo`` brings torch and nothing else; quantization brings language models, tokenizers' readers and the
training loop's parts. ``octavo.calibrate`` is therefore looked up here (PEP 562: a module's ``__getattr__``).
"""

import importlib
from typing import Any

__all__ = ["LATER", "__getattr__"]

LATER = {  # name → where
    **dict.fromkeys(("calibrate", "convert_qat", "load_calibration", "prepare_qat"), "quantization"),
    **dict.fromkeys(("load_quantized", "save_quantized"), "export"),
}


def __getattr__(name: str) -> Any:
    """``octavo.name`` of a name that is loaded late."""
    if name not in LATER:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"octavo.{LATER[name]}"), name)
