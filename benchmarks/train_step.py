"""Time of a training step: octavo's recipes against FP32, BF16 autocast and torchao's emulation.

    python -m benchmarks.train_step [--width 1024] [--as-served] [--rounds 15] [--no-write]

The model is the demo's, or two layers of another width. ``--as-served`` times training with engines' forward passes
instead, each beside the recipe whose gradients it has.

A step is forward, loss and backward of one batch; the optimizer, which is the same for all, is left out. "around" names
the precision around the FP8 linears. torchao runs its tensorwise recipe with ``emulate=True``, eager and compiled,
without the head, as octavo does. The first steps, which compile, are not timed.

Bars apply to the median of the rounds. An eager tensorwise step takes at most 1.25 times as long as a BF16 autocast
step on the demo's model, and 1.15 times at width 1024, both against torch's own and against octavo's, which widens
operands and is faster on a CPU without BF16 instructions. It is faster than torchao's eager emulation, and takes at
most half as long as its compiled one.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.measure import bf16_note, hardware, interleaved, markdown_table, publish, ratio, verdict
from benchmarks.trained_as_served import ENGINES
from octavo.models import Llama
from octavo.training.config import Precision, RunConfig, TrainingConfig, demo_config
from octavo.training.evaluate import token_loss
from octavo.training.precision import apply_recipe, surroundings

TORCH_BF16, OCTAVO_BF16, FP32 = BASES = ("bf16 autocast (torch)", "bf16 autocast (octavo)", "fp32")
BF16_BARS = {128: 1.25, 1024: 1.15}  # by the model's width
TORCHAO_BARS = {"eager": 1.0, "compiled": 0.5}
PRECISIONS = (Precision.BF16, Precision.FP32)


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, choices=BF16_BARS, default=128, help="128 is the demo's model")
    parser.add_argument("--as-served", action="store_true", help="time training with engines' forward passes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    config = config_of(arguments.width)
    if arguments.as_served:
        seconds = interleaved(served_contestants(config), rounds=arguments.rounds, warmup=1)
        lines = markdown_table(["trained as served by", "gradients", "× the recipe's own step"], served_rows(seconds))
    else:
        seconds = interleaved(contestants(config), rounds=arguments.rounds, warmup=2)
        rows = [[name, *(str(ratio(seconds, name, base)) for base in BASES)] for name in seconds]
        bars = markdown_table(["bar", "measured", "verdict"], bar_rows(seconds, arguments.width))
        lines = [*markdown_table(["step", *(f"× {base}" for base in BASES)], rows), "", *bars]
    wide = "" if arguments.width == 128 else str(arguments.width)
    what = f"{config.training.tokens_per_step} tokens; {config.model}"
    lines += ["", f"Median of {arguments.rounds} interleaved rounds (quartiles); {what}. {bf16_note()}"]
    publish(
        "train_step",
        lines,
        title="A training step",
        machine=machine,
        write=not arguments.no_write,
        variant="_".join(filter(None, [wide, "as_served" if arguments.as_served else ""])),
    )


def config_of(width: int) -> RunConfig:
    """The demo's configuration, or two layers of another width."""
    config = demo_config(quick=False)
    if width == config.model.hidden_size:
        return config
    heads = width // 64
    model = replace(
        config.model,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads // 2,
    )
    return replace(config, model=model)


def bar_rows(seconds: Mapping[str, list[float]], width: int) -> Iterator[list[str]]:
    """Yield a row for each bar: the bar, the measured ratio, and "met" or "missed"."""
    for precision in PRECISIONS:
        own, theirs = f"octavo tensorwise, {precision} around", f"torchao tensorwise {{}}, {precision} around"
        for base in (TORCH_BF16, OCTAVO_BF16):
            yield _bar_row(own, base, BF16_BARS[width], seconds)
        compiled = f"octavo tensorwise compiled, {precision} around"
        for ours, mode in ((own, "eager"), (own, "compiled"), (compiled, "compiled")):
            yield _bar_row(ours, theirs.format(mode), TORCHAO_BARS[mode], seconds)


