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
from octavo.observers import ScaleUpdates
from octavo.recipes import Recipe

__all__ = ["ConversionReport", "convert", "restore"]

_FAST_PATH = (
    "evaluates without gradients on torch's fast path, which reads the weights and runs no recipe; "
    "torch.backends.mha.set_fastpath_enabled(False) turns it off"
)
HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "classifier", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What :func:`convert` did.

    Attributes:
        recipe: the recipe's name.
        converted: paths of the layers that run it now.
        skipped: path of every other linear or embedding layer, and why it stays as it is.
        notes: path of modules that go round their converted layers, and when.
    """

    recipe: str
    converted: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers run {self.recipe}, {len(self.skipped)} stay as they are"]
        lines += [f"  {path or '(the model itself)'}: {reason}" for path, reason in self.skipped.items()]
        return "\n".join(lines + [f"note: {path or '(the model itself)'} {note}" for path, note in self.notes.items()])


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
            classifier, score), or one that shares its weight with an embedding, or else the last one that has an
            embedding's shape. It is among the layers that suffer most.
        min_weight_elements: skip layers with fewer; casting a small layer costs more than its GEMMs save.
        scale_updates: "automatic", or "manual" for loops that accumulate gradients and call ``octavo.update_scales``.

    Raises:
        ConfigError: unknown recipe or ``scale_updates``, a ``skip`` that is a bare string, a pattern that matches
            nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> print(convert(model, "tensorwise", skip=["1"]))
        1 layers run tensorwise, 1 stay as they are
          1: skip pattern '1'
    """
    resolved = recipes.get(recipe)
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a list of patterns; write skip=[{skip!r}]")
    if scale_updates not in ("automatic", "manual"):
        raise ConfigError(f"scale_updates must be 'automatic' or 'manual', not {scale_updates!r}")
    candidates = dict(_candidates(model))
    _check_patterns(skip, candidates)
    heads = {} if convert_head else _heads(candidates)
    chosen, skipped = {}, {}
    for path, module in candidates.items():  # all decided before the first change: a filter may raise
        reason = _reason_to_skip(path, module, skip, layer_filter, min_weight_elements) or heads.get(path)
        if reason is None:
            chosen[path] = module
        else:
            skipped[path] = f"{reason}; keeps its recipe {module.recipe.name}" if type(module) is Linear else reason
    updates = ScaleUpdates(manual=scale_updates == "manual")
    for path, module in chosen.items():
        module.__class__ = Linear
        assert isinstance(module, Linear)
        module.set_recipe(resolved, updates, path=path)
    return ConversionReport(recipe=resolved.name, converted=tuple(chosen), skipped=skipped, notes=dict(_notes(model)))


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
            del (
                module.amax_history,
                module.nonfinite_counts,
                module.input_scale,
                module.recipe,
                module.path,
                module.scale_updates,
            )
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


def _heads(candidates: dict[str, torch.nn.Module]) -> dict[str, str]:
    """Paths of language-model heads and what gives them away.

    A shape is the weakest sign: a position table may be as large as a projection. It counts where nothing better is
    found, and then for the last layer that has it.
    """
    linears = {path: module for path, module in candidates.items() if type(module) in (torch.nn.Linear, Linear)}
    tables = [module.weight for module in candidates.values() if isinstance(module, torch.nn.Embedding)]
    heads = {path: "head: by its name" for path in linears if path.rpartition(".")[2] in HEAD_NAMES}
    for path, linear in linears.items():
        if any(linear.weight is table for table in tables):
            heads.setdefault(path, "head: shares its weight with an embedding")
    alike = [path for path, linear in linears.items() if any(linear.weight.shape == table.shape for table in tables)]
    return heads if heads or not alike else {alike[-1]: "head: has the shape of an embedding"}


def _notes(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and type(module.linear1) is Linear:
            yield path, _FAST_PATH
