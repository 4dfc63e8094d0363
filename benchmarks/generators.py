"""Generators of text that are compared, all with the same weights: octavo's, llama.cpp's and transformers'.

Each keeps the keys and values of one sequence: ``logits`` reads on from where it stands, ``rewind`` goes back. What
follows a position that was gone back to is forgotten.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.errors import BackendError
from octavo.formats import E4M3, Format
from octavo.inference import ModelRunner
from octavo.models import Llama

__all__ = ["Generator", "LlamaCpp", "Octavo", "Plain", "Transformers", "q8_0_of"]


class Generator(Protocol):
    """Reads tokens and says what may follow."""

    def rewind(self, length: int) -> None:
        """Stand behind the first ``length`` tokens."""

    def logits(self, tokens: Sequence[int], *, every: bool = False) -> Tensor:
        """The logits [V] after the given tokens, or [T, V] after each of them."""


class Octavo:
    """octavo's runner: FP8 weights, and a cache of the given format.

    Args:
        runner: what runs.
        room: positions that the cache holds.
        fmt: of the keys and values.
    """

    def __init__(self, runner: ModelRunner, room: int, fmt: Format = E4M3) -> None:
        self.runner, self.cache = runner, runner.new_cache(room, fmt=fmt)

    def rewind(self, length: int) -> None:  # noqa: D102
        self.cache.length = length

    def logits(self, tokens: Sequence[int], *, every: bool = False) -> Tensor:  # noqa: D102
        return self.runner(torch.tensor(tokens), self.cache, every=every)

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position."""
        return self.cache.nbytes // self.cache.capacity


class Plain:
    """octavo's model without a cache: every call reads one text from its beginning.

    Args:
        model: what runs.
    """

    def __init__(self, model: Llama) -> None:
        self.model = model

    def rewind(self, length: int) -> None:  # noqa: D102
        if length:
            raise ValueError("without a cache there is only the beginning to go back to")

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], *, every: bool = False) -> Tensor:  # noqa: D102
        found: Tensor = self.model(torch.tensor([tokens]))[0]
        return found if every else found[-1]


class Transformers:
    """transformers' Llama, by its defaults.

    Args:
        model: whose weights it has.
        dtype: of weights, activations, keys and values.
    """

    def __init__(self, model: Llama, dtype: torch.dtype) -> None:
        import transformers

        ours = model.config
        config = transformers.LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            max_position_embeddings=ours.max_positions,
            rms_norm_eps=ours.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
            tie_word_embeddings=ours.tie_embeddings,
        )
        auto: Any = transformers.AutoModelForCausalLM
        self.model = auto.from_config(config, dtype=dtype).eval()
        self.model.load_state_dict(model.state_dict())
        self.cache: Any = transformers.DynamicCache()

    def rewind(self, length: int) -> None:  # noqa: D102
        if forgotten := self.cache.get_seq_length() - length:
            self.cache.crop(-forgotten)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], *, every: bool = False) -> Tensor:  # noqa: D102
        wanted = 0 if every else 1  # 0 is all
        out = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=wanted)
        found: Tensor = out.logits[0].float()
        return found if every else found[-1]


class LlamaCpp:
    """llama.cpp, by its defaults: FP16 keys and values, flash attention where it chooses it.

    Args:
        path: a .gguf file.
        room: positions that the cache holds.
        threads: for one token as for many.

    Raises:
        BackendError: llama-cpp-python is not installed, or cannot load the file.
    """

    def __init__(self, path: Path, room: int, threads: int) -> None:
        self._api = _llama_cpp()
        model = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        if not model:
            raise BackendError(f"llama.cpp cannot load {path}; remove it, and it is made again")
        settings = self._api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = room
        settings.n_threads = settings.n_threads_batch = threads
        self._context = self._api.llama_init_from_model(model, settings)
        self._memory = self._api.llama_get_memory(self._context)
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(model))
        self._length, self._batch = 0, self._api.llama_batch_init(room, 0, 1)

    def rewind(self, length: int) -> None:  # noqa: D102
        self._api.llama_memory_seq_rm(self._memory, 0, length, -1)
        self._length = length

    def logits(self, tokens: Sequence[int], *, every: bool = False) -> Tensor:  # noqa: D102
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, self._length + i, 1, 0
            batch.logits[i] = every or i == count - 1
        if self._api.llama_decode(self._context, batch):
            raise BackendError(f"llama.cpp could not read {count} tokens after {self._length}")
        self._length += count
        rows = count if every else 1
        found = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (rows, self._vocabulary))
        return torch.from_numpy(found.copy() if every else found[0].copy())

    def facts(self) -> str:
        """The version of the package and the instructions it was built for."""
        enabled = self._api.llama_print_system_info().decode().split("|")
        return f"llama-cpp-python {self._api.__version__} ({', '.join(x.split('=')[0].strip() for x in enabled[:-1])})"


def q8_0_of(path: Path, threads: int) -> Path:
    """The same weights in llama.cpp's Q8_0, made beside ``path`` by llama.cpp itself if it is not there.

    Every quantized weight is decoded and encoded again; those in Q8_0 stay as they are.
    """
    out = path.with_name(f"{path.name.split('.')[0]}.Q8_0.gguf")
    if out.is_file():
        return out
    api, scratch = _llama_cpp(), out.with_suffix(".part")
    settings = api.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize, settings.nthread = api.LLAMA_FTYPE_MOSTLY_Q8_0, True, threads
    if api.llama_model_quantize(str(path).encode(), str(scratch).encode(), ctypes.byref(settings)):
        raise BackendError(f"llama.cpp cannot make a Q8_0 file of {path}")
    return scratch.rename(out)


def _llama_cpp() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise BackendError(
            "llama.cpp is compared with, and llama-cpp-python is not installed; pip install llama-cpp-python builds it "
            "for this CPU"
        ) from error
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    return llama_cpp


_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)  # kept: C calls it
