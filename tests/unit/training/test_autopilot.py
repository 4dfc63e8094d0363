"""What the autopilot decides, look by look, from statistics made for the purpose."""

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.doctor import Sample
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_FIELDS
from octavo.errors import ConfigError
from octavo.training.autopilot import Autopilot
from octavo.training.config import RunConfig, TrainingConfig
from octavo.training.metrics import METRICS, MetricsLog, read_metrics
from octavo.training.precision import layer_recipe

HEALTHY = {
    "amax": 4.0, "rms": 1.0, "kurtosis": 3.0, "stale_ratio": 1.0, "scale": 4.0 / 448, "sqnr_db": 31.5, "cosine": 1.0,
    "underflow_fraction": 0.001, "least_stale_ratio": 1.0,
}  # fmt: skip
LOST = {"underflow_fraction": 0.6, "flushed_energy": 1e-6}
CLIPPED = {"saturation_fraction": 0.01}
LAYERS = ("layers.0.q_proj", "layers.0.down_proj")
FIRST, SECOND = "rowwise_hp_grad_weight", "blockwise"  # what is known for a bulk that underflows, in this order


def config_of(**training) -> RunConfig:
    return RunConfig(training=TrainingConfig(**{"autopilot": True, "autopilot_patience": 3, **training}))


class Run:
    """A run of which only its looks are made up: one each ten steps, of the input of two layers."""

    def __init__(self, folder, config=None, *, step=0):
        self.config = config or config_of()
        lines = [line for line in read_metrics(folder) if line["step"] <= step]
        self.folder, self.step, self.said = folder, step, []
        self.pilot = Autopilot(self.config, lines)
        self.log = MetricsLog(folder, after_step=step or None, on_line=self.pilot.see)

    def look(
        self,
        *ill: str,
        lost=LOST,
        trials: dict[str, dict] | None = None,
        loss: float = 3.0,
        loss_scale: float | None = None,
    ) -> list[dict]:
        """The next look, at which these layers are ill; what was decided."""
        self.step += 10
        extra = {} if loss_scale is None else {"loss_scale": loss_scale}
        self.log.write("step", self.step, loss=loss, lr=1e-3, grad_norm=1.0, **extra)
        casts = {CastKey(path, "input", "output"): row({**HEALTHY, **(lost if path in ill else {})}) for path in LAYERS}
        self.log.write_sample(self.sample(casts))
        for path, numbers in (trials or {}).items():
            sample = self.sample({CastKey(path, "input", "output"): row({**HEALTHY, **numbers})})
            number = max(act.number for act in self.pilot.journal.acts if act.path == path)
            line = {"path": path, "number": number, "names": sample.names(), "values": sample.values()}
            self.log.write("probation", self.step, **line)
        before = len(read_metrics(self.folder))
        self.pilot.act(self.step, self.log, self.said.append)
        return [line for line in read_metrics(self.folder)[before:] if line["kind"] == "autopilot"]

    def ten_steps(self, loss: float, *, lr: float = 1e-3) -> list[dict]:
        """The next look, after ten steps of this loss; what was decided."""
        for step in range(1, 10):
            self.log.write("step", self.step + step, loss=loss, lr=lr, grad_norm=1.0)
        return self.look(loss=loss)

    def sample(self, casts):
        recipes = {path: self.recipe(path) for path in LAYERS}
        facts: dict[str, Any] = {"in_features": 64, "out_features": 64, "device": "cpu"}
        cast = {"input output": {"format": "E4M3", "scaling": "dynamic", "scale_rounding": "fp32", "margin": 0}}
        layers = {path: {"recipe": name, **facts, "casts": cast} for path, name in recipes.items()}
        return Sample(step=self.step, casts=casts, products={}, parameters={}, layers=layers)

    def recipe(self, path):
        return self.pilot.training.overrides.get(path, "tensorwise")


def row(numbers):
    return np.array([numbers.get(name, 0.0) for name in CAST_FIELDS])


Q, DOWN = LAYERS


@pytest.fixture
def begin(tmp_path):
    """Begins runs in one folder, and closes their files."""
    with ExitStack() as stack:

        def begin_run(config=None, *, step=0):
            run = Run(tmp_path, config, step=step)
            stack.callback(run.log.close)
            return run

        yield begin_run


def test_autopilot_does_nothing_without_findings(begin):
    run = begin()
    assert [run.look() for _ in range(12)] == [[]] * 12
    assert run.pilot.training is run.config.training


