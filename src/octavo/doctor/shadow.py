"""What a layer's tensors would meet under another recipe, measured while it runs its own.

A layer that was given a finer recipe, or BF16, shows nothing of what it was given it for. At a look, a shadow takes
the tensors of the layer's first call, and once the step is over it computes the three GEMMs again under the coarser
recipe, on samples of their rows. Training does not see it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.doctor.captor import captured
from octavo.doctor.facts import layer_facts
from octavo.doctor.layer_recorder import LayerRecorder
from octavo.doctor.rerun import Rerun
from octavo.doctor.series import CastKey, ProductKey, Sample
from octavo.doctor.statistics import cast_numbers, product_numbers
from octavo.nn import Linear
from octavo.nn.linear import autocast_dtype
from octavo.recipes import Recipe
from octavo.scaling import ROLES

__all__ = ["Shadow"]


class Shadow:
    """One layer under one other recipe, in one step.

    Args:
        path: the layer's.
        layer: which runs whatever it runs.
        recipe: that is tried.
        window: float32 [3, L], the amaxes of earlier looks, newest first and -1 where there is none, of which a delayed
            recipe makes its scales; None for the tensors' own.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(8, 8, recipe="bf16")
        >>> shadow = Shadow("proj", layer, octavo.recipes.get("tensorwise"))
        >>> with shadow.watching():
        ...     layer(torch.ones(4, 8)).square().sum().backward()
        >>> [key.role for key in shadow.sample(1).casts]
        ['input', 'weight', 'grad_output']
    """

    def __init__(self, path: str, layer: Linear, recipe: Recipe, window: Tensor | None = None) -> None:
        self.path, self.layer, self.recipe, self.window = path, layer, recipe, window
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the tensors of the first call that has a backward pass."""
        handle = self.layer.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def sample(self, step: int) -> Sample | None:
        """What the layer's casts and GEMMs would be; None if it did not run, or not on finite tensors."""
        if self._seen is None or not all(bool(tensor.isfinite().all()) for tensor in self._seen):
            return None
        capture = captured(self.path, step, self.recipe, self._seen, self.layer)
        amax = None if self.window is None else torch.zeros(len(ROLES))
        casts: dict[CastKey, Tensor] = {}
        products: dict[ProductKey, Tensor] = {}
        rerun = Rerun(replace(capture, window=self.window, amax=amax), self.recipe, ran=False)
        rerun(LayerRecorder(self.path, casts, products))
        return Sample(
            step=step,
            casts={key: cast_numbers(sums.double().cpu().numpy()) for key, sums in casts.items()},
            products={key: product_numbers(sums.cpu().numpy()) for key, sums in products.items()},
            parameters={},
            layers={self.path: layer_facts(self.layer, self.recipe)},
        )

    def _see(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._seen is not None or not output.requires_grad:
            return
        (x,) = inputs
        x = x.detach().to(autocast_dtype(x)).flatten(0, -2)
        weight = self.layer.weight.detach().clone()  # the optimizer changes it before the step is over

        def keep(gradient: Tensor) -> None:
            self._seen = self._seen or (x, weight, gradient.detach().flatten(0, -2))

        output.register_hook(keep)
