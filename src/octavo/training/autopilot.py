"""The autopilot: during training, what the doctor finds is mended, and mended back when it is over.

After each look at the model the doctor's rules read the looks since the last act, and everything they find of severity
``warn`` or ``fail`` at the newest look leads to an act: the first remedy that the doctor knows for it, that a run can
take up on its way and that changes anything. Causes come before consequences: what is found of the run as a whole is
acted on only where no act at a layer is on trial.

*Judgement.* ``autopilot_patience`` looks after the last act, those on trial are judged. Where the finding is still
there, the act is taken back and the next remedy is tried. A finding about the loss shows in the whole run only: it is
still there where the whole run shows it, and half of what the loss had risen by at the act is not gone.

*Memory.* The whole run is, to the autopilot, its newest LOOKS_KEPT looks and the steps between them.

*Probation.* Where an act that gave a few layers a finer recipe for their tensors' sake has helped, these are measured
at each look under the recipe that they would run without it (:mod:`octavo.doctor.shadow`), and the numbers are written
as "probation" lines. One more than ``autopilot_patience`` of them in a row without a finding take the act back.

Where the finding returns after that, the remedy does too, and stays: the trial was no proof. No layer is changed, or
changed back, more than ``autopilot_flips`` times; what has helped is taken back only while there are two left.

Every decision is a function of metrics.jsonl as it is written: its lines, read back, bring a resumed run to the same
decisions, to the last digit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from octavo.doctor import Finding, Series, Severity, StepNotes, Thresholds, diagnose, series_of
from octavo.doctor.remedies import remedies_for
from octavo.doctor.rules.divergence import divergence
from octavo.doctor.rules.steps import learning_rate
from octavo.doctor.shadow import Shadow
from octavo.nn import Linear
from octavo.scaling import ROLES
from octavo.training.autopilot_journal import LIVE, Act, Journal, is_possible, training_after
from octavo.training.config import RunConfig, TrainingConfig
from octavo.training.events import Notice, OnEvent
from octavo.training.metrics import MetricsLog
from octavo.training.precision import layer_recipe

__all__ = ["Autopilot"]

LOOKS_KEPT = 64  # of which the rules see a trend, whatever the length of the run
LAYERS_ON_PROBATION = 4  # of one act
SHOWN_BY_TENSORS = {  # a scale that somebody freezes, or makes from another tensor, shows in no other recipe's trial
    "saturation",
    "gradient-underflow",
    "bulk-underflow",
    "stale-scale",
    "scale-oscillation",
    "biased-accumulation",
}
Rule = Callable[[Series, Thresholds], Iterator[Finding]]
SHOWN_BY_LOSS: dict[str, Rule] = {"divergence": divergence, "learning-rate": learning_rate}
LOSSES = 5  # steps whose median stands for a time
OF_LAYERS = ("recipe", "recipe_options", "overrides", "skip")  # keys that say no more than which recipe a layer runs
AT_A_SINGLE_LOOK = Thresholds(persistent_looks=1, persistent_looks_fail=1)
Line = dict[str, Any]


class Autopilot:
    """Decides, for one run.

    Args:
        config: what the run was started with.
        lines: of its metrics.jsonl so far.

    Attributes:
        ill: paths of layers, and of modules, that the newest acts are to mend.
    """

    def __init__(self, config: RunConfig, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.config = config
        self.patience, self.flips = config.training.autopilot_patience, config.training.autopilot_flips
        self.journal = Journal(self.patience)
        self.lines: list[Line] = []
        self.layers: tuple[str, ...] = ()
        self.shadows: list[tuple[Act, Shadow]] = []
        self.ill: list[str] = []
        for line in lines:
            self.see(dict(line))

    @property
    def training(self) -> TrainingConfig:
        """What the run trains with now."""
        return training_after(self.config, self.journal.in_force)

    def see(self, line: Line) -> None:
        """Take note of a line of metrics.jsonl, as it stands there."""
        self.journal.see(line)
        if line["kind"] == "watched":
            self.layers = tuple(line["layers"])
        self.lines.append(line)
        if line["kind"] == "statistics":
            self._forget()

    @contextmanager
    def looking(self, model: nn.Module, step: int, look: AbstractContextManager[StepNotes]) -> Iterator[StepNotes]:
        """``look``, around a step; the tensors of layers on probation are seen too."""
        self.shadows = [
            (act, Shadow(path, layer, layer_recipe(path, training, step=step), self._window(path)))
            for act, path, training in self._on_probation(step)
            if isinstance(layer := model.get_submodule(path), Linear)
        ]
        with ExitStack() as stack:
            for _, shadow in self.shadows:
                stack.enter_context(shadow.watching())
            yield stack.enter_context(look)

    def act(self, step: int, log: MetricsLog, emit: OnEvent) -> bool:
        """After a look: write what is decided; whether the run's settings have changed.

        ``log`` must let this object see what it writes.
        """
        self._write_trials(step, log)
        self.ill, has_changed = [], False
        for line in self._decisions(step):
            log.write("autopilot", step, **line)
            emit(Notice(text=f"step {step}: {line['finding']} at {line['path'] or 'the run'}: {line['act']}"))
            has_changed |= bool(line["changes"])
        return has_changed

    def _write_trials(self, step: int, log: MetricsLog) -> None:
        """A line of each layer on probation; none of a step that broke: it is looked at again if it is made again."""
        is_finished = any(line["kind"] == "step" and line["step"] == step for line in reversed(self.lines))
        for act, shadow in self.shadows if is_finished else ():
            sample = shadow.sample(step)
            if sample is not None:
                numbers = {"names": sample.names(), "values": sample.values()}
                log.write("probation", step, path=shadow.path, number=act.number, **numbers)
        self.shadows = []

    def _decisions(self, step: int) -> Iterator[Line]:
        """Lines to write; each is seen before the next is decided."""
        judged = [one for one in self.journal.in_force if one.judged == step]
        findings = [*self._current(), *self._of_the_loss(judged)]
        for act in judged:
            still = next((one for one in findings if one.code == act.code and one.is_at(act.path)), None)
            if still is not None:
                why = f"Taken back, it did not help: {act.remedy.text}"
                yield _taking_back(act, why, still.evidence, helped=False)
        for act in self.journal.in_force:
            if self._has_passed(act):
                looks = self.patience + 1
                why = f"Taken back, {looks} looks at its tensors were healthy without: {act.remedy.text}"
                yield _taking_back(act, why, {"looks": looks}, helped=True)
        for finding in sorted(findings, key=lambda one: not one.path):
            if self._may_act(finding):
                yield self._acting(finding)

    def _current(self) -> list[Finding]:
        """What the looks since the last act show, that matters and is there at the newest."""
        looks = sorted({line["step"] for line in self.lines if line["kind"] == "statistics"})
        before = looks[-2] if len(looks) > 1 else 0
        found = diagnose(series_of(self._since_last_act()))
        return [one for one in found if one.severity != Severity.NOTE and one.last_step > before]

    def _of_the_loss(self, judged: list[Act]) -> Iterator[Finding]:
        """Of the findings for whose sake acts were made, those that the losses of the whole run still show."""
        for act in judged:
            if act.code in SHOWN_BY_LOSS and not self._comes_back(act.step):
                series = series_of(line for line in self.lines if line["kind"] != "probation")
                for one in SHOWN_BY_LOSS[act.code](series, Thresholds()):
                    if one.evidence.get("loss_rise") != 0:
                        yield replace(one, remedies=remedies_for(one, series))

    def _comes_back(self, since: int) -> bool:
        """Whether half of what the loss had risen by at a step, from its best until then, is gone."""
        losses = [(line["step"], line["loss"]) for line in self.lines if line["kind"] == "step"]
        until = [loss for step, loss in losses if step <= since]
        medians = [median(until[end - LOSSES : end]) for end in range(LOSSES, len(until) + 1)]
        after = [loss for step, loss in losses if step > since][-LOSSES:]
        if not medians or not after:
            return False
        best = min(medians)
        return bool(median(after) - best < (medians[-1] - best) / 2)

    def _may_act(self, finding: Finding) -> bool:
        on_trial = self.journal.on_trial
        if any(act.path == finding.path for act in on_trial) or (on_trial and not finding.path):
            return False
        return (finding.code, finding.path) not in self.journal.given_up

    def _acting(self, finding: Finding) -> Line:
        number = len(self.journal.acts) + 1
        moves = self.journal.moves(finding.path)
        found = self._remedy(finding, number) if moves < self.flips else None
        if found is not None:
            self.ill += [finding.path, *finding.places[:1]]
            return {**_line(finding, act=found.remedy.text, changes=found.remedy.changes), "number": number}
        if moves >= self.flips:
            return _line(finding, act=f"Left as it is: changed and changed back {moves} times already.", changes={})
        known = finding.remedies[0].text if finding.remedies else "nothing is known that mends it."
        return _line(finding, act=f"Nothing is left that a run could change: {known}", changes={})

    def _remedy(self, finding: Finding, number: int) -> Act | None:
        """The first remedy that a run can take up, that changes anything, and that was not tried in vain."""
        in_force = self.journal.in_force
        vain = [one.remedy.changes for one in self.journal.acts if _same_place(one, finding) and not one.helped]
        for remedy in finding.remedies:
            act = Act(number=number, step=0, code=finding.code, path=finding.path, role=finding.role, remedy=remedy)
            if not remedy.changes or not remedy.changes.keys() <= LIVE or remedy.changes in vain:
                continue
            acts = [*in_force, act]
            if is_possible(self.config, acts) and self._is_felt(training_after(self.config, acts)):
                return act
        return None

    def _is_felt(self, wanted: TrainingConfig) -> bool:
        """Whether other settings are more than words: a layer runs another recipe, or anything else changes."""
        now = self.training
        if replace(wanted, **{key: getattr(now, key) for key in OF_LAYERS}) != now:
            return True
        fp8, own = (replace(one, precision_schedule=()) for one in (wanted, now))
        return any(layer_recipe(path, fp8) != layer_recipe(path, own) for path in self.layers)

    def _on_probation(self, step: int) -> Iterator[tuple[Act, str, TrainingConfig]]:
        """Acts that helped, paths of their layers, and what the run would train with without the act.

        A layer of two such acts is there for the newer: one trial of a layer at a time.
        """
        seen: set[str] = set()
        for act in reversed(self.journal.in_force):
            if not self._may_be_taken_back(act):
                continue
            without = training_after(self.config, [one for one in self.journal.in_force if one is not act])
            for path in self._layers(act):
                if path not in seen and not layer_recipe(path, without, step=step).is_high_precision:
                    seen.add(path)
                    yield act, path, without

    def _may_be_taken_back(self, act: Act) -> bool:
        is_for_layers = act.code in SHOWN_BY_TENSORS and act.remedy.changes.keys() <= {"overrides", "skip"}
        is_judged = act.judged is not None and not self.journal.on_trial
        same = [one for one in self.journal.acts if (one.code, one.path) == (act.code, act.path)]
        has_returned = any(one.helped for one in same if one.taken_back)
        return is_for_layers and is_judged and not has_returned and self.journal.moves(act.path) + 2 <= self.flips

    def _layers(self, act: Act) -> list[str]:
        patterns = [*act.remedy.changes.get("overrides", ()), *act.remedy.changes.get("skip", ())]
        paths = [path for path in self.layers if any(fnmatchcase(path, one) for one in patterns)]
        return paths if len(paths) <= LAYERS_ON_PROBATION else []

    def _has_passed(self, act: Act) -> bool:
        """Whether every layer of the act was healthy under its coarser recipe at the newest looks."""
        if not self._may_be_taken_back(act):
            return False
        paths = self._layers(act)
        return bool(paths) and all(self._is_healthy(path, without=act) for path in paths)

    def _is_healthy(self, path: str, *, without: Act) -> bool:
        own = [line for line in self._probations(path) if line.get("number") == without.number]
        trials = own[-(self.patience + 1) :]
        if len(trials) <= self.patience:
            return False
        lines = [line for trial in trials for line in _as_look(trial)]
        return all(one.severity == Severity.NOTE for one in diagnose(series_of(lines), AT_A_SINGLE_LOOK))

    def _probations(self, path: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "probation" and line["path"] == path]

    def _window(self, path: str) -> Tensor | None:
        """The amaxes of a layer's roles at its looks on probation, newest first: float32 [3, L]."""
        columns = []
        for trial in reversed(self._probations(path)):
            amaxes = dict.fromkeys(ROLES, -1.0)
            for (_, role, _), amax in zip(trial["names"]["casts"], trial["values"]["casts"]["amax"], strict=True):
                amaxes[role] = max(amaxes[role], amax)
            columns.append(list(amaxes.values()))
        return torch.tensor(columns).t().contiguous() if columns else None

    def _since_last_act(self) -> list[Line]:
        """The lines after it, and the names that the first look among them needs."""
        since = self.journal.since
        later = [line for line in self.lines if line["step"] > since and line["kind"] != "probation"]
        return [*_names_before(self.lines, since), *later]

    def _forget(self) -> None:
        """Keep the newest looks."""
        looks = [index for index, line in enumerate(self.lines) if line["kind"] == "statistics"]
        if len(looks) > LOOKS_KEPT:
            cut = looks[-LOOKS_KEPT]
            self.lines = [*_names_before(self.lines[:cut], self.lines[cut]["step"]), *self.lines[cut:]]


def _names_before(lines: list[Line], step: int) -> list[Line]:
    """The last "watched" line that is not after a step, if there is one."""
    return [line for line in lines if line["kind"] == "watched" and line["step"] <= step][-1:]


def _line(finding: Finding, *, act: str, changes: Mapping[str, Any]) -> Line:
    return {
        "finding": finding.code,
        "path": finding.path,
        "role": finding.role,
        "act": act,
        "changes": dict(changes),
        "evidence": dict(finding.evidence),
    }


def _taking_back(act: Act, why: str, evidence: Mapping[str, float], *, helped: bool) -> Line:
    return {
        "finding": act.code,
        "path": act.path,
        "role": act.role,
        "act": why,
        "changes": dict(act.remedy.changes),
        "evidence": dict(evidence),
        "takes_back": act.number,
        "helped": helped,
    }


def _same_place(act: Act, finding: Finding) -> bool:
    return (act.code, act.path) == (finding.code, finding.path)


def _as_look(trial: Line) -> tuple[Line, Line]:
    step = {"step": trial["step"]}
    return {"kind": "watched", **step, **trial["names"]}, {"kind": "statistics", **step, **trial["values"]}
