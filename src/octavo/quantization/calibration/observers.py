"""Statistics of the inputs of a model's linear layers, collected batch by batch.

A forward pre-hook on each layer counts the magnitudes of its input without storing it (see
``octavo.quantization.calibration.magnitude_histogram``). A tensor that several layers read, such as the input of the
query, key and value projections, is counted once. It is identified by object identity while it is alive: each layer
hashes the serial numbers of its inputs, and layers with equal hashes at the end received the same tensors in every
call. They form a *group* with the same statistics and the same scale.

The observed values are those that ``octavo.nn.Linear`` would cast: under ``torch.autocast``, in autocast's dtype.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.errors import ConfigError, DataError
from octavo.language_model import KVTransform, LanguageModel
from octavo.nn.scaled_layer import autocast_dtype
from octavo.quantization.calibration.magnitude_histogram import MagnitudeCounts

__all__ = [
    "Batch",
    "InputStatistics",
    "KVStatistics",
    "Observation",
    "call_of",
    "evaluating",
    "module_of",
    "observe",
]

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
LATE_SHARE = 4  # the last quarter of the batches is compared with those before


@dataclass(slots=True)
class InputStatistics:
    """Statistics of one layer's inputs.

    Attributes:
        counts: magnitudes of all inputs.
        calls: number of calls.
        serials_hash: hash of the serial numbers of its inputs, in order.
        early_scale: scale from all but the last quarter of the batches; 0 if the layer was first called in that
            quarter, None if the number of batches is unknown.
    """

    counts: MagnitudeCounts
    calls: int = 0
    serials_hash: bytes = b""
    early_scale: float | None = None


@dataclass(slots=True)
class KVStatistics:
    """Statistics of one layer's keys, after the rotary embedding, and values.

    Attributes:
        keys: magnitudes of the keys.
        values: magnitudes of the values.
        key_sum: sum of the keys over all positions, float64 [kv heads, D].
        positions: number of positions.
    """

    keys: MagnitudeCounts = field(default_factory=MagnitudeCounts)
    values: MagnitudeCounts = field(default_factory=MagnitudeCounts)
    key_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    positions: int = 0

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Count keys and values [B, T, kv heads, D]."""
        self.keys.add(keys)
        self.values.add(values)
        self.key_sum = self.key_sum.to(keys.device) + keys.double().sum((0, 1))
        self.positions += keys.shape[0] * keys.shape[1]

    @property
    def key_mean(self) -> Tensor:
        """Mean key, float32 [kv heads, D]."""
        return (self.key_sum / self.positions).float()


@dataclass(slots=True)
class Observation:
    """Statistics of a pass over the batches.

    Attributes:
        inputs: by layer path, in the order of the first calls; layers without input elements are missing.
        keys_and_values: by layer index; empty if not requested.
        batches: number of batches.
        samples: sum of their first dimensions; a one-dimensional batch counts as one.
        tokens: number of token ids; 0 if the inputs are not token ids.
        in_last_quarter: True once the last quarter of the batches begins; never if their number is unknown.
    """

    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    keys_and_values: dict[int, KVStatistics] = field(default_factory=dict)
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    in_last_quarter: bool = False

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of two or more layers that received the same tensors in every call, by path."""
        paths_by_hash: dict[bytes, list[str]] = {}
        for path, statistics in self.inputs.items():
            paths_by_hash.setdefault(statistics.serials_hash, []).append(path)
        return tuple(tuple(paths) for paths in paths_by_hash.values() if len(paths) > 1)


def module_of(model: nn.Module | LanguageModel) -> nn.Module:
    """Return the ``nn.Module`` of a model."""
    return model.model if isinstance(model, LanguageModel) else model


@torch.no_grad()
def observe(
    model: nn.Module | LanguageModel,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module],
    *,
    kv_cache: bool = False,
    before_the_last_quarter: Callable[[Observation], None] = lambda _: None,
    on_batch: Callable[[int, int | None], None] = lambda _done, _total: None,
) -> Observation:
    """Run a model over batches in evaluation mode and collect statistics of the inputs of ``layers``.

    Args:
        model: a module, or a language model, whose batches are token ids [B, T].
        batches: arguments of its calls: a tensor, a tuple or list of arguments, or a dictionary of keywords each.
        layers: linear layers by path.
        kv_cache: also count keys and values; language models only.
        before_the_last_quarter: called once, if ``batches`` has a length of two or more.
        on_batch: called after each batch with (done, total); the total is None if unknown.

    Raises:
        DataError: no batch, or a layer received NaN or ±Inf; the message names the batch and the layer.
        TypeError: a batch of another type.
    """
    observation, total = Observation(), len(batches) if isinstance(batches, Sized) else None
    late = None if total is None or total < 2 else total - -(-total // LATE_SHARE)
    call = call_of(model, partial(_count_keys_and_values, observation) if kv_cache else None)
    with evaluating(module_of(model)), _hooked(layers, observation):
        for batch in batches:
            if observation.batches == late:
                before_the_last_quarter(observation)
                observation.in_last_quarter = True
            _add_sizes(observation, batch)
            call(batch)
            on_batch(observation.batches, total)
    if not observation.batches:
        raise DataError("there is no batch to calibrate on; give at least one, and 32 samples or more in all")
    observation.inputs = {
        path: statistics for path, statistics in observation.inputs.items() if bool(statistics.counts.counts.any())
    }
    return observation


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode; restores every module's mode afterwards."""
    modes = {each: each.training for each in module.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path reads weights without calling the layers
    module.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for each, mode in modes.items():
            each.training = mode


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], observation: Observation) -> Iterator[None]:
    """Register hooks that count the layers' inputs into ``observation``."""
    shared = _SharedTensors()
    with ExitStack() as hooks:
        for path, layer in layers.items():
            count_input = partial(_count, path, observation, shared)
            hooks.enter_context(layer.register_forward_pre_hook(count_input, with_kwargs=True))
        yield


