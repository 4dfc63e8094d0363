"""Selection of the best mix from the costs of single choices.

| budget                | the mix                                                                               |
|-----------------------|---------------------------------------------------------------------------------------|
| perplexity            | fewest bytes within the budget                                                        |
| bytes                 | least loss within the budget                                                          |
| both                  | least loss within the bytes decides which weights are FP8 codes; then as many FP8     |
|                       | GEMMs in place of ``weight_only`` as the perplexity allows; of equal mixes, the one   |
|                       | with the least loss                                                                   |

Units of one group have one choice, whose bytes and losses add up.

A budget of bytes never selects FP8 GEMMs: a code takes one byte in either case, and ``weight_only``, which does not
cast the input, loses less. FP8 GEMMs only gain speed. With both budgets, tables and BF16 layers keep the precision that
the bytes require: the remaining perplexity is not spent on saving more bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from octavo.quantization.sensitivity.knapsack import Option, cheapest
from octavo.quantization.sensitivity.units import BF16, FP8_PRODUCTS, Unit

__all__ = ["best_mix", "fp8_products_share", "predicted"]

Costs = Mapping[tuple[str, str], float]  # (unit's path, choice) → nats


def best_mix(
    units: Sequence[Unit], costs: Costs, *, nats: float | None = None, byte_limit: int | None = None
) -> dict[str, str] | None:
    """Select choices by unit path; None if no mix is within the budgets.

    Args:
        units: the units.
        costs: cost of each choice alone; negative values count as 0.
        nats: maximum sum of the costs.
        byte_limit: maximum bytes of the units, excluding other parameters.
    """
    if byte_limit is None:
        return _solved(units, nats, _loss(costs), lambda unit, choice: unit.bytes_as(choice))
    smallest_loss = _solved(units, byte_limit, lambda unit, choice: unit.bytes_as(choice), _loss(costs))
    if smallest_loss is None or nats is None:
        return smallest_loss
    if predicted(costs, smallest_loss) > nats:
        return None
    return (
        _more_in_fp8([_restrict_choices(unit, smallest_loss[unit.path]) for unit in units], costs, nats)
        or smallest_loss
    )


def predicted(costs: Costs, chosen: Mapping[str, str]) -> float:
    """Cost of a mix in nats, as the sum of its choices."""
    return sum(max(0.0, costs[path, choice]) for path, choice in chosen.items())


def fp8_products_share(units: Sequence[Unit], chosen: Mapping[str, str]) -> float:
    """Share of the multiplications by weights that run in FP8."""
    in_fp8 = sum(unit.products for unit in units if chosen.get(unit.path, BF16) in FP8_PRODUCTS)
    return in_fp8 / max(1, sum(unit.products for unit in units))


Weighing = Callable[[Unit, str], float]


def _solved(units: Sequence[Unit], limit: float | None, limited: Weighing, cost: Weighing) -> dict[str, str] | None:
    if limit is None:
        limit = sum(max(limited(unit, choice) for choice in unit.choices) for unit in units)
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).append(unit)
    options = [
        [
            Option(choice=choice, limited=_sum(limited, members, choice), cost=_sum(cost, members, choice))
            for choice in members[0].choices
            if all(choice in unit.choices for unit in members)
        ]
        for members in groups.values()
    ]
    choices = cheapest(options, limit)
    if choices is None:
        return None
    return {unit.path: choice for members, choice in zip(groups.values(), choices, strict=True) for unit in members}


def _sum(weighing: Weighing, units: Sequence[Unit], choice: str) -> float:
    return sum(weighing(unit, choice) for unit in units)


def _loss(costs: Costs) -> Weighing:
    return lambda unit, choice: max(0.0, costs[unit.path, choice])


def _more_in_fp8(units: Sequence[Unit], costs: Costs, nats: float) -> dict[str, str] | None:
    """Minimise first the products that are not in FP8, then the loss, within ``nats``.

    Products are integers, and half the used share of ``nats`` is less than one, so it only breaks ties.
    """
    loss = _loss(costs)

    def cost(unit: Unit, choice: str) -> float:
        others = 0.0 if choice in FP8_PRODUCTS else float(unit.products)
        return others + (0.5 * loss(unit, choice) / nats if nats else 0.0)

    return _solved(units, nats, loss, cost)


def _restrict_choices(unit: Unit, chosen: str) -> Unit:
    """Restrict ``unit`` to its choice, or for a layer in codes to all choices that take no more bytes."""
    if unit.is_table or chosen == BF16:
        return replace(unit, choices=(chosen,))
    most = unit.bytes_as(chosen)
    return replace(unit, choices=tuple(other for other in unit.choices if unit.bytes_as(other) <= most))
