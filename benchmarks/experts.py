"""Speed of experts in one layer beside a loop over a layer for each: output and gradients of 64 experts, BF16.

    python -m benchmarks.experts [--rounds 9] [--no-write]

The loop calls ``octavo.functional.fp8_linear`` for each expert's rows with a weight of its own, and concatenates. (A
loop over slices of one weight of three dimensions, as transformers' eager experts are, takes several times longer:
autograd writes a gradient of all experts for each.) Both compute the same bits; that is checked before it is timed.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import hardware, interleaved, markdown_table, publish, ratio, verdict
from octavo import recipes
from octavo.functional import fp8_grouped_linear, fp8_linear
from octavo.recipes import Recipe

EXPERTS, WIDTH = 64, 256
BARS = {8: 2.0, 1024: 1.0}  # rows of each expert: how many times the loop's speed
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")


def variants(rows: int, recipe: Recipe) -> dict[str, Callable[[], list[Tensor]]]:
    """The loop and the layer, each returning output and gradients."""
    torch.manual_seed(0)
    x = torch.randn(EXPERTS * rows, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    alone = [each.clone().requires_grad_() for each in weight.detach()]
    grad, offsets = torch.randn(len(x), WIDTH, dtype=torch.bfloat16), torch.arange(EXPERTS + 1) * rows

    def together() -> list[Tensor]:
        y = fp8_grouped_linear(x, weight, None, offsets, recipe)
        return [y, *torch.autograd.grad(y, (x, weight), grad)]

    def loop() -> list[Tensor]:
        parts = zip(x.split(rows), alone, strict=True)
        y = torch.cat([fp8_linear(part, own, None, recipe) for part, own in parts])
        grad_x, *grads = torch.autograd.grad(y, (x, *alone), grad)
        return [y, grad_x, torch.stack(grads)]

    for one, other in zip(together(), loop(), strict=True):
        assert torch.equal(one, other), recipe.name
    return {"loop": loop, "one layer": together}


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    machine, rows_of_table = hardware(), []
    for rows, bar in BARS.items():
        for name in RECIPES:
            seconds = interleaved(variants(rows, recipes.get(name)), rounds=arguments.rounds)
            speed = ratio(seconds, "loop", "one layer")
            reached = speed.median >= bar
            rows_of_table.append([f"{rows}", name, f"{speed}", f"{bar:.1f}", verdict(reached)])
    header = ["rows an expert", "recipe", "times the loop's speed", "bar", "verdict"]
    title = f"{EXPERTS} experts of {WIDTH} x {WIDTH} in one layer beside a loop"
    publish(
        "experts", markdown_table(header, rows_of_table), title=title, machine=machine, write=not arguments.no_write
    )


if __name__ == "__main__":
    main()
