"""A linear layer forward and backward, including quantization, against ``nn.Linear`` in BF16.

Hopper's tensor cores have no scales for blocks of 32: "mxfp8" is emulated by a GEMM per block and sums in FP32. All
tensors are BF16, except those that a recipe casts; input and weight have gradients. All variants of a shape share one
weight. Eager and compiled steps are timed with their launches, of which FP8 has more; a step as a CUDA graph is the
GPU's work alone. The published figures are torchao's, for its rowwise recipe, compiled, on an H100.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.hopper.bars import judged_by_speed
from benchmarks.hopper.session import Rotation, Session, Timings, Variant
from benchmarks.hopper.sizes import LinearCase
from benchmarks.hopper.steps import TrainingStep, leaf
from benchmarks.hopper.tables import section_of
from octavo.bench.results import Section, Verdict
from octavo.nn import Linear
from octavo.nn.scaling_state import update_scales

__all__ = ["FIRST_RECIPES", "RECIPES", "bars", "measure"]

EAGER, GRAPH, COMPILED = "eager", "CUDA graph", "compiled"
FIRST_RECIPES = ("tensorwise", "rowwise", "blockwise")
RECIPES = (*FIRST_RECIPES, "delayed", "rowwise_hp_grad_weight", "mxfp8")
PUBLISHED = "published, rowwise (torchao)"
JUDGED = "The fastest of octavo's here is judged."
PUBLISHED_5B = (
    "A shape of a model with 5 billion parameters (24 layers of width 4096). Published for such a model on an H200, "
    "quantization included (Transformer Engine): delayed 1.69, current scaling 1.58, blockwise 1.40 times BF16."
)


def measure(session: Session) -> Iterator[Section]:
    """Yield sections of all shapes eager, of some compiled, and last as CUDA graphs, whose capture may break CUDA."""
    for case, how in _cases(session):
        session.check_time(f"{case.name}, {how}")
        yield _section(session, case, how)
        session.forget()


def bars(session: Session) -> list[Verdict]:
    """Bars of all sections."""
    return [bar for case, how in _cases(session) for bar, _ in _bars(case, how)]


def _cases(session: Session) -> list[tuple[LinearCase, str]]:
    """Cases and how they run; only those with a bar run as CUDA graphs."""
    every = session.sizes.linears
    barred = [case for case in every if case.bar is not None or case.blockwise_bar is not None]
    cases = {EAGER: every, COMPILED: [case for case in every if case.compiled], GRAPH: barred}
    return [(case, how) for how, some in cases.items() for case in some]


def _section(session: Session, case: LinearCase, how: str) -> Section:
    weight = nn.Parameter(session.randn(case.n, case.k) * case.k**-0.5)
    timings = session.compare(_variants(session, case, weight, how), kernels=how == GRAPH)
    published = {} if case.published is None else {f"rowwise, {how}": f"{case.published:.2f}"}
    return section_of(
        f"Linear, {how}, forward and backward, {case.name}",
        timings,
        base=_base(how),
        columns={PUBLISHED: published} if published else {},
        verdicts=_verdicts(case, timings, how),
        notes=[JUDGED] if case.bar is not None else [PUBLISHED_5B] if case.blockwise_bar is not None else [],
    )


def _base(how: str) -> str:
    """Name of the variant that a section's speeds are divided by."""
    return f"bf16, {EAGER if how == COMPILED else how}"


def _variants(session: Session, case: LinearCase, weight: nn.Parameter, how: str) -> dict[str, Variant]:
    plain = nn.Linear(case.k, case.n, bias=False, device="meta")
    plain.weight = weight
    variants = {_base(how): _step(session, case, lambda: plain, weight, graphed=how == GRAPH)}
    for recipe in RECIPES if how == EAGER else FIRST_RECIPES:
        make = _layer(case, recipe, weight)
        if how == COMPILED:
            make = _compiled(session, make)
        variants[f"{recipe}, {how}"] = _step(session, case, make, weight, graphed=how == GRAPH)
    if how == COMPILED:
        variants[f"bf16, {COMPILED}"] = _step(session, case, _compiled(session, lambda: plain), weight)
    return variants


def _layer(case: LinearCase, recipe: str, weight: nn.Parameter) -> Callable[[], Callable[[Tensor], Tensor]]:
    def make() -> Callable[[Tensor], Tensor]:
        layer = Linear(case.k, case.n, bias=False, recipe=recipe, device=weight.device, dtype=weight.dtype)
        layer.weight = weight
        return _closing(layer) if layer.recipe.is_delayed else layer

    return make


def _closing(layer: Linear) -> Callable[[Tensor], Tensor]:
    """Delayed layer that begins a step with every call, since there is no optimizer."""

    def call(x: Tensor) -> Tensor:
        update_scales(layer)
        y: Tensor = layer(x)
        return y

    return call


def _compiled(session: Session, make: Callable[[], Callable[[Tensor], Tensor]]) -> Callable[[], Callable[..., Tensor]]:
    return lambda: session.compiled(make())


def _step(
    session: Session,
    case: LinearCase,
    make: Callable[[], Callable[[Tensor], Tensor]],
    weight: nn.Parameter,
    *,
    graphed: bool = False,
) -> Variant:
    def build() -> Callable[[], object]:
        size = torch.bfloat16.itemsize * case.m
        inputs = session.rotation(lambda: leaf(session, case.m, case.k), size * case.k)
        grads = session.rotation(lambda: session.randn(case.m, case.n), size * case.n)
        step = TrainingStep(make(), [weight], inputs, grads)
        return _as_graphs(session, step) if graphed else step

    return Variant(build=build, work=6 * case.m * case.k * case.n / 1e12, unit="TFLOP")


def _as_graphs(session: Session, step: TrainingStep) -> Callable[[], object]:
    """Graphs replayed in turn, one per input, since a captured graph always reads the same memory."""
    graphs = []
    for _ in range(max(len(step.inputs.items), len(step.grads.items))):
        one = TrainingStep(step.run, step.parameters, Rotation([step.inputs()]), Rotation([step.grads()]))
        graphs.append(session.graphed(one))
        graphs[-1]()  # the first time it is sent to the device
    in_turn = Rotation(graphs)

    def replay() -> None:
        in_turn()()

    return replay


def _bars(case: LinearCase, how: str) -> Iterator[tuple[Verdict, list[str]]]:
    """Yield the bars of a section, with the variants that may reach them."""
    if case.bar is not None:
        recipes = RECIPES if how == EAGER else FIRST_RECIPES
        claim = f"linear {case.name}, {how}, × bf16, the fastest recipe"
        yield Verdict(claim=claim, bar=case.bar), [f"{recipe}, {how}" for recipe in recipes]
    if case.blockwise_bar is not None:
        claim = f"linear {case.name}, {how}, × bf16, blockwise"
        yield Verdict(claim=claim, bar=case.blockwise_bar), [f"blockwise, {how}"]


def _verdicts(case: LinearCase, found: Timings, how: str) -> list[Verdict]:
    bases = (_base(how), *([f"bf16, {COMPILED}"] if how == COMPILED else []))
    return [judged_by_speed(bar, found, ours, bases) for bar, ours in _bars(case, how)]
