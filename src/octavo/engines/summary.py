"""Results of ``octavo agree`` in words, rows of tables, and a record for JSON."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from octavo.engines.agreement import MEANS, Agreement, LayerAgreement, mean_of
from octavo.engines.attribution import Attribution, Change, PropertyEffect
from octavo.engines.layer_differences import CodesDifference
from octavo.engines.properties import unproven
from octavo.engines.self_agreement import SelfAgreement, WayAgreement
from octavo.engines.suspects import AS_CLAIMED, Suspect, Suspects
from octavo.engines.token_scores import CLIP, TokenScores, effective_share, quantile
from octavo.experiments.intervals import Interval, facts_with_ends
from octavo.recipes.engines.profile import NOT_RUN, EngineProfile

__all__ = [
    "EFFECT_COLUMNS",
    "FORMAT",
    "LAYER_COLUMNS",
    "SELF_FORMAT",
    "TOKEN_COLUMNS",
    "WAY_COLUMNS",
    "effect_cells",
    "headline",
    "in_nats",
    "layer_cells",
    "notes",
    "path_in_words",
    "possible_in_words",
    "record",
    "self_notes",
    "self_record",
    "suspect_in_words",
    "suspect_notes",
    "token_rows",
    "way_cells",
    "worst_first",
]

LISTED = 8  # changes in a sentence
FORMAT, SELF_FORMAT = "octavo agreement", "octavo self-agreement"
TOKEN_COLUMNS = ["tokens", "nats or share", "floor"]
LAYER_COLUMNS = ["layer", "weight codes", "scales", "input codes", "scales", "error", "end to end"]
EFFECT_COLUMNS = ["property", "trainer", "server", "layers", "KL alone", "KL left"]
WAY_COLUMNS = ["against alone", "bits", "|Δ log p|", "p99", "largest", "KL", f"|r − 1| > {CLIP}", "other scales"]
WORDS = {
    "abs_delta": "|Δ log p| of the text, mean",
    "forward_kl": "KL(trainer ‖ server)",
    "reverse_kl": "KL(server ‖ trainer)",
    "k1": "k1 of the server's tokens",
    "k3": "k3 of the server's tokens",
    "clipped": f"share with |r − 1| > {CLIP}",
}


def in_nats(interval: Interval) -> str:
    """An interval as text; a single window has no error.

    Example:
        >>> in_nats(Interval(estimate=0.0125, error=float("nan"), freedom=float("nan")))
        '0.01250'
    """
    shown = f"{interval.estimate:.4g}" if abs(interval.estimate) < 0.001 else f"{interval.estimate:.5f}"
    return shown if math.isnan(interval.error) else f"{shown} ± {interval.half_width:.2g}"


def headline(agreement: Agreement) -> str:
    """Sentence with the KL, its floor and the verdict."""
    floor = mean_of(agreement.floor, "reverse_kl")
    text = (
        f"{agreement.server.name} and {agreement.trainer.name}: KL {in_nats(agreement.kl)} nats a token, "
        f"floor {in_nats(floor)}"
    )
    if agreement.is_equal:
        text += ", all logits equal"
    if agreement.max_kl is None:
        return text
    return f"{text}; the bar of {agreement.max_kl:g} is {'met' if agreement.agrees else 'missed'}"


def token_rows(agreement: Agreement) -> list[tuple[str, str, str]]:
    """Measure, its value, and its floor."""
    rows = [
        (words, in_nats(mean_of(agreement.scores, name)), in_nats(mean_of(agreement.floor, name)))
        for name, words in WORDS.items()
    ]
    value, floor = _whole(agreement.scores), _whole(agreement.floor)
    more = [(words, f"{value[name]:.4g}", f"{floor[name]:.4g}") for name, words in WHOLE.items()]
    return [rows[0], *more[:2], *rows[1:], *more[2:]]


WHOLE = {
    "p99": "|Δ log p|, 99th percentile",
    "max": "|Δ log p|, largest",
    "effective_share": "effective share of samples",
    "logit_rms": "logits' difference, RMS",
    "logit_max": "logits' difference, largest",
}


def _whole(windows: Sequence[TokenScores]) -> dict[str, float]:
    """Numbers of all tokens together."""
    delta = torch.cat([scores.delta.abs() for scores in windows])
    return {
        "p99": quantile(delta, 0.99),
        "max": float(delta.max()),
        "effective_share": effective_share(torch.cat([scores.log_ratio for scores in windows])),
        "logit_rms": math.sqrt(sum(scores.logit_squares for scores in windows) / len(windows)),
        "logit_max": max(scores.largest_logit for scores in windows),
    }


def way_cells(way: WayAgreement) -> list[str]:
    """Name, whether bits are equal, numbers of all tokens, and shares of weights' and inputs' other scales."""
    whole, (delta, clipped) = _whole(way.scores), (mean_of(way.scores, name) for name in ("abs_delta", "clipped"))
    scales = ["–" if share is None else f"{share:.0%}" for share in (way.weight_scales, way.input_scales)]
    deltas = [f"{each:.3g}" for each in (delta.estimate, whole["p99"], whole["max"])]
    numbers = [*deltas, in_nats(way.kl), f"{clipped.estimate:.2%}"]
    return [way.name, "equal" if way.is_equal else "differ", *numbers, ", ".join(scales)]


def self_notes(found: SelfAgreement) -> Iterator[str]:
    """Causes of the differences, ways that do not exist, and what the numbers rest on."""
    for ranks, cause in found.causes.items():
        what = cause.name.removeprefix(f"{ranks} ranks, ")
        yield f"{ranks} ranks differ most by: {what}, KL {in_nats(cause.kl)} alone."
    for name, reason in found.refused:
        yield f"{name}: not possible, {reason}."
    yield "Other scales: share of divided weights, then of divided inputs, with another scale than undivided."
    yield (
        f"{len(found.ways[0].scores)} windows of {found.length} tokens. Attention, norms, the head and the order of "
        "each sum are octavo's, the same in every way."
    )
    yield from _unproven(found.profile)


def self_record(found: SelfAgreement, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON holds it."""
    return {
        "format": SELF_FORMAT,
        **facts,
        "engine": _profile(found.profile),
        "windows": len(found.ways[0].scores),
        "context": found.length,
        "max_kl": found.max_kl,
        "agrees": found.agrees,
        "ways": [
            {
                "name": way.name,
                "equal": way.is_equal,
                "weight_scales": way.weight_scales,
                "input_scales": way.input_scales,
                "tokens": _tokens(way.scores),
            }
            for way in found.ways
        ],
        "causes": {str(ranks): cause.name for ranks, cause in found.causes.items()},
        "refused": [{"name": name, "reason": reason} for name, reason in found.refused],
    }


