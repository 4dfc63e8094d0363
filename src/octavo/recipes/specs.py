"""Parts of a recipe: the cast of each operand of each GEMM, and the source of delayed scales.

Specifications are values: frozen, compared by their fields, checked on construction.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from torch import Tensor

from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, Format
from octavo.html.notebook import Table, summary
from octavo.html.wording import counted
from octavo.numerics import Accumulate, CastSpec, PerBlock, Rounding, Scaling
from octavo.numerics.accumulate import CHAIN
from octavo.numerics.cast_spec import check_integer, check_member, is_number
from octavo.numerics.granularity import granularity_in_words

__all__ = ["OPERANDS", "Close", "GemmSpec", "History", "Recipe", "Statistic"]

OPERANDS = {  # roles of each GEMM's left and right operand
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}


class Statistic(StrEnum):
    """Statistic that delayed scaling takes from its window of amaxes."""

    MAX = "max"
    LATEST = "latest"
    MEAN = "mean"  # of the encode scales, as the source article describes; overflows while amax grows


MOST_STEPS = 1 << 16  # of a history, which every operand of every layer has


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """Casts of the operands of ``a @ b.T``, and accumulation of their products.

    | a        | b        | the GEMM                                                                     |
    |----------|----------|------------------------------------------------------------------------------|
    | CastSpec | CastSpec | of codes, in FP8                                                             |
    | None     | None     | in high precision                                                            |
    | None     | CastSpec | in high precision, of ``a`` and the codes of ``b``, decoded to ``a``'s dtype |

    ``accumulate`` says whether cuBLAS may use its fast accumulation, and what a recipe that emulates tensor cores
    computes; otherwise the sums are FP32.
    """

    a: CastSpec | None
    b: CastSpec | None
    accumulate: Accumulate = Accumulate.HOPPER_SLOW

    def __post_init__(self) -> None:
        if self.a is not None and self.b is None:
            raise ConfigError("a GEMM casts both operands, neither, or b alone; give b a CastSpec too, or a None")
        check_member("a GEMM's accumulate", self.accumulate, tuple(Accumulate))


class Close(StrEnum):
    """Event that ends a step of delayed scaling where updates are not manual."""

    OPTIMIZER = "optimizer"  # a step of the model's optimizer; see octavo.scaling.scale_updates
    AUTOCAST = "autocast"  # that, or another outermost octavo.autocast block, as in Transformer Engine

    @classmethod
    def _missing_(cls, value: object) -> "Close | None":
        return cls.OPTIMIZER if value == "backward" else None  # its name in older files


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Rule by which delayed scaling turns the amaxes of finished steps into one.

    Attributes:
        length: number of steps kept, 1 to 65,536.
        statistic: what is taken from them; or a function of the window, float32 [roles, length], newest first and -1
            where nothing was recorded, and of the amaxes in force, [roles], both copies, that returns the next amaxes,
            [roles]; one that is not above 0 or not finite in float32 leaves the amax in force, as does a step without
            an amax. Another shape is refused when a step ends. Two histories are equal if their functions are; a file
            takes no function.
        update_interval: steps between two changes of the scale, 1 or more.
        backoff: after a step with NaN or ±Inf elements the encode scale becomes this times the last one, instead of
            following the window; above 0, and 1 lets it follow. (The source article backs off by 0.99.)
        close: when the running step ends by itself.
    """

    length: int = 16
    statistic: Statistic | Callable[[Tensor, Tensor], Tensor] = Statistic.MAX
    update_interval: int = 1
    backoff: float = 1.0
    close: Close = Close.OPTIMIZER

    def __deepcopy__(self, memo: dict[int, object]) -> "History":
        """A copy with the same function, which histories are compared by."""
        return replace(self)

    def __post_init__(self) -> None:
        check_integer("a history's length", self.length, least=1)
        if self.length > MOST_STEPS:
            raise ConfigError(f"a history's length must be at most {MOST_STEPS:,} steps, not {self.length:,}")
        check_integer("a history's update_interval", self.update_interval, least=1)
        if not callable(self.statistic):
            check_member("a history's statistic", self.statistic, tuple(Statistic))
        check_member("a history's close", self.close, tuple(Close))
        if not is_number(self.backoff) or not 0 < self.backoff <= 1:
            raise ConfigError(f"a history's backoff must be above 0 and at most 1, not {self.backoff}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A full specification of a linear layer's casts and GEMMs.

    Example:
        >>> from octavo import recipes
        >>> recipe = recipes.get("tensorwise")
        >>> recipe.grad_input.a.format.name, str(recipe.output.accumulate)
        ('E5M2', 'hopper-fast')

    Attributes:
        name: the preset's.
        output: x · weight.
        grad_input: grad_output · weight.
        grad_weight: grad_output · x.
        history: what delayed casts take their scales from; None if there are none.
        emulate_tensor_cores: sum on any device, to the bit, as each GEMM's ``accumulate`` says Hopper would; for E4M3
            and E5M2 with one scale a tensor, a row, or 128 of K.
    """

    name: str
    output: GemmSpec
    grad_input: GemmSpec
    grad_weight: GemmSpec
    history: History | None = None
    emulate_tensor_cores: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"a recipe's name is a word, not {self.name!r}")
        if not isinstance(self.emulate_tensor_cores, bool):
            raise ConfigError(f"emulate_tensor_cores must be True or False, not {self.emulate_tensor_cores!r}")
        others = self.casts if self.output.a is None else self.casts[1:]
        if any(cast.scaling == Scaling.STATIC for cast in others):
            raise ConfigError("only the input of the output GEMM can be static; use dynamic scaling for the others")
        tensors = (self.output.a, self.output.b, self.grad_input.b, self.grad_weight.b)
        if any(cast is not None and cast.rounding == Rounding.STOCHASTIC for cast in tensors):
            raise ConfigError("only gradients, grad_input.a and grad_weight.a, can be rounded stochastically")
        delayed = any(cast.scaling == Scaling.DELAYED for cast in self.casts)
        if delayed != self.is_delayed:
            raise ConfigError(f"recipe {self.name!r} must have a history if, and only if, one of its casts is delayed")
        if self.emulate_tensor_cores:
            self._check_tensor_cores_take_it()

    def _repr_html_(self) -> str | None:
        return summary(f"Recipe {self.name}", facts=_facts(self), tables=[_cast_table(self)])

    def with_gradients_in(self, fmt: Format, rounding: Rounding | None = None) -> "Recipe":
        """This recipe with other casts of grad_output; under another name if that changes it.

        Args:
            fmt: their format.
            rounding: None leaves theirs.

        Example:
            >>> from octavo import formats, recipes
            >>> recipes.get("rowwise").with_gradients_in(formats.E5M2).name
            'rowwise, E5M2 gradients'
        """

        def changed(gemm: GemmSpec) -> GemmSpec:
            if gemm.a is None:
                return gemm
            return replace(gemm, a=replace(gemm.a, format=fmt, rounding=rounding or gemm.a.rounding))

        found = replace(self, grad_input=changed(self.grad_input), grad_weight=changed(self.grad_weight))
        if found == self:
            return self
        gradients = (found.grad_input.a, found.grad_weight.a)
        stochastic = any(cast is not None and cast.rounding == Rounding.STOCHASTIC for cast in gradients)
        how = f"{fmt} stochastic" if stochastic else fmt
        return replace(found, name=f"{self.name.partition(', ')[0]}, {how} gradients")

    def _check_tensor_cores_take_it(self) -> None:
        if self.output.a is None and self.output.b is not None:
            raise ConfigError(
                f"recipe {self.name!r} cannot emulate tensor cores: it casts no input, and so sums nothing in FP8; "
                "leave it False"
            )
        for cast in self.casts:
            reason = ""
            if cast.format not in (E4M3, E5M2):
                reason = f"Hopper multiplies E4M3 and E5M2, not {cast.format}"
            elif isinstance(cast.granularity, PerBlock) and cast.granularity.columns != CHAIN:
                reason = f"Hopper's sums can be scaled every {CHAIN} of K, not every {cast.granularity.columns}"
            if reason:
                raise ConfigError(
                    f"recipe {self.name!r} cannot emulate tensor cores: {reason}; leave emulate_tensor_cores False"
                )

    @property
    def casts(self) -> tuple[CastSpec, ...]:
        """Every cast of the three GEMMs, in their order."""
        operands = (side for gemm in (self.output, self.grad_input, self.grad_weight) for side in (gemm.a, gemm.b))
        return tuple(cast for cast in operands if cast is not None)

    @property
    def is_delayed(self) -> bool:
        """Return whether any cast takes its scale from finished steps."""
        return self.history is not None

    @property
    def has_static_input(self) -> bool:
        """Return whether the input's scale comes from calibration."""
        return self.output.a is not None and self.output.a.scaling == Scaling.STATIC

    @property
    def is_high_precision(self) -> bool:
        """Return whether nothing is cast to FP8."""
        return self.output.b is None and self.grad_input.b is None and self.grad_weight.b is None


def _facts(recipe: Recipe) -> dict[str, str]:
    facts = {"accumulation": ", ".join(f"{name} {getattr(recipe, name).accumulate}" for name in OPERANDS)}
    if recipe.emulate_tensor_cores:
        facts["accumulation"] += "; tensor cores are emulated"
    history = recipe.history
    if history is not None:
        statistic = history.statistic if isinstance(history.statistic, Statistic) else repr(history.statistic)
        backoff = "" if history.backoff == 1 else f", backoff {history.backoff}"
        every = f", changed every {history.update_interval} steps" if history.update_interval > 1 else ""
        facts["history"] = f"{statistic} of {counted(history.length, 'step')}{every}{backoff}"
    return facts


def _cast_table(recipe: Recipe) -> Table:
    """Cast of each operand of each GEMM."""
    return Table(
        columns=("GEMM", "operand", "format", "one scale per", "scale from", "options"),
        rows=[
            (gemm, role, *_cast_cells(spec))
            for gemm, roles in OPERANDS.items()
            for role, spec in zip(roles, (getattr(recipe, gemm).a, getattr(recipe, gemm).b), strict=True)
        ],
    )


def _cast_cells(spec: CastSpec | None) -> tuple[str, ...]:
    """Format, granularity, source of the scale, and every option that differs from its default."""
    if spec is None:
        return ("high precision", "–", "–", "")
    shown = ("format", "granularity", "scaling")
    options = (
        "another engine's arithmetic" if field.name == "engine" else f"{field.name} {getattr(spec, field.name)}"
        for field in fields(spec)
        if field.name not in shown and getattr(spec, field.name) != field.default
    )
    return (str(spec.format), granularity_in_words(spec.granularity), str(spec.scaling), ", ".join(options))
