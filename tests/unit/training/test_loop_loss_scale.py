"""The loop with a loss scale: no digit but the scale's tells of it, and what no scale mends stops the run."""

import functools
import math

import pytest
import torch
from safetensors.torch import load_file

from octavo.doctor import Severity, diagnose
from octavo.errors import NonFiniteLossError
from octavo.training import loop, setup
from octavo.training.config import Precision
from octavo.training.events import Event, Notice
from octavo.training.loop import train
from octavo.training.loss_scaling import LossScaler
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import load_run
from octavo.training.watched_run import watched_run
from tests.unit.training.tiny_runs import comparable, tiny_config


def unscaled(run):
    """What a run wrote, less the loss scale and the statistics, whose gradients carry it."""
    lines = [line for line in comparable(read_metrics(run)) if line["kind"] not in ("watched", "statistics")]
    return [{key: value for key, value in line.items() if key != "loss_scale"} for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fp32", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_power_of_two_loss_scale_changes_no_bit(tmp_path, data, recipe):
    for scale in ("auto", 2.0**-7, 2.0**12, "dynamic"):
        config = tiny_config(recipe=recipe, precision="fp32", loss_scale=scale, grad_accumulation=2, clip_norm=0.5)
        train(config, tmp_path / str(scale), data=data)
    plain, *scaled = [unscaled(tmp_path / str(scale)) for scale in ("auto", 2.0**-7, 2.0**12, "dynamic")]
    assert scaled == [plain] * 3
    assert {line.get("loss_scale") for line in read_metrics(tmp_path / "dynamic")} == {None, 2.0**16}


@pytest.mark.long
def test_fp16_surroundings_learn_and_stay_near_fp32(tmp_path, data):
    curves = {}
    for precision in Precision:
        config = tiny_config(recipe="tensorwise", precision=precision, lr=1e-2, steps=12)
        result = train(config, tmp_path / precision, data=data)
        curves[precision] = [loss for _, loss in result.train_curve]
    assert curves[Precision.FP16] != curves[Precision.FP32]
    assert curves[Precision.FP16] == pytest.approx(curves[Precision.FP32], abs=0.02)
    assert curves[Precision.FP16][-1] < curves[Precision.FP16][0] - 0.05


RETRIED = {
    "tensorwise": {},
    "delayed": {"backoff": 0.5, "update_interval": 2, "history_length": 3},
    "delayed_te": {"history_length": 3},
}


@pytest.mark.parametrize("recipe", RETRIED)
def test_step_with_overflowing_gradients_is_repeated(tmp_path, data, monkeypatch, recipe):
    """Gradients in FP16's range at 2^14 and less, as if the model's were large: two attempts of step 3 fail.

    But for the scale, the run is one in which nothing happened, amax histories included.
    """
    events: list[Event] = []
    options = RETRIED[recipe]
    config = tiny_config(
        recipe=recipe, recipe_options=options, loss_scale="dynamic", precision="fp32", grad_accumulation=2
    )
    plain = train(config, tmp_path / "plain", data=data)
    steps: list[float] = []
    real_step = LossScaler.step

    def noting_step(self, optimizer):
        steps.append(self.value)
        return real_step(self, optimizer)

    monkeypatch.setattr(LossScaler, "step", noting_step)

    def narrow(trainer):
        def spoil(gradient):
            return gradient * math.inf if trainer.step == 2 and trainer.scaler.value > 2.0**14 else gradient

        return spoil

    spoiling_gradients(monkeypatch, narrow)
    narrowed = train(config, tmp_path / "narrow", data=data, on_event=events.append)
    assert steps == [2.0**16] * 2 + [2.0**14] * 4, "no step is tried with gradients that are not finite"
    lines = read_metrics(tmp_path / "narrow")
    failed = [line for line in lines if line["kind"] == "overflow"]
    assert failed == [{"kind": "overflow", "step": 3, "loss_scale": scale} for scale in (2.0**16, 2.0**15)]
    assert [line["loss_scale"] for line in lines if line["kind"] == "step"] == steps
    texts = [event.text for event in events if isinstance(event, Notice) and "overflow" in event.text]
    assert texts == [f"step 3: a gradient overflowed; the loss scale is now {scale}" for scale in (32768, 16384)]
    updates = [line for line in unscaled(tmp_path / "narrow") if line["kind"] != "overflow"]
    assert updates == unscaled(tmp_path / "plain")
    expected, state = (
        load_file(checkpoint / "scaling.safetensors")
        for checkpoint in (plain.checkpoint, narrowed.checkpoint)
        if checkpoint is not None
    )
    assert bool(state) == (recipe != "tensorwise")
    for key, value in expected.items():
        of_gradients = ".grad_output.amax" in key
        assert torch.equal(state[key], torch.where(value > 0, value / 4, value) if of_gradients else value), key


def spoiling_gradients(monkeypatch, make):
    """Every trainer's gradients of an FP8 layer's output, and of the head's weight, pass through ``make(trainer)``."""
    real_init = loop.Trainer.__init__

    def with_fault(self, *args, **options):
        real_init(self, *args, **options)
        spoil = make(self)

        def watch(module, inputs, output):
            if module.training:
                output.register_hook(spoil)

        self.model.model.layers[0].mlp.up_proj.register_forward_hook(watch)
        self.model.lm_head.weight.register_hook(spoil)

    monkeypatch.setattr(loop.Trainer, "__init__", with_fault)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "delayed_te"])
