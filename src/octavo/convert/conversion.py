"""``convert`` and ``restore``: plain linear layers to octavo's and back, in any model.

A layer is not replaced: the same object changes its class. Its parameters, buffers, hooks and name, ties to other
modules, and references that optimizers hold all stay as they are, and so do the keys and bytes of the model's
``state_dict``.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from octavo import recipes
from octavo.convert.attention import attention_with_recipes, check_attention, convert_attention, restore_attention
from octavo.convert.choice import (
    all_paths,
    check_patterns,
    choose_attention,
    choose_layers,
    choose_others,
    matches,
    multiplying_modules,
)
from octavo.convert.experts import kind_of, linear_shapes
from octavo.convert.fp8_storage import refuse_sharded, store_weights_as_codes
from octavo.convert.other_modules import ConvertedModule, convert_module, restore_module
from octavo.convert.plain_checkpoint import allow_save_pretrained
from octavo.convert.report import ConversionReport, bare_weights, packed_weights, shares_of, shown
from octavo.convert.weight_readers import has_fast_path, weight_readers
from octavo.errors import ConfigError
from octavo.functional import WeightCache
from octavo.nn import Linear
from octavo.nn.fp8_weight import FP8WeightLinear, is_own_linear
from octavo.nn.projected_attention import ProjectedAttention, join_projections, split_projections
from octavo.nn.shared_input import SharedInput
from octavo.recipes import Recipe
from octavo.scaling import ScaleUpdates
from octavo.scaling.scale_updates import stop_following

__all__ = ["convert", "restore"]

_NO_CODES = "experts and Conv1D keep their weights in high precision and cast them"
_FAST_PATH = (
    "evaluates without gradients on torch's fast path, which reads the weights and runs no recipe; "
    "torch.backends.mha.set_fastpath_enabled(False) turns it off"
)


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
    strict: float | None = None,
    linear_classes: Sequence[type[torch.nn.Linear]] = (),
    attention_projections: bool = False,
    convolutions: bool = False,
    attention: str | Recipe | None = None,
) -> ConversionReport:
    """Let a model's linear layers and experts run ``recipe``, in place.

    Experts in one module with weights of three dimensions, as transformers has them, have scales and amax histories for
    each expert. Stay as they are, each with its reason in the report: embeddings; the head (see Args); routers; layers
    that ``skip`` or ``layer_filter`` name or that are too small; subclasses of ``nn.Linear``, whose forward may be
    their own, unless ``linear_classes`` names them; layers that their owner never calls; weights that another library
    has quantized; and weights that are no linear layer's.

    Args:
        model: any module. Layers converted before take the new recipe.
        recipe: a preset's name or a recipe.
        skip: shell patterns of module paths, such as "lm_head" or "layers.0.*".
        layer_filter: called with path and layer; False skips it. For the weight of experts, with its name and a layer
            of one expert's shape, on the meta device.
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
            :mod:`octavo.scaling.scale_updates`), or "manual", when the loop calls ``octavo.update_scales``.
        amax_group: ranks that end a step with their largest amaxes, also in ``octavo.update_scales(model)``. None: the
            default process group if it is initialized; "rank": each rank alone.
        cache_weights: cast a weight again only when it has changed: once a step, not once a micro-batch. Costs the
            codes' bytes between steps; a compiled graph does not use it.
        frozen: "fp8" stores weights that take no gradient as FP8 codes, one byte an element, such as the base that a
            LoRA fine-tune adapts. The ``state_dict`` then has ``weight_codes`` and ``weight_scale``
            in the place of ``weight``. Weights of experts are not stored so.
        strict: the least share of multiplications that must run in FP8, from 0 to 1; a model of which less would is
            refused before it is changed.
        linear_classes: subclasses of ``nn.Linear`` that compute ``x @ weight.T + bias`` like it, such as transformers'
            ``FalconLinear``; each layer is tried on two rows. A converted one is an ``octavo.nn.Linear`` and of its
            own class again after :func:`restore`.
        attention_projections: convert the projections of ``nn.MultiheadAttention`` too, as linear layers ``in_proj``
            and ``out_proj`` (:mod:`octavo.nn.projected_attention`). Parameters stay the same objects and the
            ``state_dict`` keeps its keys; torch's fast paths of encoders, which run no recipe, are off then.
        convolutions: convert convolutions of patches that do not overlap too (:mod:`octavo.convert.convolutions`): 1×1
            kernels and embeddings of patches, without padding or groups.
        attention: recipe of attention's two products, with scales from their own tensors, such as "tensorwise"; of
            modules of :mod:`octavo.nn` and of transformers' models that run "sdpa" by its attention interface. "bf16"
            runs it in high precision again, None leaves it as it is. ``skip`` and the blocks to keep count for the
            modules of attention too, ``overrides`` do not. See :func:`octavo.functional.fp8_attention`.

    Raises:
        ConfigError: a share below ``strict``; a traced or scripted module, unknown recipe, ``scale_updates``,
            ``amax_group`` or ``frozen``, a ``skip`` that is a bare string, ``overrides`` that are no mapping, a pattern
            that matches nothing, an override of layers that all stay as they are, more blocks to keep than there are, a
            class in ``linear_classes`` that computes something else, ``attention`` of a model that has none to run it.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> print(convert(model, "tensorwise", skip=["1"]))
        1 layer runs tensorwise, 1 stays as it is
        in FP8: 71.1 % of the parameters and 80.0 % of the multiplications, counting each weight once a token
          1: skip pattern '1' (17.8 % of the parameters, 20.0 % of the multiplications)
    """
    _check_uncompiled(model)
    resolved = recipes.get(recipe)
    _check_words(scale_updates, frozen, strict)
    overriding = _looked_up(overrides)
    with _split_projections(model, wanted=attention_projections):  # all decided and checked before the first change
        paths = all_paths(model)
        check_patterns(overriding, multiplying_modules(model, convolutions=convolutions), paths)
        where: dict[str, Any] = {
            "skip": skip,
            "keep_first_blocks": keep_first_blocks,
            "keep_last_blocks": keep_last_blocks,
            "convolutions": convolutions,
        }
        choice = {**where, "layer_filter": layer_filter, "min_weight_elements": min_weight_elements}
        others, others_left = choose_others(model, **choice)
        chosen, skipped = choose_layers(
            model,
            **choice,
            convert_head=convert_head,
            linear_classes=linear_classes,
            attention=attention is not None,
        )
        _check_effect(overriding, paths, skipped | others_left, chosen | others)
        followed, of_others = (
            {path: _overridden(paths[module], overriding, resolved) for path, module in modules.items()}
            for modules in (chosen, others)
        )
        report = _planned(model, resolved, followed, skipped, others=(of_others, others_left))
        _check_share(report, strict)
        updates = ScaleUpdates(manual=scale_updates == "manual", group=amax_group)
        attention_left = _convert_attention(model, attention, where)
    _run(chosen, followed, updates, cache_weights=cache_weights)
    _run_others(others, of_others, updates, convolutions=convolutions)
    not_stored = store_weights_as_codes(model, chosen if frozen is not None else ())[1]
    not_stored |= dict.fromkeys(report.weights if frozen is not None else (), _NO_CODES)
    report = _completed(replace(report, not_stored=not_stored, attention_skipped=attention_left), model, followed)
    _warn_if_nothing_changed(report, resolved)
    _warn_if_nothing_stored(report, frozen)
    logging.getLogger("octavo").info("%s", report)
    return report


def _run(
    layers: Mapping[str, torch.nn.Linear],
    of_layers: Mapping[str, Recipe],
    updates: ScaleUpdates,
    *,
    cache_weights: bool,
) -> None:
    """Make linear layers octavo's, each with its recipe."""
    shared_input = SharedInput()
    for path, module in layers.items():
        if not isinstance(module, Linear):
            if type(module) is not torch.nn.Linear:
                module.__dict__["restored_class"] = type(module)
            module.__class__ = Linear
        assert isinstance(module, Linear)
        module.set_recipe(of_layers[path], updates, path=path)
        module.weight_cache, module.shared_input = WeightCache() if cache_weights else None, shared_input


