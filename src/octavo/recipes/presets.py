"""The named recipes, and the choice among them."""

from collections.abc import Callable
from typing import Any

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, E8M0
from octavo.numerics import (
    Accumulate,
    CastSpec,
    Granularity,
    PerBlock,
    PerRow,
    PerTensor,
    Rounding,
    ScaleRounding,
    Scaling,
)
from octavo.numerics.cast_spec import check_member
from octavo.recipes.specs import Close, GemmSpec, History, Recipe, Statistic

__all__ = ["get", "names"]

GRADIENT_FORMATS = {"E4M3": E4M3, "E5M2": E5M2}
WEIGHT_GRANULARITIES: dict[str, Granularity] = {
    "tensor": PerTensor(),
    "row": PerRow(),
    "128x128": PerBlock(128, 128),
}


def get(name: str | Recipe, **options: Any) -> Recipe:
    """A preset by name; a :class:`Recipe` passes through.

    Args:
        name: one of :func:`names`.
        options: the preset's own options, such as ``history_length`` for "delayed".

    Raises:
        ConfigError: an unknown name or option, or an option's value out of range.

    Example:
        >>> get("delayed", history_length=4).history.length
        4
    """
    if isinstance(name, Recipe):
        if options:
            raise ConfigError(f"options ({', '.join(options)}) go with a preset's name, not with a finished recipe")
        return name
    if not isinstance(name, str):
        raise TypeError(f"a recipe is a preset's name or a Recipe, not {type(name).__name__}")
    preset = _PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"there is no recipe {name!r}; use one of {', '.join(names())}")
    allowed = preset.__kwdefaults__ or {}
    unknown = [option for option in options if option not in allowed]
    if unknown:
        choice = f"takes {', '.join(allowed)}" if allowed else "takes no options"
        raise ConfigError(f"recipe {name!r} has no option {unknown[0]!r}; it {choice}")
    return preset(**options)


def names() -> tuple[str, ...]:
    """The presets' names."""
    return tuple(_PRESETS)


def _bf16() -> Recipe:
    """Nothing is cast: a layer of this recipe runs in the surrounding precision."""
    return Recipe(name="bf16", output=_PLAIN, grad_input=_PLAIN, grad_weight=_PLAIN)


def _tensorwise(
    *, emulate_tensor_cores: bool = False, gradient_format: str = "E5M2", gradient_rounding: str = "nearest"
) -> Recipe:
    """One dynamic scale a tensor; fast accumulation for the output only (torchao's tensorwise recipe)."""
    forward, backward = CastSpec(format=E4M3), CastSpec(format=E5M2)
    recipe = _one_cast_per_tensor("tensorwise", forward, backward, emulate_tensor_cores=emulate_tensor_cores)
    return _with_gradients_in(recipe, gradient_format, gradient_rounding)


def _delayed(
    *,
    history_length: int = 16,
    statistic: str = "max",
    margin: int = 0,
    update_interval: int = 1,
    backoff: float = 1.0,
    emulate_tensor_cores: bool = False,
    gradient_format: str = "E5M2",
    gradient_rounding: str = "nearest",
) -> Recipe:
    """One scale a tensor from finished steps (arXiv 2209.05433 §3)."""
    check_member("statistic", statistic, tuple(Statistic))
    history = History(
        length=history_length, statistic=Statistic(statistic), update_interval=update_interval, backoff=backoff
    )
    return _with_gradients_in(
        _from_history("delayed", history, margin, emulate_tensor_cores), gradient_format, gradient_rounding
    )


def _delayed_te(
    *,
    history_length: int = 1024,
    statistic: str = "max",
    margin: int = 0,
    emulate_tensor_cores: bool = False,
    gradient_format: str = "E5M2",
    gradient_rounding: str = "nearest",
) -> Recipe:
    """Transformer Engine's DelayedScaling: a window of 1024 steps, each ended by leaving the outermost autocast."""
    check_member("statistic", statistic, (Statistic.MAX, Statistic.LATEST))
    history = History(length=history_length, statistic=Statistic(statistic), close=Close.AUTOCAST)
    return _with_gradients_in(
        _from_history("delayed_te", history, margin, emulate_tensor_cores), gradient_format, gradient_rounding
    )