def test_growing_loss_scale_changes_no_bit(tmp_path, data, monkeypatch, recipe):
    config = tiny_config(recipe=recipe, precision="fp32", loss_scale="dynamic")
    train(config, tmp_path / "steady", data=data)
    monkeypatch.setattr(setup, "LossScaler", functools.partial(LossScaler, growth_interval=2))
    train(config, tmp_path / "growing", data=data)
    scales = [line["loss_scale"] for line in read_metrics(tmp_path / "growing") if line["kind"] == "step"]
    assert scales == [2.0**16] * 2 + [2.0**17] * 2 + [2.0**18] * 2
    assert unscaled(tmp_path / "growing") == unscaled(tmp_path / "steady")


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("loss_scale", ["auto", "dynamic", 2.0**4])
def test_overflowing_norm_of_finite_gradients_stops_the_run(tmp_path, data, monkeypatch, loss_scale, clip_norm):
    """1e25 squared is more than FP32 holds: no loss scale mends it, and no weight may change by it."""

    def huge(trainer):
        def spoil(gradient):
            if trainer.step != 4 or gradient.shape != trainer.model.lm_head.weight.shape:
                return gradient
            attempts.append(1)
            return torch.full_like(gradient, 1e25) * (trainer.scaler.value if trainer.scaler else 1)

        trainers.append(trainer)
        return spoil

    attempts: list[int] = []
    trainers: list[loop.Trainer] = []
    spoiling_gradients(monkeypatch, huge)
    config = tiny_config(precision="fp32", loss_scale=loss_scale, clip_norm=clip_norm, checkpoint_interval=2)
    with pytest.raises(
        NonFiniteLossError, match=r"at step 5 the gradient norm is inf; .* stayed finite; .*step-000004"
    ):
        train(config, tmp_path / "run", data=data)
    assert len(attempts) == 2, "the step, and the replay that looks for the tensor"
    good = load_run(tmp_path / "run").model.state_dict()
    assert all(torch.equal(good[name], tensor) for name, tensor in trainers[0].model.state_dict().items())
    assert not [line for line in read_metrics(tmp_path / "run") if line["kind"] == "overflow"]


def test_replay_of_a_broken_step_uses_its_loss_scale(tmp_path, data, monkeypatch):
    """A gradient that only the scaled loss takes beyond a bound, as FP16's: unscaled, the replay would find nothing."""

    def narrow(trainer):
        return lambda gradient: torch.where(gradient.abs() > 2.0**8, math.inf, gradient)

    spoiling_gradients(monkeypatch, narrow)
    config = tiny_config(precision="fp32", loss_scale=2.0**40, grad_accumulation=2)
    with pytest.raises(NonFiniteLossError, match=r"at step 1 .*; the first non-finite tensor is the gradient of"):
        train(config, tmp_path / "run", data=data)
    train(tiny_config(precision="fp32", grad_accumulation=2), tmp_path / "unscaled", data=data)


@pytest.mark.parametrize(("scale", "attempts"), [(2.0**10, 0), ("dynamic", 16)])
def test_overflow_at_every_loss_scale_stops_the_run(tmp_path, data, monkeypatch, scale, attempts):
    real_init = loop.Trainer.__init__

    def with_fault(self, *args, **options):
        real_init(self, *args, **options)
        self.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf if self.step == 4 else gradient)

    monkeypatch.setattr(loop.Trainer, "__init__", with_fault)
    with pytest.raises(NonFiniteLossError, match=r"at step 5 the gradient norm is .*gradient of parameter lm_head"):
        train(tiny_config(loss_scale=scale, checkpoint_interval=2), tmp_path / "run", data=data)
    assert len([line for line in read_metrics(tmp_path / "run") if line["kind"] == "overflow"]) == attempts
    assert load_run(tmp_path / "run").step == 4


def test_run_that_breaks_in_its_first_step_is_kept(tmp_path, data):
    config = tiny_config(recipe="tensorwise", precision="fp16", loss_scale=2.0**40)
    with pytest.raises(NonFiniteLossError, match="at step 1 the gradient norm is"):
        train(config, tmp_path / "run", data=data)
    assert [line["step"] for line in read_metrics(tmp_path / "run") if line["kind"] == "failure"] == [1]
    found = diagnose(watched_run(tmp_path / "run").series)
    assert ("loss-scale", Severity.FAIL) in [(one.code, one.severity) for one in found]