def test_act_line_has_remedy_evidence_and_place(begin):
    run = begin()
    assert run.look(Q) == run.look(Q) == []
    (line,) = run.look(Q)
    assert line == {
        "kind": "autopilot", "step": 30, "finding": "bulk-underflow", "path": Q, "role": "input", "number": 1,
        "act": line["act"], "changes": {"overrides": {Q: FIRST}}, "evidence": line["evidence"],
    }  # fmt: skip
    assert line["act"].startswith(f"Run {Q} with a scale for each row")
    assert line["evidence"]["underflow_fraction"] == 0.6
    assert run.pilot.training.overrides == {Q: FIRST}
    assert run.said[0].text == f"step 30: bulk-underflow at {Q}: {line['act']}"


def test_remedy_without_effect_is_reverted_and_the_next_is_tried(begin):
    run = begin()
    *lines, last = [line for _ in range(30) for line in run.look(DOWN)]
    names = [line["changes"]["overrides"][DOWN] for line in lines]
    assert (last["changes"], last["act"]) == ({}, "Left unchanged: changed and changed back 6 times already.")
    assert names[:4] == [FIRST, FIRST, SECOND, SECOND]
    assert len(names) == run.config.training.autopilot_flips
    assert names[::2] == names[1::2], "each was taken back"
    assert run.pilot.training.overrides == {}


def test_remedy_takes_precedence_over_a_wider_user_override(begin):
    run = begin(config_of(overrides={"layers.0.*": "tensorwise"}))
    lines = [line for _ in range(3) for line in run.look(Q)]
    assert [line["changes"] for line in lines] == [{"overrides": {Q: FIRST}}]
    assert layer_recipe(Q, run.pilot.training).name == FIRST
    assert layer_recipe(DOWN, run.pilot.training).name == "tensorwise"


def test_remedy_that_changes_no_layer_is_not_tried(begin, monkeypatch):
    """The rules took the layer's recipe for a coarser one than it is: nothing they know does anything."""
    monkeypatch.setattr(Run, "recipe", lambda run, path: "tensorwise")
    run = begin(config_of(overrides={"layers.*": "bf16"}))
    lines = [line for _ in range(4) for line in run.look(Q)]
    assert [line["changes"] for line in lines] == [{}]
    assert lines[0]["act"].startswith("No remedy is left that a run can apply")


def test_exhausted_remedies_are_reported_once(begin):
    run = begin(config_of(autopilot_flips=100))
    lines = [line for _ in range(40) for line in run.look(DOWN)]
    tried = [line["changes"]["overrides"][DOWN] for line in lines if line["changes"] and "takes_back" not in line]
    assert tried == list(dict.fromkeys(tried)), "nothing is tried twice in vain"
    assert tried[-1] in ("bf16", "rowwise", "mxfp8")
    assert [line["act"] for line in lines if not line["changes"]] == [lines[-1]["act"]]
    assert lines[-1]["act"].startswith("No remedy is left that a run can apply")


def test_failed_remedy_is_not_tried_again_when_the_finding_returns(begin):
    run = begin()
    for _ in range(6):
        run.look(Q)
    assert run.pilot.training.overrides == {Q: SECOND}
    for _ in range(3):
        run.look()
    (back,) = [line for _ in range(4) for line in run.look(trials={Q: {}})]
    assert (back["takes_back"], back["helped"]) == (2, True)
    again = [line for _ in range(3) for line in run.look(Q)]
    assert [line["changes"] for line in again] == [{"overrides": {Q: SECOND}}]


def test_finding_absent_at_the_newest_sample_counts_as_fixed(begin):
    run = begin(config_of(autopilot_patience=4))
    lines = [line for paths in ((Q,), (Q,), (Q,), (Q,), (Q,), (Q,), ()) for line in run.look(*paths)]
    assert [line.get("takes_back") for line in lines] == [None]
    assert [act.judged for act in run.pilot.journal.acts] == [70]


def test_two_layers_can_be_on_trial_at_once_but_one_layer_only_once(begin):
    run = begin()
    lines = [line for _ in range(3) for line in run.look(Q, DOWN)]
    assert sorted(line["path"] for line in lines) == sorted(LAYERS)
    assert run.look(Q) == run.look() == [], "on trial"
    assert [act.judged for act in run.pilot.journal.acts] == [None, None]
    assert run.look() == []
    assert [act.judged for act in run.pilot.journal.acts] == [60, 60]


