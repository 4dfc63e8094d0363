"""The exported model as octavo computes it: other tensors rounded as the file has them, inputs cast as servers do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.interchange import Contents
from octavo.kernels import quantize
from octavo.language_model import KVTransform, LanguageModel
from octavo.nn import Linear
from octavo.recipes import Recipe

__all__ = ["cast_keys_and_values", "emulated"]

Logits = Callable[[Tensor], Tensor]


@contextmanager
def emulated(
    model: LanguageModel, contents: Contents, *, dtype: torch.dtype, served: Callable[[Recipe], Recipe]
) -> Iterator[Logits]:
    """Inside the block the model computes what its file will, in FP32; it is itself again after it.

    Args:
        model: converted.
        contents: of it.
        dtype: that other tensors are written in.
        served: what becomes of a recipe.

    Yields:
        token ids [B, T] → logits [B, T, V].
    """
    with _rounded(contents.rest, dtype), _serving(model.model, contents, served), torch.no_grad():
        cast = cast_keys_and_values(contents.kv_scales) if contents.kv_scales else None
        yield partial(model.logits, kv_transform=cast)


def cast_keys_and_values(scales: Mapping[int, tuple[Tensor, Tensor]]) -> KVTransform:
    """Keys and values as a cache with one scale each a layer gives them back."""

    def through(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        key_scale, value_scale = scales[layer]
        return _cast(keys, key_scale), _cast(values, value_scale)

    return through


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return quantize(x, E4M3, scale=scale.to(x.device)).dequantize()


@contextmanager
def _rounded(rest: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Let tensors have the values that a narrower dtype keeps of them, in the dtype that they have."""
    kept = [(tensor, tensor.clone()) for tensor in rest.values() if tensor.is_floating_point()]
    with torch.no_grad():
        for tensor, _ in kept:
            tensor.copy_(tensor.to(dtype))
        try:
            yield
        finally:
            for tensor, before in kept:
                tensor.copy_(before)


@contextmanager
def _serving(model: nn.Module, contents: Contents, served: Callable[[Recipe], Recipe]) -> Iterator[None]:
    """Let layers run what is left of their recipes once they are served; their histories stay as they are."""
    layers = [layer for path in contents.layers if isinstance(layer := model.get_submodule(path), Linear)]
    kept = [layer.recipe for layer in layers]
    try:
        for layer in layers:
            layer.recipe = served(layer.recipe)
        yield
    finally:
        for layer, recipe in zip(layers, kept, strict=True):
            layer.recipe = recipe
