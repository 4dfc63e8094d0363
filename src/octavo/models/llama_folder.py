"""octavo's Llama as an ordinary Hugging Face folder, and back.

| file                  | content                                                                                    |
|-----------------------|--------------------------------------------------------------------------------------------|
| config.json           | the shape, as ``LlamaForCausalLM`` reads it                                                |
| model.safetensors     | the parameters in their own dtype, under their own names, which are Hugging Face's; a tied |
|                       | head once, as the embedding                                                                |
| tokenizer.json        | the tokenizer                                                                              |
| tokenizer_config.json | that it is a fast tokenizer                                                                |

Transformers, and whatever reads its folders, loads it without octavo. Read back by octavo it is the same ``Llama``,
without transformers. Which token ends an answer is not known here, and not written.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, ConfigError
from octavo.models import Llama, LlamaConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["THEIR_NAMES", "read_llama", "read_tokenizer", "write_llama", "write_tokenizer"]

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
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


def write_llama(folder: Path, model: Llama) -> None:
    """Write configuration and weights into an existing folder."""
    config = model.config
    shape = {theirs: getattr(config, ours) for ours, theirs in THEIR_NAMES.items()}
    written = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": str(model.model.embed_tokens.weight.dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        del tensors[HEAD]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read_llama(folder: Path) -> Llama:
    """The model of a folder that :func:`write_llama` wrote, in evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not those of the shape.
    """
    config = _config(folder / CONFIG)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
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


def write_tokenizer(folder: Path, tokenizer: "Tokenizer", *, context: int) -> None:
    """Write the tokenizer as transformers reads it."""
    (folder / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of such a folder.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str((folder / TOKENIZER).read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise CheckpointError(f"{str(folder / TOKENIZER)!r} cannot be read: {error}; write the folder again") from error


def _config(path: Path) -> LlamaConfig:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        return LlamaConfig(**{ours: given[theirs] for ours, theirs in THEIR_NAMES.items()})
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{str(path)!r} is no shape of a Llama: {error!r}; write the folder again") from error
