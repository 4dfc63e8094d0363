"""What ``is_first_microbatch`` means: the micro-batches of an optimizer's step share one weight.

Transformer Engine casts it in the first of them and keeps the codes; later ones record no amax of it. octavo casts it
again, to the same codes (``octavo.convert(..., cache_weights=True)`` keeps them), and records it once a step too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from octavo import nn as octavo_nn

__all__ = ["micro_batch"]


@contextmanager
def micro_batch(module: nn.Module, is_first: bool | None) -> Iterator[None]:
    """Record no amaxes of the weights of ``module`` inside of the block if ``is_first`` is False."""
    layers = [layer for layer in module.modules() if isinstance(layer, octavo_nn.Linear)] if is_first is False else []
    for layer in layers:
        layer.records_weight = False
    try:
        yield
    finally:
        for layer in layers:
            layer.records_weight = True
