"""A verdict: FP8 or not, with which recipe, why, and what would change it.

The checks are those of the article octavo started from, each judged by the prediction instead of by a rule of thumb.
"""

from dataclasses import dataclass, replace

from octavo.errors import ConfigError, OctavoError
from octavo.planning.constants import Constants
from octavo.planning.plan import Plan, PlanRequest, make_plan

__all__ = ["Advice", "Check", "advise"]

WORTH = 1.05  # a speed-up below it does not pay for the risk
TOLERANCE = 0.5  # per cent of perplexity that the article calls too little for FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One condition; ``holds`` is None where the planner cannot know."""

    name: str
    holds: bool | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A verdict with its reasons.

    Attributes:
        use_fp8: the answer.
        recipe: of the answer; ``bf16`` if FP8 should not be used.
        sentence: the answer in words.
        checks: conditions of when and when not.
        changes: what would change the answer, or the gain.
    """

    use_fp8: bool
    recipe: str
    sentence: str
    checks: tuple[Check, ...]
    changes: tuple[str, ...]


def advise(plan: Plan, constants: Constants, *, tolerance: float | None = None) -> Advice:
    """Return the verdict on a plan.

    Args:
        plan: all precisions of a training.
        constants: of the fit, for what would change it.
        tolerance: per cent of perplexity that may be lost; None if it is not known.

    Raises:
        ConfigError: the tolerance is no percentage.
    """
    if tolerance is not None and not 0 <= tolerance <= 100:
        raise ConfigError(f"the tolerance must be 0 to 100 per cent, not {tolerance:g}")
    checks = (_hardware(plan), _gain(plan), _layers(plan), _outside_gemms(plan), _tolerance(tolerance))
    best = plan.best_fp8
    use = all(check.holds is not False for check in checks if check.name != "layers") and best is not None
    if not use or best is None or best.speedup is None:
        failed = next(check for check in checks if check.holds is False)
        return Advice(
            use_fp8=False,
            recipe="bf16",
            sentence=f"Stay in BF16: {failed.sentence}",
            checks=checks,
            changes=_changes(plan, constants),
        )
    gain, low, high = best.speedup
    return Advice(
        use_fp8=True,
        recipe=best.name,
        sentence=f"Use FP8 with recipe {best.name}: {gain:.2f} times BF16's speed ({low:.2f} to {high:.2f}, 80 %).",
        checks=checks,
        changes=_changes(plan, constants),
    )


def _hardware(plan: Plan) -> Check:
    hardware = plan.request.hardware
    if hardware.has_fp8:
        return Check(name="hardware", holds=True, sentence=f"{hardware.name} multiplies FP8")
    reason = plan.options[1].reason or f"{hardware.name} has no FP8 units"
    return Check(name="hardware", holds=False, sentence=reason)


def _gain(plan: Plan) -> Check:
    best = plan.best_fp8
    if best is None or best.speedup is None:
        return Check(name="gain", holds=False, sentence="no FP8 recipe runs there")
    gain, low, _ = best.speedup
    words = f"{best.name} is predicted {gain:.2f} times as fast as BF16, at least {low:.2f} in 90 % of cases"
    return Check(name="gain", holds=gain >= WORTH, sentence=words)


def _layers(plan: Plan) -> Check:
    losing = [layer.name for layer in plan.layers if layer.speedup < 1]
    if not losing:
        return Check(name="layers", holds=True if plan.layers else None, sentence="no linear layer is slower in FP8")
    return Check(name="layers", holds=False, sentence=f"slower in FP8, so keep in BF16: {', '.join(losing)}")


def _outside_gemms(plan: Plan) -> Check:
    seconds = plan.bf16.seconds
    share = seconds["gemm"] / seconds["total"]
    where = max((name for name in seconds if name not in ("gemm", "total")), key=lambda name: seconds[name])
    rest = seconds[where] / seconds["total"]
    words = f"linear layers take {share:.0%} of BF16's step, {where.replace('_', ' ')} {rest:.0%}"
    return Check(name="share of linear layers", holds=share >= 0.25, sentence=words)


def _tolerance(tolerance: float | None) -> Check:
    if tolerance is None:
        words = "not given; the article asks for more than 0.5 % of perplexity, which octavo study measures"
        return Check(name="tolerance", holds=None, sentence=words)
    holds = tolerance >= TOLERANCE
    words = f"{tolerance:g} % of perplexity may be lost; {TOLERANCE:g} % is the least that FP8 needs"
    return Check(name="tolerance", holds=holds, sentence=words)


def _changes(plan: Plan, constants: Constants) -> tuple[str, ...]:
    """The gain under one change at a time."""
    request = plan.request
    found = []
    for words, changed in _variations(request):
        try:
            best = make_plan(changed, constants).best_fp8
        except OctavoError:
            continue
        if best is not None and best.speedup is not None:
            found.append(f"{words}: {best.speedup[0]:.2f} times BF16's speed, with {best.name}")
    return tuple(found)


def _variations(request: PlanRequest) -> list[tuple[str, PlanRequest]]:
    """Requests that differ in one setting: context and number of GPUs."""
    longer = replace(request, seq=4 * request.seq, global_batch=max(request.gpus, request.batch // 4))
    fewer = max(8, request.gpus // 8)
    smaller = replace(request, gpus=fewer, global_batch=max(fewer, request.batch * fewer // request.gpus))
    found = [(f"with a context of {longer.seq:,} tokens", longer)]
    if fewer < request.gpus:
        found.append((f"on {fewer:,} GPUs", smaller))
    return found
