"""Summary of a sensitivity study as sentences, rows and plain data."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.quantization.sensitivity.ablation import Increase
from octavo.quantization.sensitivity.study import Budget, MixResult, Sensitivity
from octavo.quantization.sensitivity.units import BF16, CHOICES, WEIGHT_ONLY, Unit, recipe_of

__all__ = ["asked", "cost_of", "headline", "how_ranked", "name_of", "notes", "record", "worst_first"]

FORMAT = "octavo sensitivity"


def asked(budget: Budget) -> str:
    """Describe a budget.

    Example:
        >>> asked(Budget(perplexity=0.01, bytes_share=0.6))
        'perplexity at most 1 % above BF16 and at most 0.6 of its bytes'
    """
    parts = []
    if budget.perplexity is not None:
        parts.append(f"perplexity at most {100 * budget.perplexity:g} % above BF16")
    if budget.bytes_share is not None:
        parts.append(f"at most {budget.bytes_share:g} of its bytes")
    return " and ".join(parts)


def headline(result: Sensitivity) -> str:
    """Summarise the result in one sentence."""
    best = result.best
    if best is None or best.verified is None:
        return f"No mix was found with {asked(result.budget)}"
    met = "" if result.is_met else ", which is more than was asked for"
    return (
        f"A mix of {best.bytes_share:.3f} of BF16's bytes, {best.verified.perplexity_increase:+.2%} in perplexity on "
        f"text it was not chosen on{met}"
    )


def notes(result: Sensitivity) -> Iterator[str]:
    """Yield sentences about the mix, its verification and the ranking."""
    best = result.best
    if best is not None and best.verified is not None:
        counts = Counter(recipe_of(choice) for choice in best.chosen.values())
        counts_text = ", ".join(f"{counts[choice]} {choice}" for choice in CHOICES if counts[choice])
        yield f"The mix: {counts_text}; {best.fp8_products:.0%} of the multiplications by weights in FP8."
        for unit in result.units:
            if unit.is_table and recipe_of(choice := best.chosen[unit.path]) == WEIGHT_ONLY:
                yield f"Of the {unit.shape[0]:,} rows of {unit.path} {unit.rows_in_bf16(choice):,} stay in BF16."
        yield (
            f"Loss {best.verified.nats:+.4f} ± {best.verified.error:.4f} nats over BF16's {result.bf16_nats:.4f}, on "
            f"{best.verified.windows} windows it was not chosen on; divergence {best.verified.divergence:.4f} nats."
        )
    elif result.attempts:
        near = min(result.attempts, key=lambda attempt: attempt[1].nats)[1]
        yield f"The nearest mix costs {near.nats:+.4f} ± {near.error:.4f} nats; allow more bytes or more perplexity."
    else:
        yield "The smallest mix has more bytes than that; allow more."
    if unreached := [unit.path for unit in result.units if (unit.path, unit.choices[0]) not in result.estimates]:
        others = f" and {len(unreached) - 1} more layers of experts" if len(unreached) > 1 else ""
        yield (
            f"No token reached {unreached[0]}{others}; each counts as the "
            "costliest of the same layers in the other experts. More windows (--windows) may reach them."
        )
    yield how_ranked(result)


def how_ranked(result: Sensitivity) -> str:
    """Describe the reliability of the ranking of layers."""
    if not result.measured:
        return "Layers are ranked by an estimate from gradients; none was run by itself."
    pairs, floor = result.agreement.pairs, result.floor.divergence
    ranked = (
        "too few for a rank correlation"
        if math.isnan(result.agreement.rank_correlation)
        else f"over this widest range their rank correlation is {result.agreement.rank_correlation:.2f}"
    )
    return (
        f"Layers are ranked by an estimate from gradients. {len(result.measured)} of {_pairs(result)} (layer, choice) "
        f"were run too, the costliest and others spread through the ranking: {pairs} of them cost more than the "
        f"{floor:.1e} nats by which a BF16 computation diverges from itself in another order; {ranked}."
    )


def _pairs(result: Sensitivity) -> int:
    return sum(choice != BF16 for _, choice in result.estimates)


def cost_of(result: Sensitivity, unit: Unit, choice: str) -> float | None:
    """Cost of a choice in nats per token, as used by the search; None if the unit does not have it."""
    return None if choice == BF16 else result.costs.get((unit.path, choice))


def worst_first(result: Sensitivity) -> list[Unit]:
    """Units by the cost of their costliest choice, descending."""
    return sorted(result.units, key=lambda unit: -max(cost_of(result, unit, choice) or 0.0 for choice in unit.choices))


def name_of(mix: MixResult) -> str:
    """Name of a mix in tables.

    Example:
        >>> one = MixResult(name="front", chosen={}, bytes=1, bytes_share=0.5, fp8_products=0.0, predicted=0.0)
        >>> name_of(one)
        'least loss for its bytes'
    """
    return {"front": "least loss for its bytes", "budget": "the mix"}.get(mix.name, f"{mix.name} in every block")


def record(result: Sensitivity, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as JSON-compatible data, the facts (model, text) first."""
    best = None if result.best is None else result.best.chosen
    return {
        "format": FORMAT,
        **facts,
        "budget": {"perplexity": result.budget.perplexity, "bytes_share": result.budget.bytes_share},
        "is_met": result.is_met,
        "bf16_bytes": result.bf16_bytes,
        "bf16_nats": result.bf16_nats,
        "floor": _increase(result.floor),
        "rank_correlation": None
        if math.isnan(result.agreement.rank_correlation)
        else result.agreement.rank_correlation,
        "ranked_pairs": result.agreement.pairs,
        "best": None if result.best is None else _mix(result.best),
        "attempts": [{"predicted": predicted, **_increase(increase)} for predicted, increase in result.attempts],
        "front": _mixes(result.front),
        "presets": _mixes(result.presets),
        "layers": [_layer(result, unit, best) for unit in worst_first(result)],
    }


def _layer(result: Sensitivity, unit: Unit, best: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "path": unit.path,
        "shared_by": list(unit.paths[1:]),
        "role": unit.role,
        "depth": unit.depth,
        "shape": list(unit.shape),
        "chosen": None if best is None else best[unit.path],
        "choices": {
            choice: {
                "bytes": unit.bytes_as(choice),
                "estimated_nats": result.estimates.get((unit.path, choice)),
                "counted_nats": result.costs[unit.path, choice],
                **_increase(result.measured.get((unit.path, choice))),
            }
            for choice in unit.choices
        },
    }


def _mixes(mixes: Sequence[MixResult]) -> list[dict[str, Any]]:
    return [_mix(mix) for mix in mixes]


def _mix(mix: MixResult) -> dict[str, Any]:
    return {
        "name": mix.name,
        "bytes": mix.bytes,
        "bytes_share": mix.bytes_share,
        "fp8_products": mix.fp8_products,
        "predicted_nats": mix.predicted,
        "on_chosen": _increase(mix.on_chosen),
        "verified": _increase(mix.verified),
    }


def _increase(increase: Increase | None) -> dict[str, Any]:
    if increase is None:
        return {}
    error = None if math.isinf(increase.error) else increase.error
    return {"nats": increase.nats, "error": error, "divergence": increase.divergence, "windows": increase.windows}
