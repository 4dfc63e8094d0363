"""Which remedies are known for which finding, best first, before anything is replayed.

A remedy is the smallest change that reaches the cause: one layer before all of them, a finer recipe before none. What
no configuration mends, such as ranks that reduce over other ranks, is said in words, with nothing to change.
"""

from collections.abc import Callable, Iterable

import numpy as np

from octavo.doctor.findings import Finding, Remedy, Severity
from octavo.doctor.remedies.case import WORDS, Case, fineness, listed
from octavo.doctor.series import Series

__all__ = ["remedies_for"]

LAST_PHASE = 0.8  # of a run's steps: where FP8 ends and BF16 begins


def remedies_for(finding: Finding, series: Series) -> tuple[Remedy, ...]:
    """What is known to mend a finding, best first.

    Args:
        finding: with any code of :data:`octavo.doctor.findings.CAUSES`.
        series: that it was found in; says which recipe the layer runs.

    Example:
        >>> from octavo.doctor import Severity, series_of
        >>> finding = Finding(code="sensitive-module", severity=Severity.WARN, path="lm_head")
        >>> remedies_for(finding, series_of([]))[0].changes
        {'skip': ['lm_head']}
    """
    if finding.code in ALWAYS:
        return ALWAYS[finding.code]
    return tuple(KNOWN[finding.code](Case(finding, series)))


def _nonfinite(case: Case) -> Iterable[Remedy]:
    if case.finding.role == "grad_output" and case.series.curve("loss_scale")[0].size:
        yield _dynamic_loss_scale()
    if case.evidence("weights", 0):
        yield Remedy(
            text="Find the step in which it began: look at every one (interval=1), or train with octavo train, which "
            "stops at the first."
        )
        return
    what = f"the {case.finding.role} of {case.path}" if case.path else "the tensor that the failure names"
    yield Remedy(text=f"Find what computes NaN or infinity before {what}, such as a division or a broken sample.")


def _saturation(case: Case) -> Iterable[Remedy]:
    if case.recipe == "mxfp8" and case.rounds_scales_down:
        yield _options("Round scales up, so that the largest elements fit.", scale_rounding="rceil")
    yield from case.finer("tensorwise", "blockwise", "bf16")


def _gradient_underflow(case: Case) -> Iterable[Remedy]:
    if "amax_floor" in case.finding.evidence:
        yield from _floored(case)
    elif case.gradient_format == "E4M3" and case.recipe and fineness(case.recipe) < 0:  # a recipe of one's own
        yield case.override("tensorwise")
    elif case.gradient_format == "E4M3":
        yield _options("Cast gradients to E5M2, which reaches 2^14 times as far down.", gradient_format="E5M2")
        yield from case.finer("mxfp8")
    yield from case.finer("bf16")  # finer presets than those with E5M2 gradients cast them to E4M3


def _floored(case: Case) -> Iterable[Remedy]:
    if case.evidence("amax_floor", 0.0):
        yield Remedy(text="Leave amax_floor at 0 in the recipe's casts, so that small tensors get scales of their own.")
    else:
        yield Remedy(text=f"Find why the {case.finding.role} of {case.path} is so small; in BF16 it is near zero too.")


def _bulk_underflow(case: Case) -> Iterable[Remedy]:
    if "amax_floor" in case.finding.evidence:
        yield from _floored(case)
        return
    yield from case.finer("rowwise_hp_grad_weight", "blockwise", "mxfp8", "bf16")


