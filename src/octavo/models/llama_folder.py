"""Hugging Face folders of octavo's Llama: of type "llama", "qwen2" by its biases, or "qwen3" by its norms of queries.

| file                   | content                                                                                    |
|------------------------|--------------------------------------------------------------------------------------------|
| config.json            | the shape, as ``LlamaForCausalLM``, ``Qwen2ForCausalLM`` or ``Qwen3ForCausalLM`` reads it  |
| model.safetensors      | the parameters in their own dtype, under their own names, which are Hugging Face's; a tied |
|                        | head once, as the embedding                                                                |
| tokenizer.json         | the tokenizer                                                                              |
| tokenizer_config.json  | the class of a fast tokenizer, and the begin and end tokens if known                       |
| generation_config.json | ids of the begin and end tokens; only if known                                             |

Transformers loads such a folder without octavo, and octavo reads it without transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from octavo import parsing
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.files import disk_errors
from octavo.models import Llama, LlamaConfig
from octavo.nn import RotaryScaling
from octavo.parsing import read_object, read_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "ROPE_TYPES",
    "config_record",
    "read_llama",
    "read_tokenizer",
    "rope_scaling_of",
    "shape_from_record",
    "write_llama",
    "write_tokenizer",
]

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
GENERATION = "generation_config.json"
QWEN2 = "qwen2"  # queries, keys and values have biases, and nothing else does
QWEN3 = "qwen3"  # queries and keys have norms of each head
MISTRAL = "mistral"  # a Llama whose attention may have a sliding window; read only
HEAD_SIZES = {QWEN3: 128}  # of a config.json without head_dim; elsewhere hidden_size / num_heads
HEAD = "lm_head.weight"
ROPE_TYPES = ("default", "llama3")
DEFAULT, LLAMA3 = ROPE_TYPES
SCALING_NAMES = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
SAME_IN_BOTH = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")
THEIR_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    **{name: name for name in SAME_IN_BOTH},
}


def config_record(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Content of config.json for a Llama of this shape and dtype.

    Raises:
        ConfigError: no type has this combination of biases, experts and norms of queries.
    """
    shape = {theirs: getattr(config, ours) for ours, theirs in THEIR_NAMES.items()}
    return {
        **_type_record(config),
        **shape,
        "rope_parameters": _rope_record(config),
        "hidden_act": "silu",
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rope_record(config: LlamaConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": DEFAULT, "rope_theta": config.rope_theta}
    numbers = {theirs: getattr(scaling, ours) for ours, theirs in SCALING_NAMES.items()}
    return {"rope_type": LLAMA3, "rope_theta": config.rope_theta, **numbers}


def rope_scaling_of(rope: Mapping[str, Any]) -> RotaryScaling | None:
    """Scaling of a config.json's rope_parameters, of one of ``ROPE_TYPES``.

    Raises:
        KeyError: a number is missing.
        ConfigError: a number is not positive.
    """
    if rope.get("rope_type", rope.get("type", DEFAULT)) == DEFAULT:
        return None
    return RotaryScaling(**{ours: rope[theirs] for ours, theirs in SCALING_NAMES.items()})


def _type_record(config: LlamaConfig) -> dict[str, Any]:
    if config.num_experts or config.qk_norm == "row":
        raise ConfigError(
            "octavo writes no Hugging Face folder of a Llama with experts or with qk_norm='row'; keep the folder that "
            "it was read from"
        )
    of_layers = {"attention_bias": config.qkv_bias, "head_dim": config.head_dim}
    one_bias = config.qkv_bias == config.out_bias
    if config.qk_norm and one_bias and not config.mlp_bias:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": QWEN3, "use_sliding_window": False, **of_layers}
    if one_bias and not config.qk_norm:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": config.mlp_bias, **of_layers
        }  # fmt: skip
    has_usual_heads = config.head_dim == config.hidden_size // config.num_heads
    if config.qkv_bias and not (config.mlp_bias or config.qk_norm) and has_usual_heads:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": QWEN2, "use_sliding_window": False}
    raise ConfigError(
        "a Hugging Face folder can have biases of queries, keys and values alone (qwen2, without a head_size), of all "
        "of attention (llama, or with qk_norm='head' qwen3), of the MLP or both (llama), but not "
        f"qkv_bias={config.qkv_bias}, out_bias={config.out_bias} and mlp_bias={config.mlp_bias} with "
        f"qk_norm={config.qk_norm!r} and head_size={config.head_size}"
    )


def _type_arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    """Biases, norms and head width of LlamaConfig for a config.json."""
    model_type = record.get("model_type")
    if model_type == QWEN2:
        biases = {"qkv_bias": True}
    else:
        attention = bool(record.get("attention_bias"))
        biases = {"qkv_bias": attention, "out_bias": attention}
        biases |= {} if model_type == QWEN3 else {"mlp_bias": bool(record.get("mlp_bias"))}
    usual = record["hidden_size"] // record["num_attention_heads"]
    head_size = record.get("head_dim") or HEAD_SIZES.get(model_type or "", usual)
    return {**biases, "head_size": None if head_size == usual else head_size} | (
        {"qk_norm": "head"} if model_type == QWEN3 else {}
    )


def shape_from_record(record: Mapping[str, Any]) -> LlamaConfig | None:
    """Return the shape in a config.json, or None if octavo's Llama does not compute that model exactly.

    Raises:
        CheckpointError: the rotary parameters are not an object.
    """
    rope = record.get("rope_parameters") or record.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{CONFIG} has {rope!r} as rope_parameters, which must be an object or left out")
    settings = dict(record) | {"rope_theta": record.get("rope_theta", rope.get("rope_theta", 10000.0))}
    settings |= {"num_key_value_heads": record.get("num_key_value_heads") or record.get("num_attention_heads")}
    settings.setdefault("tie_word_embeddings", False)
    is_supported = (
        record.get("model_type") in {"llama", MISTRAL, QWEN2, QWEN3}
        and record.get("hidden_act", "silu") == "silu"
        and rope.get("rope_type", rope.get("type", DEFAULT)) in ROPE_TYPES
        and not _hides_tokens(record)
        and record.get("pretraining_tp", 1) == 1
    )
    if not is_supported or not all(theirs in settings for theirs in THEIR_NAMES.values()):
        return None
    try:
        return _shape(settings, rope)
    except (ConfigError, KeyError, TypeError, ZeroDivisionError):
        return None


def _shape(record: Mapping[str, Any], rope: Mapping[str, Any]) -> LlamaConfig:
    common = {ours: record[theirs] for ours, theirs in THEIR_NAMES.items()}
    return LlamaConfig(**common, **_type_arguments(record), rope_scaling=rope_scaling_of(rope))


def _hides_tokens(record: Mapping[str, Any]) -> bool:
    """Return whether attention has a sliding window that is shorter than the longest sequence."""
    if record.get("model_type") != MISTRAL:
        return bool(record.get("use_sliding_window"))
    window, longest = record.get("sliding_window", 4096), record.get("max_position_embeddings")  # Mistral 7B's
    return window is not None and not (isinstance(longest, int) and isinstance(window, int) and window >= longest)


def write_llama(folder: Path, model: Llama) -> None:
    """Write configuration and weights into an existing folder.

    Raises:
        OSError: the files cannot be written.
    """
    config = model.config
    record = config_record(config, model.model.embed_tokens.weight.dtype)
    _write_json(folder / CONFIG, record)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        del tensors[HEAD]
    with disk_errors(folder / WEIGHTS):
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read_llama(folder: Path) -> Llama:
    """Read the model of a folder that :func:`write_llama` wrote, in evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights do not match the shape.
    """
    config = _config(folder / CONFIG)
    try:
        tensors = read_tensors(folder / WEIGHTS)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(folder / WEIGHTS)!r} cannot be read: {error}; write the folder again") from error
    model = Llama(config)
    model.to(next(iter(tensors.values())).dtype)
    stored_names = set(tensors) | ({HEAD} if config.tie_embeddings else set())
    expected_shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if stored_names != set(expected_shapes) or any(
        tensor.shape != expected_shapes[name] for name, tensor in tensors.items()
    ):
        raise CheckpointError(
            f"the weights in {str(folder / WEIGHTS)!r} do not match the shape in {CONFIG}; write the folder again"
        )
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def write_tokenizer(
    folder: Path, tokenizer: "Tokenizer", *, context: int, bos_id: int | None = None, eos_id: int | None = None
) -> None:
    """Write the tokenizer in transformers' format, with the begin and end tokens if known."""
    (folder / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    ends = {name: token for name, token in (("bos", bos_id), ("eos", eos_id)) if token is not None}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    settings |= {f"{name}_token": tokenizer.id_to_token(token) for name, token in ends.items()}
    _write_json(folder / "tokenizer_config.json", settings)
    if ends:
        _write_json(folder / GENERATION, {f"{name}_token_id": token for name, token in ends.items()})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> "Tokenizer":
    """Read the tokenizer of such a folder.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return parsing.read_tokenizer(folder / TOKENIZER)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(folder / TOKENIZER)!r} cannot be read: {error}; write the folder again") from error


def _config(path: Path) -> LlamaConfig:
    try:
        record = read_object(path)
        return _shape(record, record.get("rope_parameters") or {})
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not the configuration of a Llama: {error!r}; write the folder again"
        ) from error
