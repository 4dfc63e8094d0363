"""A verdict: FP8 or not, with which recipe, why, and what would change it.

The conditions are those of the article octavo started from. What follows from the plan and the tolerance is judged;
what only the user knows is a sentence, and decides nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.errors import ConfigError, OctavoError
from octavo.planning.constants import WORK, Constants
from octavo.planning.hardware import Hardware, find_hardware
from octavo.planning.model_names import find_model
from octavo.planning.plan import Plan, PlanRequest, make_plan

__all__ = ["HOLDS", "Advice", "Check", "advise", "speedup_text"]

WORTH = 1.05  # FP8 takes 5 to 10 % more steps, the article says, which a smaller speed-up does not pay for
MOST_FURTHER_STEPS = 1.10
HOLDS = {True: "yes", False: "no", None: "unknown"}  # a check's words
NOT_WORK = ("cast", "stragglers", "total")
TOLERANCE = 0.5  # per cent of perplexity: with less the article stays in BF16
ENOUGH_TOLERANCE = 2.0  # with so much it uses FP8
SIZES = ("smollm2-135m", "llama-3-1b", "llama-3-8b", "llama-3-70b")  # other models that what would change it tries
MOST_GPUS, CONTEXTS = 16384, (512, 131072)  # of what is tried
LARGER = "b200"  # of which a quarter as many are tried for a batch that is given


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
        use_fp8: the answer; false too where what the program's published trainings have does not gain enough.
        recipe: of the answer, the fastest of all, which the program may not have; ``bf16`` if FP8 should not be used.
        program_recipe: of the answer, the fastest that the program's published trainings have, in one of their
            layouts; None where they have none that runs.
        sentence: the answer in words.
        checks: conditions of when and when not: hardware, gain and tolerance decide, the others explain; hardware
            alone where it has no FP8 units.
        changes: what would change the answer, each alone; empty where nothing that was tried does.
    """

    use_fp8: bool
    recipe: str
    sentence: str
    checks: tuple[Check, ...]
    program_recipe: str | None = "bf16"
    changes: tuple[str, ...] = ()


def advise(plan: Plan, constants: Constants | None = None, *, tolerance: float | None = None) -> Advice:
    """Return the verdict on a plan.

    Args:
        plan: all precisions of a training.
        constants: of the fit, to plan what would change it; None leaves that out.
        tolerance: per cent of perplexity that may be lost; None if it is not known.

    Raises:
        ConfigError: the tolerance is no percentage.
    """
    if tolerance is not None and not 0 <= tolerance <= 100:
        raise ConfigError(f"the tolerance must be 0 to 100 per cent, not {tolerance:g}")
    verdict = _verdict(plan, tolerance)
    return verdict if constants is None else replace(verdict, changes=tuple(_changes(plan, constants, tolerance)))


def _verdict(plan: Plan, tolerance: float | None) -> Advice:
    if not plan.request.hardware.has_fp8:
        return _without_units(plan.request.hardware)
    deciding = (_hardware(plan), _gain(plan), _tolerance(tolerance))
    checks = (*deciding, *UNKNOWN, _layers(plan), _share_of_gemms(plan))
    best = plan.best_fp8
    failed = next((check for check in deciding if check.holds is False), None)
    if failed is not None or best is None or best.speedup is None:
        sentence = f"Stay in BF16: {failed.sentence if failed else 'no FP8 recipe runs there'}."
        sentence += f" {plan.layouts_differ}." if plan.layouts_differ else ""
        if _slow_own(plan) and best is not None and best.speedup is not None and _pays(best.speedup):
            sentence += f" With recipe {best.name} {_gains(plan, best.speedup)} {plan.transferred}."
        return Advice(use_fp8=False, recipe="bf16", sentence=sentence, checks=checks)
    sentence = f"Use FP8 with recipe {best.name}: {_gains(plan, best.speedup)}"
    sentence += "".join(f" {words}." for words in (plan.layouts_differ, plan.transferred) if words)
    has = best if not plan.transferred else plan.own
    program_recipe = None if has is None else has.name
    return Advice(use_fp8=True, recipe=best.name, program_recipe=program_recipe, sentence=sentence, checks=checks)


