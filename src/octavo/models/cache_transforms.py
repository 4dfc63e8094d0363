"""Caches of decoders that change keys and values before attention reads them, as a cache in FP8 does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.models.llama import causal_attention

__all__ = ["KVTransform", "TransformedCache", "cache_of_transformers"]

KVTransform = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # layer, keys, values [B, T, kv, D]


class TransformedCache:
    """A decoder cache of transformed keys and values: of a whole text, or of one token of each text at a time."""

    def __init__(self, transform: KVTransform) -> None:
        self._transform = transform
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Positions so far."""
        return self._stored[0][0].shape[1] if self._stored else 0

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend to the transformed keys and values so far, with those of ``keys`` and ``values`` appended."""
        new = self._transform(layer, keys, values)
        if layer in self._stored:
            keys, values = (torch.cat(both, dim=1) for both in zip(self._stored[layer], new, strict=True))
            new = keys, values
        self._stored[layer] = new
        return causal_attention(queries, *new)


def cache_of_transformers(kv_transform: KVTransform) -> Any:
    """A cache of transformers of what ``kv_transform`` returns."""
    from transformers import DynamicCache

    class CacheOfTransformers(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **named: Any) -> Any:
            new = kv_transform(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
            keys, values = (each.transpose(1, 2) for each in new)
            return super().update(keys, values, layer_idx, *rest, **named)

    return CacheOfTransformers()
