"""Emulation of an exported model: other tensors rounded to the file's dtype, inputs cast as by servers."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from octavo.checkpoints import Contents
from octavo.checkpoints.contents import attention_path
from octavo.formats import E4M3
from octavo.kernels import quantize
from octavo.language_model import KVTransform, LanguageModel
from octavo.nn import Linear
from octavo.nn.scaled_layer import ScaledLayer
from octavo.recipes import Recipe, get

__all__ = ["CACHE", "CacheCast", "add_cache_casts", "emulated", "layers_in_high_precision"]

Logits = Callable[[Tensor], Tensor]
CACHE = "kv_cache"  # name of the module in an attention, also in models that compressed-tensors loads
HIGH_PRECISION = get("bf16")  # computes in the dtype of its input
_16_BITS = (torch.bfloat16, torch.float16)


@contextmanager
def emulated(
    model: LanguageModel,
    contents: Contents,
    *,
    dtype: torch.dtype,
    served: Callable[[Recipe], Recipe],
    decoded: Collection[str] = (),
) -> Iterator[Logits]:
    """Context manager under which the model computes like its exported file, in FP32; restored afterwards.

    Args:
        model: converted.
        contents: contents of the model.
        dtype: dtype of other tensors in the file.
        served: maps a recipe to the one that servers run.
        decoded: paths of layers that the reader multiplies by decoded weights, without a cast of their inputs.

    Yields:
        token ids [B, T] → logits [B, T, V].
    """
    with (
        _rounded(contents.rest, dtype),
        _in_fp32(model.model),
        _serving(model.model, contents, served, decoded),
        _casting_caches(model.model, contents) as cast,
        torch.no_grad(),
    ):
        yield partial(model.logits, kv_transform=cast)


class CacheCast(nn.Module):
    """Round trip of a layer's keys and values [B, kv, T, D] through an FP8 cache with one scale for each.

    Without parameters or buffers: the model's ``state_dict`` does not change.
    """

    def __init__(self, key_scale: Tensor, value_scale: Tensor) -> None:
        super().__init__()
        self.scales = (key_scale, value_scale)

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Cast and decode both."""
        return self.round_trip(keys, 0), self.round_trip(values, 1)

    def round_trip(self, x: Tensor, index: int) -> Tensor:
        """Cast and decode keys (``index`` 0) or values (1)."""
        return quantize(x, E4M3, scale=self.scales[index].to(x.device)).dequantize()


def add_cache_casts(model: nn.Module, scales: Mapping[int, tuple[Tensor, Tensor]]) -> KVTransform:
    """Add a :class:`CacheCast` to each attention, as its module ``kv_cache``; returns the transform that calls them."""
    casts = {index: CacheCast(*pair) for index, pair in scales.items()}
    for index, cast in casts.items():
        model.get_submodule(attention_path(model, index)).add_module(CACHE, cast)

    def through(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cached_keys, cached_values = casts[layer](keys.transpose(1, 2), values.transpose(1, 2))
        return cached_keys.transpose(1, 2), cached_values.transpose(1, 2)

    return through


@contextmanager
def _casting_caches(model: nn.Module, contents: Contents) -> Iterator[KVTransform | None]:
    """Cast keys and values if the contents have scales for them; the added modules are removed afterwards."""
    try:
        yield add_cache_casts(model, contents.kv_scales) if contents.kv_scales else None
    finally:
        for index in contents.kv_scales:
            delattr(model.get_submodule(attention_path(model, index)), CACHE)


@contextmanager
def _rounded(rest: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Round tensors to a narrower dtype, keeping their own dtype; restored afterwards."""
    originals = [(tensor, tensor.clone()) for tensor in rest.values() if tensor.is_floating_point()]
    with torch.no_grad():
        for tensor, _ in originals:
            tensor.copy_(tensor.to(dtype))
        try:
            yield
        finally:
            for tensor, original in originals:
                tensor.copy_(original)


@contextmanager
def _in_fp32(model: nn.Module) -> Iterator[None]:
    """Widen parameters and buffers of 16 bits, as readers of the file do; the same storage is back afterwards."""
    narrow = [(each, each.data) for each in (*model.parameters(), *model.buffers()) if each.dtype in _16_BITS]
    try:
        for tensor, values in narrow:
            tensor.data = values.float()
        yield
    finally:
        for tensor, values in narrow:
            tensor.data = values


@contextmanager
def _serving(
    model: nn.Module, contents: Contents, served: Callable[[Recipe], Recipe], decoded: Collection[str]
) -> Iterator[None]:
    """Run layers with their served recipes, without changing amax histories; restored afterwards."""
    layers = {path: layer for path in contents.layers if isinstance(layer := model.get_submodule(path), Linear)}
    others = layers_in_high_precision(model)
    originals = [layer.recipe for layer in (*layers.values(), *others)]
    try:
        for path, layer in layers.items():
            layer.recipe = _weight_only(served(layer.recipe)) if path in decoded else served(layer.recipe)
        for other in others:
            other.recipe = HIGH_PRECISION
        yield
    finally:
        for each, recipe in zip((*layers.values(), *others), originals, strict=True):
            each.recipe = recipe


def _weight_only(recipe: Recipe) -> Recipe:
    return replace(recipe, output=replace(recipe.output, a=None))


def layers_in_high_precision(model: nn.Module) -> list[ScaledLayer]:
    """Layers that run FP8 recipes, and that files store in high precision: of experts, and of GPT-2's ``Conv1D``."""
    layers = [each for each in model.modules() if isinstance(each, ScaledLayer) and not isinstance(each, Linear)]
    return [each for each in layers if not each.recipe.is_high_precision]
