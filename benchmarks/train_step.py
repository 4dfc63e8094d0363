"""A training step on the demo's model: octavo's recipes beside FP32, BF16 autocast and torchao's emulation.

    python -m benchmarks.train_step [--rounds 15] [--no-write]

A step is forward, loss and backward of one batch; the optimizer is the same for all and left out. "around" says what
surrounds the FP8 linears. torchao runs its tensorwise recipe with ``emulate=True``, eager and compiled, head left out
as octavo leaves it. The first steps, which compile, are not timed.

Two bars are judged, by the median of the rounds: an eager tensorwise step takes at most 2.5 times a BF16 autocast step,
torch's own and octavo's widened one, which is the faster on a CPU without BF16 instructions; and it is ahead of
torchao's emulation, eager and compiled.
"""

import argparse
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.measure import Ratio, hardware, interleaved, ratio, write_result
from octavo.models import Llama
from octavo.training.config import Precision, TrainingConfig, demo_config
from octavo.training.evaluate import token_loss
from octavo.training.precision import apply_recipe, surroundings

TORCH_BF16, OCTAVO_BF16, FP32 = BASES = ("bf16 autocast (torch)", "bf16 autocast (octavo)", "fp32")
BF16_BAR = 2.5


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    seconds = interleaved(contestants(), rounds=arguments.rounds, warmup=2)
    rows = [[name, *(str(ratio(seconds, name, base)) for base in BASES)] for name in seconds]
    header = ["step", *(f"× {base}" for base in BASES)]
    lines = [*_table(header, rows), "", *_table(["bar", "measured", "verdict"], bar_rows(seconds))]
    config = demo_config(quick=False)
    what = f"{config.training.tokens_per_step} tokens; {config.model}"
    lines += ["", f"Median of {arguments.rounds} interleaved rounds (quartiles); {what}."]
    console = Console()
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if not arguments.no_write:
        command = f"python -m benchmarks.train_step --rounds {arguments.rounds}"
        path = write_result("train_step", lines, title="A training step", command=command, machine=machine)
        console.print(f"written to {path}", markup=False)


def bar_rows(seconds: Mapping[str, list[float]]) -> Iterator[list[str]]:
    """A row for each bar: what it asks, the measured ratio, and "met" or "missed"."""
    for precision in Precision:
        own, theirs = f"octavo tensorwise, {precision} around", f"torchao tensorwise {{}}, {precision} around"
        for base in (TORCH_BF16, OCTAVO_BF16):
            found = ratio(seconds, own, base)
            yield _bar_row(f"{own}: at most {BF16_BAR} × {base}", found, is_met=found.median <= BF16_BAR)
        compiled = f"octavo tensorwise compiled, {precision} around"
        for ours, mode in ((own, "eager"), (own, "compiled"), (compiled, "compiled")):
            found = ratio(seconds, ours, theirs.format(mode))
            yield _bar_row(f"{ours}: ahead of {theirs.format(mode)}", found, is_met=found.median < 1)


def _bar_row(asked: str, found: Ratio, *, is_met: bool) -> list[str]:
    return [asked, str(found), "met" if is_met else "missed"]


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def contestants() -> dict[str, Callable[[], Tensor]]:
    """Name and step of each."""
    config = demo_config(quick=False)
    shape = config.model.llama(vocab_size=config.data.vocab_size, max_positions=config.training.context)
    base, training = Llama(shape, seed=0), config.training
    generator = torch.Generator().manual_seed(0)
    size = (training.batch_size, training.context)
    tokens, targets = (torch.randint(shape.vocab_size, size, generator=generator) for _ in range(2))

    def step_of(model: nn.Module, around: TrainingConfig) -> Callable[[], Tensor]:
        context = surroundings(around, torch.device("cpu"))

        def step() -> Tensor:
            with context:
                loss = token_loss(model(tokens), targets)
            for parameter in model.parameters():
                parameter.grad = None
            loss.backward()
            return loss

        return step

    def of(recipe: str, precision: Precision) -> TrainingConfig:
        training: TrainingConfig = config.with_training(recipe=recipe, precision=precision).training
        return training

    steps = {FP32: step_of(base, of("fp32", Precision.FP32))}
    steps[TORCH_BF16] = step_of(copy.deepcopy(base), of("bf16", Precision.BF16))
    steps[OCTAVO_BF16] = step_of(_converted(base, of("bf16", Precision.BF16)), of("bf16", Precision.BF16))
    for recipe in ("tensorwise", "rowwise", "delayed"):
        for precision in (Precision.BF16, Precision.FP32):
            around = of(recipe, precision)
            steps[f"octavo {recipe}, {precision} around"] = step_of(_converted(base, around), around)
    for precision in (Precision.BF16, Precision.FP32):
        around = of("tensorwise", precision)
        own = _converted(base, around)
        own.compile(fullgraph=True)
        steps[f"octavo tensorwise compiled, {precision} around"] = step_of(own, around)
        steps[f"torchao tensorwise eager, {precision} around"] = step_of(_torchao(base), around)
        compiled = _torchao(base)
        compiled.compile()
        steps[f"torchao tensorwise compiled, {precision} around"] = step_of(compiled, around)
    return steps


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