def _stale_scale(case: Case) -> Iterable[Remedy]:
    yield from case.finer("tensorwise")
    if case.facts.get("statistic", "max") != "max":
        yield _options("Take the largest amax of the history, which forgets no growth.", statistic="max")
    length, g = int(case.facts.get("history_length", 1)), case.evidence("stale_ratio", 1.0)
    if g < 1 < length:
        shorter = max(1, min(4, length // 4))
        text = f"Keep a history of {shorter} steps instead of {length}, which forgets the past amax sooner."
        yield _options(text, history_length=shorter)
    elif g > 1:
        yield _options("Leave a binade free above the amax for its growth.", margin=1)
    yield from case.finer("blockwise", "bf16")


def _frozen_scale(case: Case) -> Iterable[Remedy]:
    yield from case.finer("tensorwise", "blockwise", "bf16")
    yield Remedy(text="Close every step: with manual scale updates call octavo.update_scales(model) after each.")


def _scale_oscillation(case: Case) -> Iterable[Remedy]:
    yield from case.finer("tensorwise")
    if "history_length" in case.facts:
        length = max(16, int(case.facts["history_length"]))
        text = f"Take the largest amax of the last {length} steps."
        yield _options(text, statistic="max", history_length=length)
    yield from case.finer("blockwise", "bf16")


def _inexact_amax(case: Case) -> Iterable[Remedy]:
    yield from case.finer("blockwise", "bf16")
    yield Remedy(
        text="Compute in FP32 the amax of the very tensor that is cast; whoever gives it to this layer does not."
    )


def _stale_weight(case: Case) -> Iterable[Remedy]:
    if case.facts.get("caches_weight"):
        yield Remedy(text="Cast weights anew for every micro-batch.", changes={"cache_weights": False})
    yield Remedy(text="Find who writes to this tensor unseen, and call octavo.update_scales(model) after it.")
    yield from case.finer("bf16")


def _zero_tensor(case: Case) -> Iterable[Remedy]:
    what = f"the {case.finding.role or 'tensors'} of {case.path or 'the run'}"
    yield Remedy(text=f"Find why {what} is zero: an initialisation, a mask, a branch not taken; FP8 keeps zeros exact.")


def _outlier_growth(case: Case) -> Iterable[Remedy]:
    places = case.down_projections() or [case.pattern]
    for name in ("bf16", "blockwise"):
        yield Remedy(text=f"Run {listed(places)} {WORDS[name]}.", changes={"overrides": dict.fromkeys(places, name)})
    if "alignment" in case.finding.evidence or case.has_gate:
        yield Remedy(text="Raise the weight decay of gate and up projection, or normalise their product.")
    else:
        yield Remedy(text="Raise the weight decay of the layers before it, or normalise what they give it.")


def _biased_accumulation(case: Case) -> Iterable[Remedy]:
    yield from case.finer("blockwise", "bf16")


def _sensitive_module(case: Case) -> Iterable[Remedy]:
    places = case.finding.places or (case.path,)
    yield Remedy(text=f"Keep {listed(places)} out of FP8.", changes={"skip": list(places)})


def _batch_norm(case: Case) -> Iterable[Remedy]:
    yield Remedy(text="Give the batch norm batches of one size and kind, or take a norm without running statistics.")
    parent = case.path.rpartition(".")[0]
    if parent and any(path.startswith(f"{parent}.") for path in case.series.layers):
        text = f"Run the layers of {parent} in BF16."
        yield Remedy(text=text, changes={"overrides": {f"{parent}.*": "bf16"}})


def _gradient_below_noise(case: Case) -> Iterable[Remedy]:
    noisiest = case.noisiest()
    if noisiest is not None:
        text = f"Run {noisiest} in BF16, which adds more than half of the noise."
        yield Remedy(text=text, changes={"overrides": {noisiest: "bf16"}})
    yield _last_phase()
    yield Remedy(
        text="Leave the weights' gradients in high precision.",
        changes={"recipe": "rowwise_hp_grad_weight", "recipe_options": {}},
    )


def _learning_rate(case: Case) -> Iterable[Remedy]:
    steps, rates = case.series.curve("lr")
    before, since = rates[steps < case.finding.first_step], rates[steps >= case.finding.first_step]
    if since.size:
        lr = min(float(before[-1]) if before.size else np.inf, float(since.max()) / 2)
        yield Remedy(text=f"Peak at a learning rate of {lr:.3g}.", changes={"lr": lr})
        warmup = 2 * int(steps[int(np.argmax(rates))])
        yield Remedy(text=f"Warm up over {warmup} steps.", changes={"warmup": warmup})
    else:
        yield Remedy(text="Lower the learning rate where the precision changes, and warm up again from there.")


def _divergence(case: Case) -> Iterable[Remedy]:
    _, rates = case.series.curve("lr")
    if rates.size and rates.max() > 0:
        lr = float(rates.max()) / 2
        beside = ", and train BF16 beside it" if case.finding.severity is Severity.FAIL else ""
        text = (
            f"Lower the learning rate: peak at {lr:.3g}{beside}." if beside else f"Peak at a learning rate of {lr:.3g}."
        )
        yield Remedy(text=text, changes={"lr": lr})
    elif case.finding.severity is Severity.FAIL:
        yield Remedy(text="Lower the learning rate, and train BF16 beside it.")
    yield Remedy(text="Lower the learning rate, clip the gradient, and look at the batches before the loss rose.")


def _loss_gap(case: Case) -> Iterable[Remedy]:
    ran = [str(period.facts.get("recipe", "")) for periods in case.series.periods.values() for period in periods]
    coarsest = min(map(fineness, ran), default=-1)
    for name in ("rowwise", "blockwise"):
        if coarsest < fineness(name):
            yield Remedy(text=f"Run all layers {WORDS[name]}.", changes={"recipe": name, "recipe_options": {}})
    yield _last_phase()
    yield Remedy(text="Ask which layers account for the gap: octavo doctor bisect.")


def _slow_layer(case: Case) -> Iterable[Remedy]:
    slow = [case.path] if case.path else list(case.finding.places)
    if slow:
        yield Remedy(text=f"Keep {listed(slow)} out of FP8.", changes={"skip": slow})


def _options(text: str, **options: object) -> Remedy:
    return Remedy(text=text, changes={"recipe_options": options})


def _last_phase() -> Remedy:
    return Remedy(
        text=f"Train the last {1 - LAST_PHASE:.0%} of the steps in BF16.",
        changes={"precision_schedule": [["fp8", 0.0], ["bf16", LAST_PHASE]]},
    )


def _dynamic_loss_scale() -> Remedy:
    return Remedy(text="Let the loss scale follow the gradients.", changes={"loss_scale": "dynamic"})


ALWAYS = {
    "rank-mismatch": (
        Remedy(text="Reduce amaxes over the ranks that share this tensor, all and no others: check the process group."),
    ),
    "loss-scale": (
        _dynamic_loss_scale(),
        Remedy(
            text="Surround FP8 by BF16, which needs no loss scale.", changes={"precision": "bf16", "loss_scale": "auto"}
        ),
    ),
    "checkpoint": (Remedy(text="Do as that sentence says, or start a new run in another folder."),),
    "memory": (Remedy(text="Lower batch_size or context, and raise grad_accumulation by as much."),),
    "nondeterministic": (
        Remedy(
            text="Look for what draws on a generator, the time or the order of threads; "
            "torch.use_deterministic_algorithms(True) names such operators."
        ),
    ),
}
KNOWN: dict[str, Callable[[Case], Iterable[Remedy]]] = {
    "nonfinite": _nonfinite,
    "saturation": _saturation,
    "gradient-underflow": _gradient_underflow,
    "bulk-underflow": _bulk_underflow,
    "stale-scale": _stale_scale,
    "frozen-scale": _frozen_scale,
    "scale-oscillation": _scale_oscillation,
    "inexact-amax": _inexact_amax,
    "stale-weight": _stale_weight,
    "zero-tensor": _zero_tensor,
    "outlier-growth": _outlier_growth,
    "biased-accumulation": _biased_accumulation,
    "sensitive-module": _sensitive_module,
    "batch-norm": _batch_norm,
    "gradient-below-noise": _gradient_below_noise,
    "learning-rate": _learning_rate,
    "divergence": _divergence,
    "loss-gap": _loss_gap,
    "slow-layer": _slow_layer,
}
