"""Models of transformers as octavo's Llama, which the engine runs: what fits, and why others do not.

| type          | MLP     | differs from Llama by                                                    |
|---------------|---------|--------------------------------------------------------------------------|
| llama, qwen2  | one     | biases, heads of any width                                               |
| mistral       | one     | heads of any width                                                       |
| qwen3         | one     | norms of each head's queries and keys, heads of any width, biases        |
| mixtral       | experts |                                                                          |
| qwen2_moe     | experts | biases, an expert that every token goes to                               |
| qwen3_moe     | experts | norms of each head's queries and keys, heads of any width, biases        |
| olmoe         | experts | norms of a token's queries and keys over all heads, biases               |

Some layers of qwen2_moe and qwen3_moe may have one MLP.
Modules are moved, not copied: layers that store FP8 codes keep them. Experts in one weight become linear layers of
their own first (:mod:`octavo.convert.unfused_experts`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.checkpoints import plain_configuration
from octavo.convert import UnfusedExperts, unfuse_experts
from octavo.errors import CheckpointError, ConfigError
from octavo.models import Llama, LlamaConfig
from octavo.models.llama_folder import ROPE_TYPES, rope_scaling_of, shape_from_record
from octavo.models.sources import INSTALL

__all__ = ["as_llama", "check_configuration", "why_not_llama"]


class _Mixture(NamedTuple):
    width: str  # setting with the width inside an expert
    qk_norm: str | None
    shared: str | None = None  # setting with the width inside the expert that every token goes to


_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTURES = {
    "mixtral": _Mixture("intermediate_size", None),
    "qwen2_moe": _Mixture("moe_intermediate_size", None, "shared_expert_intermediate_size"),
    "qwen3_moe": _Mixture("moe_intermediate_size", "head"),
    "olmoe": _Mixture("intermediate_size", "row"),
}
_SHARED = "it has experts that every token goes to"
_OTHER_EXPERTS = {
    "n_shared_experts": _SHARED,
    "num_shared_experts": _SHARED,
    "moe_num_shared_experts": _SHARED,
    "shared_expert_intermediate_size": _SHARED,
    "shared_intermediate_size": _SHARED,
    "n_group": "its router chooses experts by groups",
    "swiglu_limit": "its experts have biases and clamp their activations",
}
_OTHER_LAYERS = {
    "sliding_window": "its attention has a sliding window",
    "clip_qkv": "its attention clips queries, keys and values",
    "kv_lora_rank": "its attention reads compressed keys and values",
}
_OF_TYPES = {"gpt_oss": ["its attention has sinks"]}  # what no setting says


def as_llama(model: nn.Module, source: str) -> Llama:
    """Move the modules of a model of transformers to octavo's Llama; the given model is not usable afterwards.

    Args:
        model: of a type in the table above, on a CPU, in high precision or with layers that store FP8 codes.
        source: for messages.

    Raises:
        CheckpointError: another architecture, with the property that octavo's Llama does not compute.
    """
    reason, shape = _layout(model.config)
    if reason is None:
        kept = unfuse_experts(model)
        reason = next((f"{why}, at {path}" for path, why in kept.items()), None)
    if reason is None and shape is not None:
        with torch.device("meta"):
            llama = Llama(shape)
        reason = _move(model, llama)
    if reason is not None:
        raise _refusal(source, reason)
    assert shape is not None
    llama.model.cos, llama.model.sin = shape.rotary_table()
    return llama.eval()


def check_configuration(folder: Path) -> None:
    """Refuse a Hugging Face folder that :func:`as_llama` would refuse by its configuration, before weights are read.

    Raises:
        CheckpointError: transformers cannot read the configuration, or octavo's Llama does not compute the model.
        ConfigError: transformers is needed and not installed.
    """
    source, plain = str(folder), plain_configuration(folder)
    if plain.get("model_type") in _DENSE:  # octavo may read these without transformers
        return
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(f"{source!r} is read with transformers, which is not installed; {INSTALL}") from error
    try:
        config = AutoConfig.for_model(**plain)
    except Exception as error:  # transformers and its readers raise any exception
        raise CheckpointError(f"transformers cannot read {source!r}: {' '.join(str(error).split())}") from error
    reason = why_not_llama(config)
    if reason is not None:
        raise _refusal(source, reason)


def _refusal(source: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source!r} cannot be served: {reason}; octavo serves only models of the Llama layout")


def why_not_llama(config: Any) -> str | None:
    """Reason why octavo's Llama does not compute a model, by its configuration; None if it does."""
    return _layout(config)[0]


def _layout(config: Any) -> tuple[str | None, LlamaConfig | None]:
    reason = next(_reasons(config), None)
    if reason is not None:
        return reason, None
    if config.model_type in _MIXTURES:
        try:
            return None, _mixture_shape(config)
        except (ConfigError, KeyError, TypeError, ZeroDivisionError) as error:
            return str(error), None
    shape = shape_from_record(config.to_dict())
    return ("its configuration has settings that octavo's Llama does not support" if shape is None else None), shape


