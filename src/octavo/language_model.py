"""A language model from where the user has it: a run of octavo's, a Hugging Face folder, a .gguf file.

| MODEL                                          | read by                                          |
|------------------------------------------------|--------------------------------------------------|
| a run's folder (config.toml, checkpoints/)     | ``octavo.training.run_folder``                   |
| a Hugging Face folder (config.json)            | ``transformers.AutoModelForCausalLM``            |
| one in FP8 (``octavo export``, and the like)   | ``octavo.load_quantized``                        |
| a .gguf file of the Llama layout               | ``octavo.models.load_gguf``                      |
| a name on Hugging Face's hub, "org/name"         | as a folder, out of the hub's cache            |

:mod:`octavo.models.sources` tells them apart. Weights are safetensors or GGUF, never a pickle, and no code of a model
is run.

All of them give token ids [B, T] → logits [B, T, V] and a tokenizer, in FP32: a run's layers are plain again, with the
weights it was trained to. A folder in FP8 keeps its codes, and computes as its format says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.checkpoints import QuantizedModel, check_no_codes, is_quantized, load_quantized
from octavo.checksums import check_sums
from octavo.convert import restore
from octavo.errors import CheckpointError, ConfigError
from octavo.models import Llama, load_gguf
from octavo.models.cache_transforms import KVTransform, TransformedCache, cache_of_transformers
from octavo.models.sources import INSTALL, SourceKind, kind_of, located
from octavo.training.config import Device
from octavo.training.precision import resolve_device
from octavo.training.run_folder import load_run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "KVTransform",
    "LanguageModel",
    "LogitsModule",
    "from_quantized",
    "load_language_model",
    "logits_of",
    "stepwise_logits",
]

ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A decoder and its tokenizer.

    Attributes:
        model: in evaluation mode.
        tokenizer: text to ids.
        context: the most tokens it reads at once.
        source: where it came from.
        bos_id: the token that begins a text; None where the source names none.
        eos_id: the token that ends one; None likewise. A Hugging Face model keeps its own, as ``generation_config``.
        chat_template: the Jinja template of messages that a .gguf file holds; None where a folder's files have it.
        has_kv_scales: whether it is a folder in FP8 with scales of keys and values, not all of them 1.
    """

    model: nn.Module
    tokenizer: "Tokenizer"
    context: int
    source: str
    bos_id: int | None = None
    eos_id: int | None = None
    chat_template: str | None = None
    has_kv_scales: bool = False

    @property
    def device(self) -> torch.device:
        """Device of its weights, where input tokens have to be."""
        return next(self.model.parameters()).device

    def logits(self, tokens: Tensor, kv_transform: KVTransform | None = None) -> Tensor:
        """Token ids [B, T] → logits [B, T, V].

        Args:
            tokens: int64 [B, T].
            kv_transform: maps each layer's keys, after rotary embedding, and values to those that attention reads.
        """
        return logits_of(self.model, tokens, kv_transform)


def logits_of(model: nn.Module, tokens: Tensor, kv_transform: KVTransform | None = None) -> Tensor:
    """Token ids [B, T] → logits [B, T, V], of octavo's models and of transformers'."""
    if isinstance(model, Llama):
        llama_logits: Tensor = model(tokens, None if kv_transform is None else TransformedCache(kv_transform))
        return llama_logits
    cache = {} if kv_transform is None else {"past_key_values": cache_of_transformers(kv_transform)}
    output: Any = model(input_ids=tokens, use_cache=bool(cache), **cache)
    if not isinstance(getattr(output, "logits", None), Tensor) or output.logits.ndim != 3:
        raise ConfigError(
            f"{type(model).__name__} gives no logits of each token; load a model as "
            "transformers.AutoModelForCausalLM does"
        )
    logits: Tensor = output.logits
    return logits


def stepwise_logits(model: nn.Module, tokens: Tensor, kv_transform: KVTransform | None = None) -> Tensor:
    """Logits of :func:`logits_of`, a pass for each position, which reads earlier keys and values from a cache."""
    transform = kv_transform or (lambda _, keys, values: (keys, values))
    positions = tokens.split(1, dim=1)
    if isinstance(model, Llama):
        ours = TransformedCache(transform)
        return torch.cat([model(position, ours) for position in positions], dim=1)
    cache = cache_of_transformers(transform)
    passes: list[Any] = [model(input_ids=each, use_cache=True, past_key_values=cache) for each in positions]
    return torch.cat([each.logits for each in passes], dim=1)


