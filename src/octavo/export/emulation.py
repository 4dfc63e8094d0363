"""Emulation of an exported model: other tensors rounded to the file's dtype, inputs cast as by servers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from octavo.checkpoints import Contents
from octavo.formats import E4M3
from octavo.kernels import quantize
from octavo.language_model import KVTransform, LanguageModel
from octavo.nn import Linear
from octavo.recipes import Recipe

__all__ = ["cast_keys_and_values", "emulated"]

Logits = Callable[[Tensor], Tensor]
_16_BITS = (torch.bfloat16, torch.float16)


@contextmanager
def emulated(
    model: LanguageModel, contents: Contents, *, dtype: torch.dtype, served: Callable[[Recipe], Recipe]
) -> Iterator[Logits]:
    """Context manager under which the model computes like its exported file, in FP32; restored afterwards.

    Args:
        model: converted.
        contents: contents of the model.
        dtype: dtype of other tensors in the file.
        served: maps a recipe to the one that servers run.

    Yields:
        token ids [B, T] → logits [B, T, V].
    """
    with (
        _rounded(contents.rest, dtype),
        _in_fp32(model.model),
        _serving(model.model, contents, served),
        torch.no_grad(),
    ):
        cast = cast_keys_and_values(contents.kv_scales) if contents.kv_scales else None
        yield partial(model.logits, kv_transform=cast)


def cast_keys_and_values(scales: Mapping[int, tuple[Tensor, Tensor]]) -> KVTransform:
    """Round trip through an FP8 cache with one scale for keys and one for values per layer."""

    def through(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        key_scale, value_scale = scales[layer]
        return _cast(keys, key_scale), _cast(values, value_scale)

    return through


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return quantize(x, E4M3, scale=scale.to(x.device)).dequantize()


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
def _serving(model: nn.Module, contents: Contents, served: Callable[[Recipe], Recipe]) -> Iterator[None]:
    """Run layers with their served recipes, without changing amax histories; restored afterwards."""
    layers = [layer for path in contents.layers if isinstance(layer := model.get_submodule(path), Linear)]
    originals = [layer.recipe for layer in layers]
    try:
        for layer in layers:
            layer.recipe = served(layer.recipe)
        yield
    finally:
        for layer, recipe in zip(layers, originals, strict=True):
            layer.recipe = recipe
