"""Catalog of the statistics that a page shows: title, meaning, healthy range, and the worst of several values."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from octavo.doctor.thresholds import Thresholds

__all__ = ["STATISTIC_OF_CODE", "PageStatistic", "StatisticKind", "Worst", "all_statistics"]


class StatisticKind(StrEnum):
    """Kind of a number, which selects its text format and colours."""

    MAGNITUDE = "magnitude"  # positive, over many binades
    RATIO = "ratio"  # positive, 1 in the middle
    FRACTION = "fraction"  # 0 to 1, as a percentage
    SIGNED = "signed"  # 0 in the middle
    DECIBEL = "decibel"
    COUNT = "count"
    NUMBER = "number"  # anything else


class Worst(StrEnum):
    """Value that represents several samples."""

    LARGEST = "largest"
    SMALLEST = "smallest"
    FARTHEST = "farthest"  # from 1 for a ratio, from 0 for a signed number


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStatistic:
    """A statistic as a page names and colours it.

    Attributes:
        table: "casts", "products", "parameters" or "modules".
        field: its name in that table of a series.
        title: its name in a menu.
        kind: selects its text format and colours.
        meaning: one sentence.
        worst: the value of several samples that is kept.
        low: smallest healthy value; None for no limit.
        high: largest healthy value; None for no limit.
    """

    table: str
    field: str
    title: str
    kind: StatisticKind
    meaning: str
    worst: Worst = Worst.LARGEST
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        """Table and field.

        Example:
            >>> all_statistics(Thresholds(), ["alignment"])[-1].name
            'modules.alignment'
        """
        return f"{self.table}.{self.field}"


MAGNITUDE, RATIO, FRACTION, SIGNED, DECIBEL, COUNT, NUMBER = StatisticKind
LARGEST, SMALLEST, FARTHEST = Worst

# In the menu's order: table, field, title, kind, worst value, meaning.
CATALOG = (
    ("casts", "sqnr_db", "SQNR", DECIBEL, SMALLEST,
     "signal to quantization noise; on Gaussian data 31.5 dB in E4M3, 25.6 dB in E5M2"),
    ("casts", "underflow_fraction", "Underflow", FRACTION, LARGEST, "nonzeros whose code is zero"),
    ("casts", "flushed_energy", "Flushed energy", FRACTION, LARGEST,
     "share of the sum of squares in the nonzeros that became zero"),
    ("casts", "saturation_fraction", "Saturation", FRACTION, LARGEST,
     "elements beyond the largest value that the scale represents"),
    ("casts", "signed_error", "Signed error", SIGNED, FARTHEST,
     "error along the values' signs, relative to the sum of magnitudes"),
    ("casts", "cosine", "Cosine", NUMBER, SMALLEST, "of the tensor and its decoded codes"),
    ("casts", "stale_ratio", "Stale ratio", RATIO, FARTHEST, "amax over the amax that the scale was computed for"),
    ("casts", "least_stale_ratio", "Least stale ratio", RATIO, FARTHEST,
     "the smallest stale ratio of all scaling groups"),
    ("casts", "scale", "Scale", MAGNITUDE, LARGEST, "decode multiplier of the codes"),
    ("casts", "code_mismatch", "Code mismatch", FRACTION, LARGEST,
     "codes that are not those of the tensor under its scale"),
    ("casts", "amax", "Amax", MAGNITUDE, LARGEST, "largest finite magnitude"),
    ("casts", "rms", "RMS", MAGNITUDE, LARGEST, "root mean square"),
    ("casts", "kurtosis", "Kurtosis", MAGNITUDE, LARGEST, "3 for a Gaussian; outliers alone do no harm in FP8"),
    ("casts", "nonfinite", "Non-finite", COUNT, LARGEST, "NaN and ±Inf elements before the cast"),
    ("casts", "zero_fraction", "Zeros", FRACTION, LARGEST, "elements x = 0"),
    ("products", "sqnr_db", "GEMM SQNR", DECIBEL, SMALLEST, "of the product, against high precision"),
    ("products", "accumulation_bias", "Accumulation bias", SIGNED, FARTHEST,
     "loss of a Hopper tensor core's sums, against FP32 sums"),
    ("parameters", "grad_norm", "Gradient norm", MAGNITUDE, LARGEST, "of the parameter, as the optimizer receives it"),
    ("parameters", "gradient_variance", "Gradient variance", MAGNITUDE, LARGEST,
     "summed over the elements, from Adam's moments"),
    ("parameters", "update_ratio", "Update / weight", MAGNITUDE, LARGEST,
     "norm of a step's update over that of the weight"),
)  # fmt: skip

# Of Series.modules: title, kind, meaning.
MODULES = {
    "alignment": ("Gate/up alignment", NUMBER,
                  "largest |cosine| of a row of the gate projection and the same row of the up projection"),
    "batch_norm": ("Batch norm distance", NUMBER,
                   "the batch's variance against the running one, in binades beyond what a batch scatters"),
    "batch_norm_rows": ("Batch norm rows", NUMBER, "rows of the batch"),
    "expert_sqnr_db": ("Worst expert's SQNR", DECIBEL, "lowest SQNR of a cast of any expert of the layer"),
    "worst_expert": ("Worst expert", NUMBER, "the expert of the lowest SQNR"),
    "least_expert_tokens": ("Fewest tokens", NUMBER, "of an expert in the step"),
    "most_expert_tokens": ("Most tokens", NUMBER, "of an expert in the step"),
    "least_expert_share": ("Smallest share", FRACTION,
                           "of an even share of all sampled tokens, of the expert with the fewest"),
    "least_expert": ("Expert with the fewest tokens", NUMBER, "in all sampled steps so far"),
    "idle_experts": ("Idle experts", COUNT, "without a token in all sampled steps so far"),
    "expert_nonfinite": ("Non-finite of experts", COUNT, "NaN and ±Inf elements of all experts before the cast"),
    "nonfinite_expert": ("Expert with non-finite", NUMBER, "the expert with the most NaN and ±Inf in the step"),
    "casts_before": ("Casts before", COUNT, "casts of linear layers before this one of experts"),
    "attention_logit": ("Largest logit", NUMBER, "magnitude of a score of attention in FP8, scaled"),
    "attention_divergence": ("Divergence of attention", NUMBER,
                             "of probabilities in FP8 from those of uncast queries and keys, in nats"),
    "attention_gradient_imbalance": ("Imbalance of scores' gradients", FRACTION,
                                     "of attention in FP8: sums of rows as codes, 0 if exact, over their magnitude"),
    "rank_scale_ratio": ("Scales across ranks", RATIO, "the largest scale of any rank over the smallest"),
    "rank_of_largest_scale": ("Rank of the largest scale", NUMBER, "number of the rank, from 0"),
    "rank_of_smallest_scale": ("Rank of the smallest scale", NUMBER, "number of the rank, from 0"),
}  # fmt: skip

SMALLEST_IS_WORST = ("expert_sqnr_db", "least_expert_tokens", "least_expert_share")

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
    "weight-jump": ("casts.amax", "casts.rms"),
    "rank-mismatch": ("modules.rank_scale_ratio", "casts.scale"),
    "zero-tensor": ("casts.zero_fraction",),
    "outlier-growth": ("modules.alignment", "casts.kurtosis"),
    "biased-accumulation": ("products.accumulation_bias",),
    "sensitive-module": ("casts.underflow_fraction",),
    "batch-norm": ("modules.batch_norm", "modules.batch_norm_rows"),
    "attention-logits": ("modules.attention_divergence", "modules.attention_logit"),
    "attention-gradient": ("modules.attention_gradient_imbalance",),
    "starved-experts": ("modules.least_expert_share", "modules.idle_experts"),
    "gradient-below-noise": ("products.sqnr_db",),
    "learning-rate": ("parameters.update_ratio",),
    "slow-layer": ("casts.amax",),
}


def all_statistics(thresholds: Thresholds, modules: Iterable[str] = ()) -> tuple[PageStatistic, ...]:
    """The catalog with its healthy ranges, in the menu's order.

    Args:
        thresholds: limits of the healthy ranges.
        modules: names of ``Series.modules``; unknown names are plain numbers.

    Example:
        >>> [one.field for one in all_statistics(Thresholds()) if one.table == "products"]
        ['sqnr_db', 'accumulation_bias']
    """
    ranges = _healthy_ranges(thresholds)
    rows = [*CATALOG, *map(_module_row, modules)]
    return tuple(
        PageStatistic(
            table=table, field=field, title=title, kind=kind, meaning=meaning, worst=worst, low=low, high=high
        )
        for table, field, title, kind, worst, meaning in rows
        for low, high in [ranges.get(f"{table}.{field}", (None, None))]
    )


def _module_row(name: str) -> tuple[str, str, str, StatisticKind, Worst, str]:
    title, kind, meaning = MODULES.get(name, (name.replace("_", " "), NUMBER, "as the run recorded it"))
    worst = SMALLEST if name in SMALLEST_IS_WORST else LARGEST
    return "modules", name, title, kind, worst, meaning


def _healthy_ranges(thresholds: Thresholds) -> dict[str, tuple[float | None, float | None]]:
    """Smallest and largest healthy value by a statistic's name."""
    stale, bias = (1 / thresholds.loose_ratio, thresholds.stale_ratio), thresholds.accumulation_bias
    return {
        "casts.sqnr_db": (thresholds.healthy_cast_db, None),
        "casts.underflow_fraction": (None, thresholds.underflow_fraction),
        "casts.saturation_fraction": (None, thresholds.saturation_fraction),
        "casts.stale_ratio": stale,
        "casts.least_stale_ratio": stale,
        "casts.code_mismatch": (None, thresholds.code_mismatch),
        "casts.nonfinite": (None, 0.0),
        "products.sqnr_db": (thresholds.healthy_product_db, None),
        "products.accumulation_bias": (-bias, bias),
        "modules.alignment": (None, thresholds.alignment),
        "modules.batch_norm": (None, thresholds.batch_norm_binades),
        "modules.expert_sqnr_db": (thresholds.healthy_cast_db, None),
        "modules.least_expert_share": (thresholds.starved_share, None),
        "modules.attention_divergence": (None, thresholds.attention_divergence),
        "modules.attention_gradient_imbalance": (None, thresholds.score_imbalance),
        "modules.rank_scale_ratio": (None, thresholds.rank_ratio),
    }
