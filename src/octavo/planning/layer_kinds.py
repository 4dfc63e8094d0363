"""Layers of a model by kind, from its configuration: full and windowed attention, Mamba and linear attention.

Configurations list kinds (``layer_types``, Nemotron-H's pattern of letters) or say after how many layers one comes
(``attn_layer_period``, ``full_attention_interval``, ``sliding_window_pattern``). A mixer that none of this places is
refused, since a shape without it would be silently wrong.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.planning.model_shapes import MOST

__all__ = ["layers_by_kind", "number_of"]

WINDOWED = ("sliding_attention", "chunked_attention")
MIXERS = ("mamba", "linear_attention")
KINDS = ("full_attention", "attention", *WINDOWED, *MIXERS)
UNREAD = re.compile(r"mamba|rwkv|ssm_|state_size|lightning|linear_attn|conv_l_cache|attn_type_list|xlstm|recurrent")


def number_of(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of several names that is a number, 0 if none is.

    Raises:
        ConfigError: it is out of range.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise ConfigError(f"{name} of the configuration differs from layer to layer, which is not modelled")
            value = value[0]
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            if not 0 <= value <= MOST:
                raise ConfigError(f"{name} of the configuration is {value}, which is not between 0 and {MOST:,}")
            return int(value)
    return 0


def layers_by_kind(config: Mapping[str, Any], numbers: Mapping[str, int], *, name: str) -> dict[str, int]:
    """Return the fields of a shape that say how many layers have what.

    Args:
        config: of the model.
        numbers: of its layers, width and window.
        name: of the model, for messages.

    Raises:
        ConfigError: it has layers of a kind that is not modelled.
    """
    if config.get("is_encoder_decoder") is True:
        raise ConfigError(f"{name!r} has an encoder and a decoder, which is not modelled")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "M" in pattern:
        return _of_letters(config, pattern)
    kinds = _kinds(config, numbers["layers"])
    unknown = sorted(set(kinds) - set(KINDS))
    mixers = sum(kind in MIXERS for kind in kinds)
    if not unknown and not mixers:
        unknown = sorted(key for key in (*config, str(config.get("model_type", ""))) if UNREAD.search(key.lower()))
    if unknown:
        raise ConfigError(f"{name!r} has layers that are not modelled: {', '.join(unknown)[:80]}")
    found = {"window_layers": sum(kind in WINDOWED for kind in kinds)} if kinds else {}
    if config.get("use_sliding_window") is False:
        found["window"] = 0
    if not mixers:
        return found
    sizes = _linear_attention(config) if "linear_num_value_heads" in config else _mamba(config, numbers["hidden"])
    if not sizes["mamba_width"]:
        raise ConfigError(f"{name!r} has {mixers} layers of a mixer whose sizes are not known")
    return found | {"attention_layers": len(kinds) - mixers, "mamba_layers": mixers} | sizes


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of every layer; empty where the configuration does not tell them apart."""
    listed = config.get("layer_types")
    if isinstance(listed, list) and listed:
        return [str(kind) for kind in listed][:layers]
    indices = config.get("attn_layer_indices")
    if isinstance(indices, list):
        return ["full_attention" if layer in indices else "mamba" for layer in range(layers)]
    for key, usual in (
        ("attn_layer_period", "mamba"),
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
    ):
        period = number_of(config, (key,))
        if period:
            return ["full_attention" if layer % period == period - 1 else usual for layer in range(layers)]
    return []


def _linear_attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Gated DeltaNet: values as wide as a Mamba-2 mixer, queries and keys as its two states."""
    return {
        "mamba_width": number_of(config, ("linear_num_value_heads",)) * number_of(config, ("linear_value_head_dim",)),
        "mamba_state": number_of(config, ("linear_key_head_dim",)),
        "mamba_groups": max(1, number_of(config, ("linear_num_key_heads",))),
    }


def _mamba(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
    """Mamba-2 of Granite 4 and Bamba, or Mamba-1 of Jamba, which has one group."""
    width = number_of(config, ("mamba_n_heads",)) * number_of(config, ("mamba_d_head",))
    return {
        "mamba_width": width or hidden * number_of(config, ("mamba_expand",)),
        "mamba_state": number_of(config, ("mamba_d_state",)),
        "mamba_groups": max(1, number_of(config, ("mamba_n_groups",))),
    }


def _of_letters(config: Mapping[str, Any], pattern: str) -> dict[str, int]:
    """Nemotron-H's pattern: M for Mamba-2, * for attention, - for an MLP, E for experts; a layer has one of them."""
    return {
        "attention_layers": pattern.count("*"),
        "mlp_layers": pattern.count("-") + pattern.count("E"),
        "mamba_layers": pattern.count("M"),
        "mamba_width": number_of(config, ("mamba_num_heads",)) * number_of(config, ("mamba_head_dim",)),
        "mamba_state": number_of(config, ("ssm_state_size",)),
        "mamba_groups": max(1, number_of(config, ("n_groups",))),
    }