def _run_others(
    others: Mapping[str, torch.nn.Module], of_others: Mapping[str, Recipe], updates: ScaleUpdates, *, convolutions: bool
) -> None:
    """Make modules with weights of their own octavo's, each with its recipe."""
    for path, other in others.items():
        convert_module(other, kind_of(other, convolutions=convolutions), of_others[path], updates, path=path)


@contextmanager
def _split_projections(model: torch.nn.Module, *, wanted: bool) -> Iterator[None]:
    """Give attention linear layers before the block chooses, and take them away if it fails."""
    split = split_projections(model) if wanted else {}
    try:
        yield
    except BaseException:
        join_projections(split)
        raise


def _convert_attention(
    model: torch.nn.Module, attention: str | Recipe | None, where: Mapping[str, Any]
) -> dict[str, str]:
    """Run a model's attention with the recipe that ``attention`` names; path of each module left, and why."""
    if attention is None:
        return {}
    recipe = recipes.get(attention)
    check_attention(model, recipe)
    chosen, left = choose_attention(model, recipe, **where)
    convert_attention(chosen.values(), recipe)
    return left


def _completed(report: ConversionReport, model: torch.nn.Module, layers: Iterable[str]) -> ConversionReport:
    """The report with what shows in the converted model alone."""
    reasons = attention_with_recipes(model)
    return replace(
        report,
        stored=tuple(path for path in layers if _stores_codes(model.get_submodule(path))),
        attention=tuple(path for path, reason in reasons.items() if reason is None),
        attention_skipped={path: reason for path, reason in reasons.items() if reason} | report.attention_skipped,
        notes=dict(_notes(model)),
    )


