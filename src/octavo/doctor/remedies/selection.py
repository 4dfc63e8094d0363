"""Rules that select the remedies for each finding, best first, before any replay.

Remedies are the smallest changes that remove the cause: one layer rather than all, a finer recipe rather than BF16.
Problems that no configuration fixes, such as ranks that reduce over the wrong group, get advice without changes.
"""

from collections.abc import Callable, Iterable

import numpy as np

from octavo.doctor.findings import FP8_BEGINS, STEP_BEFORE, Finding, Remedy, Severity
from octavo.doctor.remedies.context import RECIPE_PHRASES, RemedyContext, fineness, join_names
from octavo.doctor.series import Series

__all__ = ["remedies_for"]

LAST_PHASE = 0.8  # share of a run's steps after which BF16 replaces FP8
BF16_AT_THE_END = Remedy(
    text=f"Train the last {1 - LAST_PHASE:.0%} of the steps in BF16.",
    changes={"precision_schedule": [["fp8", 0.0], ["bf16", LAST_PHASE]]},
)
DYNAMIC_LOSS_SCALE = Remedy(text="Let the loss scale follow the gradients.", changes={"loss_scale": "dynamic"})


def remedies_for(finding: Finding, series: Series) -> tuple[Remedy, ...]:
    """Select the remedies for a finding, best first.

    Args:
        finding: a finding with any code of :data:`octavo.doctor.findings.CAUSES`.
        series: the series of its run, which records the layer's recipe.

    Example:
        >>> from octavo.doctor import Severity, series_of
        >>> finding = Finding(code="sensitive-module", severity=Severity.WARN, path="lm_head")
        >>> remedies_for(finding, series_of([]))[0].changes
        {'skip': ['lm_head']}
    """
    if finding.code in FIXED_REMEDIES:
        return FIXED_REMEDIES[finding.code]
    return tuple(REMEDY_RULES[finding.code](RemedyContext(finding, series)))


def _nonfinite(context: RemedyContext) -> Iterable[Remedy]:
    if context.finding.role == "grad_output" and context.series.curve("loss_scale")[0].size:
        yield DYNAMIC_LOSS_SCALE
    if context.evidence("weights", 0):
        yield Remedy(
            text="Find the step in which it began: sample every step (interval=1), or use octavo train, which "
            "stops at the first."
        )
        return
    what = f"the {context.finding.role} of {context.path}" if context.path else "the tensor that the failure names"
    yield Remedy(text=f"Find what computes NaN or infinity before {what}, such as a division or a broken sample.")


def _saturation(context: RemedyContext) -> Iterable[Remedy]:
    if context.recipe == "mxfp8" and context.rounds_scales_down:
        yield _change_options("Round scales up, so that the largest elements fit.", scale_rounding="rceil")
    yield from context.finer("tensorwise", "blockwise", "bf16")


def _gradient_underflow(context: RemedyContext) -> Iterable[Remedy]:
    if "amax_floor" in context.finding.evidence:
        yield from _below_floor(context)
    elif context.gradient_format == "E4M3" and context.recipe and fineness(context.recipe) < 0:  # a custom recipe
        yield context.override("tensorwise")
    elif context.gradient_format == "E4M3":
        yield _change_options("Cast gradients to E5M2, which reaches 2^14 times as far down.", gradient_format="E5M2")
        yield from context.finer("mxfp8")
    yield from context.finer("bf16")  # finer presets than those with E5M2 gradients cast them to E4M3


def _below_floor(context: RemedyContext) -> Iterable[Remedy]:
    if context.evidence("amax_floor", 0.0):
        yield Remedy(text="Leave amax_floor at 0 in the recipe's casts, so that small tensors get scales of their own.")
    else:
        yield Remedy(
            text=f"Find why the {context.finding.role} of {context.path} is so small; in BF16 it is near zero too."
        )


def _bulk_underflow(context: RemedyContext) -> Iterable[Remedy]:
    if "amax_floor" in context.finding.evidence:
        yield from _below_floor(context)
        return
    yield from context.finer("rowwise_hp_grad_weight", "blockwise", "mxfp8", "bf16")


