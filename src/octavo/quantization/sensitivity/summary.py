"""What a sensitivity study found, in sentences, in rows and as plain data: for the terminal, the page and the file."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.quantization.sensitivity.study import Budget, Found, Sensitivity
from octavo.quantization.sensitivity.truth import Increase
from octavo.quantization.sensitivity.units import BF16, CHOICES, WEIGHT_ONLY, Unit, recipe_of

__all__ = ["asked", "cost_of", "headline", "how_ranked", "name_of", "notes", "record", "worst_first"]

FORMAT = "octavo sensitivity"


def asked(budget: Budget) -> str:
    """The budget in words.

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


def headline(found: Sensitivity) -> str:
    """What came out, in one sentence."""
    best = found.best
    if best is None or best.verified is None:
        return f"No mix was found with {asked(found.budget)}"
    met = "" if found.is_met else ", which is more than was asked for"
    return (
        f"A mix of {best.bytes_share:.3f} of BF16's bytes, {best.verified.perplexity_increase:+.2%} in perplexity on "
        f"text it was not chosen on{met}"
    )


def notes(found: Sensitivity) -> Iterator[str]:
    """What the figures hang on, a sentence each."""
    best = found.best
    if best is not None and best.verified is not None:
        counts = Counter(recipe_of(choice) for choice in best.chosen.values())
        held = ", ".join(f"{counts[choice]} {choice}" for choice in CHOICES if counts[choice])
        yield f"The mix: {held}; {best.fp8_products:.0%} of the multiplications by weights in FP8."
        for unit in found.units:
            if unit.is_table and recipe_of(choice := best.chosen[unit.path]) == WEIGHT_ONLY:
                yield f"Of the {unit.shape[0]:,} rows of {unit.path} {unit.rows_in_bf16(choice):,} stay in BF16."
        yield (
            f"Loss {best.verified.nats:+.4f} ± {best.verified.error:.4f} nats over BF16's {found.bf16_nats:.4f}, on "
            f"{best.verified.windows} windows it was not chosen on; divergence {best.verified.divergence:.4f} nats."
        )
    elif found.attempts:
        least = min(found.attempts, key=lambda attempt: attempt[1].nats)[1]
        yield f"The nearest mix costs {least.nats:+.4f} ± {least.error:.4f} nats; allow more bytes or more perplexity."
    else:
        yield "The smallest mix has more bytes than that; allow more."
    yield how_ranked(found)


def how_ranked(found: Sensitivity) -> str:
    """How far the ranking of layers may be trusted, in a sentence or two."""
    if not found.measured:
        return "Layers are ranked by an estimate from gradients; none was run by itself."
    pairs, floor = found.agreement.pairs, found.floor.divergence
    ranked = (
        "too few for a rank correlation"
        if math.isnan(found.agreement.rank_correlation)
        else f"over this widest range their rank correlation is {found.agreement.rank_correlation:.2f}"
    )
    return (
        f"Layers are ranked by an estimate from gradients. {len(found.measured)} of {_pairs(found)} (layer, choice) "
        f"were run too, the costliest and others spread through the ranking: {pairs} of them cost more than the "
        f"{floor:.5f} nats by which a BF16 computation diverges from itself in another order; {ranked}."
    )


def _pairs(found: Sensitivity) -> int:
    return sum(choice != BF16 for _, choice in found.estimates)


def cost_of(found: Sensitivity, unit: Unit, choice: str) -> float | None:
    """Nats a token, as the search counted them; None for a choice that the unit has not."""
    return None if choice == BF16 else found.costs.get((unit.path, choice))


def worst_first(found: Sensitivity) -> list[Unit]:
    """The units, by what their costliest choice costs."""
    return sorted(found.units, key=lambda unit: -max(cost_of(found, unit, choice) or 0.0 for choice in unit.choices))


def name_of(one: Found) -> str:
    """What a mix is called in tables.

    Example:
        >>> one = Found(name="front", chosen={}, bytes=1, bytes_share=0.5, fp8_products=0.0, predicted=0.0)
        >>> name_of(one)
        'least loss for its bytes'
    """
    return {"front": "least loss for its bytes", "budget": "the mix"}.get(one.name, f"{one.name} in every block")


def record(found: Sensitivity, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All of it as plain data, the facts (model, text) first."""
    best = None if found.best is None else found.best.chosen
    return {
        "format": FORMAT,
        **facts,
        "budget": {"perplexity": found.budget.perplexity, "bytes_share": found.budget.bytes_share},
        "is_met": found.is_met,
        "bf16_bytes": found.bf16_bytes,
        "bf16_nats": found.bf16_nats,
        "floor": _increase(found.floor),
        "rank_correlation": None if math.isnan(found.agreement.rank_correlation) else found.agreement.rank_correlation,
        "ranked_pairs": found.agreement.pairs,
        "best": None if found.best is None else _mix(found.best),
        "attempts": [{"predicted": guessed, **_increase(true)} for guessed, true in found.attempts],
        "front": _mixes(found.front),
        "presets": _mixes(found.presets),
        "layers": [_layer(found, unit, best) for unit in worst_first(found)],
    }


def _layer(found: Sensitivity, unit: Unit, best: Mapping[str, str] | None) -> dict[str, Any]:
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
                "estimated_nats": found.estimates[unit.path, choice],
                "counted_nats": found.costs[unit.path, choice],
                **_increase(found.measured.get((unit.path, choice))),
            }
            for choice in unit.choices
        },
    }


def _mixes(some: Sequence[Found]) -> list[dict[str, Any]]:
    return [_mix(one) for one in some]


def _mix(one: Found) -> dict[str, Any]:
    return {
        "name": one.name,
        "bytes": one.bytes,
        "bytes_share": one.bytes_share,
        "fp8_products": one.fp8_products,
        "predicted_nats": one.predicted,
        "on_chosen": _increase(one.on_chosen),
        "verified": _increase(one.verified),
    }


def _increase(true: Increase | None) -> dict[str, Any]:
    if true is None:
        return {}
    error = None if math.isinf(true.error) else true.error
    return {"nats": true.nats, "error": error, "divergence": true.divergence, "windows": true.windows}
