"""Watching what a model's linear layers are given, batch by batch, and keeping statistics only.

A forward pre-hook on each layer counts the magnitudes of its input (``octavo.quantization.calibration.magnitudes``)
and lets go of it. A tensor that several layers are given, as queries, keys and values are, is counted once. It is
known by its identity while it is alive, not by names: each layer hashes the serial numbers of the tensors that it was
given, and layers whose hashes agree at the end were given the same tensors in every call. They are a *group*; their
statistics are the same, and so are their scales.

What is observed is what an ``octavo.nn.Linear`` would cast: under ``torch.autocast`` the input in autocast's dtype.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.errors import ConfigError, DataError
from octavo.language_model import LanguageModel
from octavo.nn.linear import autocast_dtype
from octavo.quantization.calibration.magnitudes import MagnitudeCounts

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
LATE_SHARE = 4  # the last quarter of the batches is looked at by itself


@dataclass(slots=True)
class InputStatistics:
    """What one layer was given.

    Attributes:
        counts: the magnitudes of all its inputs.
        calls: how often it was called.
        given: hash of the serial numbers of the tensors it was given, in order.
        early_scale: its scale from all but the last quarter of the batches; 0 where it was first reached in that
            quarter, None where nobody knows which batches are the last.
    """

    counts: MagnitudeCounts
    calls: int = 0
    given: bytes = b""
    early_scale: float | None = None


@dataclass(slots=True)
class KVStatistics:
    """What one layer's keys, with their rotary positions, and values are.

    Attributes:
        keys: their magnitudes.
        values: theirs.
        key_sum: of the keys of all positions, float64 [kv heads, D].
        positions: how many those are.
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
        """The mean of the keys, float32 [kv heads, D]."""
        return (self.key_sum / self.positions).float()


