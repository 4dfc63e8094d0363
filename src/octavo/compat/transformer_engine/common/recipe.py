"""Transformer Engine's recipe classes, each of which converts to an octavo recipe.

| class                  | default                                 | octavo                                            |
|------------------------|-----------------------------------------|---------------------------------------------------|
| `DelayedScaling`       | HYBRID, 1024 steps, their maximum       | `delayed_te`                                      |
| `Float8CurrentScaling` | HYBRID                                  | `tensorwise`, no floor under an amax              |
| `Float8BlockScaling`   | E4M3, powers of two, 1x128 and 128x128  | `blockwise`, no floor under an amax               |
| `MXFP8BlockScaling`    | E4M3                                    | `mxfp8`                                           |

`fp8_format` selects E5M2 or E4M3 for gradients. Here the classes are frozen. Unsupported options raise an error at
construction, and so do `NVFP4BlockScaling`, `CustomRecipe` and the recipes of MXFP4.

Reference: Transformer Engine's documentation, "Common API".
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, NamedTuple

from octavo import formats, recipes
from octavo.compat.transformer_engine.common.algorithms import Algorithms
from octavo.compat.transformer_engine.common.placeholder import refused
from octavo.errors import ConfigError
from octavo.numerics import ScaleRounding
from octavo.recipes import CastSpec, GemmSpec

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP4QATFloat8BlockScaling",
    "MXFP4QATMXFP8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
]


class Maxima(NamedTuple):
    """Largest values of the formats of forward and backward casts."""

    fwd: float
    bwd: float

    @property
    def max_fwd(self) -> float:
        """``fwd`` by its newer name."""
        return self.fwd

    @property
    def max_bwd(self) -> float:
        """``bwd`` by its newer name."""
        return self.bwd


class Format(Enum):
    """Formats of forward and backward casts, by their largest values.

    Example:
        >>> Format.HYBRID.value.fwd, Format.HYBRID.value.bwd
        (448.0, 57344.0)
    """

    E2M1 = Maxima(6.0, 6.0)  # FP4, which octavo's formats do not have; no recipe takes it
    E4M3 = Maxima(formats.E4M3.max, formats.E4M3.max)
    E5M2 = Maxima(formats.E5M2.max, formats.E5M2.max)  # no recipe takes it
    HYBRID = Maxima(formats.E4M3.max, formats.E5M2.max)


_ONLY_DEFAULT = "only default"  # key in the metadata of options that octavo supports at one value


def _only(default: object) -> Any:
    return field(default=default, metadata={_ONLY_DEFAULT: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Base class of the recipes.

    Attributes:
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``.
        fp8_dpa: attention in FP8; octavo's runs in high precision, so only False.
        fp8_mha: same as ``fp8_dpa``.
        backward_override: only None.
    """

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = _only(False)
    fp8_mha: bool = _only(False)
    backward_override: str | None = _only(None)

    def __post_init__(self) -> None:
        if self.fp8_format not in (Format.HYBRID, Format.E4M3):
            raise ConfigError(f"fp8_format must be Format.HYBRID or Format.E4M3, not {self.fp8_format}")
        for option in fields(self):
            value = getattr(self, option.name)
            if _ONLY_DEFAULT in option.metadata and value != option.default:
                raise ConfigError(f"octavo supports only {option.name}={option.default!r}, not {value!r}; leave it out")

    def octavo_recipe(self) -> recipes.Recipe:
        """Convert to the octavo recipe with the same casts and GEMMs."""
        raise NotImplementedError

    @classmethod
    def delayed(cls) -> bool:
        """Return True for :class:`DelayedScaling`."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Return True for :class:`Float8CurrentScaling`."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Return True for recipes with one scale per tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Return True for :class:`Float8BlockScaling`."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Return True for :class:`MXFP8BlockScaling`."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Return False: recipes of NVFP4 and MXFP4, and ``CustomRecipe``, are not supported."""
        return False

    mxfp4_qat = custom = nvfp4


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of finished steps.

    Attributes:
        margin: binades left free above the amax.
        interval: steps between two scales; only 1.
        amax_history_len: steps in the window.
        amax_compute_algo: "max" or "most_recent" of the window, or a function ``(amax_history) -> amax``.
        scaling_factor_compute_algo: a function ``(amax, scale, fp8_max, recipe) -> scale`` of encode scales, or None;
            ``algorithms.py`` describes the arguments of both functions.
        reduce_amax: True reduces amaxes over the autocast's ``amax_reduction_group``; False uses each rank's own.

    Example:
        >>> DelayedScaling(amax_history_len=16, amax_compute_algo="most_recent").octavo_recipe().history.length
        16
    """

    margin: int = 0
    interval: int = _only(1)
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., object] = "max"
    scaling_factor_compute_algo: Callable[..., object] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in _STATISTICS:
            raise ConfigError(
                f"amax_compute_algo must be a function or one of {', '.join(_STATISTICS)}, not "
                f"{self.amax_compute_algo!r}"
            )
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ConfigError(
                f"scaling_factor_compute_algo must be a function or None, not {self.scaling_factor_compute_algo!r}"
            )
        self.octavo_recipe()  # refuses a length or a margin out of range

    def octavo_recipe(self) -> recipes.Recipe:
        """``delayed_te`` with these options."""
        recipe = recipes.get(
            "delayed_te",
            history_length=self.amax_history_len,
            statistic="max" if callable(self.amax_compute_algo) else _STATISTICS[self.amax_compute_algo],
            margin=self.margin,
        )
        if callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None:
            assert recipe.history is not None
            recipe = replace(recipe, history=replace(recipe.history, statistic=self._algorithms()))
        return _with_gradients_in(recipe, self.fp8_format)

    def _algorithms(self) -> Algorithms:
        forward, backward = self.fp8_format.value
        return Algorithms(
            amax=self.amax_compute_algo,
            scale=self.scaling_factor_compute_algo,
            maxima=(forward, forward, backward),
            margin=self.margin,
            recipe=self,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from that tensor.

    Attributes:
        use_power_2_scales: round scales to powers of two.

    Example:
        >>> Float8CurrentScaling(fp8_format=Format.E4M3).octavo_recipe().grad_input.a.format.name
        'E4M3'
    """

    use_power_2_scales: bool = False

    def octavo_recipe(self) -> recipes.Recipe:
        """``tensorwise`` with these options."""
        rounding = ScaleRounding.RCEIL if self.use_power_2_scales else ScaleRounding.FP32
        recipe = _each_cast(
            recipes.get("tensorwise"), lambda cast: replace(cast, amax_floor=0.0, scale_rounding=rounding)
        )
        return _with_gradients_in(recipe, self.fp8_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One scale per 1x128 tile of inputs and gradients, and per 128x128 block of weights.

    Attributes:
        use_f32_scales: allow any float32 scale instead of powers of two only.
        x_block_scaling_dim: only 1, tiles.
        w_block_scaling_dim: only 2, blocks.
        grad_block_scaling_dim: only 1.

    Example:
        >>> Float8BlockScaling().octavo_recipe().output.b.granularity
        PerBlock(rows=128, columns=128)
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    x_block_scaling_dim: int = _only(1)
    w_block_scaling_dim: int = _only(2)
    grad_block_scaling_dim: int = _only(1)

    def octavo_recipe(self) -> recipes.Recipe:
        """``blockwise`` with these options."""
        recipe = recipes.get("blockwise", power_of_two=not self.use_f32_scales)
        return _with_gradients_in(_each_cast(recipe, lambda cast: replace(cast, amax_floor=0.0)), self.fp8_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale, stored as a byte, per 32 elements along the summed dimension.

    Attributes:
        margin: only 0.

    Example:
        >>> MXFP8BlockScaling().octavo_recipe() == recipes.get("mxfp8")
        True
    """

    fp8_format: Format = Format.E4M3
    margin: int = _only(0)

    def octavo_recipe(self) -> recipes.Recipe:
        """``mxfp8``."""
        return _with_gradients_in(recipes.get("mxfp8"), self.fp8_format)


_STATISTICS = {"max": "max", "most_recent": "latest"}
_FOUR_BITS = "octavo computes in FP8 and has no FP4 recipe; use MXFP8BlockScaling(), the closest in blocks"

NVFP4BlockScaling = refused("NVFP4BlockScaling", _FOUR_BITS)
MXFP4QATMXFP8BlockScaling = refused("MXFP4QATMXFP8BlockScaling", _FOUR_BITS)
MXFP4QATFloat8BlockScaling = refused("MXFP4QATFloat8BlockScaling", _FOUR_BITS)
CustomRecipe = refused("CustomRecipe", "define each cast with octavo.recipes.Recipe and use octavo.autocast")


def _each_cast(recipe: recipes.Recipe, change: Callable[[CastSpec], CastSpec]) -> recipes.Recipe:
    """Apply ``change`` to every cast of a recipe."""

    def changed(gemm: GemmSpec) -> GemmSpec:
        return replace(gemm, a=gemm.a and change(gemm.a), b=gemm.b and change(gemm.b))

    output, grad_input, grad_weight = map(changed, (recipe.output, recipe.grad_input, recipe.grad_weight))
    return replace(recipe, output=output, grad_input=grad_input, grad_weight=grad_weight)


def _with_gradients_in(recipe: recipes.Recipe, fp8_format: Format) -> recipes.Recipe:
    """Set both gradient casts to the backward format; the recipe gets another name if that changes it."""
    return recipe.with_gradients_in(formats.E5M2 if fp8_format is Format.HYBRID else formats.E4M3)