def _planned(
    model: torch.nn.Module,
    default: Recipe,
    followed: Mapping[str, Recipe],
    skipped: dict[str, str],
    *,
    others: tuple[Mapping[str, Recipe], Mapping[str, str]],
) -> ConversionReport:
    """The report of a conversion that is decided and not made yet."""
    running, left = others  # modules that will run a recipe; those that will not, and why
    weights = {
        f"{path}.{name}" if path else name: recipe
        for path, recipe in running.items()
        for name in linear_shapes(model.get_submodule(path))
    }
    bare = list(bare_weights(model, weights, left))
    return ConversionReport(
        recipe=default.name,
        converted=tuple(followed),
        weights=tuple(weights),
        overridden={path: other.name for path, other in {**followed, **weights}.items() if other != default},
        skipped=skipped,
        parameters={weight.path: weight.reason for weight in bare} | dict(packed_weights(model)),
        shares=shares_of(model, followed, skipped, bare, weights),
    )


def _check_share(report: ConversionReport, least: float | None) -> None:
    """Refuse a model of whose multiplications too few would run in FP8, naming the largest weight that stays."""
    share, rest = report.shares.multiplications, report.shares.by_path
    if least is None or share >= least:
        return
    why = report.skipped | report.parameters
    largest = max(why, key=lambda path: rest[path].multiplications if path in rest else 0.0)
    raise ConfigError(
        f"{share:.3f} of the multiplications would run in FP8, less than strict={least}; the largest weight that stays "
        f"is {shown(largest)}: {why[largest]}; the model is as it was"
    )


def _stores_codes(layer: torch.nn.Module) -> bool:
    return isinstance(layer, Linear) and layer.codes_layout is not None


def _warn_if_nothing_changed(report: ConversionReport, recipe: Recipe) -> None:
    if report.converted or report.weights or recipe.is_high_precision:
        return
    why = report.skipped | report.parameters
    shares = report.shares.by_path
    largest = max(why, key=lambda path: shares[path].parameters if path in shares else 0.0, default=None)
    example = "it has no linear layer" if largest is None else f"{shown(largest)}, the largest: {why[largest]}"
    warnings.warn(
        f"convert changed nothing: no layer of this model can run {recipe.name!r} ({example}); print the report for "
        "every weight and its reason",
        stacklevel=3,
    )


