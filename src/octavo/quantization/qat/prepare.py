"""Quantization-aware training: ``prepare_qat``, train, ``convert_qat``.

Weights quantized after training were not trained for the rounding error. In a prepared model the linear layers already
compute the converted model's outputs, bit for bit, so training optimises the rounded model. Gradients pass straight
through the rounding (``octavo.quantization.qat.straight_through``); the master weights stay in high precision.

Layers and recipes are selected and reported by ``octavo.convert``; the projections of torch's attention become layers
first (``octavo.nn.projected_attention``), and ``octavo.convert.unfuse_experts`` gives experts theirs. Only a recipe's
output GEMM is used: the other two run in high precision. A ``static`` recipe determines a scale for each layer's input
in training (``octavo.quantization.qat.linear``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo import recipes
from octavo.convert import ConversionReport, convert, other_modules, restore
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.numerics.cast_spec import check_member
from octavo.quantization.qat.linear import DECAY, QATLinear, ScaleUpdate
from octavo.recipes import Recipe

__all__ = [
    "HIGH_PRECISION",
    "NO_SCALE",
    "check_recipe",
    "convert_qat",
    "freeze_scales",
    "parameter_groups",
    "prepare_qat",
]

HIGH_PRECISION = "bf16"
NO_SCALE = "a plain layer again: its input has no scale, since no training forward has reached it"


def prepare_qat(
    model: torch.nn.Module,
    recipe: str | Recipe = "static",
    *,
    scales: str = ScaleUpdate.TRACKED,
    clip_gradients: bool = False,
    decay: float = DECAY,
    skip: Sequence[str] = (),
    layer_filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    convert_head: bool = False,
    min_weight_elements: int = 1,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    overrides: Mapping[str, str | Recipe] | None = None,
) -> ConversionReport:
    """Prepare a model for quantization-aware training with ``recipe``, in place.

    The projections of ``nn.MultiheadAttention`` are prepared as ``in_proj`` and ``out_proj``; the keys of the
    ``state_dict`` do not change. Experts need layers of their own (``octavo.convert.unfuse_experts``), or stay in high
    precision. Layers that are already static, such as those of a calibrated model, keep their scales as initial
    values.

    Args:
        model: any module.
        recipe: "static", or one with dynamic scales such as "tensorwise"; not a delayed one.
        scales: update rule of a static input's scale: "tracked", "learned" or "frozen". A frozen scale must come from
            a calibrated model, or from ``octavo.load_scaling_state`` after this call. Dynamic inputs need none.
        clip_gradients: zero the gradient of saturated values.
        decay: factor on a tracked amax at each forward pass; 1 keeps the largest amax.
        skip: as in :func:`octavo.convert`, like the following arguments.
        layer_filter: as in ``convert``.
        convert_head: as in ``convert``.
        min_weight_elements: as in ``convert``.
        keep_first_blocks: as in ``convert``.
        keep_last_blocks: as in ``convert``.
        overrides: as in ``convert``; a layer whose recipe casts nothing is converted, not prepared.

    Returns:
        The prepared layers, and the reason for each other layer.

    Raises:
        ConfigError: an argument invalid for :func:`octavo.convert`; a delayed recipe, or one that casts nothing;
            unknown ``scales``; a ``decay`` outside (0, 1]; a model that is already prepared.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> report = octavo.prepare_qat(model, "static")
        >>> model(torch.randn(4, 8)).sum().backward()  # a training step, and its optimizer's
        >>> learned = model.eval()(torch.ones(1, 8))
        >>> _ = octavo.convert_qat(model)
        >>> torch.equal(model(torch.ones(1, 8)), learned)
        True
    """
    scale_update = _check_arguments(model, scales, decay)
    check_recipe(recipes.get(recipe))
    for other in _override_recipes(overrides):
        _check_not_delayed(other)
    report = convert(
        model,
        recipe,
        skip=[*skip, *other_modules(model)] if not isinstance(skip, str) else skip,  # fused experts
        layer_filter=layer_filter,
        convert_head=convert_head,
        min_weight_elements=min_weight_elements,
        keep_first_blocks=keep_first_blocks,
        keep_last_blocks=keep_last_blocks,
        overrides=overrides,
        attention_projections=True,
    )
    for path in report.converted:
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        if layer.recipe.output.b is not None:
            layer.__class__ = QATLinear
            assert isinstance(layer, QATLinear)
            layer.begin(scale_update, decay=decay, clip_gradients=clip_gradients)
    return report


def convert_qat(model: torch.nn.Module, *, hold_weights: bool = False) -> ConversionReport:
    """Convert a prepared model as ``octavo.convert`` would, with the scales from training, in place.

    The outputs are bitwise those of the prepared model in evaluation. A static layer without a training forward pass
    has no scale: it becomes a plain layer again, and the report names it.

    Args:
        model: prepared by :func:`prepare_qat`.
        hold_weights: freeze the weights and store them as FP8 codes, one byte an element; no further training.

    Raises:
        ConfigError: the model is not prepared.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = octavo.prepare_qat(model, "tensorwise")
        >>> print(octavo.convert_qat(model, hold_weights=True))
        1 layer runs tensorwise, 0 stay as they are
        in FP8: 88.9 % of the parameters and 100.0 % of the multiplications, counting each weight once a token
        1 store their weight as FP8 codes
    """
    prepared = dict(_prepared(model))
    if not prepared:
        raise ConfigError("this model has no layer in quantization-aware training; call octavo.prepare_qat first")
    finished = {path: layer.finish() for path, layer in prepared.items()}
    unreached = [path for path, layer in finished.items() if layer.recipe.has_static_input and not layer.input_scale]
    for path in unreached:
        restore(finished.pop(path))
    if hold_weights:
        for layer in finished.values():
            layer.weight.requires_grad_(False)
    used_recipes = [layer.recipe for layer in finished.values()] or [recipes.get(HIGH_PRECISION)]
    report = convert(
        model,
        used_recipes[0],
        layer_filter=lambda path, _: path in finished,
        convert_head=True,
        overrides={path: layer.recipe for path, layer in finished.items() if layer.recipe != used_recipes[0]},
        frozen="fp8" if hold_weights else None,
    )
    reasons = {path: why.replace("filter", "not prepared", 1) for path, why in report.skipped.items()}
    return replace(report, skipped={**reasons, **dict.fromkeys(unreached, NO_SCALE)})


def freeze_scales(model: torch.nn.Module) -> None:
    """Freeze tracked and learned scales, so that the last steps train with the final ones.

    Example:
        >>> import octavo
        >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = octavo.prepare_qat(layer, "static")
        >>> _ = layer(torch.ones(1, 4))
        >>> freeze_scales(layer)
        >>> _ = layer(torch.full((1, 4), 1000.0))
        >>> round(octavo.scaling_state(layer)["0.input.scale"].item() * 448, 4)
        1.0
    """
    for _, layer in _prepared(model):
        layer.freeze()


def parameter_groups(
    model: torch.nn.Module, *, learning_rate: float, weight_decay: float, scale_learning_rate: float = 1e-3
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: matrices with weight decay, vectors without, learned scales separately.

    Weight decay would move a scale towards 1 regardless of the loss. Under Adam the scales' learning rate is in powers
    of two per step, independent of the weights' rate.

    Example:
        >>> import octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = octavo.prepare_qat(model, "static", scales="learned")
        >>> groups = parameter_groups(model, learning_rate=1e-4, weight_decay=0.1)
        >>> [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]
        [(0.0001, 0.1, 1), (0.0001, 0.0, 1), (0.001, 0.0, 1)]
    """
    learned = {id(layer.log2_scale) for _, layer in _prepared(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scales = [parameter for parameter in trained if id(parameter) in learned]
    others = [parameter for parameter in trained if id(parameter) not in learned]
    groups = (
        ([parameter for parameter in others if parameter.ndim >= 2], learning_rate, weight_decay),
        ([parameter for parameter in others if parameter.ndim < 2], learning_rate, 0.0),
        (scales, scale_learning_rate, 0.0),
    )
    return [{"params": members, "lr": rate, "weight_decay": decay} for members, rate, decay in groups if members]


def _prepared(model: torch.nn.Module) -> Iterator[tuple[str, QATLinear]]:
    for path, module in model.named_modules():
        if isinstance(module, QATLinear):
            yield path, module


def _check_arguments(model: torch.nn.Module, scales: str, decay: float) -> ScaleUpdate:
    check_member("scales", scales, tuple(ScaleUpdate))
    if not 0 < decay <= 1:
        raise ConfigError(f"decay must be above 0 and at most 1, not {decay}")
    for path, _ in _prepared(model):
        raise ConfigError(f"layer {path!r} is already in quantization-aware training; call octavo.convert_qat first")
    return ScaleUpdate(scales)


def _override_recipes(overrides: object) -> Iterator[Recipe]:
    """Yield the recipes of ``overrides``; :func:`octavo.convert` raises if it is not a mapping."""
    if isinstance(overrides, Mapping):
        yield from map(recipes.get, overrides.values())


def check_recipe(recipe: Recipe) -> None:
    """Raise ConfigError unless the recipe supports quantization-aware training."""
    if recipe.output.b is None:
        raise ConfigError(f"recipe {recipe.name!r} casts no weight; use 'static', or a recipe with dynamic scales")
    _check_not_delayed(recipe)


def _check_not_delayed(recipe: Recipe) -> None:
    if recipe.is_delayed:
        raise ConfigError(
            f"recipe {recipe.name!r} takes its scales from training steps, which the converted model does not "
            "have; use 'static' with scales='tracked'"
        )
