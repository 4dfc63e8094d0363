"""ModelOpt's FP8 format, loaded by TensorRT-LLM: one scale per weight and one calibrated scale per input.

The configuration is written twice: to hf_quant_config.json for TensorRT-LLM and older servers, and to config.json's
quantization_config for newer ones. Both name ModelOpt as the producer, which servers require; the version names octavo.

Source: NVIDIA Model Optimizer, "Unified HuggingFace Checkpoint".
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from octavo._lazy import own_version
from octavo.checkpoints.contents import Contents
from octavo.checkpoints.file_format import FileFormat, Layout, damaged, names_in
from octavo.checkpoints.names import NAMES
from octavo.checkpoints.schemes import Inputs, Scheme
from octavo.numerics import PerTensor

__all__ = ["HF_QUANT_CONFIG", "MODELOPT", "configuration_from_file"]

HF_QUANT_CONFIG = "hf_quant_config.json"
ALGORITHM = "FP8"
SCHEME = Scheme(weight=PerTensor(), inputs=Inputs.STATIC)
STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}


def _configuration(contents: Contents) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": ALGORITHM,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": STATIC, "input_activations": STATIC}},
        "ignore": list(contents.left_out),
        "kv_cache_scheme": STATIC if contents.kv_scales else None,
        "producer": _producer(),
    }


def _other_files(contents: Contents) -> dict[str, str]:
    quantization = {
        "quant_algo": ALGORITHM,
        "kv_cache_quant_algo": ALGORITHM if contents.kv_scales else None,
        "exclude_modules": list(contents.left_out),
    }
    return {HF_QUANT_CONFIG: json.dumps({"producer": _producer(), "quantization": quantization}, indent=2) + "\n"}


def _producer() -> dict[str, str]:
    return {"name": "modelopt", "version": f"octavo {own_version()}"}


def configuration_from_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert hf_quant_config.json to a quantization_config, which older folders lack."""
    inner = config.get("quantization")
    inner = inner if isinstance(inner, Mapping) else {}
    cache = inner.get("kv_cache_quant_algo")
    return {
        "quant_method": "modelopt",
        "quant_algo": inner.get("quant_algo"),
        "ignore": inner.get("exclude_modules"),
        "kv_cache_scheme": STATIC if cache == ALGORITHM else cache,
    }


def _layout(config: Mapping[str, Any], linears: Sequence[str], _: Path) -> Layout:
    if config.get("quant_algo") != ALGORITHM:
        raise damaged("quant_algo", config.get("quant_algo"), repr(ALGORITHM))
    ignored = names_in("ignore", config.get("ignore")) or names_in("exclude_modules", config.get("exclude_modules"))
    cache = config.get("kv_cache_scheme")
    if cache is not None and cache != STATIC:
        raise damaged("kv_cache_scheme", cache, f"{STATIC}: {ALGORITHM}")
    recipes = {path: SCHEME.recipe for path in linears if not any(fnmatchcase(path, name) for name in ignored)}
    return Layout(recipes=recipes, has_kv_scales=cache is not None)


MODELOPT = FileFormat(
    name="modelopt",
    quant_method="modelopt",
    names=NAMES["modelopt"],
    preset="static",
    schemes=frozenset({SCHEME}),
    one_scheme=True,
    configuration=_configuration,
    layout=_layout,
    other_files=_other_files,
)