def test_helpful_act_is_reverted_after_healthy_trials_and_applied_again_if_the_finding_returns(begin):
    """Trials are asked for once the act was judged; a look of theirs that is ill counts nothing."""
    run = begin()
    for _ in range(3):
        run.look(Q)
    assert not list(run.pilot._on_probation(60)), "not before it was judged"
    for _ in range(3):
        run.look()
    assert [(act.number, path) for act, path, _ in run.pilot._on_probation(70)] == [(1, Q)]
    assert [training.overrides for _, _, training in run.pilot._on_probation(70)] == [{}]
    for numbers in ({}, {}, LOST, {}, {}, {}):
        assert run.look(trials={Q: numbers}) == []
    (line,) = run.look(trials={Q: {}})
    assert (line["takes_back"], line["helped"], line["changes"]) == (1, True, {"overrides": {Q: FIRST}})
    assert run.pilot.training.overrides == {}
    again = [line for _ in range(3) for line in run.look(Q)]
    assert [line["changes"] for line in again] == [{"overrides": {Q: FIRST}}], "it had helped: not in vain"
    assert [run.look() for _ in range(4)] == [[]] * 4
    assert not list(run.pilot._on_probation(200)), "the trial was no proof"


def test_newer_of_two_acts_at_one_layer_is_on_probation(begin):
    """Both have helped; one trial a look decides, and what the older one's trials said is none of the newer's."""
    run = begin()
    for _ in range(3):
        run.look(Q)
    for _ in range(3):
        run.look()
    lines = [line for _ in range(3) for line in run.look(Q, lost=CLIPPED, trials={Q: {}})]
    assert [line["changes"] for line in lines] == [{"overrides": {Q: SECOND}}]
    for _ in range(3):
        run.look()
    (trial,) = run.pilot._on_probation(130)
    assert (trial[0].number, trial[1], trial[2].overrides) == (2, Q, {Q: FIRST})
    assert [run.look(trials={Q: {}}) for _ in range(3)] == [[], [], []]
    (line,) = run.look(trials={Q: {}})
    assert (line["takes_back"], line["helped"]) == (2, True)
    assert run.pilot.training.overrides == {Q: FIRST}
    trials = {act.number: path for act, path, _ in run.pilot._on_probation(run.step + 10)}
    assert trials == {1: Q}, "the other finding's remedy says nothing about this one's"


def test_broken_step_writes_no_trial_and_its_repetition_writes_one(begin):
    """It is looked at twice, and its trials are no proof before it is finished."""
    run = begin()
    for ill in (Q, Q, Q, "", "", ""):
        run.look(ill)
    (act,) = run.pilot.journal.in_force

    class Trial:
        path = Q

        def sample(self, step):
            return replace(run.sample({CastKey(Q, "input", "output"): row(HEALTHY)}), step=step)

    for name in ("broke", "made again"):
        if name == "broke":
            run.log.write("failure", 70, loss=None, grad_norm=None, tensor=None)
        else:
            run.log.write("step", 70, loss=3.0, lr=1e-3, grad_norm=1.0)
        run.log.write_sample(Trial().sample(70))
        run.pilot.shadows = [(act, Trial())]
        run.pilot.act(70, run.log, run.said.append)
        trials = [line["step"] for line in read_metrics(run.folder) if line["kind"] == "probation"]
        assert trials == ([] if name == "broke" else [70])
    assert not run.pilot.shadows


@pytest.mark.long
def test_no_layer_flips_more_often_than_allowed(begin):
    run = begin(config_of(autopilot_flips=3))
    lines = []
    for _ in range(40):
        ill = [Q] if run.recipe(Q) == "tensorwise" else []
        lines += run.look(*ill, trials={Q: {}} if not ill else {})
    assert [("takes_back" in line) for line in lines] == [False, True, False]
    assert run.pilot.training.overrides == {Q: FIRST}, "left as it is healthy"


def test_a_frozen_scale_is_not_judged_by_tensors(begin):
    run = begin(config_of(recipe="delayed"))
    line = {"finding": "frozen-scale", "path": Q, "role": "input", "number": 1, "act": "Run it.", "evidence": {}}
    run.log.write("autopilot", 1, **line, changes={"overrides": {Q: "tensorwise"}})
    for _ in range(8):
        run.look(trials={Q: {}})
    assert run.pilot.journal.acts[0].judged == 30
    assert run.pilot.training.overrides == {Q: "tensorwise"}


def test_findings_of_the_run_come_after_findings_of_layers(begin):
    """A loss scale under which steps overflow again and again, and an ill layer: one act at a time."""
    run = begin(config_of(loss_scale=2.0**24))

    def look(*ill):
        for _ in range(9):
            run.log.write("overflow", run.step + 9, loss_scale=2.0**24)
        return run.look(*ill, loss_scale=2.0**24)

    lines = [line for _ in range(3) for line in look()]
    assert [line["changes"] for line in lines] == [{"loss_scale": "dynamic"}]
    assert run.pilot.training.loss_scale == "dynamic"


