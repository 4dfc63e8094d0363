"""Write docs/sqnr.md: the loss of each recipe on four kinds of data, in dB.

    python scripts/sqnr_table.py [--check]

One linear layer, 512 x 1024 x 512, as in the project's accuracy bars; the signal-to-noise ratio of its output and of
both its gradients against float64. Beside it stands what that ratio is blind to: the share of nonzeros flushed to 0.
``--check`` compares with the committed page instead of writing it; the last digit may differ between processors, whose
FP32 sums run in other orders.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import octavo
from octavo.functional import cast_operand
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor, amax, scale_from_amax, sqnr_db, underflow_fraction
from octavo.recipes import CastSpec
from octavo.scaling import GRAD_OUTPUT, INPUT, OperandScaling

PAGE = Path(__file__).parents[1] / "docs" / "sqnr.md"
M, K, N = 512, 1024, 512
RECIPES = tuple(name for name in octavo.recipes.names() if name != "bf16")
TOLERANCE = 0.11  # one in the last printed digit
ROUNDING = 120.0  # dB; results without a cast exceed it: they differ only by the order of FP32 sums


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    """Normal(0, 1)."""
    return torch.randn(*shape, generator=generator)


def laplace(*shape: int, generator: torch.Generator) -> Tensor:
    """Laplace(0, 1): a uniform number through the inverse distribution function."""
    uniform = torch.rand(*shape, generator=generator) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs())


def log_normal(*shape: int, generator: torch.Generator) -> Tensor:
    """exp(2 · Normal) with a random sign: a heavy tail, as gradients may have."""
    return (2 * gaussian(*shape, generator=generator)).exp() * gaussian(*shape, generator=generator).sign()


def outlier_channels(*shape: int, generator: torch.Generator) -> Tensor:
    """Normal(0, 1), one channel in 128 a hundred times as large."""
    x = gaussian(*shape, generator=generator)
    x[:, ::128] *= 100
    return x


DATA = {"Gaussian": gaussian, "Laplace": laplace, "log-normal": log_normal, "outlier channels": outlier_channels}


Draw = Callable[..., Tensor]


def drawn(draw: Draw, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An input and a grad_output."""
    return draw(M, K, generator=generator), draw(M, N, generator=generator)


def layer_with_a_past(recipe: str, draw: Draw, weight: Tensor) -> Linear:
    """A layer whose delayed or static scales come from other data of the same kind, seen once."""
    layer = Linear(K, N, bias=False, recipe=recipe, manual_scale_updates=True)
    layer.weight.data = weight
    x, grad = drawn(draw, torch.Generator().manual_seed(1))
    if layer.recipe.has_static_input:
        octavo.load_scaling_state(layer, {"input.scale": scale_from_amax(amax(x), octavo.E4M3)})
    elif layer.recipe.is_delayed:
        layer(x.requires_grad_()).backward(grad)
        octavo.update_scales(layer)
        layer.zero_grad()
    return layer


def measured(recipe: str, draw: Draw) -> tuple[float, float, float]:
    """SQNR of output, grad_input and grad_weight; the weight is Gaussian, input and grad_output are drawn."""
    generator = torch.Generator().manual_seed(0)
    x, grad = drawn(draw, generator)
    weight = gaussian(N, K, generator=generator)
    layer = layer_with_a_past(recipe, draw, weight)
    y = layer(x.requires_grad_())
    y.backward(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    exact = x.detach().double(), weight.double(), grad.double()
    return (
        sqnr_db(exact[0] @ exact[1].t(), y.detach()),
        sqnr_db(exact[2] @ exact[1], x.grad),
        sqnr_db(exact[2].t() @ exact[0], layer.weight.grad),
    )


def flushed(recipe: str, draw: Draw) -> tuple[float, float]:
    """Percent of the nonzeros of input and grad_output whose code is 0; NaN where they are not cast."""
    layer = layer_with_a_past(recipe, draw, torch.ones(N, K))
    known = None if layer.amax_history is None else layer.amax_history.amax
    of_input, of_gradient = (
        share_flushed(x, cast, OperandScaling(amax=None if known is None else known[role], scale=layer.input_scale))
        for role, x, cast in zip(
            (INPUT, GRAD_OUTPUT),
            drawn(draw, torch.Generator().manual_seed(0)),
            (layer.recipe.output.a, layer.recipe.grad_input.a),
            strict=True,
        )
    )
    return of_input, of_gradient


def share_flushed(x: Tensor, cast: CastSpec | None, tap: OperandScaling) -> float:
    """Percent of ``x``'s nonzeros whose code is 0."""
    operand = cast_operand(x, cast, tap)
    return 100 * underflow_fraction(x, operand) if isinstance(operand, QuantizedTensor) else math.nan


def table(figures: Callable[[str, Draw], Iterable[float]]) -> Iterator[str]:
    """A row a recipe, a column a kind of data."""
    yield "| recipe | " + " | ".join(DATA) + " |"
    yield "|---" * (1 + len(DATA)) + "|"
    for recipe in RECIPES:
        cells = [
            " / ".join(
                "–" if math.isnan(value) or value > ROUNDING else f"{value:.1f}" for value in figures(recipe, draw)
            )
            for draw in DATA.values()
        ]
        yield f"| `{recipe}` | " + " | ".join(cells) + " |"


def page() -> str:
    """The page's text."""
    lines = [
        "# What each recipe loses",
        "",
        f"Signal to quantization noise in dB of a linear layer ({M} x {K} x {N}) against float64:",
        "output / grad_input / grad_weight. The weight is Gaussian; input and grad_output are drawn as the column",
        "says. More is better; 6 dB is one bit. `python scripts/sqnr_table.py` writes this page, the tests check it.",
        "",
        *table(measured),
        "",
        "The ratio hardly tells fresh scales apart: FP8 keeps its relative precision over many binades, and the ratio",
        "is blind to what is lost at the small end. That is the share of nonzeros that become 0, in percent,",
        "of the output GEMM's input / grad_input's grad_output:",
        "",
        *table(flushed),
        "",
        *(f"- {name}: {(draw.__doc__ or '').rstrip('.')}." for name, draw in DATA.items()),
        "- `delayed` and `delayed_te` have closed one step on other data of the same kind, and `static`'s input scale",
        "  is the largest magnitude of other data of the same kind over E4M3's maximum. What is larger now saturates:",
        "  heavy tails lose most. After one step both delayed recipes know the same; their windows and updates are in",
        "  [delayed scaling](concepts/delayed-scaling.md).",
        "- grad_weight of `rowwise_hp_grad_weight` and both gradients of `static` and `weight_only` are not cast (–),",
        "  nor is `weight_only`'s input: what remains is FP32's rounding, beyond 120 dB.",
    ]
    return "\n".join(lines) + "\n"


def differs(one: str, other: str) -> bool:
    """Return True if two pages differ in text, or in figures by more than the tolerance."""
    number = re.compile(r"-?\d+\.\d+")
    if number.sub("#", one) != number.sub("#", other):
        return True
    pairs = zip(number.findall(one), number.findall(other), strict=True)
    return any(abs(float(a) - float(b)) > TOLERANCE for a, b in pairs)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    stale = differs(PAGE.read_text(encoding="utf-8"), text)
    if stale:
        sys.stderr.write("docs/sqnr.md is stale; run python scripts/sqnr_table.py\n")
    return int(stale)


if __name__ == "__main__":
    raise SystemExit(main())