def worst_first(agreement: Agreement) -> list[LayerAgreement]:
    """The layers, largest error on the same inputs first."""
    return sorted(agreement.layers, key=lambda layer: -layer.error.estimate if layer.errors else math.inf)


def layer_cells(layer: LayerAgreement) -> list[str]:
    """Path, differing codes and scales of weight and input, errors on the same and on own inputs."""
    cells = [layer.path]
    for part in (layer.weight, layer.input):
        cells += ["–", "–"] if part is None else [f"{part.share:.2%}", f"{part.scales_differ:,} of {part.scales:,}"]
    own = layer.mean_end_to_end
    return [*cells, in_nats(layer.error) if layer.errors else "–", "–" if own is None else f"{own:.4g}"]


def effect_cells(effect: PropertyEffect) -> list[str]:
    """Name, both values, effect on layers, KL alone and KL that remains."""
    name = effect.name if effect.is_proven else f"{effect.name} ({NOT_RUN})"
    numbers = [f"{effect.layer_error:.3g}", in_nats(effect.alone), in_nats(effect.remaining)]
    return [name, effect.trainer, effect.server, *numbers]


def notes(agreement: Agreement) -> Iterator[str]:
    """How the numbers came about, and what they rest on."""
    windows = len(agreement.scores)
    yield (
        f"{windows} windows of {agreement.length} tokens; ± is a 95 % interval over windows. Floor: "
        f"{agreement.trainer.name} with the last bits of its embeddings changed; below it two engines cannot be told "
        "apart end to end."
    )
    yield from _unproven(agreement.server)
    if agreement.trainer != agreement.server:
        yield from _unproven(agreement.trainer)


def _unproven(profile: EngineProfile) -> Iterator[str]:
    """Sentence with the properties that no test proves, those of a cast together; none if all are proven."""
    groups: dict[str, list[str]] = {}
    for name in unproven(profile):
        part, _, own = name.rpartition(".")
        groups.setdefault(part, []).append(own)
    said = [f"{part} {', '.join(names)}".strip() for part, names in groups.items()]
    if said:
        yield f"{profile.name}, {NOT_RUN}: {'; '.join(said)}."


def path_in_words(change: Change) -> str:
    """A step of the path to the bar.

    Example:
        >>> path_in_words(Change(properties=("input.division",), on_trainer=0.001, on_server=math.inf))
        'input.division: 0.001 if the trainer changes, not possible on the server'
    """
    sides = (("trainer", change.on_trainer), ("server", change.on_server))
    said = [
        f"{kl:.3g} if the {side} changes" if math.isfinite(kl) else f"not possible on the {side}" for side, kl in sides
    ]
    return f"{', '.join(change.properties)}: {', '.join(said)}"