def test_finding_of_the_run_waits_for_acts_on_trial_at_layers(begin):
    run = begin(config_of(loss_scale=2.0**24))
    for _ in range(3):
        run.look(Q, loss_scale=2.0**24)
    lines = []
    for _ in range(3):
        for _ in range(9):
            run.log.write("overflow", run.step + 9, loss_scale=2.0**24)
        lines += run.look(loss_scale=2.0**24)
    assert [(line["step"], line["changes"]) for line in lines] == [(60, {"loss_scale": "dynamic"})], "when it is judged"


@pytest.mark.parametrize(("later", "helped"), [(44.0, False), (17.0, False), (15.5, True)])
def test_act_on_the_loss_is_judged_by_the_loss(begin, later, helped):
    """After the act it only goes on from where it is: that it is far above its beginning shows in the whole run."""
    run = begin()
    lines = [line for loss in (7.6, 7.6, 7.6, 24.0) for line in run.ten_steps(loss)]
    assert [(line["finding"], line["changes"]) for line in lines] == [("divergence", {"lr": 5e-4})]
    assert run.pilot.training.lr == 5e-4
    assert run.ten_steps(24.0) == run.ten_steps(later) == []
    lines = run.ten_steps(later)
    assert [(line.get("takes_back"), line.get("helped")) for line in lines[:1]] == ([] if helped else [(1, False)])
    assert [line["changes"] for line in lines[1:]] == ([] if helped else [{}]), "what was tried in vain is not again"
    assert run.pilot.training.lr == (5e-4 if helped else 3e-3)


@pytest.mark.parametrize(("later", "helped"), [(3.0, True), (3.5, False)])
def test_a_learning_rate_that_jumped_is_judged_by_the_loss_if_it_rose(begin, later, helped):
    run = begin()
    for _ in range(3):
        run.ten_steps(3.0)
    run.log.write("precision", 31, recipe="tensorwise")
    (act,) = run.ten_steps(later, lr=4e-3)
    assert (act["finding"], act["changes"]) == ("learning-rate", {"lr": 1e-3})
    lines = [line for _ in range(3) for line in run.ten_steps(later)]
    assert [line.get("takes_back") for line in lines] == ([] if helped else [1, None])
    assert [sorted(line["changes"]) for line in lines] == ([] if helped else [["lr"], ["warmup"]])


@pytest.mark.long
@pytest.mark.parametrize("cut", range(10, 230, 30))
def test_decisions_are_restored_from_the_lines(begin, tmp_path, cut):
    """From any look on, an autopilot that has read the lines decides what the one that wrote them did."""
    ill = [(Q,)] * 4 + [(Q, DOWN)] * 5 + [()] * 8 + [(DOWN,)] * 6

    def follow(run, looks):
        for paths in looks:
            run.look(*paths, trials={path: {} for _, path, _ in run.pilot._on_probation(run.step + 10)})
        return run

    whole = follow(begin(), ill)
    text = (tmp_path / METRICS).read_text()
    looks = cut // 10
    resumed = follow(begin(step=cut), ill[looks:])
    assert (tmp_path / METRICS).read_text() == text
    assert any(json.loads(line)["kind"] == "autopilot" for line in text.splitlines())
    assert resumed.pilot.lines == whole.pilot.lines
    assert resumed.pilot.training == whole.pilot.training


def test_autopilot_without_fp8_layers_or_samples_is_refused():
    with pytest.raises(ConfigError, match="needs FP8 layers, but a run of 'bf16' has none"):
        config_of(recipe="bf16")
    with pytest.raises(ConfigError, match=r"set training.statistics_interval to at least 1, not 0"):
        config_of(statistics_interval=0)
    with pytest.raises(ConfigError, match=r"training.autopilot_patience must be at least 1, not 0"):
        config_of(autopilot_patience=0)
    assert not config_of().with_recipe("bf16").training.autopilot


def test_statistics_interval_is_part_of_the_hash_of_a_run_with_autopilot():
    assert config_of().config_hash() != config_of(statistics_interval=3).config_hash()
    plain = [RunConfig(training=TrainingConfig(statistics_interval=every)).config_hash() for every in (3, 10)]
    assert len(set(plain)) == 1


def test_loss_is_judged_by_steps_after_the_act():
    """Two losses after the act at step 12, both good: those of the rise before it are not among them."""
    pilot = Autopilot.__new__(Autopilot)
    losses = [3.0] * 8 + [20.0] * 4 + [3.1] * 2
    pilot.lines = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    assert pilot._comes_back(12)
    pilot.lines = pilot.lines[:12]
    assert not pilot._comes_back(12)
