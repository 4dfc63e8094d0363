"""``convert`` and ``restore``: plain linear layers to octavo's and back, in any model.

A layer is not replaced: the same object changes its class. Its parameters, buffers, hooks and name, ties to other
modules, and references that optimizers hold all stay as they are, and so do the keys and bytes of the model's
``state_dict``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from octavo import recipes
from octavo.errors import ConfigError
from octavo.functional import WeightCache
from octavo.nn import Linear
from octavo.nn.shared_input import SharedInput
from octavo.observers import ScaleUpdates
from octavo.recipes import Recipe
from octavo.scale_updates import stop_following

__all__ = ["ConversionReport", "choose_layers", "convert", "heads_of", "hold_weights", "read_by_others", "restore"]

_FAST_PATH = (
    "evaluates without gradients on torch's fast path, which reads the weights and runs no recipe; "
    "torch.backends.mha.set_fastpath_enabled(False) turns it off"
)
_TWINS = {"encoder": "decoder", "decoder": "encoder"}
HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "classifier", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What :func:`convert` did.

    Attributes:
        recipe: the recipe's name.
        converted: paths of the layers that run it, or what ``overrides`` give them.
        overridden: path of each converted layer that runs another recipe, and its name.
        held: paths of the layers whose weight is held as FP8 codes.
        not_held: path of each converted layer whose frozen weight was to be held and is not, and why.
        skipped: path of every other linear or embedding layer, and why it stays as it is.
        parameters: path of every projection that torch's attention has as a bare parameter, and why it stays.
        notes: path of modules that go round their converted layers, and when.
    """

    recipe: str
    converted: tuple[str, ...]
    overridden: dict[str, str] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    not_held: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        following = len(self.converted) - len(self.overridden)
        lines = [f"{following} layers run {self.recipe}, {len(self.skipped)} stay as they are"]
        if self.held:
            lines.append(f"{len(self.held)} hold their weight as FP8 codes")
        lines += [f"  {_shown(path)}: runs {name}" for path, name in self.overridden.items()]
        lines += [f"  {_shown(path)}: its weight is not held: {reason}" for path, reason in self.not_held.items()]
        lines += [f"  {_shown(path)}: {reason}" for path, reason in (self.skipped | self.parameters).items()]
        return "\n".join(lines + [f"note: {_shown(path)} {note}" for path, note in self.notes.items()])


def _shown(path: str) -> str:
    return path or "(the model itself)"


