"""Which mix is best, from what each choice costs alone.

| budget                | the mix                                                                               |
|-----------------------|---------------------------------------------------------------------------------------|
| perplexity            | fewest bytes within it                                                                |
| bytes                 | least loss within them                                                                |
| both                  | least loss within the bytes says which weights are FP8 codes; then as many of their   |
|                       | products in FP8, instead of ``weight_only``, as the budget of perplexity allows, and  |
|                       | of the mixes that make as many the one of least loss                                  |

Bytes alone never ask for FP8 products: a weight's code is a byte whichever product it enters, and ``weight_only``,
which leaves the input alone, loses less. What FP8 products buy is speed. So tables and layers in BF16
stay what the bytes made them: what is left of the perplexity is not spent on bytes that nobody asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from octavo.quantization.sensitivity.search import Option, cheapest
from octavo.quantization.sensitivity.units import BF16, FP8_PRODUCTS, Unit

__all__ = ["best_mix", "fp8_products_share", "predicted"]

Costs = Mapping[tuple[str, str], float]  # (unit's path, choice) → nats


def best_mix(
    units: Sequence[Unit], costs: Costs, *, nats: float | None = None, byte_limit: int | None = None
) -> dict[str, str] | None:
    """Choices by unit's path; None where no mix is within the budgets.

    Args:
        units: what is chosen for.
        costs: what each choice costs alone; less than 0 counts as 0.
        nats: the most that the costs may add up to.
        byte_limit: the most bytes of the units together, without what nobody chooses for.
    """
    if byte_limit is None:
        return _solved(units, nats, _loss(costs), lambda unit, choice: unit.bytes_as(choice))
    held = _solved(units, byte_limit, lambda unit, choice: unit.bytes_as(choice), _loss(costs))
    if held is None or nats is None:
        return held
    if predicted(costs, held) > nats:
        return None
    return _more_in_fp8([_with_other_products(unit, held[unit.path]) for unit in units], costs, nats) or held


def predicted(costs: Costs, chosen: Mapping[str, str]) -> float:
    """Nats that a mix costs if its parts add up."""
    return sum(max(0.0, costs[path, choice]) for path, choice in chosen.items())


def fp8_products_share(units: Sequence[Unit], chosen: Mapping[str, str]) -> float:
    """The share of a token's multiplications by weights that a mix makes in FP8."""
    in_fp8 = sum(unit.products for unit in units if chosen.get(unit.path, BF16) in FP8_PRODUCTS)
    return in_fp8 / max(1, sum(unit.products for unit in units))


Weighing = Callable[[Unit, str], float]


def _solved(units: Sequence[Unit], limit: float | None, limited: Weighing, cost: Weighing) -> dict[str, str] | None:
    if limit is None:
        limit = sum(max(limited(unit, choice) for choice in unit.choices) for unit in units)
    options = [
        [Option(choice=choice, limited=limited(unit, choice), cost=cost(unit, choice)) for choice in unit.choices]
        for unit in units
    ]
    found = cheapest(options, limit)
    return None if found is None else dict(zip((unit.path for unit in units), found, strict=True))


def _loss(costs: Costs) -> Weighing:
    return lambda unit, choice: max(0.0, costs[unit.path, choice])


def _more_in_fp8(units: Sequence[Unit], costs: Costs, nats: float) -> dict[str, str] | None:
    """The fewest products that are not in FP8, and then the least loss, within the nats.

    Products are whole numbers, and half the share of the nats that a mix takes is less than one of them.
    """
    loss = _loss(costs)

    def cost(unit: Unit, choice: str) -> float:
        others = 0.0 if choice in FP8_PRODUCTS else float(unit.products)
        return others + (0.5 * loss(unit, choice) / nats if nats else 0.0)

    return _solved(units, nats, loss, cost)


def _with_other_products(unit: Unit, held: str) -> Unit:
    """``unit`` as it is held; a layer's codes may enter other products, where they take no more bytes for it."""
    if unit.is_table or held == BF16:
        return replace(unit, choices=(held,))
    most = unit.bytes_as(held)
    return replace(unit, choices=tuple(other for other in unit.choices if unit.bytes_as(other) <= most))