def _count(
    path: str,
    observation: Observation,
    shared: "_SharedTensors",
    _: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Add one input to a layer's statistics."""
    serial, counted = shared.counted(args[0] if args else kwargs["input"])
    if path not in observation.inputs:
        early_scale = 0.0 if observation.in_last_quarter else None
        observation.inputs[path] = InputStatistics(MagnitudeCounts(counted.counts.device), early_scale=early_scale)
    statistics = observation.inputs[path]
    statistics.calls += 1
    statistics.serials_hash = hashlib.blake2b(statistics.serials_hash + serial.to_bytes(8), digest_size=16).digest()
    statistics.counts.merge(counted)
    _check_finite(statistics.counts, observation, f"layer {path!r} received")


class _SharedTensors:
    """Live input tensors, each counted once and given a serial number."""

    def __init__(self) -> None:
        self.alive = WeakTensorKeyDictionary()
        self.serials = count()

    def counted(self, x: Tensor) -> tuple[int, MagnitudeCounts]:
        """Return a tensor's serial number and magnitudes; a tensor modified in place gets a new serial number."""
        state = (0 if x.is_inference() else x._version, autocast_dtype(x))  # noqa: SLF001
        entry: tuple[object, int, MagnitudeCounts] | None = self.alive.get(x)
        if entry is None or entry[0] != state:
            counted = MagnitudeCounts(x.device)
            counted.add(x.to(autocast_dtype(x)))
            entry = self.alive[x] = (state, next(self.serials), counted)
        return entry[1], entry[2]


def _count_keys_and_values(observation: Observation, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Add one layer's keys and values to its statistics and return them unchanged."""
    statistics = observation.keys_and_values.setdefault(layer, KVStatistics())
    statistics.add(keys, values)
    for what, counts in (("keys", statistics.keys), ("values", statistics.values)):
        _check_finite(counts, observation, f"layer {layer} has {what} with")
    return keys, values


def call_of(model: nn.Module | LanguageModel, kv_transform: KVTransform | None = None) -> Callable[[Batch], object]:
    """Return the function to call with a batch; only a language model takes a ``kv_transform``."""
    if isinstance(model, LanguageModel):
        return partial(_call_language_model, partial(model.logits, kv_transform=kv_transform))
    if kv_transform is not None:
        raise ConfigError(
            "kv_cache=True needs an octavo.language_model.LanguageModel; load one with load_language_model, or "
            "leave kv_cache False"
        )
    return partial(_call_module, model)


def _call_language_model(logits: Callable[[Tensor], Tensor], batch: Batch) -> object:
    if not isinstance(batch, Tensor):
        raise ConfigError(f"a language model's batches are token ids [B, T], not {type(batch).__name__}")
    return logits(batch)


def _call_module(module: nn.Module, batch: Batch) -> object:
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, tuple | list):
        return module(*batch)
    if not isinstance(batch, Tensor):
        raise TypeError(
            f"a batch is a tensor, a tuple of arguments or a dictionary of keywords, not {type(batch).__name__}"
        )
    return module(batch)


def _check_finite(counts: MagnitudeCounts, observation: Observation, what: str) -> None:
    if not bool(counts.amax.isfinite()):
        raise DataError(
            f"in batch {observation.batches} {what} NaN or infinity in FP32, which no scale can represent; correct "
            "that batch, or the model"
        )


def _add_sizes(observation: Observation, batch: Batch) -> None:
    """Count a batch's samples and tokens."""
    leaves = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else (batch,)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    observation.batches += 1
    observation.samples += len(tensors[0]) if tensors and tensors[0].ndim > 1 else 1
    observation.tokens += next((leaf.numel() for leaf in tensors if not leaf.is_floating_point()), 0)
