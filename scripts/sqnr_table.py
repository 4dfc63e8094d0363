"""Write docs/sqnr.md: what each recipe loses on four kinds of data, in dB.

    python scripts/sqnr_table.py [--check]

One linear layer, 512 x 1024 x 512, as in the project's accuracy bars; the signal-to-noise ratio of its output and of
both its gradients against float64. Beside it stands what that ratio is blind to: the share of nonzeros flushed to 0.
``--check`` compares with the committed page instead of writing it; the last digit may differ between processors, whose
FP32 sums run in other orders.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import octavo
from octavo.functional import cast_operand, fp8_linear
from octavo.numerics import QuantizedTensor, sqnr_db, underflow_fraction

PAGE = Path(__file__).parents[1] / "docs" / "sqnr.md"
M, K, N = 512, 1024, 512
RECIPES = ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")
TOLERANCE = 0.11  # one in the last printed digit


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


def measured(recipe: str, draw: object) -> tuple[float, float, float]:
    """SQNR of output, grad_input and grad_weight; the weight is Gaussian, input and grad_output are drawn."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (draw(*shape, generator=generator) for shape in ((M, K), (M, N)))  # type: ignore[operator]
    weight = gaussian(N, K, generator=generator)
    x.requires_grad_()
    weight.requires_grad_()
    y = fp8_linear(x, weight, None, octavo.recipes.get(recipe))
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    exact = x.detach().double(), weight.detach().double(), grad.double()
    return (
        sqnr_db(exact[0] @ exact[1].t(), y.detach()),
        sqnr_db(exact[2] @ exact[1], x.grad),
        sqnr_db(exact[2].t() @ exact[0], weight.grad),
    )


def flushed(recipe: str, draw: object) -> tuple[float, float]:
    """Percent of the nonzeros of input and grad_output whose code is 0."""
    generator = torch.Generator().manual_seed(0)
    tensors = [draw(*shape, generator=generator) for shape in ((M, K), (M, N))]  # type: ignore[operator]
    specified = octavo.recipes.get(recipe)
    casts = (specified.output.a, specified.grad_input.a)
    operands = [cast_operand(x, cast) for x, cast in zip(tensors, casts, strict=True)]
    shares = [
        underflow_fraction(x, q) for x, q in zip(tensors, operands, strict=True) if isinstance(q, QuantizedTensor)
    ]
    of_input, of_gradient = shares
    return 100 * of_input, 100 * of_gradient


def table(figures: Callable[[str, object], Iterable[float]]) -> Iterator[str]:
    """A row a recipe, a column a kind of data."""
    yield "| recipe | " + " | ".join(DATA) + " |"
    yield "|---" * (1 + len(DATA)) + "|"
    for recipe in RECIPES:
        cells = [" / ".join(f"{value:.1f}" for value in figures(recipe, draw)) for draw in DATA.values()]
        yield f"| `{recipe}` | " + " | ".join(cells) + " |"


def page() -> str:
    """The page's text."""
    lines = [
        "# What each recipe loses",
        "",
        f"Signal to quantisation noise in dB of a linear layer ({M} x {K} x {N}) against float64:",
        "output / grad_input / grad_weight. The weight is Gaussian; input and grad_output are drawn as the column",
        "says. More is better; 6 dB is one bit. `python scripts/sqnr_table.py` writes this page, the tests check it.",
        "",
        *table(measured),
        "",
        "The ratio hardly tells the recipes apart: FP8 keeps its relative precision over many binades, and the ratio",
        "is blind to what is lost at the small end. That is the share of nonzeros that become 0, in percent,",
        "of the output GEMM's input / grad_input's grad_output:",
        "",
        *table(flushed),
        "",
        *(f"- {name}: {(draw.__doc__ or '').rstrip('.')}." for name, draw in DATA.items()),
        "- `delayed` and `static` give `tensorwise`'s figures when their amax is this tensor's, and lower ones when",
        "  it is not: [delayed scaling](delayed-scaling.md).",
        "- grad_weight of `rowwise_hp_grad_weight` is not cast: what remains is FP32's rounding.",
    ]
    return "\n".join(lines) + "\n"


def differs(one: str, other: str) -> bool:
    """Whether two pages say different things, or figures further apart than the tolerance."""
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
