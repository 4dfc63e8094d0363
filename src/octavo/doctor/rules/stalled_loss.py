"""Rule for a loss that no longer falls while the model predicts little more than token frequencies.

The losses alone do not tell a stalled model from a converged one. The unigram entropy of the text does: it is the loss
of a model that knows token frequencies and no context, and every useful model is well below it.
"""

from collections.abc import Iterator

from octavo.doctor.findings import STALLED_LOSS, Finding, Severity
from octavo.doctor.losses import finite_losses, level_near_unigram, plateau
from octavo.doctor.series import Series
from octavo.doctor.thresholds import Thresholds

__all__ = ["stalled_loss"]


def stalled_loss(series: Series, limits: Thresholds) -> Iterator[Finding]:
    """Find a loss that has not fallen for half of the run and stays within ``unigram_share`` of the unigram entropy.

    A warning. It needs the tokens of the run, which are in its folder; of other runs ``octavo doctor`` says only since
    when the loss has not fallen.
    """
    flat = plateau(series, limits)
    if flat is None or level_near_unigram(series, limits) is None or series.unigram_nats is None:
        return
    _, rates = series.curve("lr")
    rate = f"; the learning rate was up to {rates.max():.3g}" if rates.size else ""
    yield Finding(
        code="stalled-loss",
        severity=Severity.WARN,
        first_step=flat.first_step,
        last_step=int(finite_losses(series)[0][-1]),
        evidence={STALLED_LOSS: flat.level, "unigram_nats": series.unigram_nats},
        cause=f"{flat}, near the unigram entropy of {series.unigram_nats:.3g}: the model predicts little more than "
        f"token frequencies{rate}",
        weight=flat.level / series.unigram_nats,
    )
