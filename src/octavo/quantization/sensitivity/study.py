"""Sensitivity study: the cost of FP8 for each layer, and the best mix within a budget.

1. Screening: every layer under every choice, estimated from one backward pass per window.
2. Measurement: the costliest pairs, and others spread over the ranking, are run. Their agreement with the estimates is
   part of the result. A measured cost replaces the estimate if it can be distinguished from the floor.
3. Search: the best mix under the assumption that costs add up.
4. Correction: the mix is run on the windows it was chosen on. If the increase exceeds the budget or is far below it,
   the search is repeated with a proportionally changed limit, up to REPAIRS times; the best mix within the budget wins.
   Two standard errors are added to the increase, because few windows are a small sample.
5. Verification: the mix on windows it was not chosen on; mixes of other sizes and the presets on the first
   FRONT_WINDOWS of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.quantization.sensitivity.ablation import Increase, compare, floor_of, measure
from octavo.quantization.sensitivity.bf16_reference import in_bf16
from octavo.quantization.sensitivity.fisher_estimate import Key, estimate
from octavo.quantization.sensitivity.mix import Mix
from octavo.quantization.sensitivity.mix_selection import best_mix, fp8_products_share, predicted
from octavo.quantization.sensitivity.ranking import RankAgreement, agreement_of
from octavo.quantization.sensitivity.units import BF16, CHOICES, Unit, bytes_of, recipe_of, units_of

__all__ = ["Budget", "MixResult", "Sensitivity", "measure_sensitivity"]

REPAIRS, STANDARD_ERRORS = 4, 2.0
NEAR, AIM = 0.8, 0.92  # of the budget: close enough, and the target of the next attempt
FRONT_SHARES = (0.0, 0.1, 0.3, 0.6)  # of the bytes between the smallest mix and BF16
MOST_TRUTH_WINDOWS = 4
FRONT_WINDOWS = 8
FROM_FLOOR = 0.5  # of the floor's divergence: smaller costs cannot be distinguished from it
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a mix; at least one must be given.

    Attributes:
        perplexity: maximum increase over BF16, as a fraction: 0.01 is one percent.
        bytes_share: maximum size relative to BF16.
    """

    perplexity: float | None = None
    bytes_share: float | None = None

    def __post_init__(self) -> None:
        if self.perplexity is None and self.bytes_share is None:
            raise ConfigError("a budget needs perplexity, bytes_share or both")
        if self.perplexity is not None and not 0 < self.perplexity < math.inf:
            raise ConfigError(
                f"the budget of perplexity must be a fraction above 0, such as 0.01, not {self.perplexity}"
            )
        if self.bytes_share is not None and not 0 < self.bytes_share <= 1:
            raise ConfigError(f"bytes_share must be above 0 and at most 1, not {self.bytes_share}")

    @property
    def nats(self) -> float | None:
        """Budget of perplexity in nats."""
        return None if self.perplexity is None else math.log1p(self.perplexity)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixResult:
    """Mix with its size and cost.

    Attributes:
        name: origin of the mix.
        chosen: choice by unit path.
        bytes: size of the whole model.
        bytes_share: size relative to BF16.
        fp8_products: share of the multiplications by weights in FP8.
        predicted: predicted cost in nats, as the sum of its choices.
        on_chosen: measured increase on the windows it was chosen on; None if not measured.
        verified: measured increase on windows it was not chosen on.
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
    """Result of :func:`measure_sensitivity`.

    Attributes:
        units: in the model's order.
        estimates: estimated cost in nats per token, by (unit path, choice); none of an expert that no token reached.
        measured: measured increase of the pairs that were run.
        floor: increase caused by the smallest change of a BF16 computation.
        costs: cost used by the search in nats per token: measured where available, otherwise estimated, otherwise the
            largest of the same layers in the other experts.
        agreement: rank correlation of estimates and measurements.
        budget: the given budget.
        best: best mix; None if no mix is within the budget.
        front: best mixes of several sizes, smallest first.
        presets: each preset in every linear layer that allows it, tables in BF16.
        bf16_bytes: size of the model in BF16.
        bf16_nats: the reference's loss on the verification windows.
        attempts: predicted cost and measured increase of each correction step.
    """

    units: tuple[Unit, ...]
    estimates: Mapping[Key, float]
    measured: Mapping[Key, Increase]
    floor: Increase
    costs: Mapping[Key, float]
    agreement: RankAgreement
    budget: Budget
    best: MixResult | None
    front: tuple[MixResult, ...]
    presets: tuple[MixResult, ...]
    bf16_bytes: int
    bf16_nats: float
    attempts: tuple[tuple[float, Increase], ...]

    @property
    def mix(self) -> Mix | None:
        """Best mix, to be saved and applied."""
        return None if self.best is None else Mix.of(self.units, self.best.chosen)

    @property
    def is_met(self) -> bool:
        """True if the best mix is also within the budget on the verification windows."""
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
    tables: bool = True,
    merged: bool = False,
    true_pairs: int = 24,
    seed: int = 0,
    on_progress: Progress = lambda *_: None,
) -> Sensitivity:
    """Measure the cost of FP8 for each layer of a language model, and find the best mix within a budget.

    Args:
        model: token ids [B, T] → logits, octavo's Llama or transformers'; not changed.
        chosen_on: tokens [W, T] for estimates, measurements and search.
        verified_on: tokens [V, T] of other text.
        budget: limits of the mix.
        choices: allowed precisions in addition to BF16.
        tables: whether embeddings may store rows as FP8 codes, which only octavo's own format holds.
        merged: whether layers that servers run as one (:mod:`octavo.checkpoints.merged_layers`) have one choice.
        true_pairs: number of (layer, choice) pairs to measure; 0 uses estimates only.
        seed: of the labels sampled for the estimates.
        on_progress: called with a phase's name, the number of steps done and their total.

    Raises:
        ConfigError: fewer than two windows of two tokens, a window that is in both sets, an unknown choice, or layers
            that are already octavo's.
    """
    for name, windows in (("choose", chosen_on), ("verify", verified_on)):
        if windows.ndim != 2 or len(windows) < 2 or windows.shape[1] < 2:
            raise ConfigError(
                f"sensitivity needs at least two windows of two tokens to {name} on, not {_size(windows)}"
            )
    if {*map(tuple, chosen_on.tolist())} & {*map(tuple, verified_on.tolist())}:
        raise ConfigError("a window to verify on is also one to choose on; verify on other text")
    if true_pairs < 0:
        raise ConfigError(f"true_pairs must be 0 or more, not {true_pairs}")
    units = units_of(model, choices, tables=tables, merged=merged)
    with in_bf16(model):
        return _SensitivityStudy(model, units, chosen_on, verified_on, budget, on_progress).run(
            true_pairs=true_pairs, seed=seed
        )


def _size(windows: Tensor) -> str:
    return " x ".join(map(str, windows.shape))


@dataclass(slots=True)
class _SensitivityStudy:
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
        measured_windows = self.chosen_on[:MOST_TRUTH_WINDOWS]
        pairs = _pairs_to_measure(estimates, true_pairs)
        floor = floor_of(self.model, self.units, measured_windows)
        on_pair = self._phase("measure layers", len(pairs) * len(measured_windows))
        measured = measure(self.model, self.units, pairs, measured_windows, on_pair=on_pair)
        costs = _costs(self.units, estimates, measured, floor)
        best, attempts = self._best_within_budget(costs)
        nats, best = self._verify_best(best)
        front, presets = self._front(costs), self._presets(costs)
        verified_mixes = self._verify_others([*front, *presets])
        return Sensitivity(
            units=self.units,
            estimates=estimates,
            measured=measured,
            floor=floor,
            costs=costs,
            agreement=agreement_of(estimates, measured, floor),
            budget=self.budget,
            best=best,
            front=verified_mixes[: len(front)],
            presets=verified_mixes[len(front) :],
            bf16_bytes=bytes_of(self.model, self.units, {}),
            bf16_nats=nats,
            attempts=attempts,
        )

    def _phase(self, name: str, total: int) -> Callable[[int], None]:
        return lambda done: self.on_progress(name, done, total)

    def _measured_mix(self, name: str, chosen: Mapping[str, str], costs: Mapping[Key, float]) -> MixResult:
        size, bf16_bytes = bytes_of(self.model, self.units, chosen), bytes_of(self.model, self.units, {})
        return MixResult(
            name=name,
            chosen=chosen,
            bytes=size,
            bytes_share=size / bf16_bytes,
            fp8_products=fp8_products_share(self.units, chosen),
            predicted=predicted(costs, chosen),
        )

    def _limit(self, share: float) -> int:
        """Maximum bytes of all units for the model to have this share of its BF16 size."""
        bf16_bytes = bytes_of(self.model, self.units, {})
        return int(share * bf16_bytes) - (bf16_bytes - sum(unit.bytes_as(BF16) for unit in self.units))

    def _best_within_budget(
        self, costs: Mapping[Key, float]
    ) -> tuple[MixResult | None, tuple[tuple[float, Increase], ...]]:
        """Best mix that is within the budget on the windows it was chosen on, and all attempts."""
        limit = self.budget.nats
        byte_limit = None if self.budget.bytes_share is None else self._limit(self.budget.bytes_share)
        if byte_limit is not None and byte_limit < 0:
            return None, ()
        if limit is None:
            chosen = best_mix(self.units, costs, byte_limit=byte_limit)
            return (None if chosen is None else self._measured_mix("budget", chosen, costs)), ()
        target, best, attempts = limit, None, []
        for attempt in range(REPAIRS):
            chosen = best_mix(self.units, costs, nats=target, byte_limit=byte_limit)
            if chosen is None:  # the sum is only a prediction; the mix of least loss may still be within the budget
                chosen = best_mix(self.units, costs, byte_limit=byte_limit)
            if chosen is None:
                break
            (increase,) = self._increases([chosen], self._phase(f"try a mix ({attempt + 1})", 2 * len(self.chosen_on)))
            attempts.append((predicted(costs, chosen), increase))
            cost = increase.nats + STANDARD_ERRORS * increase.error
            candidate = replace(self._measured_mix("budget", chosen, costs), on_chosen=increase)
            if cost <= limit and (best is None or self._merit(candidate) > self._merit(best)):
                best = candidate
            if NEAR * limit <= cost <= limit or len({step[0] for step in attempts}) < len(attempts):
                break
            previous = min(target, attempts[-1][0]) if cost > limit else target
            target = previous * min(2.0, max(0.25, AIM * limit / max(cost, limit / 8)))
        return best, tuple(attempts)

    def _merit(self, found: MixResult) -> tuple[float, float]:
        """Sort key: FP8 products if bytes have a budget, otherwise fewer bytes; then the predicted loss."""
        bought = -found.bytes if self.budget.bytes_share is None else found.fp8_products
        return bought, -found.predicted

    def _increases(self, mixes: Sequence[Mapping[str, str]], on_forward: Callable[[int], None]) -> list[Increase]:
        return compare(self.model, self.units, mixes, self.chosen_on, on_forward=on_forward)[1]

    def _front(self, costs: Mapping[Key, float]) -> list[MixResult]:
        """Mixes of least loss for several sizes, from the smallest."""
        bf16_bytes = sum(unit.bytes_as(BF16) for unit in self.units)
        smallest = sum(min(unit.bytes_as(choice) for choice in unit.choices) for unit in self.units)
        mixes = []
        for share in FRONT_SHARES:
            chosen = best_mix(self.units, costs, byte_limit=math.ceil(smallest + share * (bf16_bytes - smallest)))
            if chosen is not None:
                mixes.append(self._measured_mix("front", chosen, costs))
        return mixes

    def _presets(self, costs: Mapping[Key, float]) -> list[MixResult]:
        names = [name for name in CHOICES[:-1] if any(name in unit.choices for unit in self.units)]
        return [
            self._measured_mix(
                name, {u.path: name for u in self.units if name in u.choices and not (u.is_table or u.is_head)}, costs
            )
            for name in names
        ]

    def _verify_best(self, best: MixResult | None) -> tuple[float, MixResult | None]:
        """Loss of the reference on the verification windows, and the best mix with its increase there."""
        mixes = [] if best is None else [best.chosen]
        on_forward = self._phase("verify the mix", len(self.verified_on) * (1 + len(mixes)))
        nats, increases = compare(self.model, self.units, mixes, self.verified_on, on_forward=on_forward)
        return nats, None if best is None else replace(best, verified=increases[0])

    def _verify_others(self, mixes: Sequence[MixResult]) -> tuple[MixResult, ...]:
        windows = self.verified_on[:FRONT_WINDOWS]
        on_forward = self._phase("verify others", len(windows) * (1 + len(mixes)))
        _, increases = compare(self.model, self.units, [mix.chosen for mix in mixes], windows, on_forward=on_forward)
        return tuple(replace(mix, verified=increase) for mix, increase in zip(mixes, increases, strict=True))


def _pairs_to_measure(estimates: Mapping[Key, float], count: int) -> list[Key]:
    """Select ``count`` pairs: half the costliest, half spread evenly over the rest of the ranking."""
    ranked = sorted((key for key in estimates if key[1] != BF16), key=lambda key: -estimates[key])
    ranked = [key for key in ranked if recipe_of(key[1]) == key[1]]  # a table is measured only with all rows as codes
    first = ranked[: (count + 1) // 2]
    others, remaining = ranked[len(first) :], min(count, len(ranked)) - len(first)
    return first + [others[(2 * index + 1) * len(others) // (2 * remaining)] for index in range(remaining)]


def _above_floor(increase: Increase, floor: Increase) -> float:
    return max(0.0, increase.divergence - floor.divergence)


def _costs(
    units: Sequence[Unit], estimates: Mapping[Key, float], measured: Mapping[Key, Increase], floor: Increase
) -> dict[Key, float]:
    """Replace estimates by measurements that exceed the floor; a table's scales the estimates of all its shares.

    What has no estimate gets the largest cost of its role in its group.
    """
    costs = dict(estimates)
    tables = {unit.path: unit for unit in units if unit.is_table}
    for (path, choice), increase in measured.items():
        measured_cost, estimated_cost = _above_floor(increase, floor), estimates[path, choice]
        if max(measured_cost, estimated_cost) < FROM_FLOOR * floor.divergence:
            continue
        if path in tables and estimated_cost > 0:
            costs |= {
                (path, other): measured_cost / estimated_cost * estimates[path, other] for other in tables[path].choices
            }
        else:
            costs[path, choice] = measured_cost
    places = {(unit.path, choice): (unit.group, unit.role, choice) for unit in units for choice in unit.choices}
    largest: dict[tuple[str, str, str], float] = {}
    for key, cost in costs.items():
        largest[places[key]] = max(cost, largest.get(places[key], 0.0))
    return {key: costs.get(key, largest[place]) for key, place in places.items()}
