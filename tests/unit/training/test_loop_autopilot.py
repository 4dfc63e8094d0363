"""A run with the autopilot: faults are cured, a healthy run is left alone, a stopped one goes on to the last digit."""

import os
import signal

import pytest
import torch

import octavo
from octavo.doctor import Captures, diagnose, series_of
from octavo.doctor.capture_selection import capture_for
from octavo.doctor.remedies import ranked
from octavo.nn import Linear
from octavo.scaling import amax_history, scale_updates
from octavo.training import loop
from octavo.training.events import Event, Notice
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import CAPTURES, load_run
from octavo.training.watched_run import watched_run
from tests.unit.training.tiny_runs import comparable, tiny_config

DOWN = "model.layers.0.mlp.down_proj"
SETTING = {
    "recipe": "delayed", "recipe_options": {"history_length": 4}, "lr": 1e-2, "warmup": 10, "eval_interval": 0,
    "statistics_interval": 2,
}  # fmt: skip


@pytest.fixture
def frozen(monkeypatch):
    """From its third step on, the scales of one layer do not move, and are far too small."""
    real = amax_history.close_histories

    def close(histories, *, condition=None):
        stuck = [each for each in histories if each.path == DOWN and int(each.steps.max()) >= 2]
        real([each for each in histories if each not in stuck], condition=condition)
        for each in stuck:
            each.discard()
            each.amax.fill_(1e-3)

    monkeypatch.setattr(scale_updates, "close_histories", close)


@pytest.fixture
def loud(monkeypatch):
    """From step 5 to 20, one element of a layer's input is so large that all others vanish beside it."""
    real = loop.Trainer.__init__

    def with_fault(self, *args, **options):
        real(self, *args, **options)

        def spoil(module, inputs):
            (x,) = inputs
            if not module.training or not 4 <= self.step < 20:
                return None
            x = x.clone()
            x[0, 0, 0] = 1e5
            return (x,)

        self.model.get_submodule(DOWN).register_forward_pre_hook(spoil)

    monkeypatch.setattr(loop.Trainer, "__init__", with_fault)


def lines_of(folder, *kinds):
    return [line for line in comparable(read_metrics(folder)) if line["kind"] in kinds]


def tail(result):
    """The mean loss of the last ten steps."""
    return sum(loss for _, loss in result.train_curve[-10:]) / 10


@pytest.mark.long
def test_autopilot_does_not_change_a_healthy_run(tmp_path, data):
    for name, on in (("off", False), ("on", True)):
        train(tiny_config(**SETTING, steps=30, autopilot=on), tmp_path / name, data=data)
    assert comparable(read_metrics(tmp_path / "on")) == comparable(read_metrics(tmp_path / "off"))
    assert not lines_of(tmp_path / "on", "autopilot", "probation")


@pytest.mark.long
def test_frozen_scale_is_fixed_and_a_wrong_trial_is_not_repeated(tmp_path, data, request):
    """The layer's tensors are healthy and its history is not: no trial of them can know that."""
    setting = {**SETTING, "lr": 3e-2, "steps": 60}
    clean = tail(train(tiny_config(**setting), tmp_path / "clean", data=data))
    request.getfixturevalue("frozen")
    ill = tail(train(tiny_config(**setting), tmp_path / "ill", data=data))
    events: list[Event] = []
    config = tiny_config(**setting, autopilot=True)
    cured = tail(train(config, tmp_path / "cured", data=data, on_event=events.append))
    assert ill - clean > 0.05
    assert abs(cured - clean) < 0.03
    lines = lines_of(tmp_path / "cured", "autopilot")
    assert {line["finding"] for line in lines} <= {"frozen-scale", "stale-scale"}
    assert {line["path"] for line in lines} == {DOWN}
    assert [line["changes"] for line in lines] == [{"overrides": {DOWN: "tensorwise"}}] * len(lines)
    assert ["takes_back" in line for line in lines] in ([False], [False, True, False])
    assert any(isinstance(event, Notice) and f"-scale at {DOWN}: Run" in event.text for event in events)
    layer = load_run(tmp_path / "cured").model.get_submodule(DOWN)
    assert isinstance(layer, octavo.nn.Linear)
    assert layer.recipe.name == "tensorwise"


@pytest.mark.long
def test_remedy_is_reverted_when_it_is_no_longer_needed(tmp_path, data, loud):
    config = tiny_config(**{**SETTING, "recipe": "tensorwise", "recipe_options": {}}, steps=40, autopilot=True)
    train(config, tmp_path / "run", data=data)
    act, back = lines_of(tmp_path / "run", "autopilot")
    assert (act["finding"], act["path"], act["role"]) == ("bulk-underflow", DOWN, "input")
    assert (back["takes_back"], back["helped"]) == (1, True)
    trials = lines_of(tmp_path / "run", "probation")
    assert {line["path"] for line in trials} == {DOWN}
    assert {line["names"]["layers"][DOWN]["recipe"] for line in trials} == {"tensorwise"}
    lost = {line["step"]: max(line["values"]["casts"]["underflow_fraction"]) > 0.5 for line in trials}
    assert all(lost[step] == (step <= 20) for step in lost)
    assert back["step"] == 28, "the fourth look after the last loud one"
    watched = [line["layers"][DOWN]["recipe"] for line in lines_of(tmp_path / "run", "watched")]
    assert watched == ["tensorwise", "rowwise_hp_grad_weight", "tensorwise"]


