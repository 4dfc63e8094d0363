"""The knapsack against every combination there is, and what the budgets ask of it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.quantization.sensitivity.knapsack import STEPS, Option, cheapest
from octavo.quantization.sensitivity.mix_selection import best_mix, fp8_products_share, predicted
from octavo.quantization.sensitivity.units import CHOICES, Unit

NUMBERS = st.integers(0, 1000).map(float)
UNIT = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4).map(
    lambda pairs: [Option(choice=str(i), limited=a, cost=b) for i, (a, b) in enumerate(pairs)]
)


def sums(options):
    return math.fsum(one.limited for one in options), math.fsum(one.cost for one in options)


def chosen_options(units, found):
    return [next(o for o in options if o.choice == choice) for options, choice in zip(units, found, strict=True)]


@given(st.lists(UNIT, min_size=1, max_size=4), st.integers(0, 4000))
def test_no_combination_is_better(units, limit):
    """But for what rounding up to whole steps may lose: less than a step a unit."""
    everything = [sums(combination) for combination in itertools.product(*units)]
    found = cheapest(units, limit)
    within = [cost for limited, cost in everything if limited <= limit]
    if found is None:
        assert not within
        return
    limited, cost = sums(chosen_options(units, found))
    assert limited <= limit
    assert cost >= min(within)
    slack = len(units) * limit / STEPS
    assert cost <= min((cost for limited, cost in everything if limited <= limit - slack), default=math.inf)


def test_empty_options_and_negative_limits_are_refused():
    with pytest.raises(ConfigError, match="every unit needs at least one option"):
        cheapest([[]], 1)
    with pytest.raises(ConfigError, match="0 or more"):
        cheapest([[Option(choice="a", limited=-1, cost=0)]], 1)


UNITS = tuple(
    Unit(
        path=f"layers.{i}.{role}",
        paths=(f"layers.{i}.{role}",),
        shape=shape,
        choices=CHOICES,
        products=shape[0] * shape[1],
    )
    for i, (role, shape) in enumerate([("up", (64, 32)), ("down", (32, 64)), ("up", (64, 32)), ("down", (32, 64))])
)
COSTS = {
    (unit.path, choice): cost * factor
    for unit, factor in zip(UNITS, (1.0, 40.0, 2.0, 0.5), strict=True)
    for choice, cost in zip(CHOICES, (0.003, 0.0035, 0.0032, 0.001, 0.0), strict=True)
}


def every_mix():
    for choices in itertools.product(CHOICES, repeat=len(UNITS)):
        yield dict(zip((unit.path for unit in UNITS), choices, strict=True))


def size(mix):
    return sum(unit.bytes_as(mix[unit.path]) for unit in UNITS)


@pytest.mark.parametrize("nats", [0.0, 0.002, 0.004, 0.01, 0.05, 1.0])
def test_the_fewest_bytes_for_a_loss(nats):
    found = best_mix(UNITS, COSTS, nats=nats)
    assert found is not None
    assert predicted(COSTS, found) <= nats
    assert size(found) == min(size(mix) for mix in every_mix() if predicted(COSTS, mix) <= nats)


@pytest.mark.parametrize("share", [0.55, 0.6, 0.75, 0.9, 1.0])
def test_the_least_loss_for_bytes(share):
    limit = int(share * sum(unit.bytes_as("bf16") for unit in UNITS))
    found = best_mix(UNITS, COSTS, byte_limit=limit)
    assert found is not None
    assert size(found) <= limit
    least = min(predicted(COSTS, mix) for mix in every_mix() if size(mix) <= limit)
    assert predicted(COSTS, found) == pytest.approx(least)


def test_both_budgets_spend_what_is_left_on_fp8_products():
    whole = sum(unit.bytes_as("bf16") for unit in UNITS)
    limit, nats = int(0.7 * whole), 0.009
    found = best_mix(UNITS, COSTS, byte_limit=limit, nats=nats)
    least = best_mix(UNITS, COSTS, byte_limit=limit)
    assert found is not None
    assert least is not None
    assert size(found) <= limit
    assert predicted(COSTS, found) <= nats
    assert fp8_products_share(UNITS, least) == 0, "bytes alone never ask for them"
    assert fp8_products_share(UNITS, found) > 0
    assert found["layers.1.down"] in ("weight_only", "bf16"), "the sensitive layer"


@pytest.mark.parametrize("nats", [0.0, 0.01, 0.05, 0.2])
def test_units_of_a_group_have_one_choice(nats):
    """The best of all mixes in which they have; the last unit lacks a choice of the first."""
    first, second, third, last = UNITS
    together = (replace(first, group="a"), second, third, replace(last, group="a", choices=CHOICES[1:]))
    found = best_mix(together, COSTS, nats=nats)
    assert found is not None
    allowed = [mix for mix in every_mix() if mix[first.path] == mix[last.path] != CHOICES[0]]
    assert found in allowed
    assert predicted(COSTS, found) <= nats
    assert size(found) == min(size(mix) for mix in allowed if predicted(COSTS, mix) <= nats)


TABLE = Unit(
    path="embed",
    paths=("embed", "lm_head"),
    shape=(128, 32),
    choices=("weight_only", "weight_only:0.75", "weight_only:0.5", "bf16"),
    is_table=True,
    is_head=True,
    products=128 * 32,
    row_order=torch.arange(128),
)
TABLE_COSTS = {("embed", choice): cost for choice, cost in zip(TABLE.choices, (0.5, 0.02, 0.001, 0.0), strict=True)}


def by_force(units, costs, limit, nats):
    """The table of choosing.py, word by word, over every mix there is."""
    mixes = [
        dict(zip((unit.path for unit in units), choices, strict=True))
        for choices in itertools.product(*(unit.choices for unit in units))
    ]

    def size_of(mix):
        return sum(unit.bytes_as(mix[unit.path]) for unit in units)

    held = min((mix for mix in mixes if size_of(mix) <= limit), key=lambda mix: predicted(costs, mix))
    fixed = {unit.path for unit in units if unit.is_table or held[unit.path] == "bf16"}
    allowed = [
        mix
        for mix in mixes
        if predicted(costs, mix) <= nats
        and all(mix[path] == held[path] for path in fixed)
        and all(unit.bytes_as(mix[unit.path]) <= unit.bytes_as(held[unit.path]) for unit in units)
    ]
    return min(allowed, key=lambda mix: (-fp8_products_share(units, mix), predicted(costs, mix)), default=None)


@pytest.mark.parametrize("share", [0.6, 0.7, 0.85, 1.0])
@pytest.mark.parametrize("nats", [0.03, 0.2, 1.0])
def test_both_budgets_are_what_every_mix_says(share, nats):
    """Perplexity buys FP8 products: not a table's bytes, not those of a layer that may stay in BF16, and no loss for
    nothing.
    """
    units, costs = (*UNITS[:3], TABLE), COSTS | TABLE_COSTS
    limit = int(share * sum(unit.bytes_as("bf16") for unit in units))
    found, expected = best_mix(units, costs, byte_limit=limit, nats=nats), by_force(units, costs, limit, nats)
    if found is None or expected is None:
        assert found is expected
        return
    assert fp8_products_share(units, found) == fp8_products_share(units, expected)
    assert predicted(costs, found) == pytest.approx(predicted(costs, expected))
    assert found["embed"] == expected["embed"]


def test_bytes_that_are_there_are_not_saved_for_perplexity():
    units, costs = (*UNITS, TABLE), COSTS | TABLE_COSTS
    whole = sum(unit.bytes_as("bf16") for unit in units)
    assert best_mix(units, costs, byte_limit=whole, nats=1.0) == dict.fromkeys((u.path for u in units), "bf16")


def test_budgets_that_exclude_each_other():
    whole = sum(unit.bytes_as("bf16") for unit in UNITS)
    assert best_mix(UNITS, COSTS, byte_limit=int(0.55 * whole), nats=0.001) is None
    assert best_mix(UNITS, COSTS, byte_limit=int(0.4 * whole)) is None
