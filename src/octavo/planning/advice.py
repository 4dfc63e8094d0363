"""A verdict: FP8 or not, with which recipe, why, and what would change it.

The checks are those of the article octavo started from, each judged by the prediction instead of by a rule of thumb.
"""

from dataclasses import dataclass, replace

from octavo.errors import ConfigError, OctavoError
from octavo.planning.constants import Constants
from octavo.planning.plan import Plan, PlanRequest, make_plan

__all__ = ["Advice", "Check", "advise"]

WORTH = 1.05  # FP8 takes 5 to 10 % more steps, the article says, which a smaller speed-up does not pay for
NOT_WORK = ("cast", "stragglers", "total")
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
        checks: conditions of when and when not: hardware, gain and tolerance decide, the others explain.
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
    deciding = (_hardware(plan), _gain(plan), _tolerance(tolerance))
    checks = (*deciding, _layers(plan), _share_of_gemms(plan))
    best = plan.best_fp8
    failed = next((check for check in deciding if check.holds is False), None)
    if failed is not None or best is None or best.speedup is None:
        recipe, sentence = "bf16", f"Stay in BF16: {failed.sentence if failed else 'no FP8 recipe runs there'}."
    else:
        gain, low, high = best.speedup
        recipe = best.name
        program = plan.request.framework
        who = f"a program with {program}'s costs" if plan.transferred else program
        sentence = (
            f"Use FP8 with recipe {recipe}: {who} is predicted to train {gain:.2f} times as fast as "
            f"in BF16 ({low:.2f} to {high:.2f}, 80 %)."
        )
        sentence += "".join(f" {words}." for words in (plan.layouts_differ, plan.transferred) if words)
    changes = _changes(plan, constants)
    return Advice(use_fp8=recipe != "bf16", recipe=recipe, sentence=sentence, checks=checks, changes=changes)


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
    if gain < WORTH:
        words += f"; less than {WORTH:g} does not pay for the further steps that FP8 may take"
    elif low < 1:
        words += ", where it would be slower; measure before deciding"
    return Check(name="gain", holds=gain >= WORTH and low >= 1, sentence=words)


def _layers(plan: Plan) -> Check:
    losing = [layer.name for layer in plan.layers if layer.speedup < 1]
    if not losing:
        return Check(name="layers", holds=True if plan.layers else None, sentence="no linear layer is slower in FP8")
    return Check(name="layers", holds=False, sentence=f"slower in FP8, so keep in BF16: {', '.join(losing)}")


def _share_of_gemms(plan: Plan) -> Check:
    """Amdahl's limit in the fastest recipe's layout: linear layers at FP8's peak, without casts.

    Other work is as in BF16, or as in FP8 where that saves some: gathered weights, recomputation, stragglers.
    """
    best, hardware = plan.best_fp8, plan.request.hardware
    bf16 = best.bf16_here if best is not None and best.bf16_here is not None else plan.bf16
    seconds = bf16.seconds
    share = seconds["gemm"] / seconds["total"]
    where = max((name for name in seconds if name not in ("gemm", "total")), key=lambda name: seconds[name])
    rest = seconds[where] / seconds["total"]
    words = f"linear layers take {share:.0%} of BF16's step, {where.replace('_', ' ')} {rest:.0%}"
    words += f" with {bf16.job.layout}" if plan.layouts_differ else ""
    if best is None or best.candidate is None:
        return Check(name="share of linear layers", holds=None, sentence=words)
    in_fp8 = best.candidate.seconds
    fastest = {name: min(each, in_fp8[name]) for name, each in seconds.items() if name not in NOT_WORK}
    fastest["gemm"] = min(seconds["gemm"] * hardware.bf16 / hardware.fp8, in_fp8["gemm"])
    stragglers = seconds["total"] / (seconds["total"] - seconds.get("stragglers", 0.0))
    most = seconds["total"] / (sum(fastest.values()) * stragglers)
    words += f"; at the peak of FP8 the step would be {most:.2f} times as fast"
    return Check(name="share of linear layers", holds=most >= WORTH, sentence=words)


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
