"""A language model from where the user has it: a run of octavo's, a Hugging Face folder, a .gguf file.

| MODEL                                          | read by                                          |
|------------------------------------------------|--------------------------------------------------|
| a run's folder (config.toml, checkpoints/)     | ``octavo.training.run_folder``                   |
| a Hugging Face folder (config.json)            | ``transformers.AutoModelForCausalLM``            |
| one in FP8 (``octavo export``, and the like)   | ``octavo.load_quantized``                        |
| a .gguf file of the Llama layout               | ``octavo.models.load_gguf``                      |
| a model's name on Hugging Face's hub, "org/name" | ``transformers``, which downloads it           |

All of them give token ids [B, T] → logits [B, T, V] and a tokenizer, in FP32: a run's layers are plain again, with the
weights it was trained to. A folder in FP8 keeps its codes, and computes as its format says.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo.convert import restore
from octavo.errors import CheckpointError, ConfigError
from octavo.interchange import check_no_codes, is_quantized, load_quantized
from octavo.models import Llama, load_gguf
from octavo.training.config import Device
from octavo.training.precision import resolve_device
from octavo.training.run_folder import CONFIG, check_is_run, has_run, load_run

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["HF_CONFIG", "KeysAndValues", "Kind", "LanguageModel", "kind_of", "load_language_model", "logits_of"]

KeysAndValues = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # layer, keys, values [B, T, kv, D]
HF_CONFIG = "config.json"
INSTALL = "pip install 'octavo[hf]'"


class Kind(StrEnum):
    """Of the sources in the table above; a Hugging Face folder whose weights are FP8 codes is one of its own."""

    RUN = "run"
    HUGGING_FACE = "hugging face"
    QUANTIZED = "quantized"
    GGUF = "gguf"


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
    """

    model: nn.Module
    tokenizer: "Tokenizer"
    context: int
    source: str
    bos_id: int | None = None
    eos_id: int | None = None

    @property
    def device(self) -> torch.device:
        """Where its weights are, and the tokens that it reads have to be."""
        return next(self.model.parameters()).device

    def logits(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]."""
        return logits_of(self.model, tokens)

    @contextmanager
    def keys_and_values_through(self, pass_through: KeysAndValues) -> "Iterator[Callable[[Tensor], Tensor]]":
        """Inside the block attention reads what ``pass_through`` makes of each layer's keys and values.

        Keys have their rotary positions. Yields what to call instead of :meth:`logits`.
        """
        if not isinstance(self.model, Llama):
            yield lambda tokens: logits_of(self.model, tokens, pass_through)
            return
        attentions: list[Any] = [layer.self_attn for layer in self.model.model.layers]
        for index, attention in enumerate(attentions):
            attention.reread = partial(pass_through, index)
        try:
            yield self.logits
        finally:
            for attention in attentions:
                attention.reread = None


def logits_of(model: nn.Module, tokens: Tensor, pass_through: KeysAndValues | None = None) -> Tensor:
    """Token ids [B, T] → logits [B, T, V], of octavo's models and of transformers'."""
    if isinstance(model, Llama):
        found: Tensor = model(tokens)
        return found
    cache = {} if pass_through is None else {"past_key_values": _passing_cache(pass_through)}
    output: Any = model(input_ids=tokens, use_cache=bool(cache), **cache)
    logits: Tensor = output.logits
    return logits


def load_language_model(source: str | Path, *, device: Device = Device.CPU) -> LanguageModel:
    """Read a model.

    Args:
        source: see the table above; an existing path wins over a name on the hub.
        device: where to put it, wherever a run was trained.

    Raises:
        ConfigError: there is no such path and it is no name, or transformers is needed and not installed.
        CheckpointError: what is there is no language model, or a damaged one.
    """
    target = resolve_device(device)
    loaded = _loaded(source)
    loaded.model.to(target)
    return loaded


def _loaded(source: str | Path) -> LanguageModel:
    """On the CPU."""
    kind, path = kind_of(source), Path(source)
    if kind is Kind.HUGGING_FACE:
        return _from_hugging_face(str(source))
    read = {Kind.GGUF: _from_gguf, Kind.RUN: _from_run, Kind.QUANTIZED: _from_quantized}
    return read[kind](path)


def kind_of(source: str | Path) -> Kind:
    """What is there, and so who reads it: decided here and nowhere else.

    A Hugging Face folder, of ``octavo qat`` too, may hold files of the names that a run's have; its config.json tells.

    Raises:
        ConfigError: there is no such path and it is no name; or it is a study's folder, which has several models.
        CheckpointError: what is there is no language model.
    """
    path = Path(source)
    if path.suffix.lower() == ".gguf":
        return Kind.GGUF
    if path.is_dir() and (path / HF_CONFIG).is_file():
        return Kind.QUANTIZED if is_quantized(path) else Kind.HUGGING_FACE
    check_is_run(path)
    if has_run(path):
        return Kind.RUN
    if path.exists():
        raise CheckpointError(
            f"{str(source)!r} is no model; give a run's folder (it has a {CONFIG}), a Hugging Face folder (it has a "
            f"{HF_CONFIG}) or a .gguf file"
        )
    is_name = str(source).count("/") == 1 and not str(source).startswith((".", "/", "~"))
    if is_name and not path.parent.is_dir():  # a folder of that name is here: its owner is no hub's
        return Kind.HUGGING_FACE
    raise ConfigError(f"there is no {str(source)!r}; give a run's folder, a Hugging Face folder or a .gguf file")


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
    )


def _from_run(path: Path) -> LanguageModel:
    run = load_run(path, device=Device.CPU)
    restore(run.model)
    return LanguageModel(
        model=run.model, tokenizer=run.tokenizer, context=run.config.training.context, source=str(path)
    )


def _from_quantized(path: Path) -> LanguageModel:
    read = load_quantized(path)
    return LanguageModel(model=read.model, tokenizer=read.tokenizer, context=read.context, source=str(path))


def _from_hugging_face(source: str) -> LanguageModel:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{source!r} is read with transformers, which is not installed; {INSTALL}") from error
    check_no_codes(Path(source))
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        model, report = read
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers, its readers and its tokenizers raise whatever they like
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot read {source!r}: {first}") from error
    _check_report(source, report)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{source!r} has no fast tokenizer (tokenizer.json); convert it with transformers first")
    context = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise CheckpointError(f"{source!r} does not say how many tokens it reads (max_position_embeddings)")
    return LanguageModel(model=model.eval(), tokenizer=backend, context=context, source=source)


def _check_report(source: str, report: Mapping[str, Any]) -> None:
    """Raise where transformers left out tensors of the file, or drew numbers for those that it has not."""
    for kind, what in (("unexpected_keys", "which its model does not have"), ("missing_keys", "which is not there")):
        if names := sorted(report[kind]):
            raise CheckpointError(
                f"transformers reads {source!r} without {names[0]}, {what}, and {len(names) - 1} more; download or "
                "write it again"
            )


def _passing_cache(pass_through: KeysAndValues) -> Any:
    """A transformers cache for one forward pass, which keeps nothing and hands on what ``pass_through`` makes."""
    from transformers import DynamicCache

    class PassingCache(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            keys, values = pass_through(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
            return keys.transpose(1, 2), values.transpose(1, 2)

    return PassingCache()
