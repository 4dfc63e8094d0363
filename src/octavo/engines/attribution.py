"""Attribution of two engines' disagreement to the properties in which their profiles differ.

For each property, swapped alone from the trainer's value to the server's:

    alone      KL(trainer with the server's value ‖ trainer)         what it is worth by itself
    remaining  KL(server ‖ trainer with the server's value)          what is left once it is equal
    layers     root mean square, over layers, of the relative error of outputs on the trainer's inputs

Σ alone need not be the total: interactions = total − Σ alone. Rounding amplifies any change of a bit to the floor, so
that small effects look alike end to end; a layer's outputs on the same inputs show them in order.

The path is greedy: properties become equal in the order of what remains, on the trainer's side or the server's, until
the KL is within the bar. Then those that it can do without are left out, so that none is unneeded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from octavo.engines.agreement import Agreement, Progress, check_windows
from octavo.engines.layer_differences import compare_codes, relative_error
from octavo.engines.model import EngineCopies, EngineModel, copies_for, watching
from octavo.engines.properties import differences, is_proven, value_in_words, with_property
from octavo.engines.token_scores import divergences
from octavo.errors import BackendError, ConfigError
from octavo.experiments.intervals import Interval, student_interval
from octavo.language_model import LanguageModel
from octavo.recipes.engines.profile import EngineProfile

__all__ = ["Attribution", "Change", "LayerProbe", "PropertyEffect", "attribute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyEffect:
    """One property in which two profiles differ.

    Attributes:
        name: as :func:`octavo.engines.properties.differences` gives it.
        trainer: its value there, in words.
        server: its value there.
        alone: KL that it makes alone, nats a token.
        remaining: KL that is left without it.
        layer_error: of outputs on the same inputs, without a floor.
        is_proven: whether a test proves both engines' values.
    """

    name: str
    trainer: str
    server: str
    alone: Interval
    remaining: Interval
    layer_error: float
    is_proven: bool

    @property
    def changes_nothing(self) -> bool:
        """Whether no number on this text depends on it."""
        return not (self.layer_error or self.alone.estimate or self.alone.error > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A step of the path: properties equal so far, and KL(server ‖ trainer) then.

    Attributes:
        properties: of the other side's value.
        on_trainer: KL after the trainer has taken the server's values.
        on_server: KL after the server has taken the trainer's.
    """

    properties: tuple[str, ...]
    on_trainer: float
    on_server: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Result of :func:`attribute`.

    Attributes:
        total: KL(server ‖ trainer) on the attribution's windows.
        effects: largest effect on layers first.
        path: until the bar is met; empty without a bar, or if it is met already.
        inseparable: properties that no engine can have alone, such as FNUZ codes with Hopper's sums, or not with the
            codes of this folder.
    """

    total: Interval
    effects: tuple[PropertyEffect, ...]
    path: tuple[Change, ...]
    inseparable: tuple[str, ...] = ()

    @property
    def interactions(self) -> float:
        """Total − Σ alone."""
        return self.total.estimate - sum(effect.alone.estimate for effect in self.effects)


class LayerProbe:
    """Inputs and outputs of an engine model's layers on one window, to run other profiles' layers on."""

    def __init__(self, model: EngineModel, window: Tensor) -> None:
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        with watching(model.layers, self._see):
            model(window[None, :-1])

    def _see(self, path: str, x: Tensor, y: Tensor) -> None:
        self._seen[path] = x, y

    def error(self, other: EngineModel) -> float:
        """Root mean square over layers of another model's relative errors on these inputs."""
        errors = [relative_error(other.layer_output(path, x), y) for path, (x, y) in self._seen.items()]
        return math.sqrt(sum(error**2 for error in errors) / len(errors))


