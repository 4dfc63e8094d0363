"""``octavo.autocast``: another recipe for every octavo layer inside a block, or none."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor

from octavo import recipes
from octavo.recipes import Recipe

__all__ = ["active_recipe", "autocast", "autocast_region"]


class _Override(local):
    """Each thread's innermost recipe. Not a ContextVar, which torch.compile cannot trace."""

    recipe: Recipe | None
    depth: int  # of nested blocks

    def __init__(self) -> None:
        self.recipe, self.depth = None, 0  # not the class's: torch 2.11 would read those while it traces
        # Tensors: a graph reads their values, and would be traced again for every new value of an int.
        with torch.inference_mode(mode=False):
            self.entered = torch.zeros((), dtype=torch.int64, device="cpu")  # outermost blocks so far
            self.region = torch.zeros((), dtype=torch.int64, device="cpu")  # number of the one that runs, or 0


_override = _Override()


@contextmanager
def autocast(recipe: str | Recipe | None = None, *, enabled: bool = True) -> Iterator[None]:
    """Run octavo layers with ``recipe`` instead of their own.

    Blocks nest, the innermost decides. The backward pass uses the recipe that its forward ran with. Where activation
    checkpointing runs a forward again, on whichever thread, a layer repeats the recipe of its last call: do not run one
    layer under two recipes between a forward and its backward there. Layers that are plain ``nn.Linear`` are not
    touched. Each thread has its own blocks.

    Args:
        recipe: a preset's name or a recipe; None keeps each layer's own (useful to re-enable inside a disabled block).
        enabled: False runs the block in high precision, whatever ``recipe`` says.

    Raises:
        ConfigError: an unknown recipe.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(4, 4, bias=False, recipe="tensorwise")
        >>> with octavo.autocast(enabled=False):
        ...     exact = layer(torch.ones(1, 4))
        >>> torch.equal(exact, torch.ones(1, 4) @ layer.weight.T)
        True
    """
    if not enabled:
        recipe = "bf16"
    outer = _override.recipe
    _override.recipe = None if recipe is None else recipes.get(recipe)
    if not _override.depth:
        _override.region.copy_(_override.entered.add_(1))
    _override.depth += 1
    try:
        yield
    finally:
        _override.recipe = outer
        _override.depth -= 1
        if not _override.depth:
            _override.region.zero_()


def autocast_region() -> Tensor:
    """int64 [] on the CPU: the number of the outermost block that runs on this thread, 0 outside of any.

    It changes in place.
    """
    return _override.region


def active_recipe(own: Recipe) -> Recipe:
    """The recipe a layer runs with: the innermost autocast's, or its own."""
    return own if _override.recipe is None else _override.recipe