def convert(
    model: torch.nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    skip: Sequence[str] = (),
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    convert_head: bool = False,
    min_weight_elements: int = 1,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    overrides: Mapping[str, str | Recipe] | None = None,
    scale_updates: str = "automatic",
    amax_group: "torch.distributed.ProcessGroup | str | None" = None,
    cache_weights: bool = False,
    frozen: str | None = None,
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
        keep_first_blocks: leave the layers of the model's first blocks as they are. Blocks are the children of the
            ``ModuleList`` or ``Sequential`` that has most of the layers; where another has its path but for "encoder"
            in place of "decoder" or the reverse, both keep theirs.
        keep_last_blocks: the same for its last.
        overrides: recipes for some layers, by shell patterns of paths; the first that matches counts.
        scale_updates: when the steps of delayed scaling end: "automatic", with the optimizer's (see
            :mod:`octavo.scale_updates`), or "manual", when the loop calls ``octavo.update_scales``.
        amax_group: ranks that end an automatic step with their largest amaxes; None for the default process group if
            it is initialized, "rank" for each rank alone.
        cache_weights: cast a weight again only when it has changed: once a step, not once a micro-batch. Costs the
            codes' bytes between steps; a compiled graph does not use it.
        frozen: "fp8" holds weights that take no gradient as FP8 codes, one byte an element, such as the base that a
            LoRA fine-tune adapts. The ``state_dict`` then has the codes and ``weight_scale``.

    Raises:
        ConfigError: unknown recipe, ``scale_updates``, ``amax_group`` or ``frozen``, a ``skip`` that is a bare string,
            ``overrides`` that are no mapping, a pattern that matches nothing, an override of layers that all stay as
            they are, more blocks to keep than there are.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> print(convert(model, "tensorwise", skip=["1"]))
        1 layers run tensorwise, 1 stay as they are
          1: skip pattern '1'
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, not {type(model).__name__}")
    resolved = recipes.get(recipe)
    _check_words(scale_updates, frozen)
    overriding, paths = _looked_up(overrides), _all_paths(model)
    _check_patterns(overriding, dict(_candidates(model)), paths)
    chosen, skipped = choose_layers(
        model,
        skip=skip,
        layer_filter=layer_filter,
        convert_head=convert_head,
        min_weight_elements=min_weight_elements,
        keep_first_blocks=keep_first_blocks,
        keep_last_blocks=keep_last_blocks,
    )
    _check_effect(overriding, paths, skipped, chosen)
    updates, shared_input = ScaleUpdates(manual=scale_updates == "manual", group=amax_group), SharedInput()
    followed = {path: _overridden(paths[module], overriding, resolved) for path, module in chosen.items()}
    for path, module in chosen.items():
        module.__class__ = Linear
        assert isinstance(module, Linear)
        module.set_recipe(followed[path], updates, path=path)
        module.weight_cache, module.shared_input = WeightCache() if cache_weights else None, shared_input
    not_held = hold_weights(model, chosen if frozen is not None else ())[1]
    held = tuple(path for path, layer in chosen.items() if isinstance(layer, Linear) and layer.held)
    return ConversionReport(
        recipe=resolved.name,
        converted=tuple(chosen),
        overridden={path: other.name for path, other in followed.items() if other != resolved},
        held=held,
        not_held=not_held,
        skipped=skipped,
        parameters=dict(_bare_projections(model)),
        notes=dict(_notes(model)),
    )


def choose_layers(
    model: torch.nn.Module,
    *,
    skip: Sequence[str] = (),
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    convert_head: bool = False,
    min_weight_elements: int = 1,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
) -> tuple[dict[str, torch.nn.Linear], dict[str, str]]:
    """Which layers :func:`convert` would take, with the arguments that it has; nothing is changed.

    Returns:
        The layers by path; and the path of every other linear or embedding layer, with the reason why it stays.

    Raises:
        ConfigError: a ``skip`` that is a bare string, a pattern that matches nothing, or more blocks to keep than there
            are.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> chosen, left = choose_layers(model)
        >>> list(chosen), left["2"]
        (['1'], 'head: has the shape of an embedding')
    """
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a list of patterns; write skip=[{skip!r}]")
    candidates = dict(_candidates(model))
    paths = _all_paths(model)
    _check_patterns(skip, candidates, paths)
    kept = _heads(candidates) if not convert_head else {}
    kept |= _outer_blocks(model, candidates, keep_first_blocks, keep_last_blocks)
    chosen, skipped = {}, {}
    for path, module in candidates.items():  # all decided before the first change: a filter may raise
        reason = _reason_to_skip(paths[module], module, skip, layer_filter, min_weight_elements) or kept.get(path)
        if reason is None:
            assert isinstance(module, torch.nn.Linear)
            chosen[path] = module
        else:
            skipped[path] = f"{reason}; keeps its recipe {module.recipe.name}" if type(module) is Linear else reason
    return chosen, skipped


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Make every octavo linear layer a plain ``nn.Linear`` again; weights are untouched, scaling state is dropped.

    A weight that was held as FP8 codes becomes what they decode to: the rest is gone.

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
            stop_following(module)
            held = module.held_weight()
            if held is not None:
                module.weight = torch.nn.Parameter(held.dequantize(), requires_grad=False)
                del module.weight_scale
            del (
                module.amax_history,
                module.nonfinite_counts,
                module.input_scale,
                module.held,
                module.weight_cache,
                module.shared_input,
                module.last_recipe,
                module.recipe,
                module.path,
                module.scale_updates,
            )
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
            restored.append(path)
    return tuple(restored)


