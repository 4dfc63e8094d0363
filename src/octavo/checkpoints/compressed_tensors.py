"""The compressed-tensors format, written by vLLM's tools and loaded by vLLM, SGLang and transformers.

Its quantization_config contains groups of layers; each defines the casts of weights and inputs and the layers they
apply to, by class ("Linear"), path or regular expression ("re:…"). `ignore` lists layers that are not quantized.
Different layers may have different schemes.

Source: the library compressed-tensors, ``quantization/quant_config.py`` and ``quant_scheme.py``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoints.contents import Contents, FP8Layer
from octavo.checkpoints.file_format import FileFormat, Layout, damaged, matched_scheme, names_in
from octavo.checkpoints.names import NAMES
from octavo.checkpoints.schemes import BLOCK, GROUP, Inputs, Scheme, scheme_of
from octavo.formats import E4M3
from octavo.numerics import Granularity, PerRow, PerTensor

__all__ = ["COMPRESSED_TENSORS"]

NAME, FORMAT, DENSE = "compressed-tensors", "float-quantized", "dense"
STRATEGIES: dict[Granularity, str] = {PerTensor(): "tensor", PerRow(): "channel", BLOCK: "block"}
SCHEMES = frozenset(
    Scheme(weight=weight, inputs=inputs)
    for weight in (PerTensor(), PerRow())
    for inputs in (Inputs.HIGH_PRECISION, Inputs.STATIC, Inputs.TOKEN)
) | {Scheme(weight=BLOCK, inputs=Inputs.GROUP), Scheme(weight=BLOCK, inputs=Inputs.HIGH_PRECISION)}
E4M3_NUMBERS = {"num_bits": E4M3.bits, "type": "float", "symmetric": True}
CACHE = E4M3_NUMBERS | {"strategy": "tensor", "dynamic": False}
INPUTS: dict[Inputs, dict[str, Any] | None] = {
    Inputs.HIGH_PRECISION: None,
    Inputs.STATIC: {"strategy": "tensor", "dynamic": False},
    Inputs.TOKEN: {"strategy": "token", "dynamic": True},
    Inputs.GROUP: {"strategy": "group", "dynamic": True, "group_size": GROUP.columns},
}


def _configuration(contents: Contents) -> dict[str, Any]:
    groups: dict[Scheme, list[str]] = {}
    for path, layer in contents.layers.items():
        groups.setdefault(scheme_of(layer.recipe), []).append(path)
    return {
        "quant_method": NAME,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": _group(scheme, ["Linear"] if len(groups) == 1 else paths)
            for i, (scheme, paths) in enumerate(groups.items())
        },
        "ignore": list(contents.left_out),
        "kv_cache_scheme": dict(CACHE) if contents.kv_scales else None,
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    weights = E4M3_NUMBERS | {"strategy": STRATEGIES[scheme.weight], "dynamic": False}
    if scheme.weight == BLOCK:
        weights["block_structure"] = [BLOCK.rows, BLOCK.columns]
    inputs = INPUTS[scheme.inputs]
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if inputs is None else E4M3_NUMBERS | inputs,
        "output_activations": None,
    }


def _refusal_reason(layer: FP8Layer) -> str | None:
    columns = layer.weight.shape[1]
    if scheme_of(layer.recipe).inputs is Inputs.GROUP and columns % GROUP.columns:
        return (
            f"its inputs have {columns} features, not a multiple of {GROUP.columns}, which compressed-tensors cannot "
            "divide into groups; use a scale a row, or the format hf-fp8"
        )
    return None


def _layout(config: Mapping[str, Any], linears: Sequence[str], _: Path) -> Layout:
    if config.get("format") != FORMAT:
        raise damaged("format", config.get("format"), f"{FORMAT!r}: weights as FP8 codes")
    _check_dense(config)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise damaged("config_groups", groups, "groups of layers by name")
    ignored = _targets("ignore", config)
    schemes = [(_targets("targets", group), _scheme(group)) for group in groups.values()]
    recipes = {}
    for path in linears:
        if any(_matches(target, path) for target in ignored):
            continue
        # A path takes precedence over an expression, and an expression over a class.
        matches = sorted(
            (_rank(target), i) for i, (targets, _) in enumerate(schemes) for target in _matching_targets(targets, path)
        )
        if matches:
            recipes[path] = schemes[matches[0][1]][1].recipe
    kv_scheme = config.get("kv_cache_scheme")
    if kv_scheme is not None and not _is_supported_cache(kv_scheme):
        raise damaged("kv_cache_scheme", kv_scheme, "symmetric E4M3, a static scale for keys and one for values")
    return Layout(recipes=recipes, has_kv_scales=kv_scheme is not None)


def _check_dense(config: Mapping[str, Any]) -> None:
    """Raise if weights are sparse or transformed; a sparsity_config may state that they are dense."""
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == DENSE):
        sparsity_format = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
        raise damaged("the format of its sparsity_config", sparsity_format, f"{DENSE!r}, weights without sparsity")
    if config.get("transform_config"):
        raise damaged("transform_config", config["transform_config"], "weights that are not transformed")


def _targets(key: str, config: Mapping[str, Any]) -> list[str]:
    """Names and valid regular expressions."""
    targets = names_in(key, config.get(key))
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise damaged(key, target, f"regular expressions; this one is invalid: {error}") from error
    return targets


def _matching_targets(targets: Sequence[str], path: str) -> Iterator[str]:
    return (target for target in targets if target == "Linear" or _matches(target, path))


def _matches(target: str, path: str) -> bool:
    return bool(re.match(target.removeprefix("re:"), path)) if target.startswith("re:") else target == path


def _rank(target: str) -> int:
    return 2 if target == "Linear" else 1 if target.startswith("re:") else 0


def _is_supported_cache(args: object) -> bool:
    """Report whether a KV-cache scheme is supported; missing keys have the defaults of compressed-tensors."""
    if not isinstance(args, Mapping):
        return False
    scheme = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False} | dict(args)
    return all(scheme[key] == value for key, value in CACHE.items())


def _scheme(group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if group.get("output_activations") is not None:
        raise damaged("output_activations", group["output_activations"], "none")
    if group.get("format") not in (None, FORMAT):
        raise damaged("a group's format", group["format"], repr(FORMAT))
    for role, args in (("weights", weights), ("input_activations", inputs)):
        if args is None and role == "input_activations":
            continue
        if not isinstance(args, Mapping) or any(args.get(key) != value for key, value in E4M3_NUMBERS.items()):
            raise damaged(role, args, "symmetric E4M3 (num_bits 8, type float)")
    assert isinstance(weights, Mapping)
    granularity = {strategy: each for each, strategy in STRATEGIES.items()}.get(str(weights.get("strategy")))
    if granularity is None or (granularity == BLOCK and weights.get("block_structure") not in ([128, 128], (128, 128))):
        raise damaged("weights", weights, "the strategies tensor, channel and block with block_structure [128, 128]")
    return matched_scheme(NAME, Scheme(weight=granularity, inputs=_inputs(inputs)), SCHEMES)


def _inputs(args: Mapping[str, Any] | None) -> Inputs:
    if args is None:
        return Inputs.HIGH_PRECISION
    for inputs, expected in INPUTS.items():
        if expected is not None and all(args.get(key, False) == value for key, value in expected.items()):
            return inputs
    raise damaged("input_activations", dict(args), "static per tensor, dynamic per token, and dynamic per group of 128")


COMPRESSED_TENSORS = FileFormat(
    name=NAME,
    quant_method=NAME,
    names=NAMES[NAME],
    preset="rowwise",
    schemes=SCHEMES,
    one_scheme=False,
    configuration=_configuration,
    layout=_layout,
    refuses=_refusal_reason,
)
