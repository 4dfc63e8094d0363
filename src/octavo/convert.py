"""``convert`` and ``restore``: plain linear layers to octavo's and back, in any model.

A layer is not replaced: the same object changes its class. Its parameters, buffers, hooks and name, ties to other
modules, and references that optimizers hold all stay as they are, and so do the keys and bytes of the model's
``state_dict``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from octavo import recipes
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.recipes import Recipe

__all__ = ["ConversionReport", "convert", "restore"]

HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "classifier", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What :func:`convert` did.

    Attributes:
        recipe: the recipe's name.
        converted: paths of the layers that run it now.
        skipped: path of every other linear or embedding layer, and why it stays.
    """

    recipe: str
    converted: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers run {self.recipe}, {len(self.skipped)} stay in high precision"]
        return "\n".join(lines + [f"  {path}: {reason}" for path, reason in self.skipped.items()])


def convert(
    model: torch.nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    skip: Sequence[str] = (),
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    convert_head: bool = False,
    min_weight_elements: int = 1,
    scale_updates: str = "automatic",
) -> ConversionReport:
    """Let a model's linear layers run ``recipe``, in place.

    Stay as they are, each with its reason in the report: embeddings; the head (see Args); layers that ``skip`` or
    ``layer_filter`` name or that are too small; and subclasses of ``nn.Linear``, whose forward may be their own.

    Args:
        model: any module. Layers converted before take the new recipe.
        recipe: a preset's name or a recipe.
        skip: shell patterns of module paths, such as "lm_head" or "layers.0.*".
        layer_filter: called with path and layer; False skips it.
        convert_head: convert the language-model head too: a layer named lm_head (or embed_out, output_projection,
            classifier, score), or one that shares its weight or its shape with an embedding. It is among the layers
            that suffer most.
        min_weight_elements: skip layers with fewer; casting a small layer costs more than its GEMMs save.
        scale_updates: "automatic", or "manual" for loops that accumulate gradients and call ``octavo.update_scales``.

    Raises:
        ConfigError: unknown recipe or ``scale_updates``, a ``skip`` that is a bare string, a pattern that matches
            nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> print(convert(model, "tensorwise", skip=["1"]))
        1 layers run tensorwise, 1 stay in high precision
          1: skip pattern '1'
    """
    resolved = recipes.get(recipe)
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a list of patterns; write skip=[{skip!r}]")
    if scale_updates not in ("automatic", "manual"):
        raise ConfigError(f"scale_updates must be 'automatic' or 'manual', not {scale_updates!r}")
    candidates = dict(_candidates(model))
    _check_patterns(skip, candidates)
    embeddings = [module for module in candidates.values() if isinstance(module, torch.nn.Embedding)]
    converted, skipped = [], {}
    for path, module in candidates.items():
        reason = _reason_to_skip(path, module, skip, layer_filter, min_weight_elements)
        if reason is None and not convert_head:
            reason = _head_reason(path, module, embeddings)
        if reason is not None:
            skipped[path] = reason
            continue
        module.__class__ = Linear
        assert isinstance(module, Linear)
        module.set_recipe(resolved, manual_scale_updates=scale_updates == "manual")
        converted.append(path)
    return ConversionReport(recipe=resolved.name, converted=tuple(converted), skipped=skipped)


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Make every octavo linear layer a plain ``nn.Linear`` again; weights are untouched, scaling state is dropped.

    Returns:
        The paths of the restored layers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = convert(model)
        >>> restore(model), type(model[0]) is torch.nn.Linear
        (('0',), True)
    """
    restored = []
    for path, module in model.named_modules():
        if type(module) is Linear:
            del module.amax_history, module.recipe, module.manual_scale_updates
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
            restored.append(path)
    return tuple(restored)


def _candidates(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield path, module


def _check_patterns(skip: Sequence[str], candidates: dict[str, torch.nn.Module]) -> None:
    for pattern in skip:
        if not any(fnmatchcase(path, pattern) for path in candidates):
            shown = ", ".join(list(candidates)[:5])
            raise ConfigError(f"skip pattern {pattern!r} matches no linear layer; the first paths are {shown}")


def _reason_to_skip(
    path: str,
    module: torch.nn.Module,
    skip: Sequence[str],
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None,
    min_weight_elements: int,
) -> str | None:
    if not isinstance(module, torch.nn.Linear):
        return "embedding: a look-up, not a product"
    if type(module) not in (torch.nn.Linear, Linear):
        return f"subclass {type(module).__name__} of nn.Linear may compute something else"
    for pattern in skip:
        if fnmatchcase(path, pattern):
            return f"skip pattern {pattern!r}"
    if layer_filter is not None and not layer_filter(path, module):
        return "filter"
    if module.weight.numel() < min_weight_elements:
        return f"shape: {module.weight.numel()} weights, fewer than {min_weight_elements}"
    return None


def _head_reason(path: str, module: torch.nn.Module, embeddings: Sequence[torch.nn.Embedding]) -> str | None:
    assert isinstance(module, torch.nn.Linear)
    if path.rpartition(".")[2] in HEAD_NAMES:
        return "head: by its name"
    if any(module.weight is embedding.weight for embedding in embeddings):
        return "head: shares its weight with an embedding"
    if any(module.weight.shape == embedding.weight.shape for embedding in embeddings):
        return "head: has the shape of an embedding"
    return None
