"""Hugging Face's "fp8" format, used by DeepSeek-V3: 128x128 blocks of weights, dynamic inputs.

Source: DeepSeek-V3, arXiv 2412.19437 §3.3.2; ``FineGrainedFP8Config`` of transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoints.contents import Contents
from octavo.checkpoints.file_format import FileFormat, Layout, damaged, names_in
from octavo.checkpoints.names import NAMES
from octavo.checkpoints.schemes import BLOCK, Inputs, Scheme
from octavo.convert import HEAD_NAMES

__all__ = ["HF_FP8"]

SCHEME = Scheme(weight=BLOCK, inputs=Inputs.GROUP)
FIXED = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK.rows, BLOCK.columns]}
DEFAULTS = {"fmt": "e4m3", "activation_scheme": "dynamic"}


def _configuration(contents: Contents) -> dict[str, Any]:
    return {"quant_method": "fp8", **FIXED, "modules_to_not_convert": list(contents.left_out)}


def _layout(config: Mapping[str, Any], linears: Sequence[str], _: Path) -> Layout:
    for key, value in FIXED.items():
        setting = config.get(key, DEFAULTS.get(key))
        if (list(setting) if isinstance(setting, tuple) else setting) != value:
            raise damaged(key, setting, repr(value))
    if config.get("scale_fmt", "float") != "float":  # "ue8m0" uses power-of-two scales for inputs, another scheme
        raise damaged("scale_fmt", config["scale_fmt"], "'float'")
    excluded = config.get("modules_to_not_convert", config.get("ignored_layers"))
    # The default of transformers; DeepSeek's files omit the key.
    left_out = HEAD_NAMES if excluded is None else names_in("modules_to_not_convert", excluded)
    return Layout(recipes={path: SCHEME.recipe for path in linears if not _is_left_out(path, left_out)})


def _is_left_out(path: str, left_out: Sequence[str]) -> bool:
    """Report whether a name is a dotted part of the path: the module itself, a parent, or the end of the path."""
    return any(f".{path}.".find(f".{name}.") >= 0 for name in left_out)


HF_FP8 = FileFormat(
    name="hf-fp8",
    quant_method="fp8",
    names=NAMES["hf-fp8"],
    preset="blockwise",
    schemes=frozenset({SCHEME}),
    one_scheme=True,
    configuration=_configuration,
    layout=_layout,
)
