"""Every recipe on the demo's model: held-out loss, gap to BF16, time of a step, bytes kept for backward.

    python -m benchmarks.recipes [--steps 450] [--threads 1] [--rounds 9] [--out runs/recipes] [--no-write]

All runs of the table share initial weights, batches and everything else but the recipe. The gap is paired over the
held-out windows; its standard error covers the choice of text, not that of the seed (benchmarks/study.py has seeds).
Step times are interleaved. The bytes are those that the linears' forwards keep for their backwards, counted by hooks on
saved tensors, weights included where a recipe keeps codes of them. Finished runs are kept in ``--out``.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import octavo
from benchmarks.measure import hardware, interleaved, markdown_table, publish, ratio
from octavo.experiments.run_measures import Phase
from octavo.experiments.study import run_study
from octavo.models import Llama
from octavo.text.tokens import TokenData, prepare
from octavo.training.comparison import Study
from octavo.training.config import RunConfig, demo_config
from octavo.training.evaluate import token_loss
from octavo.training.precision import apply_recipe, surroundings

BASE = "bf16"
RECIPES = tuple(name for name in octavo.recipes.names() if not octavo.recipes.get(name).has_static_input)

COLUMNS = ("recipe", "held-out nats", "− bf16 (± standard error)", "step time × bf16", "bytes kept × bf16")


def main() -> None:
    """Train, time, count, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own number")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    console, machine = Console(), hardware()
    config = demo_config(quick=False).with_training(steps=arguments.steps, threads=arguments.threads)
    data = prepare(config.data.source, arguments.out / "data", vocab_size=config.data.vocab_size)
    study = run_study(config, arguments.out, data=data, recipes=RECIPES, on_phase=_Printer(console))
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    steps, kept = _steps_and_bytes(config, data)
    seconds = interleaved(steps, rounds=arguments.rounds)
    lines = markdown_table(COLUMNS, (_row(study, recipe, seconds, kept) for recipe in RECIPES))
    lines += ["", f"{arguments.steps} steps, seed {config.training.seed}, {arguments.threads or 'all'} threads."]
    lines += [f"Step times: median of {arguments.rounds} interleaved rounds (quartiles)."]
    lines += ["They are a verdict only where the load average above is near 0; losses and bytes do not depend on it."]
    lines += ["", *(f"- {name}: {fact}" for name, fact in study.facts.items())]
    publish("recipes", lines, title="Every recipe in training", machine=machine, write=not arguments.no_write)


class _Printer:
    """One line a phase."""

    def __init__(self, console: Console) -> None:
        self.console, self.name = console, ""

    def __call__(self, phase: Phase) -> None:
        if phase.name != self.name:
            self.name = phase.name
            self.console.print(phase.name, markup=False)


def _row(study: Study, recipe: str, seconds: Mapping[str, list[float]], kept: Mapping[str, int]) -> list[str]:
    gap = study.gap(recipe, BASE)
    return [
        f"`{recipe}`",
        f"{study.run(recipe).nats:.4f}",
        f"{gap.nats:+.4f} ± {gap.standard_error:.4f}",
        str(ratio(seconds, recipe, BASE)),
        f"{kept[recipe] / kept[BASE]:.2f}",
    ]


def _steps_and_bytes(config: RunConfig, data: TokenData) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Times of a training step with each recipe, and the bytes that its linears keep for backward."""
    training = config.training
    tokens, targets = data.batch(0, batch_size=training.batch_size, context=training.context, seed=training.seed)
    shape = config.model.llama(vocab_size=data.vocab_size, max_positions=training.context)
    steps: dict[str, Callable[[], object]] = {}
    kept: dict[str, int] = {}
    for recipe in RECIPES:
        own = config.with_training(recipe=recipe).training
        model = Llama(shape, seed=0)
        apply_recipe(model, own)
        around = surroundings(own, torch.device("cpu"))

        def step(model: nn.Module = model, around: object = around) -> Tensor:
            with around:  # type: ignore[attr-defined]
                loss = token_loss(model(tokens), targets)
            loss.backward()
            model.zero_grad(set_to_none=True)
            return loss

        steps[recipe] = step
        kept[recipe] = _kept_by_linears(model, around, tokens)
    return steps, kept


def _kept_by_linears(model: nn.Module, around: object, tokens: Tensor) -> int:
    """Bytes that the forwards of the decoder's linears keep and that are no parameter."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, Tensor] = {}  # the tensors themselves, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def watched(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*inputs: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return original(*inputs)

        return forward

    linears = [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "lm_head" not in name]
    for layer in linears:
        layer.forward = watched(layer.forward)  # type: ignore[method-assign]
    with around:  # type: ignore[attr-defined]
        model(tokens)
    for layer in linears:
        del layer.forward
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


if __name__ == "__main__":
    main()