def _reasons(config: Any) -> Iterator[str]:
    """Properties that octavo's Llama does not compute, the most telling first."""
    settings, model_type = config.to_dict(), config.model_type
    shared = _MIXTURES[model_type].shared if model_type in _MIXTURES else None
    others = [
        f"{words} ({name} is {settings[name]})"
        for name, words in _OTHER_EXPERTS.items()
        if settings.get(name) and name != shared and (name, settings[name]) != ("n_group", 1)
    ]
    if others or settings.get("kv_lora_rank"):
        attention = [*_OF_TYPES.get(model_type, []), *_other_layers(settings), *_other_rotation(config)]
        yield ", and ".join(each for each in (" and ".join(others), ", ".join(attention)) if each)
    if model_type not in (*_DENSE, *_MIXTURES):
        types = ", ".join(map(repr, (*_DENSE, *_MIXTURES)))
        yield f"its type is {model_type!r}, not one of {types}"
        return  # which may lack the settings below
    if config.hidden_act != "silu":
        yield f"its MLP has {config.hidden_act!r}, not 'silu'"
    yield from _other_rotation(config)
    if model_type in (*_MIXTURES, "mistral"):
        yield from _other_layers(settings)


def _other_rotation(config: Any) -> Iterator[str]:
    """Rotary positions that octavo's Llama does not compute."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ROPE_TYPES:
        yield f"its rotary positions are {kind!r}, not {' or '.join(map(repr, ROPE_TYPES))}"


def _other_layers(settings: Mapping[str, Any]) -> Iterator[str]:
    """Properties of attention that octavo's Llama does not compute."""
    usual, context = {}, settings.get("max_position_embeddings")
    if context is not None and (settings.get("sliding_window") or 0) >= context:  # which hides no token
        usual["sliding_window"] = settings["sliding_window"]
    for name, words in _OTHER_LAYERS.items():
        if settings.get(name) and settings[name] != usual.get(name):
            yield f"{words} ({name} is {settings[name]})"


def _mixture_shape(config: Any) -> LlamaConfig:
    mixture, has_biases = _MIXTURES[config.model_type], bool(getattr(config, "attention_bias", False))
    dense = _dense_layers(config)
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, mixture.width),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        max_positions=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        rope_scaling=rope_scaling_of(config.rope_parameters),
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_word_embeddings,
        qkv_bias=has_biases or bool(getattr(config, "qkv_bias", False)),
        out_bias=has_biases,
        head_size=getattr(config, "head_dim", None),
        qk_norm=mixture.qk_norm,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        normalize_shares=getattr(config, "norm_topk_prob", True),  # Mixtral always does
        dense_layers=dense,
        dense_size=config.intermediate_size if dense else None,
        shared_size=None if mixture.shared is None else getattr(config, mixture.shared),
    )


def _dense_layers(config: Any) -> tuple[int, ...]:
    """Layers with one MLP: those in ``mlp_only_layers``, and all but every ``decoder_sparse_step``-th."""
    alone, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return tuple(i for i in range(config.num_hidden_layers) if i in alone or (i + 1) % step)


def _move(model: nn.Module, llama: Llama) -> str | None:
    """Give ``llama`` the layers and parameters of ``model``; returns the reason if they are others."""
    given, expected = _parts(model, _expert_names(model)), _parts(llama, {})
    if different := sorted(given.keys() ^ expected.keys()):
        return f"it has other tensors, such as {different[0]}"
    if different := [name for name, part in given.items() if _shapes(part) != _shapes(expected[name])]:
        return f"its tensors have other shapes, such as {different[0]}"
    for name, part in given.items():
        if isinstance(part, nn.Module):
            llama.set_submodule(name, part)
        else:
            path, _, leaf = name.rpartition(".")
            setattr(llama.get_submodule(path), leaf, part)
    return None


def _parts(model: nn.Module, names: Mapping[str, str]) -> dict[str, nn.Module | nn.Parameter]:
    """Linear layers and embeddings by path, and all other parameters by name; ``names`` are other paths of some."""
    parts = dict[str, nn.Module | nn.Parameter]()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            parts[names.get(path, path)] = module
        else:
            parts |= {f"{path}.{leaf}": parameter for leaf, parameter in module.named_parameters(recurse=False)}
    return parts


def _shapes(part: nn.Module | nn.Parameter) -> tuple[object, ...]:
    """Sizes, of a linear layer also where it stores codes."""
    match part:
        case nn.Linear():
            return part.out_features, part.in_features, part.bias is not None
        case nn.Embedding():
            return part.num_embeddings, part.embedding_dim
        case nn.Parameter():
            return tuple(part.shape)
    raise TypeError(type(part))  # _parts gives no others


def _expert_names(model: nn.Module) -> dict[str, str]:
    """Path in octavo's Llama of each expert's layers."""
    return {
        f"{path}.{expert}.{theirs}": f"{path}.{expert}.{ours}"
        for path, module in model.named_modules()
        if isinstance(module, UnfusedExperts)
        for expert in range(module.num_experts)
        for theirs, ours in zip(
            (*module.up_names, module.down_name), ("gate_proj", "up_proj", "down_proj"), strict=False
        )
    }
