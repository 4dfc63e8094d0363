"""A linear layer forward and backward, quantization included, beside ``nn.Linear`` in BF16.

Hopper's tensor cores know no scales for 32 numbers: "mxfp8" is emulated, a product of each block and a sum in FP32.
Everything is BF16 but for what a recipe casts; input and weight take gradients. All contestants of a shape share one
weight. The published figures are torchao's, for its rowwise recipe, compiled, on an H100.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from octavo.bench.bars import judged_by_speed
from octavo.bench.results import Section, Verdict
from octavo.bench.session import Comparison, Contestant, Session
from octavo.bench.sizes import LinearCase
from octavo.bench.steps import TrainingStep, leaf
from octavo.bench.tables import section_of
from octavo.nn import Linear

__all__ = ["FIRST_RECIPES", "RECIPES", "bars", "measure"]

BF16 = "bf16, eager"
FIRST_RECIPES = ("tensorwise", "rowwise", "blockwise")
RECIPES = (*FIRST_RECIPES, "delayed", "rowwise_hp_grad_weight", "mxfp8")
PUBLISHED, ROWWISE = "published, rowwise (torchao)", ("rowwise, eager", "rowwise, compiled")
JUDGED = "The fastest of octavo's here is judged."
PUBLISHED_5B = (
    "A shape of a model with 5 billion parameters (24 layers of width 4096). Published for such a model on an H200, "
    "quantization included (Transformer Engine): delayed 1.69, current scaling 1.58, blockwise 1.40 times BF16."
)


def measure(session: Session) -> Iterator[Section]:
    """A section for every shape, eager, then one for those that are compiled too, which takes longer."""
    for case, compiled in _cases(session):
        session.check_time(f"{case.name}, {_how(compiled=compiled)}")
        yield _section(session, case, compiled=compiled)
        session.forget()


def bars(session: Session) -> list[Verdict]:
    """Of every section."""
    return [bar for case, compiled in _cases(session) for bar, _ in _bars(case, compiled=compiled)]


def _cases(session: Session) -> list[tuple[LinearCase, bool]]:
    """And whether it is compiled."""
    compiled = [(case, True) for case in session.sizes.linears if case.compiled]
    return [(case, False) for case in session.sizes.linears] + compiled


def _how(*, compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _section(session: Session, case: LinearCase, *, compiled: bool) -> Section:
    weight = nn.Parameter(session.randn(case.n, case.k) * case.k**-0.5)
    found = session.compare(_contestants(session, case, weight, compiled=compiled))
    published = {} if case.published is None else dict.fromkeys(ROWWISE, f"{case.published:.2f}")
    return section_of(
        f"Linear, {_how(compiled=compiled)}, forward and backward, {case.name}",
        found,
        base=BF16,
        columns={PUBLISHED: published} if published else {},
        verdicts=_verdicts(case, found, compiled=compiled),
        notes=[JUDGED] if case.bar is not None else [PUBLISHED_5B] if case.blockwise_bar is not None else [],
    )


def _contestants(session: Session, case: LinearCase, weight: nn.Parameter, *, compiled: bool) -> dict[str, Contestant]:
    plain = nn.Linear(case.k, case.n, bias=False, device="meta")
    plain.weight = weight
    entered = {BF16: _step(session, case, lambda: plain, weight)}
    if not compiled:
        return entered | {
            f"{name}, eager": _step(session, case, _layer(case, name, weight), weight) for name in RECIPES
        }
    for recipe in FIRST_RECIPES:
        make = _layer(case, recipe, weight)
        entered[f"{recipe}, compiled"] = _step(session, case, lambda make=make: session.compiled(make()), weight)  # type: ignore[misc]
    entered["bf16, compiled"] = _step(session, case, lambda: session.compiled(plain), weight)
    return entered


def _layer(case: LinearCase, recipe: str, weight: nn.Parameter) -> Callable[[], Linear]:
    def make() -> Linear:
        layer = Linear(case.k, case.n, bias=False, recipe=recipe, device=weight.device, dtype=weight.dtype)
        layer.weight = weight
        return layer

    return make


def _step(
    session: Session, case: LinearCase, make: Callable[[], Callable[[Tensor], Tensor]], weight: nn.Parameter
) -> Contestant:
    def build() -> TrainingStep:
        size = torch.bfloat16.itemsize * case.m
        inputs = session.rotation(lambda: leaf(session, case.m, case.k), size * case.k)
        grads = session.rotation(lambda: session.randn(case.m, case.n), size * case.n)
        return TrainingStep(make(), [weight], inputs, grads)

    return Contestant(build=build, work=6 * case.m * case.k * case.n / 1e12, unit="TFLOP")


def _bars(case: LinearCase, *, compiled: bool) -> Iterator[tuple[Verdict, list[str]]]:
    """A section's bars, and whose speed each is about."""
    how = _how(compiled=compiled)
    if case.bar is not None:
        recipes = FIRST_RECIPES if compiled else RECIPES
        claim = f"linear {case.name}, {how}, × bf16, the fastest recipe"
        yield Verdict(claim=claim, bar=case.bar), [f"{recipe}, {how}" for recipe in recipes]
    if case.blockwise_bar is not None:
        claim = f"linear {case.name}, {how}, × bf16, blockwise"
        yield Verdict(claim=claim, bar=case.blockwise_bar), [f"blockwise, {how}"]


def _verdicts(case: LinearCase, found: Comparison, *, compiled: bool) -> list[Verdict]:
    return [judged_by_speed(bar, found, ours, (BF16,)) for bar, ours in _bars(case, compiled=compiled)]
