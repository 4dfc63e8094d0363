"""Loading of GGUF files, the format of llama.cpp: ``load_gguf`` returns a Llama and its tokenizer.

Differences from octavo's own layout:

- Quantized weights are decoded to the requested dtype, from every encoding that the library ``gguf`` decodes.
- Rows of the query and key projections pair neighbours for the rotary positions; octavo pairs a head's first half with
  its second. The rows are reordered once at loading.
- A file without ``output.weight`` ties the head to the embedding.

Files with features that octavo's Llama does not have raise CheckpointError: other architectures, biases, experts,
scaled rotary positions, heads of another width than hidden_size / num_heads, and unknown settings, which could change
results.

Loading needs the memory of the model and of a few rows: tensors are decoded one at a time from the mapped file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_tokenizer import VOCABULARY, read_tokenizer, token_id
from octavo.models.llama import Llama, LlamaConfig, skip_init

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["GGUFModel", "load_gguf"]

MOST_POSITIONS = 1 << 21
ARCHITECTURE = "llama"
CHAT_TEMPLATE = "tokenizer.chat_template"
SHAPE_SETTINGS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base",
}  # fmt: skip
UNUSED_SETTINGS = {"tensor_data_layout", "expert_used_count"}  # where expert_count is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """Content of a GGUF file.

    Attributes:
        model: the model.
        tokenizer: the tokenizer; adds the begin and end tokens if the file says so.
        bos_id: id of the token that begins a text, or None.
        eos_id: id of the token that ends a text, or None.
        chat_template: Jinja template that renders messages as text, or None.
    """

    model: Llama
    tokenizer: "Tokenizer"
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.float32) -> GGUFModel:
    """Read a Llama-layout .gguf file.

    Args:
        path: the file.
        dtype: dtype of the parameters.

    Raises:
        CheckpointError: the file is not a GGUF file, is damaged, or has an unsupported model or tokenizer.
        ConfigError: ``dtype`` is not a floating dtype of two bytes or more, or the library ``gguf`` is not installed.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"parameters are loaded as float32, bfloat16, float16 or float64, not {dtype}")
    file = GGUFFile(path)
    config, tokenizer = _config(file), read_tokenizer(file)
    return GGUFModel(
        model=_model(file, config, dtype),
        tokenizer=tokenizer,
        bos_id=token_id(file, "bos"),
        eos_id=token_id(file, "eos"),
        chat_template=file.get(CHAT_TEMPLATE, str) if CHAT_TEMPLATE in file.values else None,
    )


def _config(file: GGUFFile) -> LlamaConfig:
    if (architecture := file.get("general.architecture", str)) != ARCHITECTURE:
        raise CheckpointError(
            f"{file.path} holds a model of architecture {architecture!r}; octavo reads {ARCHITECTURE!r}"
        )
    heads = _setting(file, "attention.head_count", int)
    try:
        config = LlamaConfig(
            vocab_size=len(file.get(VOCABULARY, list)),
            hidden_size=_setting(file, "embedding_length", int),
            intermediate_size=_setting(file, "feed_forward_length", int),
            num_layers=_setting(file, "block_count", int),
            num_heads=heads,
            num_kv_heads=_setting(file, "attention.head_count_kv", int, heads),
            max_positions=_setting(file, "context_length", int),
            rope_theta=_setting(file, "rope.freq_base", float, 10000.0),
            rms_norm_eps=_setting(file, "attention.layer_norm_rms_epsilon", float),
            tie_embeddings="output.weight" not in file.tensors,
        )
    except ConfigError as error:
        raise CheckpointError(f"{file.path} holds a model that octavo's Llama does not support: {error}") from error
    if config.num_layers > len(file.tensors):
        raise CheckpointError(
            f"{file.path} is damaged: it declares {config.num_layers} layers and has {len(file.tensors)} tensors"
        )
    if config.max_positions > MOST_POSITIONS:
        raise CheckpointError(
            f"{file.path} declares {config.max_positions} positions, whose rotary table would fill the memory; "
            f"octavo reads models of up to {MOST_POSITIONS}"
        )
    _check_settings(file, config)
    return config