def _check_words(scale_updates: str, frozen: str | None) -> None:
    if scale_updates not in ("automatic", "manual"):
        raise ConfigError(f"scale_updates must be 'automatic' or 'manual', not {scale_updates!r}")
    if frozen not in (None, "fp8"):
        raise ConfigError(f"frozen must be None or 'fp8', not {frozen!r}")


def _looked_up(overrides: object) -> dict[str, Recipe]:
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"overrides takes a mapping from patterns to recipes, such as {{'layers.0.*': 'bf16'}}, not {overrides!r}"
        )
    return {pattern: recipes.get(other) for pattern, other in overrides.items()}


def _check_effect(
    overriding: dict[str, Recipe],
    paths: dict[torch.nn.Module, list[str]],
    skipped: dict[str, str],
    chosen: Mapping[str, torch.nn.Module],
) -> None:
    """Refuse an override whose layers all stay as they are."""
    for pattern in overriding:
        if not any(_matches(pattern, paths[module]) for module in chosen.values()):
            path, reason = next(
                (path, reason)
                for path, reason in skipped.items()
                if any(path in known and _matches(pattern, known) for known in paths.values())
            )
            raise ConfigError(
                f"override {pattern!r} has no effect: whatever it matches stays as it is ({_shown(path)}: {reason}); "
                "leave the override out, or let convert take the layer"
            )


def _all_paths(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every path of every module; one that stands in several places has several, the first of them its own."""
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def _matches(pattern: str, paths: list[str]) -> bool:
    return any(fnmatchcase(path, pattern) for path in paths)


def _overridden(paths: list[str], overriding: dict[str, Recipe], default: Recipe) -> Recipe:
    return next((recipe for pattern, recipe in overriding.items() if _matches(pattern, paths)), default)


def _outer_blocks(
    model: torch.nn.Module, candidates: dict[str, torch.nn.Module], first: int, last: int
) -> dict[str, str]:
    """Paths of the layers in the model's first and last blocks, and which they are."""
    _check_counts(keep_first_blocks=first, keep_last_blocks=last)
    kept: dict[str, str] = {}
    for stack in _stacks(model, candidates) if first or last else ():
        count = len(list(model.get_submodule(stack).children()))
        if first + last > count:
            raise ConfigError(
                f"keep_first_blocks={first} and keep_last_blocks={last} must be no more together than the {count} "
                f"blocks of {_shown(stack)}"
            )
        kept |= _ends(model, candidates, stack, first, last)
    return kept


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"{name} must be a whole number of at least 0, not {count!r}")


def _stacks(model: torch.nn.Module, candidates: dict[str, torch.nn.Module]) -> list[str]:
    """Paths of the list of blocks that has most of the layers and of its twin in an encoder-decoder."""
    lists = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    }
    if not lists:
        raise ConfigError(
            "this model has no ModuleList or Sequential whose first or last blocks could be kept; name layers by skip"
        )
    largest = max(lists, key=lambda path: (len(_inside(path, candidates)), lists[path]))
    swapped = [_TWINS.get(name, name) for name in largest.split(".")]
    return [path for path in lists if path in (largest, ".".join(swapped))]


def _inside(path: str, candidates: dict[str, torch.nn.Module]) -> list[str]:
    return [name for name in candidates if name.startswith(f"{path}." if path else "")]


def _ends(
    model: torch.nn.Module, candidates: dict[str, torch.nn.Module], stack: str, first: int, last: int
) -> dict[str, str]:
    """Paths of the layers in the first and last blocks of one list."""
    children = [name for name, _ in model.get_submodule(stack).named_children()]
    kept = {}
    for name in _inside(stack, candidates):
        block = children.index(name[len(stack) :].lstrip(".").split(".")[0])
        if block < first or block >= len(children) - last:
            kept[name] = f"block {block} of {len(children)} is kept"
    return kept