def _gains(plan: Plan, speedup: tuple[float, float, float]) -> str:
    program, (gain, low, high) = plan.request.framework, map(speedup_text, speedup)
    who = f"a program with {program}'s costs" if plan.transferred else program
    return f"{who} is predicted to train {gain} times as fast as in BF16 ({low} to {high}, 80 %)."


def _pays(speedup: tuple[float, float, float]) -> bool:
    gain, low, _ = speedup
    return gain >= WORTH and low >= 1


def _slow_own(plan: Plan) -> tuple[str, tuple[float, float, float]] | None:
    """The program's own fastest recipe, where the plan's best is a transfer and this one does not pay."""
    own = plan.own
    if not plan.transferred or own is None or own.speedup is None or _pays(own.speedup):
        return None
    return own.name, own.speedup


def _without_units(hardware: Hardware) -> Advice:
    """The verdict where no gain, layer or tolerance matters."""
    lack = f"{hardware.name} has no FP8 units"
    sentence = (
        f"Stay in BF16 or FP16: {lack}. FP8 saves memory there and no time: recipe weight_only stores weights in "
        "8 bits and multiplies in 16; the others are emulated, slower than 16 bits."
    )
    return Advice(
        use_fp8=False, recipe="bf16", sentence=sentence, checks=(Check(name="hardware", holds=False, sentence=lack),)
    )


UNKNOWN = (
    Check(
        name="latency",
        holds=None,
        sentence="of serving, not of this training; the article uses FP8 for less than 50 ms a token with more than 8 "
        "requests, which octavo plan --answer predicts",
    ),
    Check(
        name="converged model",
        holds=None,
        sentence="not known; the article fine-tunes a converged model for FP8, as octavo qat does",
    ),
    Check(
        name="research",
        holds=None,
        sentence="not known; where every bit of precision matters, the article stays in BF16",
    ),
)


def _hardware(plan: Plan) -> Check:
    return Check(name="hardware", holds=True, sentence=f"{plan.request.hardware.name} multiplies FP8")


def _gain(plan: Plan) -> Check:
    best = plan.best_fp8
    if best is None or best.speedup is None:
        return Check(name="gain", holds=False, sentence="no FP8 recipe runs there")
    name, speedup = best.name, best.speedup
    if slow := _slow_own(plan):
        name, speedup = f"{slow[0]}, the fastest that {plan.request.framework} has,", slow[1]
    gain, low, _ = speedup
    least = speedup_text(low)
    words = f"{name} is predicted {speedup_text(gain)} times as fast as BF16, at least {least} in 90 % of cases"
    if gain < WORTH:
        words += f"; less than {WORTH:g} does not pay for the further steps that FP8 may take"
    elif low < 1:
        words += ", where it would be slower; measure before deciding"
    elif low < MOST_FURTHER_STEPS:
        words += f"; {least} does not pay for {MOST_FURTHER_STEPS - 1:.0%} more steps, the most that FP8 may take"
    return Check(name="gain", holds=_pays(speedup), sentence=words)


def speedup_text(speedup: float) -> str:
    """Return a speed-up with two decimals, never those of a threshold that it does not reach.

    Example:
        >>> speedup_text(1.4478), speedup_text(1.0999)  # which does not pay for 10 % more steps, as 1.10 does
        ('1.45', '1.09')
    """
    nearest = round(speedup, 2)
    is_too_high = nearest > speedup and nearest in (1.0, WORTH, MOST_FURTHER_STEPS)
    return f"{nearest - 0.01 if is_too_high else nearest:.2f}"


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
    words = f"linear layers take {share:.0%} of BF16's step, {WORK[where]} {rest:.0%}"
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
    holds = False if tolerance < TOLERANCE else True if tolerance >= ENOUGH_TOLERANCE else None
    words = f"{tolerance:g} % of perplexity may be lost; {TOLERANCE:g} % is the least that FP8 needs"
    if holds is None:
        words += f"; below the article's {ENOUGH_TOLERANCE:g} to 3 %, so measure it with octavo study"
    return Check(name="tolerance", holds=holds, sentence=words)


