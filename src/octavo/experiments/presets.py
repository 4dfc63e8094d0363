"""Grids that rerun published claims (:mod:`octavo.experiments.claims`), each with what would confirm it."""

from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.experiments.cells import Variant
from octavo.experiments.claims import Claim
from octavo.experiments.grid import Grid
from octavo.experiments.grid_comparison import Group
from octavo.parsing import did_you_mean

__all__ = ["PRESETS", "Preset", "preset_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Variants and factors of a grid, and the claims that it tests."""

    variants: tuple[Variant, ...]
    claims: tuple[Claim, ...]
    lr_factors: tuple[float, ...] = (1.0,)
    warmup_factors: tuple[float, ...] = (1.0,)

    def grid(self, seeds: tuple[int, ...]) -> Grid:
        """The preset's grid over these seeds."""
        return Grid(variants=self.variants, seeds=seeds, lr_factors=self.lr_factors, warmup_factors=self.warmup_factors)


def preset_named(name: str) -> Preset:
    """A preset by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}{did_you_mean(name, list(PRESETS))}; use one of {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def _variant(name: str, recipe: str, training: dict[str, Any] | None = None, **options: Any) -> Variant:
    return Variant(name=name, recipe=recipe, options=options, training=training or {})


def _at(name: str, lr: float = 1.0, warmup: float = 1.0) -> Group:
    return name, lr, warmup


_BF16 = Variant(name="bf16", recipe="bf16")
_TENSORWISE = Variant(name="tensorwise", recipe="tensorwise")
_ARTICLE = "the article that octavo started from (2025)"
_FP8_LAST = {"precision_schedule": (("bf16", 0.0), ("fp8", 0.8))}
_BF16_LAST = {"precision_schedule": (("fp8", 0.0), ("bf16", 0.8))}
_JUMP = {"gradient_jumps": ((0.5, 16), (0.6, 0))}
_ALIGNED = {"aligned_channels": 4}
_SMOOTH = {"smooth_swiglu": True}
_NORMS = {"cast_norms": True}
_FIXED = {"history_length": 1, "update_interval": 1 << 16, "margin": 3}  # the first step's amaxes, with headroom
_BASE_WIDTH = 64


def _wide(kind: str, width: int, *, is_mu: bool = True) -> Variant:
    """A width in BF16 or with fixed scales; heads have 32 elements, and the MLP three times the width."""
    return Variant(
        name=f"{kind}-{width}{'' if is_mu else '-usual'}",
        recipe="bf16" if kind == "bf16" else "delayed",
        options={} if kind == "bf16" else _FIXED,
        training={"mu_base_width": _BASE_WIDTH} if is_mu else {},
        model={
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_heads": width // 32,
            "num_kv_heads": width // 64,
        },
    )


PRESETS: dict[str, Preset] = {
    "learning-rate": Preset(
        variants=(_BF16, _TENSORWISE),
        lr_factors=(0.5, 0.85, 1.0, 1.5, 2.0),
        warmup_factors=(1.0, 1.5),
        claims=(
            Claim(
                text="FP8 wants 0.85 times the learning rate and 1.5 times the warm-up.",
                source=_ARTICLE,
                better=_at("tensorwise", 0.85, 1.5),
                worse=_at("tensorwise"),
            ),
            Claim(
                text="FP8 gains more by that than BF16 does.",
                source=_ARTICLE,
                better=_at("tensorwise", 0.85, 1.5),
                worse=_at("tensorwise"),
                baselines=(_at("bf16", 0.85, 1.5), _at("bf16")),
            ),
        ),
    ),
    "phases": Preset(
        variants=(
            _BF16,
            _TENSORWISE,
            _variant("fp8-last", "tensorwise", _FP8_LAST),
            _variant("bf16-last", "tensorwise", _BF16_LAST),
        ),
        claims=(
            Claim(
                text="BF16 for four fifths of the steps, then FP8, ends lower than FP8 throughout.",
                source=_ARTICLE,
                better=_at("fp8-last"),
                worse=_at("tensorwise"),
            ),
            Claim(
                text="The last fifth of the steps in BF16 ends lower than FP8 throughout.",
                source="arXiv 2505.19115, of FP4",
                better=_at("bf16-last"),
                worse=_at("tensorwise"),
            ),
            Claim(
                text="BF16 for the last fifth ends lower than BF16 for the four fifths before.",
                source="octavo's docs/troubleshooting.md, against the article",
                better=_at("bf16-last"),
                worse=_at("fp8-last"),
            ),
        ),
    ),
    "delayed-scaling": Preset(
        variants=(
            _BF16,
            _TENSORWISE,
            _variant("max-of-16", "delayed"),
            _variant("max-of-1024", "delayed", history_length=1024),
            _variant("latest", "delayed", history_length=1),
            _variant("mean-of-32", "article"),
        ),
        claims=(
            Claim(
                text="Scales from the maximum of a window lose nothing against scales of the tensor at hand.",
                source="arXiv 2209.05433",
                better=_at("tensorwise"),
                worse=_at("max-of-16"),
                loses_nothing=True,
            ),
            Claim(
                text="A mean of scales every 4 steps trains worse than the maximum.",
                source="octavo's docs/concepts/delayed-scaling.md, against the article",
                better=_at("max-of-16"),
                worse=_at("mean-of-32"),
            ),
        ),
    ),
    "gradient-format": Preset(
        variants=(
            _BF16,
            _variant("tensor-E5M2", "tensorwise"),
            _variant("tensor-E4M3", "tensorwise", gradient_format="E4M3"),
            _variant("block-E5M2", "blockwise", gradient_format="E5M2"),
            _variant("block-E4M3", "blockwise"),
        ),
        claims=(
            Claim(
                text="With one scale a tensor, gradients need E5M2's range.",
                source="arXiv 2209.05433",
                better=_at("tensor-E5M2"),
                worse=_at("tensor-E4M3"),
            ),
            Claim(
                text="With a scale a block, E4M3's third bit is worth more than E5M2's range.",
                source="arXiv 2412.19437",
                better=_at("block-E4M3"),
                worse=_at("block-E5M2"),
            ),
        ),
    ),
    "stochastic-rounding": Preset(
        variants=(
            _BF16,
            _TENSORWISE,
            _variant("stochastic", "tensorwise", gradient_rounding="stochastic"),
        ),
        claims=(
            Claim(
                text="Stochastic rounding of gradients ends lower than rounding to nearest.",
                source="arXiv 1905.12334",
                better=_at("stochastic"),
                worse=_at("tensorwise"),
            ),
        ),
    ),
    "accumulation": Preset(
        variants=(
            _BF16,
            _TENSORWISE,
            _variant("hopper", "tensorwise", emulate_tensor_cores=True),
        ),
        claims=(
            Claim(
                text="Hopper's 14-bit accumulation ends higher than float32 sums.",
                source="arXiv 2412.19437 §3.3.2",
                better=_at("tensorwise"),
                worse=_at("hopper"),
            ),
        ),
    ),
    "mx-scales": Preset(
        variants=(
            _BF16,
            _variant("round-up", "mxfp8"),
            _variant("floor", "mxfp8", scale_rounding="floor"),
        ),
        claims=(
            Claim(
                text="MXFP8 scales rounded up end lower than the specification's floor.",
                source="arXiv 2506.08027",
                better=_at("round-up"),
                worse=_at("floor"),
            ),
        ),
    ),
    "power-of-two": Preset(
        variants=(
            _BF16,
            _variant("row-power", "rowwise"),
            _variant("row-float", "rowwise", power_of_two=False),
            _variant("block-power", "blockwise"),
            _variant("block-float", "blockwise", power_of_two=False),
        ),
        claims=(
            Claim(
                text="Float scales of a row end lower than powers of two.",
                source="a user would expect it: the scaled values lie closer to the format's maximum",
                better=_at("row-float"),
                worse=_at("row-power"),
            ),
            Claim(
                text="Float scales of a block end lower than powers of two.",
                source="as above",
                better=_at("block-float"),
                worse=_at("block-power"),
            ),
        ),
    ),
    "head": Preset(
        variants=(_BF16, _TENSORWISE, _variant("head-in-fp8", "tensorwise", {"convert_head": True})),
        claims=(
            Claim(
                text="The head belongs in high precision.",
                source="arXiv 2412.19437 §3.3.1",
                better=_at("tensorwise"),
                worse=_at("head-in-fp8"),
            ),
        ),
    ),
    "qk-norm": Preset(
        variants=(
            _BF16,
            _TENSORWISE,
            Variant(name="bf16-qk-norm", recipe="bf16", model={"qk_norm": True}),
            Variant(name="tensorwise-qk-norm", recipe="tensorwise", model={"qk_norm": True}),
        ),
        claims=(
            Claim(
                text="Norms of queries and keys lower what FP8 costs.",
                source="a question of octavo's own",
                better=_at("tensorwise-qk-norm"),
                worse=_at("tensorwise"),
                baselines=(_at("bf16-qk-norm"), _at("bf16")),
            ),
        ),
    ),
    "moments": Preset(
        variants=(
            _BF16,
            _variant("fp8-moments", "bf16", {"moments": "fp8"}),
            _variant("fp8-moments-expanded", "bf16", {"moments": "fp8-expanded"}),
        ),
        claims=(
            Claim(
                text="FP8 moments of AdamW cost accuracy.",
                source="after arXiv 2410.19313 §3.1, whose second moment is E4M3 and here E5M2",
                better=_at("bf16"),
                worse=_at("fp8-moments"),
            ),
            Claim(
                text="Expanding each block's range ends lower than FP8 moments without.",
                source="as above",
                better=_at("fp8-moments-expanded"),
                worse=_at("fp8-moments"),
            ),
        ),
    ),
    "gradient-jump": Preset(
        variants=(
            _BF16,
            _variant("tensorwise", "tensorwise", _JUMP),
            _variant("max-of-16", "delayed", _JUMP),
            _variant("max-of-1024", "delayed", _JUMP, history_length=1024),
            _variant("latest", "delayed", _JUMP, history_length=1),
            _variant("mean-of-32", "article", _JUMP),
        ),
        claims=(
            Claim(
                text="After all gradients have jumped, a mean of scales trains worse than the maximum of a window.",
                source="octavo's docs/concepts/delayed-scaling.md, against the article",
                better=_at("max-of-16"),
                worse=_at("mean-of-32"),
            ),
            Claim(
                text="After they have fallen back, a window of 1,024 steps trains worse than the latest step.",
                source="a question of octavo's own",
                better=_at("latest"),
                worse=_at("max-of-1024"),
            ),
        ),
    ),
    "norm-weights": Preset(
        variants=(
            _BF16,
            _variant("floor", "mxfp8", scale_rounding="floor"),
            _variant("floor-norms", "mxfp8", _NORMS, scale_rounding="floor"),
            _variant("round-up", "mxfp8"),
            _variant("round-up-norms", "mxfp8", _NORMS),
        ),
        claims=(
            Claim(
                text="Weights of norms in MXFP8 end higher than in high precision.",
                source="arXiv 2506.20752",
                better=_at("floor"),
                worse=_at("floor-norms"),
            ),
            Claim(
                text="They cost less with scales rounded up, which saturate nothing.",
                source="a question of octavo's own",
                better=_at("round-up-norms"),
                worse=_at("floor-norms"),
                baselines=(_at("round-up"), _at("floor")),
            ),
        ),
    ),
    "smooth-swiglu": Preset(
        variants=(
            _BF16,
            _TENSORWISE,
            _variant("smooth", "tensorwise", _SMOOTH),
            _variant("bf16-aligned", "bf16", _ALIGNED),
            _variant("tensorwise-aligned", "tensorwise", _ALIGNED),
            _variant("smooth-aligned", "tensorwise", _ALIGNED | _SMOOTH),
        ),
        claims=(
            Claim(
                text="Aligned rows of gate and up raise what FP8 costs.",
                source="arXiv 2409.12517 §4",
                better=_at("tensorwise"),
                worse=_at("tensorwise-aligned"),
                baselines=(_at("bf16"), _at("bf16-aligned")),
            ),
            Claim(
                text="With aligned rows, Smooth-SwiGLU ends lower than FP8 without it.",
                source="arXiv 2409.12517 §4",
                better=_at("smooth-aligned"),
                worse=_at("tensorwise-aligned"),
            ),
            Claim(
                text="Without them, Smooth-SwiGLU loses nothing.",
                source="arXiv 2409.12517 §4",
                better=_at("tensorwise"),
                worse=_at("smooth"),
                loses_nothing=True,
            ),
        ),
    ),
    "widths": Preset(
        variants=(
            _wide("bf16", _BASE_WIDTH),
            _wide("fixed", _BASE_WIDTH),
            _wide("bf16", 4 * _BASE_WIDTH),
            _wide("fixed", 4 * _BASE_WIDTH),
            _wide("bf16", 4 * _BASE_WIDTH, is_mu=False),
            _wide("fixed", 4 * _BASE_WIDTH, is_mu=False),
        ),
        claims=(
            Claim(
                text="With µ-parametrised weights, FP8 with scales that never change loses nothing at width 64.",
                source="arXiv 2502.05967, whose scales are constants; these are the first step's",
                better=_at("bf16-64"),
                worse=_at("fixed-64"),
                loses_nothing=True,
            ),
            Claim(
                text="Nor does it at width 256.",
                source="as above",
                better=_at("bf16-256"),
                worse=_at("fixed-256"),
                loses_nothing=True,
            ),
            Claim(
                text="At width 256, such scales cost less with µ-parametrised weights than with the usual ones.",
                source="a question of octavo's own",
                better=_at("fixed-256"),
                worse=_at("fixed-256-usual"),
                baselines=(_at("bf16-256"), _at("bf16-256-usual")),
            ),
        ),
    ),
}
