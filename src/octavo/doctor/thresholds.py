"""Thresholds of the doctor's rules, each with its source."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.errors import ConfigError

__all__ = ["ThresholdSource", "Thresholds", "source_of"]


@dataclass(frozen=True, slots=True)
class ThresholdSource:
    """Source of a threshold: ``kind`` is "published" or "ours", ``why`` names the paper or the measurement."""

    kind: str
    why: str


def _published(value: float, why: str) -> Any:
    return field(default=value, metadata={"source": ThresholdSource("published", why)})


def _ours(value: float, why: str) -> Any:
    return field(default=value, metadata={"source": ThresholdSource("ours", why)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Thresholds of the rules; :func:`source_of` gives the source of each.

    Raises:
        ConfigError: a value is not a finite number.
    """

    persistent_looks: float = _ours(
        3, "a healthy delayed run of 150 steps had g >= 2 in single samples, never in three"
    )
    persistent_looks_fail: float = _ours(2, "two samples beyond any healthy value are not chance")

    saturation_fraction: float = _published(1e-5, "FP8-LM, arXiv 2310.18313 section 2.1: halve the scale above 0.001 %")
    stale_ratio: float = _ours(2.0, "measured on Gaussian data: 24.9 dB, 1.3 % saturated; 1.5 still has 30.9 dB")
    stale_ratio_fail: float = _ours(4.0, "measured on Gaussian data: 10.6 dB, 21 % saturated")
    loose_ratio: float = _ours(8.0, "three binades of the range are unused; judged with underflow only")
    loose_ratio_fail: float = _ours(4096.0, "E4M3 has 17 binades below its maximum: a Gaussian's bulk leaves them")
    frozen_motion: float = _ours(1.25, "weights' amaxes move less in a short healthy run, inputs' more")
    frozen_excess: float = _ours(1.02, "a maximum follows larger values; files keep 5 digits")
    frozen_memories: float = _ours(
        3.0, "in history lengths: amaxes in bfloat16 repeat, also at steps that are not sampled"
    )
    exact_ratio: float = _ours(1e-4, "files keep 5 digits; an amax rounded to bfloat16 is off by up to 4e-3")
    rounded_amax: float = _ours(
        1.0079, "2^-7, the spacing of bfloat16: closer amaxes were rounded, farther ones belong to another tensor"
    )
    oscillation_binades: float = _ours(1.0, "a jump of one binade each way; healthy scales drift by tenths")
    oscillation_binades_fail: float = _ours(2.0, "a swing of 4x saturates 21 % of a Gaussian at every other step")
    oscillation_turns: float = _ours(4, "independent jumps turn four times in a row, all of a binade, below 1 in 1000")
    code_mismatch: float = _ours(
        1e-3, "healthy runs have none in any dtype; one update changes 0.5 to 5 % of the codes"
    )
    weight_jump: float = _ours(4.0, "two binades, beyond what updates reach: no update of healthy runs comes near")
    update_peak: float = _ours(
        32.0, "of an update's rms: Adam's largest change of an element is 3.2 times the rate, its rms a tenth of it"
    )
    rank_ratio: float = _ours(4.0, "gradients of different micro-batches differ by 2x in a healthy run")
    rank_ratio_input: float = _ours(1.8, "inputs of different micro-batches differ by less; a halved scale by 2x")

    underflow_fraction: float = _ours(
        0.1, "healthy runs flush up to 1 % of a gradient's nonzeros; 62 % on a log-normal"
    )
    underflow_fraction_fail: float = _ours(0.5, "most of the tensor is lost, whatever the SQNR")
    harmless_flush: float = _ours(1e-4, "share of the energy; rounding to E4M3 makes noise of 7e-4 of it")
    healthy_cast_db: float = _ours(24.0, "Gaussian data: E4M3 31.5, E5M2 25.6, and 24.9 at half the scale")
    healthy_product_db: float = _ours(21.5, "tensorwise with an E5M2 gradient: 24.6 dB, of which half may be lost")
    zero_weight_fraction: float = _ours(0.25, "a trained weight has no exact zeros unless they were put there")
    alignment: float = _ours(0.95, "healthy runs of widths 16 and 64 reached 0.92; judged with the peak of the product")
    aligned_exactly: float = _ours(0.99, "healthy runs, at four times a sensible learning rate too, stayed below 0.965")
    aligned_peak: float = _ours(64.0, "amax over rms of a down projection's input; healthy runs have up to 30")
    outlier_growth: float = _ours(4.0, "of amax over rms; healthy runs stay within 3x, since amax and rms grow alike")
    climbing_peak: float = _ours(1024.0, "three binades below where E4M3's SQNR falls")
    climbing_growth: float = _ours(8.0, "three binades since the beginning")
    harmful_peak: float = _ours(4096.0, "measured: SQNR is flat until amax/rms = 2^13; one binade before that")
    accumulation_bias: float = _ours(0.01, "zero-mean data: 1.3e-3 at K = 4096; same-sign data: 7 %")
    accumulation_bias_fail: float = _ours(0.1, "between the 7 % of K = 4096 and the 22 % of K = 16384, same sign")
    head_widening: float = _ours(
        6.0, "vocabularies are 7 to 60 times as wide as models; MLPs widen 8 times at most and narrow again"
    )
    router_narrowing: float = _ours(4.0, "published routers narrow 8x or more, gates of an MLP widen or narrow 3.5x")
    batch_norm_binades: float = _ours(2.0, "a batch's variance differs 4x from the running one, beyond its scatter")
    batch_norm_steps: float = _ours(20, "running statistics of momentum 0.1 lose 88 % of an error in 20 steps")
    batch_norm_share: float = _ours(0.5, "of the samples; a single batch may differ from the others")
    batch_norm_settling: float = _ours(0.5, "a distance that halves is converging")
    batch_norm_sizes: float = _ours(4.0, "a quarter of the rows: the batch's variance scatters twice as far")
    starved_share: float = _ours(0.1, "of an even share: the expert sees a tenth of the tokens that others learn from")
    attention_divergence: float = _ours(0.02, "nats: random queries and keys have 0.001, with logits of ±70 0.02")
    attention_divergence_fail: float = _ours(0.2, "nats: a logit is off by 0.6, its probability by a factor of 1.9")
    score_imbalance: float = _ours(0.1, "of a row's magnitude: random queries and keys have 0.013, a scale a row less")
    score_imbalance_fail: float = _ours(0.3, "one scale a head and logits of ±150; a scale a row has 0.02 there")
    slow_weight_elements: float = _published(
        2.0**24, "torchao: rowwise linears forward and backward, 8192x4096x4096 1.00x BF16, 4096^3 0.84x, 1024^3 0.42x"
    )

    gradient_to_noise: float = _published(math.sqrt(3), "arXiv 2505.19115: below sqrt(3) training stops improving")
    overflows: float = _ours(8, "a dynamic scale of 2^16 may halve several times before it fits")
    overflow_rate: float = _ours(0.01, "a scale that doubles every 2000 steps overflows once in 2000 steps")
    fp16_rms: float = _ours(2.0**-20, "16 of FP16's smallest steps: most elements are zero or one of a few numbers")
    vanished_fraction: float = _ours(0.25, "exact zeros in a dense gradient; healthy ones had 7 %")
    lr_jump: float = _ours(3.0, "schedules change by a few percent per step, warm-ups double at most")
    lr_settled: float = _ours(5, "initial steps of a warm-up, in which the rate may multiply")
    switch_window: float = _ours(20, "steps before and after a switch that are compared")
    loss_rise: float = _ours(0.02, "of the loss before; two standard deviations are required too")
    diverged_loss: float = _ours(2.0, "of the loss at the beginning; healthy runs end below it")
    spike_loss: float = _ours(
        1.2, "of the loss at the beginning, which healthy runs only leave downwards, or before a jump of the rate"
    )
    large_update: float = _ours(
        0.1, "of the weights' norm, before gradients vanish: healthy runs had 0.023, AdamW at 3e-3 without warm-up 0.15"
    )
    replaced_weights: float = _ours(
        1.0,
        "of the weights' norm: AdamW's first update at 0.02, of weights of 0.02; a run with 0.5 learned all the same",
    )
    grown_weights: float = _ours(
        3.0, "in rms: a healthy run's grew by 1.3; AdamW at 0.03 and 0.1, at the unigram entropy, by 6 and 9"
    )
    grown_at_unigram: float = _ours(
        2.5,
        "in rms, near the unigram entropy: at the best rate of a small Llama weights grew by 2.2, at twice it by 3.0",
    )
    stuck_loss: float = _ours(0.5, "of the first loss: a model of token frequencies alone is above 0.6 of it")
    stalled_loss: float = _ours(0.01, "of a level; healthy runs fall by several percent in the second half")
    lost_gain: float = _ours(0.5, "of what the loss had gained; overshoots of a warm-up and restarted rates come back")
    least_gain: float = _ours(0.1, "of the loss at the beginning: fine-tuning gains less, and a restart may cost that")
    lasting_rise: float = _ours(
        20.0,
        "steps, or the warm-up, or (except at the unigram entropy) a tenth of the run, whichever is longest: healthy "
        "spikes recover sooner",
    )
    settled_loss: float = _ours(0.05, "of a level: drift of a settled loss from one half to the next")
    unigram_share: float = _ours(
        0.1, "of the unigram entropy: the loss of a model that predicts token frequencies alone"
    )
    loss_noise: float = _ours(
        5.0, "standard deviations; of losses that wander for ten steps but have no trend 1 % seem to rise"
    )
    loss_gap: float = _published(0.0025, "DeepSeek-V3, arXiv 2412.19437: relative loss error below 0.25 %")
    loss_gap_fail: float = _ours(0.01, "four times what is published of a good run")
    gap_steps: float = _ours(10, "fewer steps after warm-up show no trend")
    replay_difference: float = _ours(
        0.01, "another order of sums turns a few FP8 codes by 6 %; a gradient's norm hardly moves"
    )

    def __post_init__(self) -> None:
        for threshold in fields(self):
            value = getattr(self, threshold.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"threshold {threshold.name} must be a finite number, not {value!r}")


def source_of(name: str) -> ThresholdSource:
    """Source of a threshold.

    Example:
        >>> source_of("saturation_fraction").kind
        'published'
    """
    source: ThresholdSource = next(one for one in fields(Thresholds) if one.name == name).metadata["source"]
    return source
