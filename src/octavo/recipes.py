"""Recipes: which operand of which GEMM is cast how, and where its scale comes from.

A linear layer multiplies three times, always as ``a @ b.T`` with the summed dimension last:

| GEMM          | a                     | b                | result                |
|---------------|-----------------------|------------------|-----------------------|
| `output`      | input [M, K]          | weight [N, K]    | output [M, N]         |
| `grad_input`  | grad_output [M, N]    | weight.T [K, N]  | grad_input [M, K]     |
| `grad_weight` | grad_output.T [N, M]  | input.T [K, M]   | grad_weight [N, K]    |

The presets (sources: the published recipes named in each docstring):

| preset                   | input  | weight           | grad_output | a scale for each                             |
|--------------------------|--------|------------------|-------------|----------------------------------------------|
| `bf16`                   | –      | –                | –           | none: the surrounding precision              |
| `tensorwise`             | E4M3   | E4M3             | E5M2        | tensor, from this tensor                     |
| `delayed`, `delayed_te`  | E4M3   | E4M3             | E5M2        | tensor, from finished steps                  |
| `rowwise`                | E4M3   | E4M3             | E4M3        | row of each GEMM's operand, a power of two   |
| `rowwise_hp_grad_weight` | E4M3   | E4M3             | E4M3        | row; the weight's in grad_input is the       |
|                          |        |                  |             | tensor's; grad_weight in high precision      |
| `blockwise`              | E4M3   | E4M3             | E4M3        | 1x128; weight 128x128; a power of two        |
| `mxfp8`                  | E4M3   | E4M3             | E4M3        | 1x32 of each GEMM's operand, an E8M0 byte    |
| `static`                 | E4M3   | E4M3             | –           | tensor, the input's from calibration; the    |
|                          |        |                  |             | gradients' GEMMs in high precision           |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, E8M0, FP32, Format
from octavo.numerics import Accumulate, Granularity, Nonfinite, PerBlock, PerRow, PerTensor, ScaleRounding
from octavo.numerics.cast import check_fp8_format
from octavo.numerics.granularity import granularity_or_default
from octavo.numerics.scaling import AMAX_FLOOR

__all__ = ["CastSpec", "Close", "GemmSpec", "History", "Recipe", "Scaling", "Statistic", "get", "names"]


class Scaling(StrEnum):
    """Where a scale comes from."""

    DYNAMIC = "dynamic"  # this tensor
    DELAYED = "delayed"  # finished steps
    STATIC = "static"  # calibration; the layer holds it


class Statistic(StrEnum):
    """What delayed scaling takes from its window of amaxes."""

    MAX = "max"
    LATEST = "latest"
    MEAN = "mean"  # of the encode scales, as the source article describes; overflows while amax grows


_PER_TENSOR = PerTensor()


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """How one operand becomes FP8.

    Attributes:
        format: an FP8 format.
        granularity: which elements share a scale.
        scaling: where the scale comes from; delayed and static need one scale for the tensor.
        scale_rounding: which numbers the scale may be (numerics/scaling.py).
        scale_format: FP32, or E8M0 for one byte a scale.
        amax_floor: smaller amaxes count as this.
        margin: binades left free above amax, 0 or more.
        nonfinite: what an infinite element becomes.
    """

    format: Format
    granularity: Granularity = _PER_TENSOR
    scaling: Scaling = Scaling.DYNAMIC
    scale_rounding: ScaleRounding = ScaleRounding.FP32
    scale_format: Format = FP32
    amax_floor: float = AMAX_FLOOR
    margin: int = 0
    nonfinite: Nonfinite = Nonfinite.PROPAGATE

    def __post_init__(self) -> None:
        check_fp8_format(self.format)
        granularity_or_default(self.granularity)
        _check_member("a cast's scaling", self.scaling, tuple(Scaling))
        _check_member("a cast's nonfinite", self.nonfinite, tuple(Nonfinite))
        _check_member("a cast's scale_rounding", self.scale_rounding, tuple(ScaleRounding))
        _check_member("a cast's scale_format", self.scale_format, (FP32, E8M0))
        if self.scale_format == E8M0 and self.scale_rounding == ScaleRounding.FP32:
            raise ConfigError("E8M0 holds powers of two; a cast with it needs scale_rounding rceil, floor or even")
        if self.scaling != Scaling.DYNAMIC and not isinstance(self.granularity, PerTensor):
            raise ConfigError(
                f"{self.scaling} scaling keeps one number a tensor; {self.granularity} needs dynamic scaling"
            )
        if not 0 <= self.amax_floor < math.inf:
            raise ConfigError(f"amax_floor must be 0 or more and finite, not {self.amax_floor}")
        _check_whole("a cast's margin", self.margin, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """How the operands of ``a @ b.T`` are cast (None leaves both in high precision), and how a tensor core sums them.

    ``accumulate`` is what CUDA is asked for; elsewhere the sums are FP32 unless the recipe emulates tensor cores.
    """

    a: CastSpec | None
    b: CastSpec | None
    accumulate: Accumulate = Accumulate.HOPPER_SLOW

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ConfigError("a GEMM casts both operands or neither; give both a CastSpec or both None")
        _check_member("a GEMM's accumulate", self.accumulate, tuple(Accumulate))


class Close(StrEnum):
    """What ends a step of delayed scaling that nobody closes by hand, at the next training forward."""

    BACKWARD = "backward"  # a backward pass has run since
    AUTOCAST = "autocast"  # the outermost octavo.autocast block was left since, as in Transformer Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """How delayed scaling turns the amaxes of finished steps into one.

    Attributes:
        length: number of steps kept, 1 or more.
        statistic: what is taken from them.
        update_interval: steps between two changes of the scale, 1 or more.
        backoff: after a step with NaN or ±Inf elements the encode scale becomes this times the last one, instead of
            following the window; above 0, and 1 lets it follow. (The source article backs off by 0.99.)
        close: when the running step ends by itself.
    """

    length: int = 16
    statistic: Statistic = Statistic.MAX
    update_interval: int = 1
    backoff: float = 1.0
    close: Close = Close.BACKWARD

    def __post_init__(self) -> None:
        _check_whole("a history's length", self.length, least=1)
        _check_whole("a history's update_interval", self.update_interval, least=1)
        _check_member("a history's statistic", self.statistic, tuple(Statistic))
        _check_member("a history's close", self.close, tuple(Close))
        if not 0 < self.backoff <= 1:
            raise ConfigError(f"a history's backoff must be above 0 and at most 1, not {self.backoff}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A full specification of a linear layer's casts and GEMMs.

    Example:
        >>> recipe = get("tensorwise")
        >>> recipe.grad_input.a.format.name, str(recipe.output.accumulate)
        ('E5M2', 'hopper-fast')

    Attributes:
        name: the preset's.
        output: x · weight.
        grad_input: grad_output · weight.
        grad_weight: grad_output · x.
        history: what delayed casts take their scales from; None if there are none.
        emulate_tensor_cores: sum on any device, to the bit, as each GEMM's ``accumulate`` says Hopper would.
    """

    name: str
    output: GemmSpec
    grad_input: GemmSpec
    grad_weight: GemmSpec
    history: History | None = None
    emulate_tensor_cores: bool = False

    def __post_init__(self) -> None:
        delayed = any(cast.scaling == Scaling.DELAYED for cast in self.casts)
        if delayed != self.is_delayed:
            raise ConfigError(f"recipe {self.name!r} must have a history if, and only if, one of its casts is delayed")

    @property
    def casts(self) -> tuple[CastSpec, ...]:
        """Every cast of the three GEMMs, in their order."""
        operands = (side for gemm in (self.output, self.grad_input, self.grad_weight) for side in (gemm.a, gemm.b))
        return tuple(cast for cast in operands if cast is not None)

    @property
    def is_delayed(self) -> bool:
        """Whether any cast takes its scale from finished steps."""
        return self.history is not None

    @property
    def has_static_input(self) -> bool:
        """Whether the input's scale comes from calibration."""
        return self.output.a is not None and self.output.a.scaling == Scaling.STATIC

    @property
    def is_high_precision(self) -> bool:
        """Whether nothing is cast to FP8."""
        return self.output.a is None and self.grad_input.a is None and self.grad_weight.a is None


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