def _article(
    *,
    update_interval: int = 4,
    emulate_tensor_cores: bool = False,
    gradient_format: str = "E5M2",
    gradient_rounding: str = "nearest",
) -> Recipe:
    """The delayed scaling of octavo's source article: a mean of 32 scales, taken every 4 to 8 steps; 0.99 on overflow.

    The mean of the encode scales lags while amaxes grow, and what lies beyond saturates; "delayed" takes the maximum.
    """
    history = History(length=32, statistic=Statistic.MEAN, update_interval=update_interval, backoff=0.99)
    recipe = _from_history("article", history, 0, emulate_tensor_cores)
    return _with_gradients_in(recipe, gradient_format, gradient_rounding)


def _rowwise(
    *,
    power_of_two: bool = True,
    emulate_tensor_cores: bool = False,
    gradient_format: str = "E4M3",
    gradient_rounding: str = "nearest",
) -> Recipe:
    """A scale for each row of each GEMM's operand, E4M3 throughout (torchao's rowwise recipe: powers of two)."""
    check_member("power_of_two", power_of_two, (False, True))
    rounding = ScaleRounding.RCEIL if power_of_two else ScaleRounding.FP32
    row = CastSpec(format=E4M3, granularity=PerRow(), scale_rounding=rounding)
    recipe = Recipe(
        name="rowwise",
        output=GemmSpec(a=row, b=row, accumulate=Accumulate.HOPPER_FAST),
        grad_input=GemmSpec(a=row, b=row),
        grad_weight=GemmSpec(a=row, b=row),
        emulate_tensor_cores=emulate_tensor_cores,
    )
    return _with_gradients_in(recipe, gradient_format, gradient_rounding)


def _rowwise_hp_grad_weight(*, emulate_tensor_cores: bool = False) -> Recipe:
    """As rowwise, but the weight has one scale in grad_input, and grad_weight is not cast (torchao's recipe)."""
    row = CastSpec(format=E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL)
    tensor = CastSpec(format=E4M3, scale_rounding=ScaleRounding.RCEIL)
    return Recipe(
        name="rowwise_hp_grad_weight",
        output=GemmSpec(a=row, b=row, accumulate=Accumulate.HOPPER_FAST),
        grad_input=GemmSpec(a=row, b=tensor),
        grad_weight=_PLAIN,
        emulate_tensor_cores=emulate_tensor_cores,
    )


def _blockwise(
    *,
    power_of_two: bool = True,
    emulate_tensor_cores: bool = False,
    gradient_format: str = "E4M3",
    gradient_rounding: str = "nearest",
) -> Recipe:
    """1x128 tiles of input and gradient, 128x128 blocks of the weight (DeepSeek-V3, arXiv 2412.19437 §3.3.2)."""
    check_member("power_of_two", power_of_two, (False, True))
    rounding = ScaleRounding.RCEIL if power_of_two else ScaleRounding.FP32
    tile = CastSpec(format=E4M3, granularity=PerBlock(1, 128), scale_rounding=rounding)
    block = CastSpec(format=E4M3, granularity=PerBlock(128, 128), scale_rounding=rounding)
    recipe = Recipe(
        name="blockwise",
        output=GemmSpec(a=tile, b=block),
        grad_input=GemmSpec(a=tile, b=block),
        grad_weight=GemmSpec(a=tile, b=tile),
        emulate_tensor_cores=emulate_tensor_cores,
    )
    return _with_gradients_in(recipe, gradient_format, gradient_rounding)


def _mxfp8(
    *, scale_rounding: str = "rceil", gradient_format: str = "E4M3", gradient_rounding: str = "nearest"
) -> Recipe:
    """A power-of-two byte for every 32 along K (OCP Microscaling Formats 1.0; rounded up as in arXiv 2506.08027)."""
    check_member("scale_rounding", scale_rounding, tuple(ScaleRounding)[1:])
    group = CastSpec(
        format=E4M3,
        granularity=PerBlock(1, 32),
        scale_rounding=ScaleRounding(scale_rounding),
        scale_format=E8M0,
    )
    gemm = GemmSpec(a=group, b=group)
    return _with_gradients_in(
        Recipe(name="mxfp8", output=gemm, grad_input=gemm, grad_weight=gemm), gradient_format, gradient_rounding
    )