def _bar_row(name: str, base: str, bar: float, seconds: Mapping[str, list[float]]) -> list[str]:
    measured = ratio(seconds, name, base)
    return [f"{name}: at most {bar} × {base}", str(measured), verdict(measured.median <= bar, base)]


Step = Callable[[], Tensor]


def step_maker(config: RunConfig) -> tuple[Llama, Callable[[nn.Module, TrainingConfig], Step]]:
    """The model in FP32, and what makes a step on one batch of a converted copy."""
    shape = config.model.llama(vocab_size=config.data.vocab_size, max_positions=config.training.context)
    generator = torch.Generator().manual_seed(0)
    size = (config.training.batch_size, config.training.context)
    tokens, targets = (torch.randint(shape.vocab_size, size, generator=generator) for _ in range(2))

    def step_of(model: nn.Module, around: TrainingConfig) -> Step:
        context = surroundings(around, torch.device("cpu"), model)

        def step() -> Tensor:
            with context:
                loss = token_loss(model(tokens), targets)
            for parameter in model.parameters():
                parameter.grad = None
            loss.backward()
            return loss

        return step

    return Llama(shape, seed=0), step_of


def contestants(config: RunConfig) -> dict[str, Step]:
    """Name and step of each."""
    base, step_of = step_maker(config)

    def of(recipe: str, precision: Precision) -> TrainingConfig:
        training: TrainingConfig = config.with_training(recipe=recipe, precision=precision).training
        return training

    steps = {FP32: step_of(base, of("fp32", Precision.FP32))}
    steps[TORCH_BF16] = step_of(copy.deepcopy(base), of("bf16", Precision.BF16))
    steps[OCTAVO_BF16] = step_of(_converted(base, of("bf16", Precision.BF16)), of("bf16", Precision.BF16))
    for recipe in ("tensorwise", "rowwise", "delayed"):
        for precision in PRECISIONS:
            around = of(recipe, precision)
            steps[f"octavo {recipe}, {precision} around"] = step_of(_converted(base, around), around)
    for precision in PRECISIONS:
        around = of("tensorwise", precision)
        own = _converted(base, around)
        own.compile(fullgraph=True)
        steps[f"octavo tensorwise compiled, {precision} around"] = step_of(own, around)
        steps[f"torchao tensorwise eager, {precision} around"] = step_of(_torchao(base), around)
        compiled = _torchao(base)
        compiled.compile()
        steps[f"torchao tensorwise compiled, {precision} around"] = step_of(compiled, around)
    return steps


def served_contestants(config: RunConfig) -> dict[str, Step]:
    """A step as each engine serves, by its name, and of each recipe of their gradients, by the recipe's."""
    base, step_of = step_maker(config)
    settings = {recipe: {"recipe": recipe, "precision": Precision.BF16} for recipe in ENGINES.values()}
    settings |= {engine: {"recipe": recipe, "as_served_by": engine} for engine, recipe in ENGINES.items()}
    trainings = {name: config.with_training(**setting).training for name, setting in settings.items()}
    return {name: step_of(_converted(base, around), around) for name, around in trainings.items()}


def served_rows(seconds: Mapping[str, list[float]]) -> Iterator[list[str]]:
    """Yield engine, recipe and the ratio of their steps."""
    for engine, recipe in ENGINES.items():
        yield [engine, recipe, str(ratio(seconds, engine, recipe))]


def _converted(base: nn.Module, training: TrainingConfig) -> nn.Module:
    model = copy.deepcopy(base)
    apply_recipe(model, training)
    return model


def _torchao(base: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = copy.deepcopy(base)
    converted: nn.Module = convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, path: "lm_head" not in path
    )
    return converted


if __name__ == "__main__":
    main()