def _tensorwise(*, emulate_tensor_cores: bool = False) -> Recipe:
    """One dynamic scale a tensor; fast accumulation for the output only (torchao's tensorwise recipe)."""
    forward, backward = CastSpec(format=E4M3), CastSpec(format=E5M2)
    return _one_cast_per_tensor("tensorwise", forward, backward, emulate_tensor_cores=emulate_tensor_cores)


def _delayed(
    *,
    history_length: int = 16,
    statistic: str = "max",
    margin: int = 0,
    update_interval: int = 1,
    backoff: float = 1.0,
    emulate_tensor_cores: bool = False,
) -> Recipe:
    """One scale a tensor from finished steps (arXiv 2209.05433 §3)."""
    _check_member("statistic", statistic, tuple(Statistic))
    history = History(
        length=history_length, statistic=Statistic(statistic), update_interval=update_interval, backoff=backoff
    )
    return _from_history("delayed", history, margin, emulate_tensor_cores)


def _delayed_te(
    *, history_length: int = 1024, statistic: str = "max", margin: int = 0, emulate_tensor_cores: bool = False
) -> Recipe:
    """Transformer Engine's DelayedScaling: a window of 1024 steps, each ended by leaving the outermost autocast."""
    _check_member("statistic", statistic, (Statistic.MAX, Statistic.LATEST))
    history = History(length=history_length, statistic=Statistic(statistic), close=Close.AUTOCAST)
    return _from_history("delayed_te", history, margin, emulate_tensor_cores)