@pytest.mark.long
def test_layer_is_captured_before_its_recipe_changes(tmp_path, data, loud, monkeypatch):
    """The remedies of what was found are replayed on the recipe that it was found under; no digit depends on it."""
    config = tiny_config(**{**SETTING, "recipe": "tensorwise", "recipe_options": {}}, steps=16, autopilot=True)
    train(config, tmp_path / "run", data=data)
    (act,) = lines_of(tmp_path / "run", "autopilot")
    series = watched_run(tmp_path / "run").series
    until = series_of(line for line in read_metrics(tmp_path / "run") if line["step"] <= act["step"])
    (one,) = [found for found in diagnose(until) if (found.code, found.path) == ("bulk-underflow", DOWN)]
    captures = Captures(tmp_path / "run" / CAPTURES)
    capture = capture_for(one, DOWN, captures, series=series)
    assert capture is not None
    assert (capture.recipe.name, capture.step) == ("tensorwise", act["step"])
    assert capture.input.abs().max() == 1e5
    assert all(remedy.error_removed is not None for remedy in ranked(one, captures, series=series, rounds=1))
    monkeypatch.setattr(loop.Trainer, "_capture", lambda trainer, paths: None)
    train(config, tmp_path / "without", data=data)
    assert comparable(read_metrics(tmp_path / "without")) == comparable(read_metrics(tmp_path / "run"))


@pytest.mark.long
def test_capture_does_not_change_amax_histories(tmp_path, data, loud, monkeypatch):
    """Amaxes of delayed layers in that pass belong to no step, as its layer ran another recipe."""
    real = loop.Trainer._capture
    left: list[float] = []

    def capture(self, paths):
        real(self, paths)
        layers = [module for module in self.model.modules() if isinstance(module, Linear)]
        left.extend(layer.amax_history.pending.max().item() for layer in layers if layer.amax_history is not None)

    monkeypatch.setattr(loop.Trainer, "_capture", capture)
    train(tiny_config(**SETTING, steps=16, autopilot=True), tmp_path / "run", data=data)
    assert lines_of(tmp_path / "run", "autopilot")
    assert set(left) == {-1.0}


def test_broken_step_is_repeated_if_a_remedy_is_known(tmp_path, data):
    """A fixed loss scale that no gradient survives: one that follows them takes its place, and no step is lost."""
    setting = {**SETTING, "precision": "fp16", "loss_scale": 2.0**40, "steps": 6}
    with pytest.raises(octavo.errors.NonFiniteLossError):
        train(tiny_config(**setting), tmp_path / "broken", data=data)
    result = train(tiny_config(**setting, autopilot=True), tmp_path / "run", data=data)
    assert result.step == 6
    (line,) = lines_of(tmp_path / "run", "autopilot")
    assert (line["step"], line["finding"], line["changes"]) == (1, "loss-scale", {"loss_scale": "dynamic"})
    steps = lines_of(tmp_path / "run", "step")
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6]
    assert {one["loss_scale"] for one in steps} == {2.0**16}


@pytest.mark.long
@pytest.mark.parametrize("fault", ["frozen", "loud"])
def test_resume_with_autopilot_matches_uninterrupted_run(tmp_path, data, fault, request):
    """Pieces that end before an act, while it is on trial, while it is on probation, and after."""
    request.getfixturevalue(fault)
    recipe = {"recipe": "tensorwise", "recipe_options": {}} if fault == "loud" else {}
    config = tiny_config(**{**SETTING, **recipe}, steps=34, autopilot=True)
    train(config, tmp_path / "whole", data=data)
    for stop in (5, 11, 14, 23, 29, 34):

        def stop_at(event, stop=stop):
            if type(event).__name__ == "StepDone" and event.step == stop < 34:
                os.kill(os.getpid(), signal.SIGTERM)

        assert train(config, tmp_path / "cut", data=data, resume=stop > 5, on_event=stop_at).step == stop
    assert lines_of(tmp_path / "cut", "autopilot")
    assert comparable(read_metrics(tmp_path / "cut")) == comparable(read_metrics(tmp_path / "whole"))
    whole, cut = (load_run(tmp_path / name).model.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], tensor) for name, tensor in cut.items())


def test_run_that_recovered_is_not_reported_as_broken(tmp_path, data):
    setting = {**SETTING, "precision": "fp16", "loss_scale": 2.0**40, "steps": 6, "statistics_interval": 1}
    train(tiny_config(**setting, autopilot=True), tmp_path / "run", data=data)
    lines = read_metrics(tmp_path / "run")
    assert [line["kind"] for line in lines].count("failure") == 1
    (found,) = diagnose(series_of(lines))
    assert (found.code, found.severity, found.evidence["mended_at"]) == ("loss-scale", "note", 1)
    assert found.cause.endswith("while the loss stayed finite; resolved at step 1")
    broken = [line for line in lines if line["kind"] != "step"]  # none was finished
    assert [(one.code, one.severity) for one in diagnose(series_of(broken))] == [("loss-scale", "fail")]


@pytest.mark.long
def test_statistics_of_a_changed_head_have_its_recipe(tmp_path, data):
    setting = {**SETTING, "convert_head": True, "steps": 8}
    for autopilot in (False, True):
        train(tiny_config(**setting, autopilot=autopilot), tmp_path / f"run{autopilot}", data=data)
    (found,) = diagnose(series_of(read_metrics(tmp_path / "runFalse")))
    assert (found.code, found.path, found.severity) == ("sensitive-module", "lm_head", "warn")
    assert "and it runs delayed" in found.cause
    (found,) = diagnose(series_of(read_metrics(tmp_path / "runTrue")))
    assert (found.code, found.path, found.severity) == ("sensitive-module", "lm_head", "note")
    assert "and until step 1 it ran delayed" in found.cause
    assert found.cause.endswith("; resolved at step 1")