def _warn_if_nothing_stored(report: ConversionReport, frozen: str | None) -> None:
    if frozen is None or report.stored or not report.converted:
        return
    reasons = [f"{shown(path)}: {reason}" for path, reason in report.not_stored.items()]
    reasons.append("they all take gradients; freeze some with requires_grad_(False), then call convert again")
    warnings.warn(
        f"frozen='fp8' stored none of the {len(report.converted)} weights as codes: {reasons[0]}", stacklevel=3
    )


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Make every octavo linear layer a plain ``nn.Linear`` again, and experts and attention what they were before.

    Weights are untouched, scaling state is dropped.

    Layers of Megatron-Core that ``octavo.compat.megatron`` converted become Megatron's again.

    A weight that was stored as FP8 codes becomes its decoded values.

    Returns:
        The paths of the restored layers.

    Raises:
        ConfigError: FSDP2 has sharded layers or their codes; nothing is restored then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = convert(model)
        >>> restore(model), type(model[0]) is torch.nn.Linear
        (('0',), True)
    """
    refuse_sharded(model)
    restored = []
    for path, module in list(model.named_modules()):
        if isinstance(module, ConvertedModule):
            restore_module(module)
            restored.append(path)
        elif is_own_linear(module) or (isinstance(module, Linear) and module.restored_class is not torch.nn.Linear):
            stop_following(module)
            if isinstance(module, FP8WeightLinear):
                module.release_weight()
            del (
                module.amax_history,
                module.nonfinite_counts,
                module.input_scale,
                module.codes_layout,
                module.weight_cache,
                module.shared_input,
                module.last_recipe,
                module.trained_recipe,
                module.recipe,
                module.path,
                module.scale_updates,
            )
            module.__class__ = vars(module).pop("restored_class", module.restored_class)
            restored.append(path)
    restore_attention(model)
    join_projections({path: module for path, module in model.named_modules() if isinstance(module, ProjectedAttention)})
    allow_save_pretrained(model)
    return tuple(restored)


def _check_uncompiled(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, not {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{shown(path)} is a {type(module).__name__} of torch.jit, whose layers cannot be exchanged; "
                "convert the model first, then trace it"
            )


def _check_words(scale_updates: str, frozen: str | None, strict: object) -> None:
    if scale_updates not in ("automatic", "manual"):
        raise ConfigError(f"scale_updates must be 'automatic' or 'manual', not {scale_updates!r}")
    if frozen not in (None, "fp8"):
        raise ConfigError(f"frozen must be None or 'fp8', not {frozen!r}")
    is_number = isinstance(strict, int | float) and not isinstance(strict, bool)
    if strict is not None and not (is_number and 0 <= strict <= 1):  # type: ignore[operator]
        raise ConfigError(f"strict must be a share from 0 to 1 or None, not {strict!r}")


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
        if not any(matches(pattern, paths[module]) for module in chosen.values()):
            path, reason = next(
                (path, reason)
                for path, reason in skipped.items()
                if any(path in known and matches(pattern, known) for known in paths.values())
            )
            raise ConfigError(
                f"override {pattern!r} has no effect: whatever it matches stays as it is ({shown(path)}: {reason}); "
                "leave the override out, or let convert take the layer"
            )


def _overridden(paths: list[str], overriding: dict[str, Recipe], default: Recipe) -> Recipe:
    return next((recipe for pattern, recipe in overriding.items() if matches(pattern, paths)), default)


def _notes(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Modules that on some of their ways read the weights of layers that run a recipe on the others."""
    around: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if has_fast_path(module) and is_own_linear(module.linear1):
            yield path, _FAST_PATH
    for layer, reader in weight_readers(model).items():
        if is_own_linear(layer) and reader.reads:
            around.setdefault(reader.path, []).append(layer.path.removeprefix(f"{reader.path}."))
    for path, names in around.items():
        yield (
            path,
            f"reads the weights of {', '.join(names)} itself where it does not call them, and runs no recipe there",
        )