@dataclass(slots=True)
class Observation:
    """What was seen.

    Attributes:
        inputs: by the layer's path, in the order of the first calls; layers that were given no element are missing.
        keys_and_values: by the layer's number; empty where they were not asked for.
        batches: how many there were.
        samples: the sum of their first dimensions; a batch of one dimension is one.
        tokens: the token ids among them; 0 where the model is given none.
        in_last_quarter: whether the last quarter of the batches has begun; never where their number is not known.
    """

    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    keys_and_values: dict[int, KVStatistics] = field(default_factory=dict)
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    in_last_quarter: bool = False

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the layers that were given the same tensors in every call, where there are two or more."""
        alike: dict[bytes, list[str]] = {}
        for path, one in self.inputs.items():
            alike.setdefault(one.given, []).append(path)
        return tuple(tuple(paths) for paths in alike.values() if len(paths) > 1)


def module_of(model: nn.Module | LanguageModel) -> nn.Module:
    """The module itself."""
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
    """Run a model over batches, in evaluation mode, and count what ``layers`` are given.

    Args:
        model: a module, or a language model, whose batches are token ids [B, T].
        batches: what the module is called with: a tensor, a tuple or list of arguments, or a dictionary of keywords.
        layers: linear layers by path.
        kv_cache: whether to count keys and values; of a language model only.
        before_the_last_quarter: called once, if ``batches`` has a length of two or more.
        on_batch: called after each batch with (done, total); the total is None where nobody knows it.

    Raises:
        DataError: there is no batch, or a layer was given NaN or ±Inf; its sentence names batch and layer.
        TypeError: a batch of another kind.
    """
    seen, total = Observation(), len(batches) if isinstance(batches, Sized) else None
    late = None if total is None or total < 2 else total - -(-total // LATE_SHARE)
    module = module_of(model)
    with evaluating(module), _hooked(layers, seen), _called(model, seen, kv_cache=kv_cache) as call:
        for batch in batches:
            if seen.batches == late:
                before_the_last_quarter(seen)
                seen.in_last_quarter = True
            _add_sizes(seen, batch)
            call(batch)
            on_batch(seen.batches, total)
    if not seen.batches:
        raise DataError("there is no batch to calibrate on; give at least one, and 32 samples or more in all")
    seen.inputs = {path: one for path, one in seen.inputs.items() if bool(one.counts.counts.any())}
    return seen


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, and every module's own mode after it."""
    modes = {each: each.training for each in module.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it reads weights and calls no layer
    module.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for each, mode in modes.items():
            each.training = mode


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], seen: Observation) -> Iterator[None]:
    """Hooks on the layers, which count into ``seen``."""
    shared = _SharedTensors()
    handles = [
        layer.register_forward_pre_hook(partial(_count, path, seen, shared), with_kwargs=True)
        for path, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _count(
    path: str, seen: Observation, shared: "_SharedTensors", _: nn.Module, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Add one layer's input to what was seen of it."""
    serial, counted = shared.counted(args[0] if args else named["input"])
    if path not in seen.inputs:
        early_scale = 0.0 if seen.in_last_quarter else None
        seen.inputs[path] = InputStatistics(MagnitudeCounts(counted.counts.device), early_scale=early_scale)
    own = seen.inputs[path]
    own.calls += 1
    own.given = hashlib.blake2b(own.given + serial.to_bytes(8), digest_size=16).digest()
    own.counts.merge(counted)
    _check_finite(own.counts, seen, f"layer {path!r} is given")


class _SharedTensors:
    """The tensors that layers were given and that are still alive, each counted once and with a serial number."""

    def __init__(self) -> None:
        self.alive = WeakTensorKeyDictionary()
        self.serials = count()

    def counted(self, x: Tensor) -> tuple[int, MagnitudeCounts]:
        """The serial number of a tensor, and its magnitudes; a tensor that was written to since is another."""
        state = (0 if x.is_inference() else x._version, autocast_dtype(x))  # noqa: SLF001
        known: tuple[object, int, MagnitudeCounts] | None = self.alive.get(x)
        if known is None or known[0] != state:
            counted = MagnitudeCounts(x.device)
            counted.add(x.to(autocast_dtype(x)))
            known = self.alive[x] = (state, next(self.serials), counted)
        return known[1], known[2]


@contextmanager
def _called(
    model: nn.Module | LanguageModel, seen: Observation, *, kv_cache: bool
) -> Iterator[Callable[[Batch], object]]:
    """What to call with a batch; keys and values are counted if they are asked for."""
    if not isinstance(model, LanguageModel):
        if kv_cache:
            raise ConfigError(
                "keys and values are found in an octavo.language_model.LanguageModel, not in any module; load one "
                "with load_language_model, or leave kv_cache False"
            )
        yield call_of(model)
        return

    def count_both(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        own = seen.keys_and_values.setdefault(layer, KVStatistics())
        own.add(keys, values)
        for what, counts in (("keys", own.keys), ("values", own.values)):
            _check_finite(counts, seen, f"attention of layer {layer} makes {what} of")
        return keys, values

    yield partial(_call_language_model, partial(model.logits, kv_transform=count_both if kv_cache else None))


def call_of(model: nn.Module | LanguageModel) -> Callable[[Batch], object]:
    """What to call with a batch."""
    if isinstance(model, LanguageModel):
        return partial(_call_language_model, model.logits)
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


def _check_finite(counts: MagnitudeCounts, seen: Observation, what: str) -> None:
    if not bool(counts.amax.isfinite()):
        raise DataError(
            f"in batch {seen.batches} {what} NaN or infinity in FP32, which no scale provides for; mend that batch, or "
            "the model"
        )


def _add_sizes(seen: Observation, batch: Batch) -> None:
    """Count the batch itself."""
    leaves = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else (batch,)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    seen.batches += 1
    seen.samples += len(tensors[0]) if tensors and tensors[0].ndim > 1 else 1
    seen.tokens += next((leaf.numel() for leaf in tensors if not leaf.is_floating_point()), 0)
