"""Support of ``is_first_microbatch``: the micro-batches of an optimizer step share one weight.

Transformer Engine casts the weight and records its amax only in the first micro-batch. octavo casts it in each, to the
same codes (``octavo.convert(..., cache_weights=True)`` keeps them), and also records it once per step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from octavo import nn as octavo_nn

__all__ = ["micro_batch"]


@contextmanager
def micro_batch(module: nn.Module, is_first: bool | None) -> Iterator[None]:
    """Disable recording the amaxes of the weights of ``module`` inside the block if ``is_first`` is False."""
    layers = [layer for layer in module.modules() if isinstance(layer, octavo_nn.Linear)] if is_first is False else []
    for layer in layers:
        layer.records_weight = False
    try:
        yield
    finally:
        for layer in layers:
            layer.records_weight = True
