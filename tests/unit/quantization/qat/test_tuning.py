"""The loop that tunes BF16 and FP8 models alike."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, NonFiniteLossError
from octavo.quantization import TuneSettings, prepare_qat, tune
from octavo.quantization.qat.linear import QATLinear, ScaleUpdate
from octavo.quantization.qat.tuning import TuneStep, window_nats
from octavo.training.schedules import learning_rate
from tests.unit.quantization.tiny_model import tiny_language_model, windows

SETTINGS = TuneSettings(steps=6, batch_size=3, context=16, learning_rate=3e-3, warmup=2)


def tuned(settings: TuneSettings = SETTINGS, **options: Any) -> tuple[torch.nn.Module, list[TuneStep]]:
    model = tiny_language_model().model
    steps: list[TuneStep] = []
    tune(model, windows(settings.windows), settings, on_step=steps.append, **options)
    return model, steps


def test_a_step_is_adamw_on_a_clipped_gradient():
    """Three updates, by hand, of the same windows in the order that the seed gives."""
    settings = TuneSettings(steps=3, batch_size=2, context=16, learning_rate=1e-2, warmup=2, clip_norm=0.5, seed=4)
    model, steps = tuned(settings)
    by_hand = tiny_language_model().model
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in by_hand.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in by_hand.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
    )
    order = torch.randperm(6, generator=torch.Generator().manual_seed(4))
    for step in (1, 2, 3):
        rows = windows(6)[order[2 * step - 2 : 2 * step]]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=1e-2, floor=1e-3, warmup=2, steps=3)
        optimizer.zero_grad()
        logits = by_hand(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        assert norm > 0.5
        optimizer.step()
        assert steps[step - 1].loss == loss.item()
        assert steps[step - 1].grad_norm == norm.item()
        assert steps[step - 1].learning_rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, by_hand.get_parameter(name)), name


def test_the_loss_falls_and_the_model_is_left_in_evaluation():
    model, steps = tuned(TuneSettings(steps=30, batch_size=4, context=16, learning_rate=1e-2))
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert not model.training


@pytest.mark.long
def test_a_prepared_model_learns_as_a_plain_one_does():
    settings = TuneSettings(steps=30, batch_size=4, context=16, learning_rate=1e-2)
    _, plain = tuned(settings)
    model = tiny_language_model().model
    steps: list[TuneStep] = []
    prepare_qat(model, "static")
    tune(model, windows(settings.windows), settings, on_step=steps.append)
    assert steps[-1].loss == pytest.approx(plain[-1].loss, rel=0.05)
    assert steps[-1].loss != plain[-1].loss


@pytest.mark.parametrize(("share", "moves"), [(0.5, 3), (0.0, 6), (1.0, 0)])
def test_scales_stay_for_the_last_share_of_the_steps(share, moves):
    model = tiny_language_model().model
    prepare_qat(model, "static", scales="learned")
    settings = TuneSettings(steps=6, batch_size=1, context=16, learning_rate=1e-3, warmup=0, freeze_share=share)
    layers = [module for module in model.modules() if isinstance(module, QATLinear)]
    if share == 1:  # nothing tracked, nothing learned: there must be scales
        tune(model, windows(1), TuneSettings(steps=1, batch_size=1, context=16, freeze_share=0.0))
    seen = []

    def on_step(_: TuneStep) -> None:
        seen.append([layer.log2_scale.item() for layer in layers if layer.log2_scale is not None])

    tune(model, windows(6), settings, on_step=on_step)
    changed = [a != b for a, b in itertools.pairwise(seen)]
    assert changed == [step < moves for step in range(1, 6)]
    assert all(layer.scales == (ScaleUpdate.LEARNED if share == 0 else ScaleUpdate.FROZEN) for layer in layers)


@pytest.mark.long
def test_distillation_pulls_towards_the_teacher():
    """The student's weights are noisy; with the teacher alone it comes back to its logits, whatever the text."""
    teacher = tiny_language_model().model
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    settings = TuneSettings(steps=40, batch_size=4, context=16, learning_rate=2e-3, warmup=2, distill=1.0)
    inputs = windows(4, seed=9)[:, :-1]

    def distance() -> float:
        with torch.no_grad():
            return (student(inputs) - teacher(inputs)).square().mean().item()

    before = distance()
    tune(student, windows(settings.windows), settings, teacher=teacher)
    assert distance() < 0.3 * before
    with pytest.raises(ConfigError, match="needs a teacher"):
        tune(student, windows(settings.windows), settings)


def test_a_loss_that_is_not_finite_stops_with_the_weights_of_before():
    model = tiny_language_model().model
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(NonFiniteLossError, match=r"step 1: the loss is nan; .* parameter model\.layers\.1\.mlp\.up"):
        tune(model, windows(18), SETTINGS)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) or tensor.isnan().any() for name, tensor in before.items())


def test_window_nats_are_plain_cross_entropy():
    model, rows = tiny_language_model().model, windows(3)
    seen: list[tuple[int, int]] = []
    found = window_nats(model, rows, on_window=lambda done, total: seen.append((done, total)))
    for row, nats in zip(rows, found, strict=True):
        logits = model(row[None, :-1])[0].double()
        by_hand = [-(logits[i].log_softmax(-1)[row[i + 1]]).item() for i in range(len(row) - 1)]
        assert nats == pytest.approx(math.fsum(by_hand) / len(by_hand), rel=1e-6)
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("given", [windows(17), windows(18, length=15), windows(18).flatten()])
def test_windows_that_do_not_fit(given):
    with pytest.raises(ConfigError, match="6 steps need 18 windows of 16 tokens"):
        tune(tiny_language_model().model, given, SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("context", 1),
        ("warmup", -1),
        ("seed", -1),
        ("learning_rate", 0.0),
        ("scale_learning_rate", math.inf),
        ("clip_norm", math.nan),
        ("weight_decay", -1.0),
        ("freeze_share", 1.1),
        ("distill", 2.0),
        ("temperature", 0.0),
    ],
)
def test_settings_out_of_range(name: str, value: Any):
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match="distillation" if name in ("distill", "temperature") else name):
        TuneSettings(**options)


def test_before_casts_hook_runs_once_with_the_weights_of_that_step():
    settings = replace(SETTINGS, high_precision_share=0.5, freeze_share=2 / 3)
    assert (settings.high_precision_steps, settings.moving_steps) == (3, 4)
    model = tiny_language_model().model
    prepare_qat(model, "static")
    seen: list[tuple[int, bool]] = []
    steps: list[TuneStep] = []

    def has_scales() -> bool:
        return any(layer.input_scale > 0 for layer in model.modules() if isinstance(layer, QATLinear))

    tune(
        model,
        windows(settings.windows),
        settings,
        before_casts=lambda: seen.append((len(steps), has_scales())),
        on_step=steps.append,
    )
    assert seen == [(3, False)]
    assert has_scales()
    plain: list[TuneStep] = []
    tune(tiny_language_model().model, windows(settings.windows), settings, on_step=plain.append)
    assert [step.loss for step in steps[:3]] == [step.loss for step in plain[:3]]
    assert steps[3].loss != plain[3].loss


def test_a_teacher_is_asked_in_steps_that_cast():
    settings = replace(SETTINGS, high_precision_share=0.5, distill=0.5)
    asked: list[int] = []

    def teacher(tokens: torch.Tensor) -> torch.Tensor:
        asked.append(len(tokens))
        return torch.zeros(*tokens.shape, 300)

    tuned(settings, teacher=teacher)
    assert asked == [3, 3, 3]