@torch.no_grad()
def attribute(
    model: LanguageModel | nn.Module,
    agreement: Agreement,
    tokens: Tensor,
    *,
    on_progress: Progress = lambda _name, _done, _total: None,
) -> Attribution:
    """Attribute a disagreement, on the tokens of :func:`octavo.agree` or fewer of them.

    Args:
        model: as for :func:`octavo.agree`.
        agreement: its result, which names both profiles and the bar.
        tokens: int64 [windows, T]; two passes of the model for each property and window.
        on_progress: called with a phase's name, and runs done of all.

    Raises:
        ConfigError: as :func:`octavo.agree`.
    """
    check_windows(tokens)
    trainer, server = agreement.trainer, agreement.server
    names = differences(trainer, server)
    runs = _Runs(copies_for(model, (trainer, server), tokens), tokens)
    ours, theirs = runs.logits(trainer), runs.logits(server)
    assert ours is not None
    assert theirs is not None
    probe, total = LayerProbe(runs.copies.of(trainer), tokens[0]), runs.kl(theirs, ours)
    effects, inseparable = list[PropertyEffect](), list[str]()
    for index, name in enumerate(names):
        changed = with_property(trainer, name, server)
        logits = ours if runs.has_same_codes(trainer, changed, name) else runs.logits(changed)
        if logits is None:
            inseparable.append(name)
            continue
        effects.append(
            PropertyEffect(
                name=name,
                trainer=value_in_words(trainer, name),
                server=value_in_words(server, name),
                alone=runs.kl(logits, ours),
                remaining=runs.kl(theirs, logits),
                layer_error=probe.error(runs.copies.of(changed)),
                is_proven=is_proven(trainer, name) and is_proven(server, name),
            )
        )
        on_progress("attribute", index + 1, len(names))
    bar, path = agreement.max_kl, list[Change]()
    if bar is not None and total.estimate > bar:
        order = [each.name for each in sorted(effects, key=lambda effect: effect.remaining.estimate)]
        path = _Path(runs, agreement, (ours, theirs)).changes([*order, *inseparable], on_progress)
    return Attribution(
        total=total,
        effects=tuple(sorted(effects, key=lambda effect: (-effect.layer_error, -effect.alone.estimate))),
        path=tuple(path),
        inseparable=tuple(inseparable),
    )


class _Runs:
    """Logits of profiles on the same windows."""

    def __init__(self, copies: EngineCopies, tokens: Tensor) -> None:
        self.copies, self._tokens = copies, tokens

    def logits(self, profile: EngineProfile) -> list[Tensor] | None:
        """Logits [T, V] of each window; None if no kernel computes such a profile."""
        try:
            model = self.copies.of(profile)
            return [model(window[None, :-1])[0] for window in self._tokens]
        except (BackendError, ConfigError):
            return None

    def has_same_codes(self, first: EngineProfile, second: EngineProfile, name: str) -> bool:
        """Whether a property of the weights' cast changes no code and no scale of this model."""
        if not name.startswith("weight."):
            return False
        ours, theirs = self.copies.of(first).layers, self.copies.of(second).layers
        return all(compare_codes(layer.codes, theirs[path].codes).is_equal for path, layer in ours.items())

    def kl(self, server: Sequence[Tensor], trainer: Sequence[Tensor]) -> Interval:
        """KL(server ‖ trainer) of two runs."""
        windows = zip(server, trainer, strict=True)
        return student_interval([float(divergences(theirs, ours).mean()) for theirs, ours in windows])


class _Path:
    """Properties made equal, the one that leaves least first, until one side's change meets the bar."""

    def __init__(self, runs: _Runs, agreement: Agreement, logits: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        assert agreement.max_kl is not None
        self._runs, self._profiles, self._logits = runs, (agreement.trainer, agreement.server), logits
        self._bar = agreement.max_kl

    def changes(self, order: Sequence[str], on_progress: Progress) -> list[Change]:
        """Steps of the path, none of which is unneeded."""
        for count in range(1, len(order) + 1):
            change = self._change(order[:count])
            on_progress("find a path", count, len(order))
            if self._is_met(change):
                break
        else:
            count = len(order)
        needed, steps = self._needed(order[:count], on_trainer=change.on_trainer <= self._bar), list[Change]()
        while len(steps) < len(needed) and not (steps and self._is_met(steps[-1])):
            steps.append(self._change(needed[: len(steps) + 1]))
        return steps

    def _needed(self, properties: Sequence[str], *, on_trainer: bool) -> Sequence[str]:
        """Properties without those that a side can leave out and still meet the bar, last ones first."""
        for name in reversed(properties):
            fewer = [each for each in properties if each != name]
            if self._kl(fewer, on_trainer=on_trainer) <= self._bar:
                return self._needed(fewer, on_trainer=on_trainer)
        return properties

    def _is_met(self, change: Change) -> bool:
        return min(change.on_trainer, change.on_server) <= self._bar

    def _change(self, properties: Sequence[str]) -> Change:
        on_trainer, on_server = (self._kl(properties, on_trainer=side) for side in (True, False))
        return Change(properties=tuple(properties), on_trainer=on_trainer, on_server=on_server)

    def _kl(self, properties: Sequence[str], *, on_trainer: bool) -> float:
        """KL(server ‖ trainer) after one side has taken the other's values; infinite if it cannot."""
        (ours, theirs), (trainer, server) = self._logits, self._profiles
        profile, other = (trainer, server) if on_trainer else (server, trainer)
        logits = self._runs.logits(reduce(lambda each, name: with_property(each, name, other), properties, profile))
        if logits is None:
            return math.inf
        return (self._runs.kl(theirs, logits) if on_trainer else self._runs.kl(logits, ours)).estimate
