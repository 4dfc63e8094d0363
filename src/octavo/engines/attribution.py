"""Attribution of two engines' disagreement to the properties in which their profiles differ.

For each property, swapped alone from the trainer's value to the server's:

    alone      KL(trainer with the server's value ‖ trainer)         what it is worth by itself
    remaining  KL(server ‖ trainer with the server's value)          what is left once it is equal
    layers     root mean square, over layers, of the relative error of outputs on the trainer's inputs

Σ alone need not be the total: interactions = total − Σ alone. Rounding amplifies any change of a bit to the floor, so
that small effects look alike end to end; a layer's outputs on the same inputs show them in order.

The path is greedy: properties become equal in the order of what remains, on the trainer's side or the server's, until
the KL is within the bar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.engines.agreement import Agreement, Progress, copies_for
from octavo.engines.layer_differences import compare_codes, relative_error
from octavo.engines.model import EngineCopies, EngineModel, watching
from octavo.engines.properties import differences, proof_of, value_in_words, with_property
from octavo.engines.token_scores import divergences
from octavo.errors import BackendError, ConfigError
from octavo.experiments.intervals import Interval, student_interval
from octavo.language_model import LanguageModel
from octavo.recipes.engines.profile import NOT_RUN, EngineProfile

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
        return not (self.layer_error or self.alone.estimate or self.alone.error)


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
        inseparable: properties that no engine can have alone, such as FNUZ codes with Hopper's sums.
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
                is_proven=_is_proven(trainer, name) and _is_proven(server, name),
            )
        )
        on_progress("attribute", index + 1, len(names))
    bar, path = agreement.max_kl, list[Change]()
    if bar is not None and total.estimate > bar:
        order = [each.name for each in sorted(effects, key=lambda effect: effect.remaining.estimate)]
        path = _path(runs, agreement, [*order, *inseparable], (ours, theirs), on_progress)
    return Attribution(
        total=total,
        effects=tuple(sorted(effects, key=lambda effect: (-effect.layer_error, -effect.alone.estimate))),
        path=tuple(path),
        inseparable=tuple(inseparable),
    )


def _is_proven(profile: EngineProfile, name: str) -> bool:
    return proof_of(profile, name) != NOT_RUN


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


def _path(
    runs: _Runs,
    agreement: Agreement,
    order: Sequence[str],
    logits: tuple[Sequence[Tensor], Sequence[Tensor]],
    on_progress: Progress,
) -> list[Change]:
    """Make properties equal, the one that leaves least first, until one side's change meets the bar."""
    (trainer, server), (ours, theirs) = (agreement.trainer, agreement.server), logits
    path: list[Change] = []
    for index, name in enumerate(order):
        trainer = with_property(trainer, name, agreement.server)
        server = with_property(server, name, agreement.trainer)
        near_server, near_trainer = runs.logits(trainer), runs.logits(server)
        change = Change(
            properties=tuple(order[: index + 1]),
            on_trainer=math.inf if near_server is None else runs.kl(theirs, near_server).estimate,
            on_server=math.inf if near_trainer is None else runs.kl(near_trainer, ours).estimate,
        )
        path.append(change)
        on_progress("find a path", index + 1, len(order))
        if agreement.max_kl is not None and min(change.on_trainer, change.on_server) <= agreement.max_kl:
            break
    return path
