"""octavo's Llama as an ordinary Hugging Face folder, and back: of the type "llama", or "qwen2" by its biases.

| file                   | content                                                                                    |
|------------------------|--------------------------------------------------------------------------------------------|
| config.json            | the shape, as ``LlamaForCausalLM`` or ``Qwen2ForCausalLM`` reads it                        |
| model.safetensors      | the parameters in their own dtype, under their own names, which are Hugging Face's; a tied |
|                        | head once, as the embedding                                                                |
| tokenizer.json         | the tokenizer                                                                              |
| tokenizer_config.json  | that it is a fast tokenizer, and the tokens at the ends of a text where they are known     |
| generation_config.json | their ids; not there where they are not known                                              |

Transformers, and whatever reads its folders, loads it without octavo. Read back by octavo it is the same ``Llama``,
without transformers.
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
from octavo.parsing import read_object, read_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "config_record",
    "read_llama",
    "read_tokenizer",
    "shape_from_record",
    "write_llama",
    "write_tokenizer",
]

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
GENERATION = "generation_config.json"
QWEN2 = "qwen2"  # queries, keys and values have biases, and nothing else does
HEAD = "lm_head.weight"
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
    """What config.json says of a Llama of this shape, with parameters of this dtype.

    Raises:
        ConfigError: neither type has biases in these places.
    """
    shape = {theirs: getattr(config, ours) for ours, theirs in THEIR_NAMES.items()}
    return {
        **_kind(config),
        **shape,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _kind(config: LlamaConfig) -> dict[str, Any]:
    if config.qkv_bias == config.out_bias:
        biases = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **biases}
    if config.qkv_bias and not config.mlp_bias:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": QWEN2, "use_sliding_window": False}
    raise ConfigError(
        "a Hugging Face folder has biases of queries, keys and values alone (qwen2), or of all of attention, or of the "
        f"MLP, or of both (llama), and not qkv_bias={config.qkv_bias}, out_bias={config.out_bias} and "
        f"mlp_bias={config.mlp_bias}"
    )


def _biases(record: Mapping[str, Any]) -> dict[str, bool]:
    """Where a model of this record has biases."""
    if record.get("model_type") == QWEN2:
        return {"qkv_bias": True}
    attention = bool(record.get("attention_bias"))
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": bool(record.get("mlp_bias"))}


def shape_from_record(record: Mapping[str, Any]) -> LlamaConfig | None:
    """The shape that a config.json asks for, where octavo's Llama is just that model; None where it is another.

    Every key is known, or says that what it stands for is left out: nothing that changes the numbers is passed over.

    Raises:
        CheckpointError: its rotary positions are described by no object.
    """
    rope = record.get("rope_parameters") or record.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{CONFIG} has {rope!r} as rope_parameters; they are an object, or left out")
    given = dict(record) | {"rope_theta": record.get("rope_theta", rope.get("rope_theta", 10000.0))}
    given |= {"num_key_value_heads": record.get("num_key_value_heads") or record.get("num_attention_heads")}
    given.setdefault("tie_word_embeddings", False)
    plain = (
        record.get("model_type") in {"llama", QWEN2}
        and record.get("hidden_act", "silu") == "silu"
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and not record.get("use_sliding_window")
        and record.get("pretraining_tp", 1) == 1
    )
    if not plain or not all(theirs in given for theirs in THEIR_NAMES.values()):
        return None
    try:
        shape = LlamaConfig(**{ours: given[theirs] for ours, theirs in THEIR_NAMES.items()}, **_biases(record))
    except (ConfigError, TypeError):
        return None
    return shape if (record.get("head_dim") or shape.head_dim) == shape.head_dim else None


def write_llama(folder: Path, model: Llama) -> None:
    """Write configuration and weights into an existing folder.

    Raises:
        OSError: the disk is full, or refuses otherwise.
    """
    config = model.config
    written = config_record(config, model.model.embed_tokens.weight.dtype)
    _write_json(folder / CONFIG, written)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        del tensors[HEAD]
    with disk_errors(folder / WEIGHTS):
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read_llama(folder: Path) -> Llama:
    """The model of a folder that :func:`write_llama` wrote, in evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not those of the shape.
    """
    config = _config(folder / CONFIG)
    try:
        tensors = read_tensors(folder / WEIGHTS)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(folder / WEIGHTS)!r} cannot be read: {error}; write the folder again") from error
    model = Llama(config)
    model.to(next(iter(tensors.values())).dtype)
    given = set(tensors) | ({HEAD} if config.tie_embeddings else set())
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if given != set(wanted) or any(tensor.shape != wanted[name] for name, tensor in tensors.items()):
        raise CheckpointError(
            f"the weights in {str(folder / WEIGHTS)!r} are not those of the shape in {CONFIG}; write the folder again"
        )
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def write_tokenizer(
    folder: Path, tokenizer: "Tokenizer", *, context: int, bos_id: int | None = None, eos_id: int | None = None
) -> None:
    """Write the tokenizer as transformers reads it, and which tokens begin and end a text where that is known."""
    (folder / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    ends = {name: found for name, found in (("bos", bos_id), ("eos", eos_id)) if found is not None}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    settings |= {f"{name}_token": tokenizer.id_to_token(found) for name, found in ends.items()}
    _write_json(folder / "tokenizer_config.json", settings)
    if ends:
        _write_json(folder / GENERATION, {f"{name}_token_id": found for name, found in ends.items()})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of such a folder.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return parsing.read_tokenizer(folder / TOKENIZER)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{str(folder / TOKENIZER)!r} cannot be read: {error}; write the folder again") from error


def _config(path: Path) -> LlamaConfig:
    try:
        given = read_object(path)
        return LlamaConfig(**{ours: given[theirs] for ours, theirs in THEIR_NAMES.items()}, **_biases(given))
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{str(path)!r} is no shape of a Llama: {error!r}; write the folder again") from error
