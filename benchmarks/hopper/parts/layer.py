"""One transformer layer of Llama 3 8B's shape, 8,192 tokens, forward and backward.

``octavo.nn.TransformerLayer`` with each recipe, and the same layer with the recipe "bf16"; for comparison a layer of
plain ``nn.Linear`` (octavo.models.llama, its norms torch's own in BF16), in BF16 and, where torchao is installed,
converted by torchao. All parameters and activations are BF16, except those that a recipe casts.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.hopper.bars import judged_by_memory, judged_by_speed
from benchmarks.hopper.parts.linears import FIRST_RECIPES, RECIPES
from benchmarks.hopper.session import Session, Timings, Variant
from benchmarks.hopper.steps import Memory, TrainingStep, leaf, memory_of
from benchmarks.hopper.tables import gigabytes, section_of
from octavo.bench.results import Failure, Section, Verdict
from octavo.errors import BackendError
from octavo.models.llama import DecoderLayer, LlamaConfig
from octavo.nn import TransformerLayer, rotary_table

__all__ = ["bars", "measure"]

BASE = "bf16, compiled"
EAGER = "bf16, eager"
PLAIN = {"compiled": "plain layer, bf16, compiled", "eager": "plain layer, bf16, eager"}
TORCHAO = ("tensorwise", "rowwise")
PUBLISHED = (
    "Published for one layer, forward and backward (Transformer Engine, its introduction): FP8 1.53 times BF16, with "
    "fused norms 1.65 times."
)
PEAKS = (
    "Peak: parameters, and the most that a step adds to them, gradients included. Kept: between forward and backward."
)
SPEED_BAR = 1.5
MEMORY = Verdict(claim="TransformerLayer, peak memory × bf16, compiled", bar=0.75, at_most=True)

Forward = Callable[[Tensor], Tensor]


def measure(session: Session) -> Iterator[Section]:
    """Yield the times, then the memory."""
    timings = session.compare(_variants(session))
    size = session.sizes.layer
    title = f"TransformerLayer, {size.batch * size.length:,} tokens, hidden {size.hidden}, ffn {size.ffn}"
    yield section_of(title, timings, base=BASE, verdicts=_speed_verdicts(timings), notes=[PUBLISHED])
    steps = {name: run for name, run in timings.runs.items() if isinstance(run, TrainingStep)}
    memory, failures = session.look_at_each(steps, partial(memory_of, session))
    yield _memory_section(memory, failures, timings.failures)


def bars(_: Session) -> list[Verdict]:
    """Bars, which are the same for all sizes."""
    return [*(bar for bar, _, _ in _speed_bars()), MEMORY]


def _variants(session: Session) -> dict[str, Variant]:
    """Variants, those with bars first, because the last are left out if time runs short."""
    octavo = {recipe: _octavo(session, recipe) for recipe in ("bf16", *RECIPES)}
    variants = {
        BASE: _step(session, octavo["bf16"], compiled=True),
        EAGER: _step(session, octavo["bf16"], compiled=False),
        PLAIN["eager"]: _step(session, lambda: _plain(session), compiled=False),
        PLAIN["compiled"]: _step(session, lambda: _plain(session), compiled=True),
        "tensorwise, eager": _step(session, octavo["tensorwise"], compiled=False),
        "tensorwise, compiled": _step(session, octavo["tensorwise"], compiled=True),
    }
    for recipe in TORCHAO:
        variants[f"torchao {recipe}, compiled"] = _step(session, _torchao(session, recipe), compiled=True)
    for compiled, recipe in (
        *((True, recipe) for recipe in FIRST_RECIPES[1:]),
        *((False, recipe) for recipe in RECIPES[1:]),
        *((True, recipe) for recipe in RECIPES[len(FIRST_RECIPES) :]),
    ):
        variants[f"{recipe}, {'compiled' if compiled else 'eager'}"] = _step(session, octavo[recipe], compiled=compiled)
    return variants


def _step(session: Session, make: Callable[[], tuple[nn.Module, Forward]], *, compiled: bool) -> Variant:
    size = session.sizes.layer
    tokens = size.batch * size.length

    def build() -> TrainingStep:
        module, forward = make()
        inputs = session.rotation(lambda: leaf(session, size.batch, size.length, size.hidden), 2 * tokens * size.hidden)
        grads = session.rotation(lambda: session.randn(size.batch, size.length, size.hidden), 2 * tokens * size.hidden)
        run = session.compiled(forward) if compiled else forward
        return TrainingStep(run, list(module.parameters()), inputs, grads)

    return Variant(build=build, work=tokens, unit="tokens")


def _rotations(session: Session) -> tuple[Tensor, Tensor]:
    size = session.sizes.layer
    cos, sin = rotary_table(size.hidden // size.heads, size.length, 500000.0, device=session.device)
    return cos, sin


def _octavo(session: Session, recipe: str) -> Callable[[], tuple[nn.Module, Forward]]:
    size = session.sizes.layer

    def make() -> tuple[nn.Module, Forward]:
        layer = TransformerLayer(
            size.hidden,
            size.ffn,
            size.heads,
            num_kv_heads=size.kv_heads,
            activation="swiglu",
            normalization="rmsnorm",
            bias=False,
            recipe=recipe,
            device=session.device,
            dtype=torch.bfloat16,
        )
        rotations = _rotations(session)
        return layer, lambda x: layer(x, rotations=rotations)

    return make


def _plain(session: Session) -> tuple[nn.Module, Forward]:
    size = session.sizes.layer
    config = LlamaConfig(
        vocab_size=1,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_layers=1,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        max_positions=size.length,
    )
    layer: nn.Module = DecoderLayer(config)
    for name in ("input_layernorm", "post_attention_layernorm"):  # the model's own compute in FP32, step by step
        setattr(layer, name, nn.RMSNorm(size.hidden, eps=config.rms_norm_eps))
    layer.to(session.device, torch.bfloat16)
    cos, sin = _rotations(session)
    return layer, lambda x: layer(x, cos, sin)


def _torchao(session: Session, recipe: str) -> Callable[[], tuple[nn.Module, Forward]]:
    def make() -> tuple[nn.Module, Forward]:
        if not session.on_gpu or importlib.util.find_spec("torchao") is None:
            raise BackendError("torchao is not installed" if session.on_gpu else "torchao is not rehearsed")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        layer, _ = _plain(session)
        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
        cos, sin = _rotations(session)
        return layer, lambda x: layer(x, cos, sin)

    return make


def _speed_bars() -> Iterator[tuple[Verdict, list[str], Sequence[str]]]:
    """Yield each bar with the variants that may reach it and the variants that they are compared with."""
    ours = {how: [f"{recipe}, {how}" for recipe in RECIPES] for how in PLAIN}
    for own, how, bar in ((BASE, "compiled", SPEED_BAR), (EAGER, "eager", 1.0)):
        yield Verdict(claim=f"TransformerLayer, {how}, × the faster bf16", bar=bar), ours[how], (own, PLAIN[how])
    for recipe in TORCHAO:
        peer = f"torchao {recipe}, compiled"
        yield Verdict(claim=f"TransformerLayer, compiled, × {peer}", bar=1.0), ours["compiled"], (peer,)


def _speed_verdicts(found: Timings) -> list[Verdict]:
    return [judged_by_speed(bar, found, ours, bases) for bar, ours, bases in _speed_bars()]


def _memory_section(
    memory: Mapping[str, Memory], failures: Sequence[Failure] = (), earlier: Sequence[Failure] = ()
) -> Section:
    """Section on memory; ``failures`` are of its measurement, ``earlier`` ones of variants that were not timed."""
    base = memory.get(BASE, Memory(0, 0))
    rows = [
        (
            name,
            gigabytes(step_memory.peak),
            _share(step_memory.peak, base.peak),
            gigabytes(step_memory.kept),
            _share(step_memory.kept, base.kept),
        )
        for name, step_memory in memory.items()
    ]
    peaks = {name: step_memory.peak for name, step_memory in memory.items()}
    ours = [f"{recipe}, compiled" for recipe in RECIPES]
    return Section(
        title="Its memory",
        columns=("layer", "peak", f"× {BASE}", "kept for backward", f"× {BASE}"),
        rows=tuple(rows),
        notes=(PEAKS,),
        verdicts=(judged_by_memory(MEMORY, peaks, ours, BASE, (*earlier, *failures)),),
        failures=tuple(failures),
        raw={name: {"peak": step_memory.peak, "kept": step_memory.kept} for name, step_memory in memory.items()},
    )


def _share(own: int, base: int) -> str:
    return f"{own / base:.2f}" if base else "–"
