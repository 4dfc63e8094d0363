"""What the heat map can show: every statistic, its healthy range, and which of several values is the worst."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from octavo.doctor.thresholds import Thresholds

__all__ = ["STATISTIC_OF_CODE", "Kind", "Statistic", "Worst", "all_statistics", "module_statistic"]


class Kind(StrEnum):
    """How a number is written and spread over colours."""

    MAGNITUDE = "magnitude"  # positive, over many binades
    RATIO = "ratio"  # positive, 1 in the middle
    FRACTION = "fraction"  # 0 to 1, as a percentage
    SIGNED = "signed"  # 0 in the middle
    DECIBEL = "decibel"
    COUNT = "count"
    NUMBER = "number"  # anything else


class Worst(StrEnum):
    """Which value stands for several looks."""

    LARGEST = "largest"
    SMALLEST = "smallest"
    FARTHEST = "farthest"  # from 1 for a ratio, from 0 for a signed number


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """One entry of the page's menu.

    Attributes:
        table: "casts", "products", "parameters" or "modules".
        field: its name there.
        title: as the menu has it.
        kind: how it is written.
        meaning: one sentence.
        worst: which value of several looks is kept.
        low: smallest healthy value; None where there is none.
        high: largest healthy value; None where there is none.
    """

    table: str
    field: str
    title: str
    kind: Kind
    meaning: str
    worst: Worst = Worst.LARGEST
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        """Table and field.

        Example:
            >>> module_statistic("alignment", Thresholds()).name
            'modules.alignment'
        """
        return f"{self.table}.{self.field}"


VALUES = (
    Statistic(table="casts", field="amax", title="Amax", kind=Kind.MAGNITUDE, meaning="largest finite magnitude"),
    Statistic(table="casts", field="rms", title="RMS", kind=Kind.MAGNITUDE, meaning="root mean square"),
    Statistic(
        table="casts",
        field="kurtosis",
        title="Kurtosis",
        kind=Kind.MAGNITUDE,
        meaning="3 for a Gaussian; outliers alone do no harm in FP8",
    ),
    Statistic(
        table="casts",
        field="nonfinite",
        title="Non-finite",
        kind=Kind.COUNT,
        meaning="NaN and ±Inf elements before the cast",
        high=0.0,
    ),
    Statistic(table="casts", field="zero_fraction", title="Zeros", kind=Kind.FRACTION, meaning="elements x = 0"),
)

ERRORS = (
    Statistic(
        table="casts",
        field="signed_error",
        title="Signed error",
        kind=Kind.SIGNED,
        meaning="error along the values' signs, relative to the sum of magnitudes",
        worst=Worst.FARTHEST,
    ),
    Statistic(
        table="casts",
        field="cosine",
        title="Cosine",
        kind=Kind.NUMBER,
        meaning="of the tensor and what its codes decode to",
        worst=Worst.SMALLEST,
    ),
)

# By a finding's code, the statistics that show it, the best first; codes about the whole run have none.
STATISTIC_OF_CODE = {
    "nonfinite": ("casts.nonfinite",),
    "saturation": ("casts.saturation_fraction",),
    "gradient-underflow": ("casts.underflow_fraction",),
    "bulk-underflow": ("casts.underflow_fraction",),
    "stale-scale": ("casts.stale_ratio",),
    "frozen-scale": ("casts.scale",),
    "scale-oscillation": ("casts.scale",),
    "inexact-amax": ("casts.stale_ratio", "casts.least_stale_ratio"),
    "stale-weight": ("casts.code_mismatch",),
    "rank-mismatch": ("modules.rank_scale_ratio", "casts.scale"),
    "zero-tensor": ("casts.zero_fraction",),
    "outlier-growth": ("modules.alignment", "casts.kurtosis"),
    "biased-accumulation": ("products.accumulation_bias",),
    "sensitive-module": ("casts.underflow_fraction",),
    "batch-norm": ("modules.batch_norm", "modules.batch_norm_rows"),
    "gradient-below-noise": ("products.sqnr_db",),
    "learning-rate": ("parameters.update_ratio",),
    "slow-layer": ("casts.amax",),
}


def all_statistics(thresholds: Thresholds, modules: Iterable[str] = ()) -> tuple[Statistic, ...]:
    """The menu, in its order.

    Args:
        thresholds: where healthy ranges end.
        modules: names of ``Series.modules``.

    Example:
        >>> [one.field for one in all_statistics(Thresholds()) if one.table == "products"]
        ['sqnr_db', 'accumulation_bias']
    """
    named = tuple(module_statistic(name, thresholds) for name in modules)
    return (*_of_noise(thresholds), *ERRORS, *_of_scales(thresholds), *VALUES, *_of_the_rest(thresholds), *named)


def module_statistic(name: str, thresholds: Thresholds) -> Statistic:
    """The entry of one of ``Series.modules``."""
    high: float | None
    match name:
        case "alignment":
            title, kind, high = "Gate/up alignment", Kind.NUMBER, thresholds.alignment
            meaning = "largest |cosine| of a row of the gate projection and the same row of the up projection"
        case "batch_norm":
            title, kind, high = "Batch norm distance", Kind.NUMBER, thresholds.batch_norm_binades
            meaning = "the batch's variance against the running one, in binades beyond what a batch scatters"
        case "batch_norm_rows":
            title, kind, high = "Batch norm rows", Kind.NUMBER, None
            meaning = "rows of the batch whose statistics it took"
        case "rank_scale_ratio":
            title, kind, high = "Scales across ranks", Kind.RATIO, thresholds.rank_ratio
            meaning = "the largest scale of any rank over the smallest"
        case _:
            title, kind, high = name.replace("_", " "), Kind.NUMBER, None
            meaning = "as the run recorded it"
    return Statistic(table="modules", field=name, title=title, kind=kind, meaning=meaning, high=high)


def _of_noise(thresholds: Thresholds) -> tuple[Statistic, ...]:
    return (
        Statistic(
            table="casts",
            field="sqnr_db",
            title="SQNR",
            kind=Kind.DECIBEL,
            meaning="signal to quantization noise; on Gaussian data 31.5 dB in E4M3, 25.6 dB in E5M2",
            worst=Worst.SMALLEST,
            low=thresholds.healthy_cast_db,
        ),
        Statistic(
            table="casts",
            field="underflow_fraction",
            title="Underflow",
            kind=Kind.FRACTION,
            meaning="nonzeros whose code is zero",
            high=thresholds.underflow_fraction,
        ),
        Statistic(
            table="casts",
            field="flushed_energy",
            title="Flushed energy",
            kind=Kind.FRACTION,
            meaning="share of the sum of squares in the nonzeros that became zero",
        ),
        Statistic(
            table="casts",
            field="saturation_fraction",
            title="Saturation",
            kind=Kind.FRACTION,
            meaning="elements beyond the largest value that the scale provides for",
            high=thresholds.saturation_fraction,
        ),
    )


def _of_scales(thresholds: Thresholds) -> tuple[Statistic, ...]:
    return (
        Statistic(
            table="casts",
            field="stale_ratio",
            title="Stale ratio",
            kind=Kind.RATIO,
            meaning="amax now over the amax that the scale was made for",
            worst=Worst.FARTHEST,
            low=1 / thresholds.loose_ratio,
            high=thresholds.stale_ratio,
        ),
        Statistic(
            table="casts",
            field="least_stale_ratio",
            title="Least stale ratio",
            kind=Kind.RATIO,
            meaning="the smallest stale ratio of all scaling groups",
            worst=Worst.FARTHEST,
            low=1 / thresholds.loose_ratio,
            high=thresholds.stale_ratio,
        ),
        Statistic(table="casts", field="scale", title="Scale", kind=Kind.MAGNITUDE, meaning="what codes decode with"),
        Statistic(
            table="casts",
            field="code_mismatch",
            title="Code mismatch",
            kind=Kind.FRACTION,
            meaning="codes that are not those of the tensor under its scale",
            high=thresholds.code_mismatch,
        ),
    )


def _of_the_rest(thresholds: Thresholds) -> tuple[Statistic, ...]:
    bias = thresholds.accumulation_bias
    return (
        Statistic(
            table="products",
            field="sqnr_db",
            title="GEMM SQNR",
            kind=Kind.DECIBEL,
            meaning="of the product, against high precision",
            worst=Worst.SMALLEST,
            low=thresholds.healthy_product_db,
        ),
        Statistic(
            table="products",
            field="accumulation_bias",
            title="Accumulation bias",
            kind=Kind.SIGNED,
            meaning="what a Hopper tensor core's sums lose, against FP32 sums",
            worst=Worst.FARTHEST,
            low=-bias,
            high=bias,
        ),
        Statistic(
            table="parameters",
            field="grad_norm",
            title="Gradient norm",
            kind=Kind.MAGNITUDE,
            meaning="of the parameter, as the optimizer sees it",
        ),
        Statistic(
            table="parameters",
            field="gradient_variance",
            title="Gradient variance",
            kind=Kind.MAGNITUDE,
            meaning="summed over the elements, from Adam's moments",
        ),
        Statistic(
            table="parameters",
            field="update_ratio",
            title="Update / weight",
            kind=Kind.MAGNITUDE,
            meaning="norm of a step's update over that of the weight",
        ),
    )
