"""The whole question in one call: what each layer costs in FP8, and the mix that meets a budget.

1. Screen (screen.py): every layer under every choice, estimated from one backward pass a window.
2. Truth (truth.py): the costliest pairs and others spread through the ranking, run for real. How far the estimates
   agree is part of the result. The truth takes the estimate's place where it can be told from the floor.
3. Search (choosing.py): the best mix if costs add up.
4. Repair: the mix is run on the windows it was chosen on. Where the increase is not within the budget, or far below
   it, the search is asked for another sum, as much smaller or larger, up to REPAIRS times; the best mix within is kept.
   Two standard errors are added to the increase: a few windows have their luck, and the mix is for other text.
5. Verification: that mix on windows it was not chosen on; mixes of other sizes and the presets by themselves on the
   first FRONT_WINDOWS of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.quantization.sensitivity.choosing import best_mix, fp8_products_share, predicted
from octavo.quantization.sensitivity.mix import Mix
from octavo.quantization.sensitivity.ranking import Agreement, agreement_of
from octavo.quantization.sensitivity.screen import Key, estimate
from octavo.quantization.sensitivity.surroundings import in_bf16
from octavo.quantization.sensitivity.truth import Increase, compare, floor_of, measure
from octavo.quantization.sensitivity.units import BF16, CHOICES, Unit, bytes_of, recipe_of, units_of

__all__ = ["Budget", "Found", "Sensitivity", "measure_sensitivity"]

REPAIRS, STANDARD_ERRORS = 4, 2.0
NEAR, AIM = 0.8, 0.92  # of the budget: what is close enough, and what the next attempt is to reach
FRONT_SHARES = (0.0, 0.1, 0.3, 0.6)  # of the bytes between the smallest mix and BF16
MOST_TRUTH_WINDOWS = 4
FRONT_WINDOWS = 8
FROM_FLOOR = 0.5  # of the floor's divergence: less than that cannot be told from it
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a mix may cost, one of them at least.

    Attributes:
        perplexity: the increase over BF16, as a share: 0.01 is one percent.
        bytes_share: the model's bytes over those in BF16.
    """

    perplexity: float | None = None
    bytes_share: float | None = None

    def __post_init__(self) -> None:
        if self.perplexity is None and self.bytes_share is None:
            raise ConfigError("a budget says perplexity, bytes_share or both; give one of them")
        if self.perplexity is not None and not 0 < self.perplexity < math.inf:
            raise ConfigError(f"a budget of perplexity is a share above 0, such as 0.01, not {self.perplexity}")
        if self.bytes_share is not None and not 0 < self.bytes_share <= 1:
            raise ConfigError(f"a budget of bytes is a share of BF16's above 0 and at most 1, not {self.bytes_share}")

    @property
    def nats(self) -> float | None:
        """The budget of perplexity in nats."""
        return None if self.perplexity is None else math.log1p(self.perplexity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A mix and what is known of it.

    Attributes:
        name: how it was found.
        chosen: from unit's path to choice.
        bytes: of the whole model.
        bytes_share: over those in BF16.
        fp8_products: the share of the multiplications by weights that are in FP8.
        predicted: nats that its parts cost together, by the estimates.
        on_chosen: its increase on the windows it was chosen on; None where nobody looked.
        verified: its increase on windows it was not chosen on.
    """

    name: str
    chosen: Mapping[str, str]
    bytes: int
    bytes_share: float
    fp8_products: float
    predicted: float
    on_chosen: Increase | None = None
    verified: Increase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What :func:`measure_sensitivity` found.

    Attributes:
        units: in the model's order.
        estimates: nats a token by (unit's path, choice), as the screen says.
        measured: the true increase of those that were run alone.
        floor: what the smallest change of a BF16 computation does.
        costs: nats a token that the search counts: the truth where it is known, else the estimate.
        agreement: how far the estimates rank the pairs that were run as the truth does.
        budget: what was asked for.
        best: the mix for it; None where no mix was within it.
        front: best mixes of several sizes, smallest first.
        presets: each preset by itself in every linear layer it may have, tables in BF16.
        bf16_bytes: of the model.
        bf16_nats: the reference's loss on the verification windows.
        attempts: what the repair tried: predicted nats and true increase.
    """

    units: tuple[Unit, ...]
    estimates: Mapping[Key, float]
    measured: Mapping[Key, Increase]
    floor: Increase
    costs: Mapping[Key, float]
    agreement: Agreement
    budget: Budget
    best: Found | None
    front: tuple[Found, ...]
    presets: tuple[Found, ...]
    bf16_bytes: int
    bf16_nats: float
    attempts: tuple[tuple[float, Increase], ...]

    @property
    def mix(self) -> Mix | None:
        """The best mix, to be saved and applied."""
        return None if self.best is None else Mix.of(self.units, self.best.chosen)

    @property
    def is_met(self) -> bool:
        """Whether the best mix kept the budget on windows it was not chosen on too."""
        if self.best is None or self.best.verified is None:
            return False
        limit = self.budget.nats
        return limit is None or self.best.verified.nats <= limit


def measure_sensitivity(
    model: nn.Module,
    chosen_on: Tensor,
    verified_on: Tensor,
    *,
    budget: Budget,
    choices: Sequence[str] = CHOICES,
    true_pairs: int = 24,
    seed: int = 0,
    on_progress: Progress = lambda *_: None,
) -> Sensitivity:
    """What each layer of a language model costs in FP8, and the best mix within a budget.

    Args:
        model: token ids [B, T] → logits, octavo's Llama or transformers'; untouched afterwards.
        chosen_on: tokens [W, T] that everything is chosen on.
        verified_on: tokens [V, T] of other text.
        budget: what the mix may cost.
        choices: what a layer may be, besides BF16.
        true_pairs: how many (layer, choice) are run for real; 0 trusts the screen.
        seed: of the labels that the screen draws.
        on_progress: called with a phase's name, what is done and what there is to do.

    Raises:
        ConfigError: no two windows of two tokens to choose or verify on, a window that is in both, an unknown choice,
            layers that are octavo's already.
    """
    for name, windows in (("choose", chosen_on), ("verify", verified_on)):
        if windows.ndim != 2 or len(windows) < 2 or windows.shape[1] < 2:
            raise ConfigError(
                f"sensitivity needs two windows of two tokens at least to {name} on, not {_size(windows)}"
            )
    if {*map(tuple, chosen_on.tolist())} & {*map(tuple, verified_on.tolist())}:
        raise ConfigError("a window to verify on is one of those to choose on; verify on other text")
    if true_pairs < 0:
        raise ConfigError(f"true_pairs must be 0 or more, not {true_pairs}")
    found = units_of(model, choices)
    with in_bf16(model):
        return _Study(model, found, chosen_on, verified_on, budget, on_progress).run(true_pairs=true_pairs, seed=seed)


def _size(windows: Tensor) -> str:
    return " x ".join(map(str, windows.shape))


@dataclass(slots=True)
class _Study:
    model: nn.Module
    units: tuple[Unit, ...]
    chosen_on: Tensor
    verified_on: Tensor
    budget: Budget
    on_progress: Progress

    def run(self, *, true_pairs: int, seed: int) -> Sensitivity:
        self.units, estimates = estimate(
            self.model, self.units, self.chosen_on, seed=seed, on_window=self._phase("estimate", len(self.chosen_on))
        )
        few = self.chosen_on[:MOST_TRUTH_WINDOWS]
        pairs = _pairs_to_measure(estimates, true_pairs)
        floor = floor_of(self.model, self.units, few)
        on_pair = self._phase("measure layers", len(pairs) * len(few))
        measured = measure(self.model, self.units, pairs, few, on_pair=on_pair)
        costs = _costs(self.units, estimates, measured, floor)
        best, attempts = self._repaired(costs)
        nats, best = self._verified(best)
        front, presets = self._front(costs), self._presets(costs)
        others = self._verified_too([*front, *presets])
        return Sensitivity(
            units=self.units,
            estimates=estimates,
            measured=measured,
            floor=floor,
            costs=costs,
            agreement=agreement_of(estimates, measured, floor),
            budget=self.budget,
            best=best,
            front=others[: len(front)],
            presets=others[len(front) :],
            bf16_bytes=bytes_of(self.model, self.units, {}),
            bf16_nats=nats,
            attempts=attempts,
        )

    def _phase(self, name: str, total: int) -> Callable[[int], None]:
        return lambda done: self.on_progress(name, done, total)

    def _found(self, name: str, chosen: Mapping[str, str], costs: Mapping[Key, float]) -> Found:
        size, whole = bytes_of(self.model, self.units, chosen), bytes_of(self.model, self.units, {})
        return Found(
            name=name,
            chosen=chosen,
            bytes=size,
            bytes_share=size / whole,
            fp8_products=fp8_products_share(self.units, chosen),
            predicted=predicted(costs, chosen),
        )

    def _limit(self, share: float) -> int:
        """Bytes that the units together may have for the model to have this share of BF16's."""
        whole = bytes_of(self.model, self.units, {})
        return int(share * whole) - (whole - sum(unit.bytes_as(BF16) for unit in self.units))

    def _repaired(self, costs: Mapping[Key, float]) -> tuple[Found | None, tuple[tuple[float, Increase], ...]]:
        """The best mix that the windows it was chosen on find within the budget, and what was tried."""
        limit = self.budget.nats
        byte_limit = None if self.budget.bytes_share is None else self._limit(self.budget.bytes_share)
        if byte_limit is not None and byte_limit < 0:
            return None, ()
        if limit is None:
            chosen = best_mix(self.units, costs, byte_limit=byte_limit)
            return (None if chosen is None else self._found("budget", chosen, costs)), ()
        asked, kept, attempts = limit, None, []
        for attempt in range(REPAIRS):
            chosen = best_mix(self.units, costs, nats=asked, byte_limit=byte_limit)
            if chosen is None:  # by the sum of the parts; the least that the bytes allow may still do
                chosen = best_mix(self.units, costs, byte_limit=byte_limit)
            if chosen is None:
                break
            (true,) = self._increases([chosen], self._phase(f"try a mix ({attempt + 1})", 2 * len(self.chosen_on)))
            attempts.append((predicted(costs, chosen), true))
            cost = true.nats + STANDARD_ERRORS * true.error
            found = replace(self._found("budget", chosen, costs), on_chosen=true)
            if cost <= limit and (kept is None or self._merit(found) > self._merit(kept)):
                kept = found
            if NEAR * limit <= cost <= limit or len({step[0] for step in attempts}) < len(attempts):
                break
            whole = min(asked, attempts[-1][0]) if cost > limit else asked
            asked = whole * min(2.0, max(0.25, AIM * limit / max(cost, limit / 8)))
        return kept, tuple(attempts)

    def _merit(self, found: Found) -> tuple[float, float]:
        """What perplexity buys: FP8 products where bytes have their own budget, fewer bytes if not; then loss."""
        bought = -found.bytes if self.budget.bytes_share is None else found.fp8_products
        return bought, -found.predicted

    def _increases(self, mixes: Sequence[Mapping[str, str]], on_forward: Callable[[int], None]) -> list[Increase]:
        return compare(self.model, self.units, mixes, self.chosen_on, on_forward=on_forward)[1]

    def _front(self, costs: Mapping[Key, float]) -> list[Found]:
        """The least loss for several sizes, from the smallest there is."""
        whole = sum(unit.bytes_as(BF16) for unit in self.units)
        smallest = sum(min(unit.bytes_as(choice) for choice in unit.choices) for unit in self.units)
        found = []
        for share in FRONT_SHARES:
            chosen = best_mix(self.units, costs, byte_limit=math.ceil(smallest + share * (whole - smallest)))
            if chosen is not None:
                found.append(self._found("front", chosen, costs))
        return found

    def _presets(self, costs: Mapping[Key, float]) -> list[Found]:
        names = [name for name in CHOICES[:-1] if any(name in unit.choices for unit in self.units)]
        return [
            self._found(
                name, {u.path: name for u in self.units if name in u.choices and not (u.is_table or u.is_head)}, costs
            )
            for name in names
        ]

    def _verified(self, best: Found | None) -> tuple[float, Found | None]:
        """The reference's loss on the verification windows, and the best mix with its increase there."""
        mixes = [] if best is None else [best.chosen]
        on_forward = self._phase("verify the mix", len(self.verified_on) * (1 + len(mixes)))
        nats, increases = compare(self.model, self.units, mixes, self.verified_on, on_forward=on_forward)
        return nats, None if best is None else replace(best, verified=increases[0])

    def _verified_too(self, some: Sequence[Found]) -> tuple[Found, ...]:
        few = self.verified_on[:FRONT_WINDOWS]
        on_forward = self._phase("verify others", len(few) * (1 + len(some)))
        _, increases = compare(self.model, self.units, [one.chosen for one in some], few, on_forward=on_forward)
        return tuple(replace(one, verified=true) for one, true in zip(some, increases, strict=True))


def _pairs_to_measure(estimates: Mapping[Key, float], count: int) -> list[Key]:
    """The costliest half of ``count``, and as many spread evenly through the rest of the ranking."""
    ranked = sorted((key for key in estimates if key[1] != BF16), key=lambda key: -estimates[key])
    ranked = [key for key in ranked if recipe_of(key[1]) == key[1]]  # a table as a whole says enough
    first = ranked[: (count + 1) // 2]
    rest, wanted = ranked[len(first) :], min(count, len(ranked)) - len(first)
    return first + [rest[(2 * index + 1) * len(rest) // (2 * wanted)] for index in range(wanted)]


def _beyond(increase: Increase, floor: Increase) -> float:
    return max(0.0, increase.divergence - floor.divergence)


def _costs(
    units: Sequence[Unit], estimates: Mapping[Key, float], measured: Mapping[Key, Increase], floor: Increase
) -> dict[Key, float]:
    """The truth in place of the estimate, where one of them stands out from the floor; a table's for all its shares."""
    costs = dict(estimates)
    tables = {unit.path: unit for unit in units if unit.is_table}
    for (path, choice), increase in measured.items():
        true, guessed = _beyond(increase, floor), estimates[path, choice]
        if max(true, guessed) < FROM_FLOOR * floor.divergence:
            continue
        if path in tables and guessed > 0:
            costs |= {(path, other): true / guessed * estimates[path, other] for other in tables[path].choices}
        else:
            costs[path, choice] = true
    return costs