def _rowwise(*, emulate_tensor_cores: bool = False) -> Recipe:
    """A power-of-two scale for each row of each GEMM's operand, E4M3 throughout (torchao's rowwise recipe)."""
    row = CastSpec(format=E4M3, granularity=PerRow(), scale_rounding=ScaleRounding.RCEIL)
    return Recipe(
        name="rowwise",
        output=GemmSpec(a=row, b=row, accumulate=Accumulate.HOPPER_FAST),
        grad_input=GemmSpec(a=row, b=row),
        grad_weight=GemmSpec(a=row, b=row),
        emulate_tensor_cores=emulate_tensor_cores,
    )


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


def _blockwise(*, power_of_two: bool = True, emulate_tensor_cores: bool = False) -> Recipe:
    """1x128 tiles of input and gradient, 128x128 blocks of the weight (DeepSeek-V3, arXiv 2412.19437 §3.3.2)."""
    rounding = ScaleRounding.RCEIL if power_of_two else ScaleRounding.FP32
    tile = CastSpec(format=E4M3, granularity=PerBlock(1, 128), scale_rounding=rounding)
    block = CastSpec(format=E4M3, granularity=PerBlock(128, 128), scale_rounding=rounding)
    return Recipe(
        name="blockwise",
        output=GemmSpec(a=tile, b=block),
        grad_input=GemmSpec(a=tile, b=block),
        grad_weight=GemmSpec(a=tile, b=tile),
        emulate_tensor_cores=emulate_tensor_cores,
    )


def _mxfp8(*, scale_rounding: str = "rceil") -> Recipe:
    """A power-of-two byte for every 32 along K (OCP Microscaling Formats 1.0; rounded up as in arXiv 2506.08027)."""
    _check_member("scale_rounding", scale_rounding, tuple(ScaleRounding)[1:])
    group = CastSpec(
        format=E4M3,
        granularity=PerBlock(1, 32),
        scale_rounding=ScaleRounding(scale_rounding),
        scale_format=E8M0,
        amax_floor=0.0,
    )
    gemm = GemmSpec(a=group, b=group)
    return Recipe(name="mxfp8", output=gemm, grad_input=gemm, grad_weight=gemm)


def _static(*, emulate_tensor_cores: bool = False) -> Recipe:
    """The input's scale comes from calibration, the weight's from the weight; for inference."""
    held, measured = CastSpec(format=E4M3, scaling=Scaling.STATIC), CastSpec(format=E4M3)
    return Recipe(
        name="static",
        output=GemmSpec(a=held, b=measured, accumulate=Accumulate.HOPPER_FAST),
        grad_input=_PLAIN,
        grad_weight=_PLAIN,
        emulate_tensor_cores=emulate_tensor_cores,
    )


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


def _check_member(what: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _check_whole(what: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, not {value!r}")


_PLAIN = GemmSpec(a=None, b=None)
_PRESETS: dict[str, Callable[..., Recipe]] = {
    "bf16": _bf16,
    "tensorwise": _tensorwise,
    "delayed": _delayed,
    "delayed_te": _delayed_te,
    "rowwise": _rowwise,
    "rowwise_hp_grad_weight": _rowwise_hp_grad_weight,
    "blockwise": _blockwise,
    "mxfp8": _mxfp8,
    "static": _static,
}