def _stale_scale(context: RemedyContext) -> Iterable[Remedy]:
    yield from context.finer("tensorwise")
    if context.facts.get("statistic", "max") != "max":
        yield _change_options("Take the largest amax of the history, which forgets no growth.", statistic="max")
    length, g = int(context.facts.get("history_length", 1)), context.evidence("stale_ratio", 1.0)
    if g < 1 < length:
        shorter = max(1, min(4, length // 4))
        text = f"Keep a history of {shorter} steps instead of {length}, which forgets the past amax sooner."
        yield _change_options(text, history_length=shorter)
    elif g > 1:
        yield _change_options("Leave a binade free above the amax for its growth.", margin=1)
    yield from context.finer("blockwise", "bf16")


def _frozen_scale(context: RemedyContext) -> Iterable[Remedy]:
    yield from context.finer("tensorwise", "blockwise", "bf16")
    yield Remedy(text="Close every step: with manual scale updates call octavo.update_scales(model) after each.")


def _scale_oscillation(context: RemedyContext) -> Iterable[Remedy]:
    yield from context.finer("tensorwise")
    if "history_length" in context.facts:
        length = max(16, int(context.facts["history_length"]))
        text = f"Take the largest amax of the last {length} steps."
        yield _change_options(text, statistic="max", history_length=length)
    yield from context.finer("blockwise", "bf16")


def _inexact_amax(context: RemedyContext) -> Iterable[Remedy]:
    yield from context.finer("blockwise", "bf16")
    yield Remedy(text="Compute the amax that is passed to this layer in FP32, from the tensor that is cast.")


def _stale_weight(context: RemedyContext) -> Iterable[Remedy]:
    if context.facts.get("caches_weight"):
        yield Remedy(text="Cast weights anew for every micro-batch.", changes={"cache_weights": False})
    yield Remedy(
        text="Find the code that writes to this tensor directly, and call octavo.update_scales(model) after it."
    )
    yield from context.finer("bf16")


def _weight_jump(context: RemedyContext) -> Iterable[Remedy]:
    step = int(context.evidence(STEP_BEFORE, 0))
    yield Remedy(
        text=f"Start again from a checkpoint of step {step} or earlier (octavo train --from), and find what wrote to "
        "the weight since."
    )


def _zero_tensor(context: RemedyContext) -> Iterable[Remedy]:
    what = f"the {context.finding.role or 'tensors'} of {context.path or 'the run'}"
    yield Remedy(text=f"Find why {what} is zero: an initialisation, a mask, a branch not taken; FP8 keeps zeros exact.")


def _outlier_growth(context: RemedyContext) -> Iterable[Remedy]:
    places = context.down_projections() or [context.pattern]
    for name in ("bf16", "blockwise"):
        yield Remedy(
            text=f"Run {join_names(places)} {RECIPE_PHRASES[name]}.", changes={"overrides": dict.fromkeys(places, name)}
        )
    if "alignment" in context.finding.evidence or context.includes_down_projection:
        yield Remedy(text="Raise the weight decay of gate and up projection, or normalise their product.")
    else:
        yield Remedy(text="Raise the weight decay of the layers before it, or normalise their output.")


def _sensitive_module(context: RemedyContext) -> Iterable[Remedy]:
    places = context.finding.places or (context.path,)
    yield Remedy(text=f"Keep {join_names(places)} out of FP8.", changes={"skip": list(places)})


def _batch_norm(context: RemedyContext) -> Iterable[Remedy]:
    yield Remedy(text="Give the batch norm batches of one size and kind, or use a norm without running statistics.")
    parent = context.path.rpartition(".")[0]
    if parent and any(path.startswith(f"{parent}.") for path in context.series.layers):
        text = f"Run the layers of {parent} in BF16."
        yield Remedy(text=text, changes={"overrides": {f"{parent}.*": "bf16"}})


def _gradient_below_noise(context: RemedyContext) -> Iterable[Remedy]:
    noisiest = context.noisiest_layer()
    if noisiest is not None:
        text = f"Run {noisiest} in BF16, which adds more than half of the noise."
        yield Remedy(text=text, changes={"overrides": {noisiest: "bf16"}})
    yield BF16_AT_THE_END
    yield Remedy(
        text="Compute the weights' gradients in high precision.",
        changes={"recipe": "rowwise_hp_grad_weight", "recipe_options": {}},
    )


def _learning_rate(context: RemedyContext) -> Iterable[Remedy]:
    steps, rates = context.series.curve("lr")
    before, since = rates[steps < context.finding.first_step], rates[steps >= context.finding.first_step]
    if since.size:
        lr = min(float(before[-1]) if before.size else np.inf, float(since.max()) / 2)
        yield Remedy(text=f"Peak at a learning rate of {lr:.3g}.", changes={"lr": lr})
        peak = int(np.argmax(rates))
        if peak:
            warmup = 2 * int(steps[peak])
            yield Remedy(text=f"Warm up over {warmup} steps.", changes={"warmup": warmup})
        else:
            yield Remedy(text="Warm up to the learning rate, which was at its peak in the first step.")
    else:
        yield Remedy(text="Lower the learning rate where the precision changes, and warm up again from there.")


def _divergence(context: RemedyContext) -> Iterable[Remedy]:
    _, rates = context.series.curve("lr")
    if rates.size and rates.max() > 0:
        lr = float(rates.max()) / 2
        text = f"Peak at a learning rate of {lr:.3g}."
        if context.finding.severity is Severity.FAIL:
            text = f"Lower the learning rate: peak at {lr:.3g}, and compare with a run in BF16."
        yield Remedy(text=text, changes={"lr": lr})
    elif context.finding.severity is Severity.FAIL:
        yield Remedy(text="Lower the learning rate, and compare with a run in BF16.")
    yield Remedy(text="Lower the learning rate, clip the gradient, and inspect the batches before the loss rose.")


def _stalled_loss(context: RemedyContext) -> Iterable[Remedy]:
    _, rates = context.series.curve("lr")
    if rates.size and rates.max() > 0:
        lr = float(rates.max()) / 3
        yield Remedy(
            text=f"Peak at a learning rate of {lr:.3g}, and compare the losses at the same step.", changes={"lr": lr}
        )
    yield Remedy(text="Train on one batch alone: if its loss does not fall to zero, check inputs, labels and masks.")


def _loss_gap(context: RemedyContext) -> Iterable[Remedy]:
    if FP8_BEGINS in context.finding.evidence:
        yield Remedy(text="Find what else differs: config.toml, text, checkpoints; then train the reference again.")
        return
    ran = [str(period.facts.get("recipe", "")) for periods in context.series.periods.values() for period in periods]
    coarsest = min(map(fineness, ran), default=-1)
    for name in ("rowwise", "blockwise"):
        if coarsest < fineness(name):
            yield Remedy(text=f"Run all layers {RECIPE_PHRASES[name]}.", changes={"recipe": name, "recipe_options": {}})
    yield BF16_AT_THE_END
    yield Remedy(text="Find the layers that cause the gap: octavo doctor bisect.")


def _slow_layer(context: RemedyContext) -> Iterable[Remedy]:
    slow = [context.path] if context.path else list(context.finding.places)
    if slow:
        yield Remedy(text=f"Keep {join_names(slow)} out of FP8.", changes={"skip": slow})


def _change_options(text: str, **options: object) -> Remedy:
    return Remedy(text=text, changes={"recipe_options": options})


FIXED_REMEDIES = {
    "rank-mismatch": (
        Remedy(text="Reduce amaxes over exactly the ranks that share this tensor: check the process group."),
    ),
    "loss-scale": (
        DYNAMIC_LOSS_SCALE,
        Remedy(
            text="Run the layers outside of FP8 in BF16, which needs no loss scale.",
            changes={"precision": "bf16", "loss_scale": "auto"},
        ),
    ),
    "checkpoint": (Remedy(text="Follow the advice in the finding, or start a new run in another folder."),),
    "memory": (Remedy(text="Lower batch_size or context, and raise grad_accumulation by the same factor."),),
    "starved-experts": (
        Remedy(
            text="Raise the weight of the loss that balances the router (transformers: output_router_logits=True and "
            "router_aux_loss_coef), or give each step more tokens."
        ),
    ),
    "attention-logits": (
        Remedy(text='Run attention in high precision: octavo.convert(model, ..., attention="bf16").'),
        Remedy(text="Normalise queries and keys before their product (octavo.nn: qk_norm=True), or lower the rate."),
    ),
    "attention-gradient": (
        Remedy(text='Give each row a scale of its own: octavo.convert(model, ..., attention="rowwise").'),
        Remedy(text='Run attention in high precision: octavo.convert(model, ..., attention="bf16").'),
    ),
    "nondeterministic": (
        Remedy(
            text="Find operators that depend on a random generator, the time or the order of threads; "
            "torch.use_deterministic_algorithms(True) reports some of them."
        ),
    ),
}
REMEDY_RULES: dict[str, Callable[[RemedyContext], Iterable[Remedy]]] = {
    "nonfinite": _nonfinite,
    "saturation": _saturation,
    "gradient-underflow": _gradient_underflow,
    "bulk-underflow": _bulk_underflow,
    "stale-scale": _stale_scale,
    "frozen-scale": _frozen_scale,
    "scale-oscillation": _scale_oscillation,
    "inexact-amax": _inexact_amax,
    "stale-weight": _stale_weight,
    "weight-jump": _weight_jump,
    "zero-tensor": _zero_tensor,
    "outlier-growth": _outlier_growth,
    "biased-accumulation": lambda context: context.finer("blockwise", "bf16"),
    "sensitive-module": _sensitive_module,
    "batch-norm": _batch_norm,
    "gradient-below-noise": _gradient_below_noise,
    "learning-rate": _learning_rate,
    "divergence": _divergence,
    "loss-spike": _divergence,
    "stalled-loss": _stalled_loss,
    "loss-gap": _loss_gap,
    "slow-layer": _slow_layer,
}
