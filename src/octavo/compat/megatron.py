"""Megatron-Core's parallel linear layers in FP8: ``octavo.compat.megatron.convert``.

A rank's slices are scaled as one process scales the whole matrices (:mod:`octavo.scaling.slices`). Collectives stay
Megatron's own: ColumnParallelLinear, whose N ranks divide, sums the input's gradient in backward, or gathers the
input's parts under sequence parallelism; RowParallelLinear, whose K they divide, sums the output in its ``forward``.

Tested with megatron-core 0.16.1 on gloo.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo import recipes
from octavo.convert.choice import matches
from octavo.errors import ConfigError
from octavo.functional import fp8_linear
from octavo.nn import Linear
from octavo.nn.tensor_parallel import LocalTensors, check_sizes, slices_of
from octavo.recipes import Recipe
from octavo.scaling import WEIGHT, ScaleUpdates, Slices

__all__ = ["convert"]

HEAD = "output_layer"
_DIVIDED = {"ColumnParallelLinear": "N", "RowParallelLinear": "K"}


def convert(
    model: torch.nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    skip: Sequence[str] = (),
    convert_head: bool = False,
    amax_group: Any = None,
) -> tuple[str, ...]:
    """Let Megatron-Core's ColumnParallelLinear and RowParallelLinear layers run in FP8, in place.

    Parameters, ``state_dict``, sharded checkpoints and process groups stay Megatron's. ``octavo.restore`` undoes it.

    Args:
        model: a model on this rank, of Megatron-Core's modules.
        recipe: a preset's name or a recipe.
        skip: shell patterns of module paths.
        convert_head: convert layers named "output_layer" too.
        amax_group: as for :func:`octavo.convert`, for delayed recipes.

    Returns:
        The paths of the converted layers.

    Raises:
        ConfigError: no such layer is left by ``skip``, a slice that is no multiple of the recipe's blocks, or a layer
            with fused gradient accumulation, deferred weight gradients or no weight of its own.

    docs/how-to/megatron.md has an example.
    """
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a list of patterns; write skip=[{skip!r}]")
    resolved = recipes.get(recipe)
    chosen = {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__ in _DIVIDED
        and type(module).__module__ == "megatron.core.tensor_parallel.layers"
        and not any(matches(pattern, [path]) for pattern in skip)
        and (convert_head or path.rpartition(".")[2] != HEAD)
    }
    if not chosen:
        raise ConfigError(
            "the model has no ColumnParallelLinear or RowParallelLinear of megatron-core to convert; octavo.convert "
            "takes nn.Linear layers"
        )
    for path, module in chosen.items():
        _check(path, module, resolved)
    updates = ScaleUpdates(group=amax_group)
    for path, module in chosen.items():
        module.__class__ = _converted_class(type(module))  # type: ignore[arg-type]
        assert isinstance(module, ParallelLinear)
        module.set_recipe(resolved, updates, path=path)
    return tuple(chosen)


def _check(path: str, module: Any, recipe: Recipe) -> None:
    """Raise ConfigError where a layer cannot be converted."""
    if module.weight is None:
        raise ConfigError(f"layer {path!r} has no weight of its own; leave it out by skip=[{path!r}]")
    if module.gradient_accumulation_fusion:
        raise ConfigError(f"layer {path!r} fuses gradient accumulation; set gradient_accumulation_fusion=False")
    if module.config.defer_embedding_wgrad_compute:
        raise ConfigError(f"layer {path!r} defers its weight gradient; set defer_embedding_wgrad_compute=False")
    divided, ranks = _DIVIDED[type(module).__name__], _group(module).size()
    check_sizes(f"layer {path!r}", divided, module.weight.shape["NK".index(divided)] * ranks, ranks, recipe)


def _group(module: Any) -> Any:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group() if module.tp_group is None else module.tp_group


class ParallelLinear(Linear):
    """GEMMs in FP8 of a converted layer, whose class is derived from this one and from Megatron's.

    Attributes:
        divided: the dimension of the GEMMs that the ranks divide, "N" or "K".
    """

    divided: str

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K of this rank's weight."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N of this rank's weight."""
        return self.weight.shape[0]

    def weight_slice(self) -> tuple[Tensor, Slices] | None:
        """This rank's slice of the weight."""
        slices = slices_of(self.divided, _group(self))[WEIGHT]
        return None if slices is None else (self.weight, slices)

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002 (Megatron's name)
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **_: Any,
    ) -> Tensor:
        """Megatron's GEMMs with the collectives of their passes; its ``forward`` calls this."""
        from megatron.core.tensor_parallel import mappings

        if weight is not self.weight:
            raise ConfigError(
                f"{self.called} is given a weight that is not its own, and its scales are of its own; leave it out of "
                "octavo.compat.megatron.convert by skip"
            )
        group = _group(self)
        if sequence_parallel:
            input = mappings.gather_from_sequence_parallel_region(input, group=group)  # noqa: A001
        elif allreduce_dgrad:
            input = mappings.copy_to_tensor_model_parallel_region(input, group=group)  # noqa: A001
        recipe = self.recipe_now()
        if recipe.is_high_precision:
            return fp8_linear(input, weight.to(input.dtype), bias, recipe)
        local = LocalTensors(input, weight, bias, slices_of(self.divided, group))
        return self.forward_cast(recipe, lambda _: (input, None), local)


@cache
def _converted_class(original: type) -> type:
    """The class of converted layers: Megatron's, but for its GEMMs."""
    names: dict[str, Any] = {
        name: getattr(original, name) for name in ("forward", "__repr__", "get_extra_state", "set_extra_state")
    }
    names |= {"restored_class": original, "divided": _DIVIDED[original.__name__]}
    return type(f"FP8{original.__name__}", (ParallelLinear, original), names)