def _setting(file: GGUFFile, name: str, kind: Any, default: Any = None) -> Any:
    return file.get(f"{ARCHITECTURE}.{name}", kind, default)


def _check_settings(file: GGUFFile, config: LlamaConfig) -> None:
    """Raise CheckpointError for settings that would change the model's results."""
    settings = {
        name.removeprefix(f"{ARCHITECTURE}."): value
        for name, value in file.values.items()
        if name.startswith(f"{ARCHITECTURE}.")
    }
    required = {"rope.scaling.type": "none", "expert_count": 0}
    required |= dict.fromkeys(
        ("rope.dimension_count", "attention.key_length", "attention.value_length"), config.head_dim
    )
    for name in settings.keys() & required.keys():
        if settings[name] != required[name]:
            raise CheckpointError(
                f"{file.path} has {settings[name]!r} as {ARCHITECTURE}.{name}; octavo's Llama supports only "
                f"{required[name]!r}"
            )
    unscaled = {name for name in settings if name.startswith("rope.scaling.") and "rope.scaling.type" in settings}
    if unknown := sorted(settings.keys() - SHAPE_SETTINGS - UNUSED_SETTINGS - required.keys() - unscaled):
        raise CheckpointError(
            f"{file.path} has unknown settings, which may change the model's results: "
            + ", ".join(f"{ARCHITECTURE}.{name}" for name in unknown)
        )


def _model(file: GGUFFile, config: LlamaConfig, dtype: torch.dtype) -> Llama:
    stored_names = _stored_tensors(config)
    _check_tensors(file, dict(stored_names.values()))
    with skip_init():  # memory that is never written is never allocated
        model = Llama(config)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for ours, (theirs, _) in stored_names.items():
        weight, head_count = file.tensor(theirs, dtype), heads.get(ours.split(".")[-2])
        model.get_parameter(ours).data = weight if head_count is None else _to_half_pairs(weight, head_count)
    return model


def _stored_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map each parameter's name to its name in the file and its shape."""
    H, inner, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    embedding = (config.vocab_size, H)
    outer = {"model.embed_tokens": ("token_embd", embedding), "model.norm": ("output_norm", (H,))}
    outer |= {} if config.tie_embeddings else {"lm_head": ("output", embedding)}
    layer_tensors = {
        "input_layernorm": ("attn_norm", (H,)),
        "self_attn.q_proj": ("attn_q", (H, H)),
        "self_attn.k_proj": ("attn_k", (kv, H)),
        "self_attn.v_proj": ("attn_v", (kv, H)),
        "self_attn.o_proj": ("attn_output", (H, H)),
        "post_attention_layernorm": ("ffn_norm", (H,)),
        "mlp.gate_proj": ("ffn_gate", (inner, H)),
        "mlp.up_proj": ("ffn_up", (inner, H)),
        "mlp.down_proj": ("ffn_down", (H, inner)),
    }
    layers = {
        f"model.layers.{layer}.{ours}": (f"blk.{layer}.{theirs}", shape)
        for layer in range(config.num_layers)
        for ours, (theirs, shape) in layer_tensors.items()
    }
    return {f"{ours}.weight": (f"{theirs}.weight", shape) for ours, (theirs, shape) in (outer | layers).items()}


def _check_tensors(file: GGUFFile, shapes: dict[str, tuple[int, ...]]) -> None:
    if missing := [name for name in shapes if name not in file.tensors]:
        raise CheckpointError(f"{file.path} has no {_listed(missing)}; it is not a complete Llama")
    if unexpected := sorted(file.tensors.keys() - shapes.keys()):
        raise CheckpointError(
            f"{file.path} has {_listed(unexpected)}, which octavo's Llama does not have: it has no biases, no experts "
            "and no scaled rotary positions"
        )
    for name, shape in shapes.items():
        if (stored_shape := file.tensors[name].shape) != shape:
            raise CheckpointError(f"{file.path} has {name} of shape {stored_shape}; its settings require {shape}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _to_half_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads · D, K] from rotary pairs of neighbours to pairs of a head's first and second half."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