def hold_weights(
    model: torch.nn.Module, paths: Iterable[str], *, scales: Mapping[str, torch.Tensor] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Let converted layers hold their frozen weights as FP8 codes; see :meth:`octavo.nn.Linear.hold_weight_as_codes`.

    Args:
        model: converted.
        paths: of the layers; those whose weight is still trained are passed over.
        scales: decode scales to use instead of those that the recipe makes, by path.

    Returns:
        The paths of those that now hold codes; and of those that could not, with the reason.
    """
    others_read = read_by_others(model)
    held, not_held = [], {}
    for path in paths:
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        if layer.weight.requires_grad or layer.held is not None:
            continue
        if path in others_read:
            not_held[path] = others_read[path]
        elif layer.recipe.output.b is None:
            not_held[path] = f"{layer.recipe.name} casts no weight"
        else:
            layer.hold_weight_as_codes(scale=(scales or {}).get(path))
            held.append(path)
    return tuple(held), not_held


def read_by_others(model: torch.nn.Module) -> dict[str, str]:
    """Path of every linear layer whose weight something else reads too, so that it cannot become codes, and what does.

    Example:
        >>> model = torch.nn.ModuleDict({"table": torch.nn.Embedding(9, 4), "up": torch.nn.Linear(4, 8)})
        >>> model["head"] = torch.nn.Linear(4, 9, bias=False)
        >>> model["head"].weight = model["table"].weight
        >>> read_by_others(model)
        {'head': 'other modules use it too'}
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in module.parameters(recurse=False))
    fast_path = _read_by_fast_path(model)
    found = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        if layer in fast_path:
            found[path] = "torch's fast path of nn.TransformerEncoderLayer reads it in high precision"
        elif owners[id(layer.weight)] > 1:
            found[path] = "other modules use it too"
    return found


def _read_by_fast_path(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Layers whose weights torch's encoder reads for itself in evaluation, and what stands inside them (adapters)."""
    return {
        inner
        for layer in model.modules()
        if isinstance(layer, torch.nn.TransformerEncoderLayer)
        for linear in (layer.linear1, layer.linear2)
        for inner in linear.modules()
    }


def _bare_projections(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Weights of queries, keys and values that torch's attention has as parameters and not as layers."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if getattr(module, name) is not None:
                    where = f"{path}.{name}" if path else name
                    yield (
                        where,
                        "stays as it is: a parameter of nn.MultiheadAttention, which multiplies by it, and no layer",
                    )


def _candidates(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield path, module


def _check_patterns(
    patterns: Iterable[str], candidates: dict[str, torch.nn.Module], paths: dict[torch.nn.Module, list[str]]
) -> None:
    for pattern in patterns:
        if not any(_matches(pattern, paths[module]) for module in candidates.values()):
            linears = [path for path, module in candidates.items() if isinstance(module, torch.nn.Linear)]
            raise ConfigError(
                f"pattern {pattern!r} matches no layer; the first linear layers are {', '.join(linears[:5])}"
            )


def _reason_to_skip(
    paths: list[str],
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
        if _matches(pattern, paths):
            return f"skip pattern {pattern!r}"
    if layer_filter is not None and not layer_filter(paths[0], module):
        return "filter"
    if module.weight.numel() < min_weight_elements:
        return f"shape: {module.weight.numel()} weights, fewer than {min_weight_elements}"
    return None


def heads_of(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of what :func:`convert` takes for language-model heads.

    Example:
        >>> heads_of(torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "lm_head": torch.nn.Linear(8, 16)}))
        ('lm_head',)
    """
    return tuple(_heads(dict(_candidates(model))))


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