def suspect_in_words(suspect: Suspect) -> str:
    """Changes that explain a server, and how well."""
    changes = "; or ".join(f"{name} {value}".strip() for name, value in suspect.changes[:3])
    more = f"; or {len(suspect.changes) - 3} more with the same numbers" if len(suspect.changes) > 3 else ""
    if suspect.is_exact:
        return f"{changes}{more}: exact"
    behind = "" if suspect.behind.estimate == 0 else f", {in_nats(suspect.behind)} above the first"
    return f"{changes}{more}: mean |Δ log p| {suspect.mean_delta:.4g}{behind}"


def suspect_notes(agreement: Agreement, suspects: Suspects) -> Iterator[str]:
    """Sentences on what a text does not exclude, unless a change is exact, and on what was not tried."""
    best, *_ = suspects.ranked
    if not best.is_exact:
        yield possible_in_words(suspects)
        delta = torch.cat([scores.delta for scores in agreement.floor]).abs().mean()
        yield f"Floor: last bits alone change {agreement.trainer.name} by a mean |Δ log p| of {delta:.4g}."
    if suspects.untried:
        names = ", ".join(dict.fromkeys(name for name, _ in suspects.untried))
        count = len(suspects.untried)
        yield f"Not tried, since no kernel computes them or they do not fit the model: {count} ({names})."


def possible_in_words(suspects: Suspects) -> str:
    """Sentences with the changes that a text does not exclude."""
    tried = f"of {len(suspects.ranked)} tried (95 %, over windows, with Holm's correction)"
    names = [" or ".join(f"{name} {value}".strip() for name, value in each.changes[:3]) for each in suspects.possible]
    if len(names) == 1:
        return f"The text excludes all but the first {tried}."
    claimed = any((AS_CLAIMED, "") in each.changes for each in suspects.possible)
    listed = "; ".join(names[:LISTED]) + (f"; and {len(names) - LISTED} more" if len(names) > LISTED else "")
    return (
        f"{'The server may be as claimed. ' if claimed else ''}The text does not exclude {len(names)} {tried}: "
        f"{listed}. More windows tell more of them apart."
    )


def record(
    agreement: Agreement,
    facts: dict[str, Any],
    attribution: Attribution | None = None,
    suspects: Suspects | None = None,
) -> dict[str, Any]:
    """Everything as JSON holds it; what is not finite becomes None where it is written."""
    result: dict[str, Any] = {
        "format": FORMAT,
        **facts,
        "trainer": _profile(agreement.trainer),
        "server": _profile(agreement.server),
        "windows": len(agreement.scores),
        "context": agreement.length,
        "max_kl": agreement.max_kl,
        "equal": agreement.is_equal,
        "agrees": agreement.agrees,
        "tokens": _tokens(agreement.scores),
        "floor": _tokens(agreement.floor),
        "layers": [
            {
                "path": layer.path,
                "weight": _codes(layer.weight),
                "input": _codes(layer.input),
                "error": _interval(layer.error),
                "end_to_end": list(layer.end_to_end),
            }
            for layer in agreement.layers
        ],
    }
    if attribution is not None:
        result["attribution"] = _attribution(attribution)
    if suspects is not None:
        result["suspects"] = [facts_with_ends(each) | {"exact": each.is_exact} for each in suspects.ranked]
        result["untried"] = [list(each) for each in suspects.untried]
    return result


def _profile(profile: EngineProfile) -> dict[str, Any]:
    facts = {"name": profile.name, "engine": profile.engine, "accumulate": str(profile.accumulate)}
    return {**facts, NOT_RUN: list(unproven(profile))}


def _tokens(windows: Sequence[TokenScores]) -> dict[str, Any]:
    return {name: _interval(mean_of(windows, name)) for name in MEANS} | _whole(windows)


def _interval(interval: Interval) -> dict[str, float | None]:
    known = not math.isnan(interval.error)
    ends = {"low": interval.low, "high": interval.high} if known else {"low": None, "high": None}
    return {"estimate": interval.estimate, **ends}


def _codes(part: CodesDifference | None) -> dict[str, Any] | None:
    return None if part is None else asdict(part) | {"share": part.share}


def _attribution(attribution: Attribution) -> dict[str, Any]:
    return {
        "total": _interval(attribution.total),
        "interactions": attribution.interactions,
        "properties": [
            {
                "name": effect.name,
                "trainer": effect.trainer,
                "server": effect.server,
                "proof": "run" if effect.is_proven else NOT_RUN,
                "layer_error": effect.layer_error,
                "alone": _interval(effect.alone),
                "remaining": _interval(effect.remaining),
            }
            for effect in attribution.effects
        ],
        "path": [asdict(change) for change in attribution.path],
        "inseparable": list(attribution.inseparable),
    }
