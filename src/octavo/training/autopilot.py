"""The autopilot: apply remedies for the doctor's findings during training, and revert them when they are not needed.

After each sample of the model, the doctor's rules read the samples since the last act. Each finding of severity
``warn`` or ``fail`` at the newest sample leads to an act: its first remedy that a run can apply during training and
that changes anything. Causes come before consequences: findings of the whole run are acted on only if no act at a layer
is on trial.

*Judgement.* ``autopilot_patience`` samples after the last act, the acts on trial are judged. If the finding persists,
the act is taken back and the next remedy is tried. A finding about the loss is judged on the whole run: it persists if
the whole run shows it and less than half of the loss's rise at the act has been recovered.

*Memory.* For the autopilot, the whole run is its newest SAMPLES_KEPT samples and the steps between them.

*Probation.* After an act that gave a few layers a finer recipe because of their tensors has helped, those layers are
also measured under the recipe that they would run without the act (:mod:`octavo.doctor.shadow`), in "probation" lines.
After ``autopilot_patience`` + 1 of them in a row without a finding the act is taken back.

If the finding returns after that, the remedy is applied again and stays. No layer is changed or changed back more than
``autopilot_flips`` times; an act that helped is taken back only while two changes are left.

Every decision is a function of metrics.jsonl, so a resumed run that reads its lines makes the same decisions, bit for
bit.
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
from octavo.doctor.rules.learning_rate import learning_rate
from octavo.doctor.shadow import Shadow
from octavo.nn import Linear
from octavo.scaling import ROLES
from octavo.training.autopilot_journal import LIVE, Act, Journal, is_possible, training_after
from octavo.training.config import RunConfig, TrainingConfig
from octavo.training.events import Notice, OnEvent
from octavo.training.metrics import Log
from octavo.training.precision import layer_recipe

__all__ = ["Autopilot"]

SAMPLES_KEPT = 64  # enough for the rules' trends; bounds memory
LAYERS_ON_PROBATION = 4  # most layers of one act
SHOWN_BY_TENSORS = {  # findings that a trial under another recipe can show; a frozen or foreign scale cannot
    "saturation",
    "gradient-underflow",
    "bulk-underflow",
    "stale-scale",
    "scale-oscillation",
    "biased-accumulation",
}
Rule = Callable[[Series, Thresholds], Iterator[Finding]]
SHOWN_BY_LOSS: dict[str, Rule] = {"divergence": divergence, "learning-rate": learning_rate}
TRANSIENT = "loss-spike"  # one that stays is a divergence
LOSSES = 5  # steps per median of the loss
OF_LAYERS = ("recipe", "recipe_options", "overrides", "skip")  # keys that only decide the recipes of layers
AT_A_SINGLE_SAMPLE = Thresholds(persistent_looks=1, persistent_looks_fail=1)
Line = dict[str, Any]


class Autopilot:
    """Autopilot of one run.

    Args:
        config: configuration that the run was started with.
        lines: lines of its metrics.jsonl so far.

    Attributes:
        unhealthy_layers: paths of layers, and of modules, that the newest acts change.
    """

    def __init__(self, config: RunConfig, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.config = config
        self.patience, self.flips = config.training.autopilot_patience, config.training.autopilot_flips
        self.journal = Journal(self.patience)
        self.lines: list[Line] = []
        self.layers: tuple[str, ...] = ()
        self.shadows: list[tuple[Act, Shadow]] = []
        self.unhealthy_layers: list[str] = []
        for line in lines:
            self.see(dict(line))

    @property
    def training(self) -> TrainingConfig:
        """Current settings of the run."""
        return training_after(self.config, self.journal.in_force)

    def see(self, line: Line) -> None:
        """Record a line of metrics.jsonl."""
        self.journal.see(line)
        if line["kind"] == "watched":
            self.layers = tuple(line["layers"])
        self.lines.append(line)
        if line["kind"] == "statistics":
            self._forget()

    @contextmanager
    def sampling(self, model: nn.Module, step: int, sample: AbstractContextManager[StepNotes]) -> Iterator[StepNotes]:
        """Context around a step: ``sample``, and the shadows of layers on probation."""
        self.shadows = [
            (act, Shadow(path, layer, layer_recipe(path, training, step=step), self._window(path)))
            for act, path, training in self._on_probation(step)
            if isinstance(layer := model.get_submodule(path), Linear)
        ]
        with ExitStack() as stack:
            for _, shadow in self.shadows:
                stack.enter_context(shadow.watching())
            yield stack.enter_context(sample)

    def act(self, step: int, log: Log, emit: OnEvent) -> bool:
        """Decide after a sample and write the decisions; return True if the run's settings changed.

        ``log`` must pass its lines to :meth:`see`.
        """
        self._write_trials(step, log)
        self.unhealthy_layers, has_changed = [], False
        for line in self._decisions(step):
            log.write("autopilot", step, **line)
            emit(Notice(text=f"step {step}: {line['finding']} at {line['path'] or 'the run'}: {line['act']}"))
            has_changed |= bool(line["changes"])
        return has_changed

    def _write_trials(self, step: int, log: Log) -> None:
        """Write a line for each layer on probation, unless the step broke and may be repeated."""
        is_finished = any(line["kind"] == "step" and line["step"] == step for line in reversed(self.lines))
        for act, shadow in self.shadows if is_finished else ():
            sample = shadow.sample(step)
            if sample is not None:
                numbers = {"names": sample.names(), "values": sample.values()}
                log.write("probation", step, path=shadow.path, number=act.number, **numbers)
        self.shadows = []

    def _decisions(self, step: int) -> Iterator[Line]:
        """Yield lines to write; each must be recorded before the next is requested."""
        judged = [one for one in self.journal.in_force if one.judged == step]
        findings = [*self._current(), *self._of_the_loss(judged)]
        for act in judged:
            remaining = next((one for one in findings if one.code == act.code and one.is_at(act.path)), None)
            if remaining is not None:
                yield _reversal(act, "it did not help", remaining.evidence, helped=False)
        for act in self.journal.in_force:
            if self._has_passed(act):
                samples = self.patience + 1
                yield _reversal(act, f"{samples} samples were healthy without it", {"samples": samples}, helped=True)
        for finding in sorted(findings, key=lambda one: not one.path):
            if self._may_act(finding):
                yield self._acting(finding)

    def _current(self) -> list[Finding]:
        """Warnings and failures in the samples since the last act that the newest sample shows and that may last."""
        samples = sorted({line["step"] for line in self.lines if line["kind"] == "statistics"})
        before = samples[-2] if len(samples) > 1 else 0
        findings = [one for one in diagnose(series_of(self._since_last_act())) if one.code != TRANSIENT]
        return [one for one in findings if one.severity != Severity.NOTE and one.last_step > before]

    def _of_the_loss(self, judged: list[Act]) -> Iterator[Finding]:
        """Findings about the loss behind judged acts that the whole run still shows."""
        for act in judged:
            if act.code in SHOWN_BY_LOSS and not self._comes_back(act.step):
                series = series_of(line for line in self.lines if line["kind"] != "probation")
                for one in SHOWN_BY_LOSS[act.code](series, Thresholds()):
                    if one.evidence.get("loss_rise") != 0:
                        yield replace(one, remedies=remedies_for(one, series))

    def _comes_back(self, since: int) -> bool:
        """Return True if the loss has recovered half of its rise from its best until ``since``."""
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
        act = self._remedy(finding, number) if moves < self.flips else None
        if act is not None:
            self.unhealthy_layers += [finding.path, *finding.places[:1]]
            return {**_line(finding, act.remedy.text, act.remedy.changes, finding.evidence), "number": number}
        if moves >= self.flips:
            text = f"Left unchanged: changed and changed back {moves} times already."
        else:
            advice = finding.remedies[0].text if finding.remedies else "no remedy is known."
            text = f"No remedy is left that a run can apply: {advice}"
        return _line(finding, text, {}, finding.evidence)

    def _remedy(self, finding: Finding, number: int) -> Act | None:
        """First remedy that a run can apply, that changes anything, and that has not failed before."""
        in_force = self.journal.in_force
        failed = [act for act in self.journal.acts_on(finding.code, finding.path) if not act.helped]
        failed_changes = [act.remedy.changes for act in failed]
        for remedy in finding.remedies:
            act = Act(number=number, step=0, code=finding.code, path=finding.path, role=finding.role, remedy=remedy)
            if not remedy.changes or not remedy.changes.keys() <= LIVE or remedy.changes in failed_changes:
                continue
            acts = [*in_force, act]
            if is_possible(self.config, acts) and self._is_felt(training_after(self.config, acts)):
                return act
        return None

    def _is_felt(self, proposed: TrainingConfig) -> bool:
        """Return True if settings change the recipe of a layer or anything else."""
        now = self.training
        if replace(proposed, **{key: getattr(now, key) for key in OF_LAYERS}) != now:
            return True
        proposed_fp8, current_fp8 = (replace(one, precision_schedule=()) for one in (proposed, now))
        return any(layer_recipe(path, proposed_fp8) != layer_recipe(path, current_fp8) for path in self.layers)

    def _on_probation(self, step: int) -> Iterator[tuple[Act, str, TrainingConfig]]:
        """Yield acts that helped, the paths of their layers, and the settings without the act.

        A layer of two such acts is on probation for the newer one only.
        """
        covered: set[str] = set()
        for act in reversed(self.journal.in_force):
            if not self._may_be_taken_back(act):
                continue
            without = training_after(self.config, [one for one in self.journal.in_force if one is not act])
            for path in self._layers(act):
                if path not in covered and not layer_recipe(path, without, step=step).is_high_precision:
                    covered.add(path)
                    yield act, path, without

    def _may_be_taken_back(self, act: Act) -> bool:
        is_for_layers = act.code in SHOWN_BY_TENSORS and act.remedy.changes.keys() <= {"overrides", "skip"}
        is_judged = act.judged is not None and not self.journal.on_trial
        has_returned = any(one.helped for one in self.journal.acts_on(act.code, act.path) if one.taken_back)
        return is_for_layers and is_judged and not has_returned and self.journal.moves(act.path) + 2 <= self.flips

    def _layers(self, act: Act) -> list[str]:
        patterns = [*act.remedy.changes.get("overrides", ()), *act.remedy.changes.get("skip", ())]
        paths = [path for path in self.layers if any(fnmatchcase(path, one) for one in patterns)]
        return paths if len(paths) <= LAYERS_ON_PROBATION else []

    def _has_passed(self, act: Act) -> bool:
        """Return True if every layer of the act was healthy under its coarser recipe at the newest samples."""
        if not self._may_be_taken_back(act):
            return False
        paths = self._layers(act)
        return bool(paths) and all(self._is_healthy(path, without=act) for path in paths)

    def _is_healthy(self, path: str, *, without: Act) -> bool:
        act_trials = [line for line in self._probations(path) if line.get("number") == without.number]
        trials = act_trials[-(self.patience + 1) :]
        if len(trials) <= self.patience:
            return False
        lines = [line for trial in trials for line in _as_look(trial)]
        return all(one.severity == Severity.NOTE for one in diagnose(series_of(lines), AT_A_SINGLE_SAMPLE))

    def _probations(self, path: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "probation" and line["path"] == path]

    def _window(self, path: str) -> Tensor | None:
        """Amaxes of a layer's roles at its samples on probation, newest first: float32 [3, L]."""
        columns = []
        for trial in reversed(self._probations(path)):
            amaxes = dict.fromkeys(ROLES, -1.0)
            for (_, role, _), amax in zip(trial["names"]["casts"], trial["values"]["casts"]["amax"], strict=True):
                amaxes[role] = max(amaxes[role], amax)
            columns.append(list(amaxes.values()))
        return torch.tensor(columns).t().contiguous() if columns else None

    def _since_last_act(self) -> list[Line]:
        """Lines since the last act, preceded by the names that their first sample needs."""
        since = self.journal.since
        later = [line for line in self.lines if line["step"] > since and line["kind"] != "probation"]
        return [*_names_before(self.lines, since), *later]

    def _forget(self) -> None:
        """Drop all but the newest samples."""
        samples = [index for index, line in enumerate(self.lines) if line["kind"] == "statistics"]
        if len(samples) > SAMPLES_KEPT:
            cut = samples[-SAMPLES_KEPT]
            self.lines = [*_names_before(self.lines[:cut], self.lines[cut]["step"]), *self.lines[cut:]]


def _names_before(lines: list[Line], step: int) -> list[Line]:
    """Last "watched" line up to a step, as a list of at most one."""
    return [line for line in lines if line["kind"] == "watched" and line["step"] <= step][-1:]


def _line(place: Finding | Act, text: str, changes: Mapping[str, Any], evidence: Mapping[str, float]) -> Line:
    where = {"finding": place.code, "path": place.path, "role": place.role}
    return {**where, "act": text, "changes": dict(changes), "evidence": dict(evidence)}


def _reversal(act: Act, reason: str, evidence: Mapping[str, float], *, helped: bool) -> Line:
    text = f"Taken back, because {reason}: {act.remedy.text}"
    return {**_line(act, text, act.remedy.changes, evidence), "takes_back": act.number, "helped": helped}


def _as_look(trial: Line) -> tuple[Line, Line]:
    step = {"step": trial["step"]}
    return {"kind": "watched", **step, **trial["names"]}, {"kind": "statistics", **step, **trial["values"]}
