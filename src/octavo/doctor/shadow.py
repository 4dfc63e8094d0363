"""Statistics of a layer under another recipe, measured while it runs its own.

After a layer has moved to a finer recipe or BF16, its own statistics no longer show whether the original problem
persists. In a sampled step a shadow takes the tensors of the layer's first call, and after the step it replays the
three GEMMs under the coarser recipe on sampled rows. Training is not affected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.doctor.capture_scheduler import capture_layer
from octavo.doctor.facts import layer_facts
from octavo.doctor.layer_recorder import LayerRecorder
from octavo.doctor.rerun import Rerun
from octavo.doctor.series import CastKey, ProductKey, Sample
from octavo.doctor.statistics import cast_numbers, product_numbers
from octavo.nn import Linear
from octavo.nn.scaled_layer import autocast_dtype
from octavo.recipes import Recipe
from octavo.scaling import ROLES

__all__ = ["Shadow"]


class Shadow:
    """Measurement of one layer under another recipe in one step.

    Args:
        path: the layer's path.
        layer: the layer, which runs its own recipe.
        recipe: the recipe to measure.
        window: float32 [3, L] amaxes of earlier samples, newest first and -1 for unused entries, from which a delayed
            recipe computes its scales; None to use the tensors' own amaxes.

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
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the tensors of the first call with a backward pass."""
        handle = self.layer.register_forward_hook(self._record, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def sample(self, step: int) -> Sample | None:
        """Statistics of the layer's casts and GEMMs; None if it did not run, or its tensors are not finite."""
        if self._tensors is None or not all(bool(tensor.isfinite().all()) for tensor in self._tensors):
            return None
        capture = capture_layer(self.path, step, self.recipe, self._tensors, self.layer)
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

    def _record(self, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        if self._tensors is not None or not output.requires_grad:
            return
        (x,) = (*inputs, *named.values())
        x = x.detach().to(autocast_dtype(x)).flatten(0, -2)
        weight = self.layer.weight.detach().clone()  # the optimizer changes it before the step ends

        def record_gradient(gradient: Tensor) -> None:
            self._tensors = self._tensors or (x, weight, gradient.detach().flatten(0, -2))

        output.register_hook(record_gradient)
