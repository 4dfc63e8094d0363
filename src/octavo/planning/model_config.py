"""Shapes of models from a ``config.json`` of Hugging Face, or from the folder that has one."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, DataError
from octavo.parsing import read_object
from octavo.planning.model_names import find_model
from octavo.planning.model_shapes import ModelShape

__all__ = ["load_shape", "shape_of_config"]

# Names of a number in the configurations of different model types; the first that is there counts.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size", "num_labels"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "ffn_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "dense_layers": ("first_k_dense_replace",),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
    "window": ("sliding_window",),
    "mtp_layers": ("num_nextn_predict_layers",),
    "expert_hidden": ("moe_latent_size",),
}
NOT_GATED = ("gpt", "mpt", "opt", "bloom", "falcon", "nemotron", "phi-", "vit", "bert", "dit", "starcoder", "gpt_neox")
ENCODERS = ("vit", "bert", "dit", "siglip", "clip")
MOST = 1 << 24  # of any number of a configuration


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model: a name, a ``config.json``, or a folder that has one.

    Raises:
        ConfigError: the name is unknown, or the configuration lacks a number.
        DataError: the file is damaged.
        OSError: it cannot be opened.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        return find_model(model)
    try:
        config = read_object(path, allow_nan=True)
    except DataError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}; give a model's config.json") from error
    return shape_of_config(config, name=path.parent.name or path.stem)


def shape_of_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape that a configuration describes.

    Raises:
        ConfigError: a number is missing or out of range.

    Example:
        >>> numbers = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
        >>> shape_of_config(numbers | {"intermediate_size": 256, "model_type": "llama"}, name="small").parameters
        143872
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    numbers: dict[str, Any] = {field: _number(config, names) for field, names in NAMES.items()}
    missing = [field for field in ("layers", "hidden", "heads", "vocab") if not numbers[field]]
    if missing:
        names = ", ".join(NAMES[missing[0]])
        raise ConfigError(f"the configuration of {name!r} has no number of {missing[0]}; it needs one of {names}")
    kind = str(config.get("model_type", "")).lower()
    numbers["ffn"] = numbers["ffn"] or (0 if numbers["experts"] else 4 * numbers["hidden"])
    numbers |= _experts(config, numbers) | _hybrid(config)
    if numbers["kv_rank"]:
        numbers["head_dim"] = _number(config, ("qk_nope_head_dim",)) + numbers["rope_dim"]
    return ModelShape(
        name=name,
        gated="gated" in str(config.get("feed_forward_proj", "")) or not kind.startswith(NOT_GATED),
        causal=not kind.startswith(ENCODERS),
        tied=config.get("tie_word_embeddings") is True,
        source="its config.json",
        **numbers,
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of several names that is a number, 0 if none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            if not 0 <= value <= MOST:
                raise ConfigError(f"{name} of the configuration is {value}, which is not between 0 and {MOST:,}")
            return int(value)
    return 0


def _experts(config: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    """Numbers of a mixture that configurations express in other units."""
    if not numbers["experts"]:
        return {"expert_ffn": 0, "shared_ffn": 0, "top_k": 0, "dense_layers": 0}
    if numbers["top_k"] > numbers["experts"]:
        raise ConfigError(f"the configuration sends a token to {numbers['top_k']} of {numbers['experts']} experts")
    width = numbers["expert_ffn"] or numbers["ffn"]
    shared = numbers["shared_ffn"] or width * _number(config, ("n_shared_experts",))
    dense = numbers["dense_layers"] if numbers["ffn"] else 0
    return {"expert_ffn": width, "shared_ffn": shared, "top_k": numbers["top_k"] or 1, "dense_layers": dense}


def _hybrid(config: Mapping[str, Any]) -> dict[str, int]:
    """Layers by kind of a hybrid with Mamba-2 layers (Nemotron-H's pattern of letters)."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or "M" not in pattern:
        return {}
    width = _number(config, ("mamba_num_heads",)) * _number(config, ("mamba_head_dim",))
    return {
        "attention_layers": pattern.count("*"),
        "mlp_layers": pattern.count("-") + pattern.count("E"),
        "mamba_layers": pattern.count("M"),
        "mamba_width": width,
        "mamba_state": _number(config, ("ssm_state_size",)),
        "mamba_groups": max(1, _number(config, ("n_groups",))),
    }
