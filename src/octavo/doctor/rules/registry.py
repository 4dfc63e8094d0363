"""All rules, ordered so that causes come before consequences.

CONTRIBUTING.md ("Add something") lists the steps of adding a rule; its remedy goes to ``remedies/selection.py``.
"""

from collections.abc import Callable, Iterator

from octavo.doctor.findings import Finding
from octavo.doctor.rules.attention import attention_gradient, attention_logits
from octavo.doctor.rules.divergence import divergence, loss_spike
from octavo.doctor.rules.experts import starved_experts
from octavo.doctor.rules.learning_rate import learning_rate
from octavo.doctor.rules.modules import batch_norm, sensitive_module, slow_layer
from octavo.doctor.rules.nonfinite import nonfinite
from octavo.doctor.rules.outliers import outlier_growth
from octavo.doctor.rules.range import bulk_underflow, gradient_underflow, saturation, zero_tensor
from octavo.doctor.rules.scales import frozen_scale, inexact_amax, rank_mismatch, scale_oscillation, stale_scale
from octavo.doctor.rules.stalled_loss import stalled_loss
from octavo.doctor.rules.steps import gradient_below_noise, loss_scale
from octavo.doctor.rules.sums import biased_accumulation
from octavo.doctor.rules.weights import stale_weight, weight_jump
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["LOSS_RULES", "RULES", "Rule"]

Rule = Callable[[Series, Thresholds], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    loss_scale,
    learning_rate,
    weight_jump,
    stale_weight,
    rank_mismatch,
    scale_oscillation,
    frozen_scale,
    inexact_amax,
    stale_scale,
    nonfinite,
    sensitive_module,
    batch_norm,
    starved_experts,
    attention_logits,
    attention_gradient,
    outlier_growth,
    zero_tensor,
    saturation,
    bulk_underflow,
    gradient_underflow,
    biased_accumulation,
    gradient_below_noise,
    divergence,
    loss_spike,
    stalled_loss,
    slow_layer,
)
LOSS_RULES: tuple[Rule, ...] = (learning_rate, divergence, loss_spike, stalled_loss)  # that need no samples