class LogitsModule(nn.Module):
    """Wrap octavo's or transformers' model in a module that maps token ids [B, T] to logits [B, T, V]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]."""
        return logits_of(self.model, tokens)


def load_language_model(source: str | Path, *, device: Device = Device.CPU, hub: bool = False) -> LanguageModel:
    """Read a model.

    Args:
        source: see the table above.
        device: where to put it, wherever a run was trained.
        hub: see :func:`octavo.models.sources.located`.

    Raises:
        ConfigError: see :func:`octavo.models.sources.located`; or transformers is needed and not installed.
        CheckpointError: what is there is no language model, or a damaged one.
    """
    target = resolve_device(device)
    path = located(source, hub=hub)
    loaded = READERS[kind_of(path)](path)
    loaded.model.to(target)
    return loaded


def _from_gguf(path: Path) -> LanguageModel:
    loaded = load_gguf(path)
    model = loaded.model.eval()
    return LanguageModel(
        model=model,
        tokenizer=loaded.tokenizer,
        context=model.config.max_positions,
        source=str(path),
        bos_id=loaded.bos_id,
        eos_id=loaded.eos_id,
        chat_template=loaded.chat_template,
    )


def _from_run(path: Path) -> LanguageModel:
    run = load_run(path, device=Device.CPU)
    restore(run.model)
    return LanguageModel(
        model=run.model, tokenizer=run.tokenizer, context=run.config.training.context, source=str(path)
    )


def from_quantized(quantized: QuantizedModel, source: Path) -> LanguageModel:
    """Language model of an FP8 checkpoint that was loaded from the folder ``source``."""
    return LanguageModel(
        model=quantized.model,
        tokenizer=quantized.tokenizer,
        context=quantized.context,
        source=str(source),
        has_kv_scales=any(float(scale) != 1 for pair in quantized.kv_scales.values() for scale in pair),
    )


def _from_folder(path: Path) -> LanguageModel:
    return from_quantized(load_quantized(path), path) if is_quantized(path) else _from_hugging_face(path)


def _from_hugging_face(path: Path) -> LanguageModel:
    source = str(path)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{source!r} is read with transformers, which is not installed; {INSTALL}") from error
    check_sums(path)
    if (path / ADAPTER).is_file():
        raise CheckpointError(f"{source!r} holds an adapter ({ADAPTER}), whose model may lie elsewhere; merge the two")
    check_no_codes(path)
    at_hand: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    weights: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(source, **weights, **at_hand)
        model, report = read
    except Exception as error:  # transformers and its readers raise any exception
        raise CheckpointError(f"transformers cannot read {source!r}: {_one_line(error)}") from error
    _check_report(source, report)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **at_hand)
    except Exception as error:  # so do its tokenizers
        raise CheckpointError(
            f"transformers finds no tokenizer in {source!r}; put the model's tokenizer.json and tokenizer_config.json "
            f"there (it says: {_one_line(error)})"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{source!r} has no fast tokenizer (tokenizer.json); convert it with transformers first")
    context = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise CheckpointError(f"{source!r} does not say how many tokens it reads (max_position_embeddings)")
    return LanguageModel(model=model.eval(), tokenizer=backend, context=context, source=source)


def _one_line(error: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


READERS = {
    SourceKind.GGUF: _from_gguf,
    SourceKind.RUN: _from_run,
    SourceKind.HUGGING_FACE: _from_folder,
}


def _check_report(source: str, report: Mapping[str, Any]) -> None:
    """Raise where transformers left out tensors of the file, or drew numbers for those that it has not."""
    for kind, what in (("unexpected_keys", "which its model does not have"), ("missing_keys", "which is not there")):
        if names := sorted(report[kind]):
            raise CheckpointError(
                f"transformers reads {source!r} without {names[0]}, {what}, and {len(names) - 1} more; download or "
                "write it again"
            )
