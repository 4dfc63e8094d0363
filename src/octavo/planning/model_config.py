"""Shapes of models from a ``config.json`` of Hugging Face, or from the folder that has one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, DataError
from octavo.parsing import read_object
from octavo.planning.layer_kinds import layers_by_kind, number_of
from octavo.planning.model_names import find_model
from octavo.planning.model_shapes import ModelShape
from octavo.planning.model_types import ENCODERS, causal_and_gated

__all__ = ["load_shape", "shape_of_config"]

# Names of a number in the configurations of different model types; the first that is there counts.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size", "num_labels"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "ffn_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
    "window": ("sliding_window", "attention_chunk_size"),
    "mtp_layers": ("num_nextn_predict_layers",),
    "expert_hidden": ("moe_latent_size",),
}
SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
TIED = ("gemma", "gpt2", "gpt_bigcode", "mpt", "opt", "bloom", "falcon", "cohere")  # unless their configuration says


def load_shape(model: str) -> ModelShape:
    """Return the shape of a model: a name, a ``config.json``, or a folder that has one.

    Raises:
        ConfigError: the name is empty or unknown, or the configuration lacks a number.
        DataError: the file is damaged.
        OSError: it cannot be opened.
    """
    if not model.strip():
        raise ConfigError("the model's name is empty; give a name, a config.json, or a folder that has one")
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        if model.startswith((".", "/", "~")):
            raise ConfigError(
                f"there is no folder {model!r}; give a model's name, its config.json, or a folder that has one"
            )
        return find_model(model)
    try:
        config = read_object(path, allow_nan=True)
    except DataError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}; give a model's config.json") from error
    return shape_of_config(config, name=path.parent.name or path.stem)


def shape_of_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape that a configuration describes.

    Raises:
        ConfigError: a number is missing or out of range, or the model's type is not known.

    Example:
        >>> numbers = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
        >>> shape_of_config(numbers | {"intermediate_size": 256, "model_type": "llama"}, name="small").parameters
        143872
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**inner, "architectures": config.get("architectures") or inner.get("architectures")}
    for part in ("ffn_config", "attn_config"):  # of DBRX
        nested = config.get(part)
        config = {**nested, **config} if isinstance(nested, Mapping) else config
    if config.get("block_configs"):
        raise ConfigError(f"{name!r} has blocks of different shapes (block_configs), which are not modelled")
    kind = str(config.get("model_type") or config.get("_class_name") or "").lower()
    numbers = {field: number_of(config, names) for field, names in NAMES.items()}
    numbers["hidden"] = numbers["hidden"] or numbers["heads"] * numbers["head_dim"]
    if not numbers["vocab"] and kind in ENCODERS:
        numbers["vocab"] = _outputs(config)
    missing = [field for field in ("layers", "hidden", "heads", "vocab") if not numbers[field]]
    if missing:
        names = ", ".join(NAMES[missing[0]])
        raise ConfigError(f"the configuration of {name!r} has no number of {missing[0]}; it needs one of {names}")
    causal, gated = causal_and_gated(config, kind=kind, name=name)
    numbers["ffn"] = numbers["ffn"] or (0 if numbers["experts"] else 4 * numbers["hidden"])
    if config.get("use_swiglu_ffn") is True:  # DINOv2: two thirds of the width without a gate
        numbers["ffn"] = 8 * ((2 * numbers["ffn"] // 3 + 7) // 8)
    numbers |= _experts(config, numbers) | layers_by_kind(config, numbers, name=name)
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        numbers["kv_heads"] = 1
    if numbers["kv_rank"]:
        numbers["head_dim"] = number_of(config, ("qk_nope_head_dim",)) + numbers["rope_dim"]
    sizes: dict[str, Any] = numbers
    return ModelShape(
        name=name,
        gated=gated,
        causal=causal,
        tied=config.get("tie_word_embeddings", kind.startswith(TIED)) is True,
        source="its config.json",
        **sizes,
    )


def _outputs(config: Mapping[str, Any]) -> int:
    """Classes of an encoder, or numbers of a patch that a diffusion model predicts; 1,000 if nothing says."""
    labels = config.get("id2label")
    patch = number_of(config, ("out_channels",)) * number_of(config, ("patch_size",)) ** 2
    return (len(labels) if isinstance(labels, Mapping) else 0) or patch or 1000


def _experts(config: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, int]:
    """Numbers of a mixture that configurations express in other units."""
    if not numbers["experts"]:
        ffn = number_of(config, ("shared_intermediate_size",)) or numbers["ffn"]  # Granite 4's one MLP
        return {"ffn": ffn, "expert_ffn": 0, "shared_ffn": 0, "top_k": 0, "dense_layers": 0}
    if numbers["top_k"] > numbers["experts"]:
        raise ConfigError(f"the configuration sends a token to {numbers['top_k']} of {numbers['experts']} experts")
    width = numbers["expert_ffn"] or numbers["ffn"]
    shared = numbers["shared_ffn"] or width * number_of(config, SHARED)
    if str(config.get("model_type", "")).startswith(("llama4", "hunyuan")):  # one, of which no key tells
        shared = width
    ffn = number_of(config, ("intermediate_size_mlp",)) or numbers["ffn"]
    dense = _dense_layers(config, numbers)
    sizes = {"ffn": ffn, "expert_ffn": width, "shared_ffn": shared, "top_k": numbers["top_k"] or 1}
    return sizes | {"dense_layers": dense if ffn else 0}


PERIODS = ("expert_layer_period", "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq")


def _dense_layers(config: Mapping[str, Any], numbers: Mapping[str, int]) -> int:
    """Layers of a mixture without experts: the first ones, all but one of a period, and those that are listed."""
    layers, first = numbers["layers"], numbers["dense_layers"]
    period = number_of(config, PERIODS) or 1
    listed = config.get("mlp_only_layers")
    dense = set(listed) if isinstance(listed, list) else set()
    starts_period = not any(config.get(name) for name in PERIODS[:3])  # moe_layer_freq counts from the first layer
    dense |= {layer for layer in range(layers) if layer % period != (0 if starts_period else period - 1)}
    return len({layer for layer in dense if layer in range(layers)} | set(range(min(first, layers))))