def _static(
    *, weight_granularity: str = "tensor", power_of_two: bool = False, emulate_tensor_cores: bool = False
) -> Recipe:
    """The input's scale comes from calibration, the weight's from the weight; for inference.

    An input has one scale: scales along the dimension that is summed over cannot leave the sum. A weight may have one
    for each row, which leaves it with the output's column, or for each 128x128 block.
    """
    check_member("weight_granularity", weight_granularity, tuple(WEIGHT_GRANULARITIES))
    check_member("power_of_two", power_of_two, (False, True))
    rounding = ScaleRounding.RCEIL if power_of_two else ScaleRounding.FP32
    held = CastSpec(format=E4M3, scaling=Scaling.STATIC, scale_rounding=rounding)
    measured = CastSpec(format=E4M3, granularity=WEIGHT_GRANULARITIES[weight_granularity], scale_rounding=rounding)
    return Recipe(
        name="static",
        output=GemmSpec(a=held, b=measured, accumulate=Accumulate.HOPPER_FAST),
        grad_input=_PLAIN,
        grad_weight=_PLAIN,
        emulate_tensor_cores=emulate_tensor_cores,
    )


def _weight_only(*, granularity: str = "row") -> Recipe:
    """Weights are codes and one FP32 scale a row (or tensor, or 128x128 block); all GEMMs are in high precision."""
    check_member("granularity", granularity, tuple(WEIGHT_GRANULARITIES))
    weight = CastSpec(format=E4M3, granularity=WEIGHT_GRANULARITIES[granularity])
    return Recipe(name="weight_only", output=GemmSpec(a=None, b=weight), grad_input=_PLAIN, grad_weight=_PLAIN)


def _from_history(name: str, history: History, margin: int, emulate_tensor_cores: bool) -> Recipe:
    forward = CastSpec(format=E4M3, scaling=Scaling.DELAYED, margin=margin)
    backward = CastSpec(format=E5M2, scaling=Scaling.DELAYED, margin=margin)
    return _one_cast_per_tensor(name, forward, backward, history, emulate_tensor_cores=emulate_tensor_cores)


def _one_cast_per_tensor(
    name: str,
    forward: CastSpec,
    backward: CastSpec,
    history: History | None = None,
    *,
    emulate_tensor_cores: bool,
) -> Recipe:
    """Each tensor cast once and used by two GEMMs: three quantizations a step, not six."""
    return Recipe(
        name=name,
        output=GemmSpec(a=forward, b=forward, accumulate=Accumulate.HOPPER_FAST),
        grad_input=GemmSpec(a=backward, b=forward),
        grad_weight=GemmSpec(a=backward, b=forward),
        history=history,
        emulate_tensor_cores=emulate_tensor_cores,
    )


def _with_gradients_in(recipe: Recipe, gradient_format: str, gradient_rounding: str) -> Recipe:
    check_member("gradient_format", gradient_format, tuple(GRADIENT_FORMATS))
    check_member("gradient_rounding", gradient_rounding, tuple(Rounding))
    return recipe.with_gradients_in(GRADIENT_FORMATS[gradient_format], Rounding(gradient_rounding))


_PLAIN = GemmSpec(a=None, b=None)
_PRESETS: dict[str, Callable[..., Recipe]] = {
    "bf16": _bf16,
    "tensorwise": _tensorwise,
    "delayed": _delayed,
    "delayed_te": _delayed_te,
    "article": _article,
    "rowwise": _rowwise,
    "rowwise_hp_grad_weight": _rowwise_hp_grad_weight,
    "blockwise": _blockwise,
    "mxfp8": _mxfp8,
    "static": _static,
    "weight_only": _weight_only,
}