def _changes(plan: Plan, constants: Constants, tolerance: float | None) -> Iterator[str]:
    """Changes that turn the verdict round, each alone: the nearest value in each direction that is tried."""
    use_fp8 = _verdict(plan, tolerance).use_fp8
    if _verdict(plan, 0.0 if use_fp8 else TOLERANCE).use_fp8 != use_fp8:
        words, then = ("less than", "stay in BF16") if use_fp8 else ("at least", "use FP8")
        yield f"with a tolerance of {words} {TOLERANCE:g} % of perplexity: {then}"
    if tolerance is not None and tolerance < TOLERANCE:
        return  # nothing else helps
    for direction in _directions(plan.request, use_fp8=use_fp8):
        for words, request in direction:
            try:
                changed = make_plan(request, constants)
            except OctavoError:
                continue
            verdict = _verdict(changed, tolerance)
            if verdict.use_fp8 != use_fp8:
                yield f"{words}: {_in_short(verdict, changed)}"
                break


def _in_short(verdict: Advice, plan: Plan) -> str:
    """A verdict's first sentence, without layouts."""
    best = plan.best_fp8
    if not verdict.use_fp8 or best is None or best.speedup is None:
        first = verdict.sentence.split(". ")[0].removesuffix(".")
        return first[0].lower() + first[1:]
    return f"use FP8 with recipe {verdict.recipe}, {speedup_text(best.speedup[0])} times as fast"


def _directions(request: PlanRequest, *, use_fp8: bool) -> Iterator[list[tuple[str, PlanRequest]]]:
    """Requests that differ in one setting, by direction, the nearest first.

    A batch that was not given is the usual one of the changed request. One that was given keeps its tokens, on fewer,
    more, and fewer and larger GPUs too.
    """
    if not request.hardware.has_fp8:
        yield from ([_on(request, name)] for name in ("h100", "b200"))
        return
    gpus, same = request.gpus, " with the same batch" if request.global_batch else ""
    for numbers in ([gpus // 8, gpus // 64], [gpus * 8, gpus * 64]):
        within = [each for each in numbers if 1 <= each <= MOST_GPUS]
        yield [(f"on {each:,} GPU{'s' * (each > 1)}{same}", replace(request, gpus=each)) for each in within]
    larger, fewer = find_hardware(LARGER), gpus // 4
    if same and fewer and larger.bf16 > request.hardware.bf16:
        yield [(f"on {fewer:,} {LARGER}{same}", replace(request, gpus=fewer, hardware=larger))]
    for contexts in ([request.seq // 4, request.seq // 16], [request.seq * 4, request.seq * 16]):
        within = [each for each in contexts if CONTEXTS[0] <= each <= CONTEXTS[1]]
        yield [(f"with a context of {each:,} tokens", _with_context(request, each)) for each in within]
    others = [find_model(name) for name in (reversed(SIZES) if use_fp8 else SIZES)]
    sized = [each for each in others if (each.parameters < request.model.parameters) == use_fp8]
    yield [(f"with the model {each.name}", replace(request, model=each)) for each in sized]
    for name in ("a100",) if use_fp8 else ("h100", "b200"):
        yield [_on(request, name)]


def _on(request: PlanRequest, name: str) -> tuple[str, PlanRequest]:
    return f"on {name}", replace(request, hardware=find_hardware(name))


def _with_context(request: PlanRequest, seq: int) -> PlanRequest:
    batch = request.global_batch and max(1, request.global_batch * request.seq // seq)
    return replace(request, seq=seq, global_batch=batch)
