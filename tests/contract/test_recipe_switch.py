"""A recipe that changes in mid-training is told once a model; in evaluation, and before training, it is not."""

import copy

import pytest
import torch

import octavo
from octavo.training.config import TrainingConfig
from octavo.training.precision import apply_recipe


def _model(recipe: str = "tensorwise") -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    octavo.convert(model, recipe, convert_head=True)
    return model


def _train(model: torch.nn.Module) -> None:
    model(torch.ones(4, 16)).sum().backward()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "octavo"]


SAID = (
    "layer '0' was trained with recipe 'tensorwise' and now runs 'rowwise': scales and rounding change in "
    "mid-training, and a delayed recipe begins without a history; this is logged once a model"
)


def test_switching_recipes_by_autocast_logs_once(caplog):
    model = _model()
    for _ in range(2):
        _train(model)
        with octavo.autocast("rowwise"):
            _train(model)
    assert _told(caplog) == [SAID]


def test_switching_recipes_by_set_recipe_logs_once(caplog):
    model = _model()
    _train(model)
    for layer in model.children():
        assert isinstance(layer, octavo.nn.Linear)
        layer.set_recipe(octavo.recipes.get("rowwise"), layer.scale_updates, path=layer.path)
    _train(model)
    _train(model)
    assert _told(caplog) == [SAID]


def test_switching_recipes_by_conversion_logs(caplog):
    model = _model()
    _train(model)
    octavo.convert(model, "rowwise", convert_head=True)
    _train(model)
    assert _told(caplog) == [SAID]


def test_switching_to_high_precision_logs(caplog):
    model = _model()
    _train(model)
    with octavo.autocast(enabled=False):
        _train(model)
    assert len(_told(caplog)) == 1
    assert "now runs 'bf16'" in _told(caplog)[0]


def test_recipe_changes_before_training_and_in_evaluation_do_not_log(caplog):
    model = _model()
    for recipe in ("rowwise", "blockwise"):
        octavo.convert(model, recipe, convert_head=True)
    _train(model)
    octavo.convert(model, octavo.recipes.get("blockwise"), convert_head=True)
    _train(model)
    with octavo.autocast("rowwise"), torch.no_grad():
        model(torch.ones(4, 16))
    model.eval()
    with octavo.autocast("rowwise"):
        model(torch.ones(4, 16, requires_grad=True))
    _train(copy.deepcopy(model).train())
    assert not _told(caplog)


def test_scheduled_recipe_changes_do_not_log(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    training = TrainingConfig(recipe="tensorwise", steps=4, precision_schedule=(("bf16", 0.0), ("fp8", 0.5)))
    for step in (1, 2, 3, 4):
        apply_recipe(model, training, step=step)
        _train(model)
    assert not _told(caplog)
