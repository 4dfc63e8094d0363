import copy

import pytest
import torch

import octavo
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies import apply_to_model, take_back
from octavo.errors import ConfigError


def model_of(recipe="tensorwise", **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    octavo.convert(model, recipe, scale_updates="manual", **options)
    return model


def remedy(**changes):
    return Remedy(text="", changes=changes)


def recipes_of(model):
    return {path: layer.recipe.name for path, layer in model.named_modules() if isinstance(layer, octavo.nn.Linear)}


def trained(model, steps=2):
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().sum().backward()
        octavo.update_scales(model)
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_the_layers_that_match_run_the_other_recipe_from_now_on():
    model, wanted = model_of(), model_of(overrides={"2": "rowwise"})
    before = copy.deepcopy(model.state_dict())
    apply_to_model(model, remedy(overrides={"2": "rowwise"}))
    assert recipes_of(model) == {"0": "tensorwise", "2": "rowwise"}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(map(torch.equal, trained(model), trained(wanted)))


def test_skipped_layers_run_in_high_precision():
    model, plain = model_of(), model_of("bf16")
    apply_to_model(model, remedy(skip=["*"]))
    assert all(map(torch.equal, trained(model), trained(plain)))


def test_undo_restores_the_recipes_of_every_layer():
    model, never = model_of("delayed"), model_of("delayed")
    undo = apply_to_model(model, remedy(overrides={"2": "bf16"}, recipe="tensorwise"))
    assert recipes_of(model) == {"0": "tensorwise", "2": "bf16"}
    assert {path: recipe.name for path, recipe in undo.recipes.items()} == {"0": "delayed", "2": "delayed"}
    take_back(model, undo)
    assert recipes_of(model) == {"0": "delayed", "2": "delayed"}
    assert all(map(torch.equal, trained(model), trained(never)))
    assert model[0].scale_updates is model[2].scale_updates, "one model's layers close their steps together"


def test_remedies_are_taken_back_in_turn():
    model = model_of("delayed")
    first = apply_to_model(model, remedy(overrides={"2": "rowwise"}))
    second = apply_to_model(model, remedy(overrides={"*": "blockwise"}))
    assert recipes_of(model) == {"0": "blockwise", "2": "blockwise"}
    take_back(model, second)
    assert recipes_of(model) == {"0": "delayed", "2": "rowwise"}
    take_back(model, first)
    assert recipes_of(model) == {"0": "delayed", "2": "delayed"}


def test_no_layer_becomes_coarser():
    model = model_of("rowwise", overrides={"2": "bf16"})
    undo = apply_to_model(model, remedy(recipe="tensorwise", overrides={"2": "blockwise"}))
    assert recipes_of(model) == {"0": "rowwise", "2": "bf16"}
    assert not undo.recipes


def test_options_change_the_layers_that_have_them():
    model = model_of("delayed", overrides={"2": "rowwise"})
    trained(model)
    undo = apply_to_model(model, remedy(recipe_options={"history_length": 4}))
    assert model[0].recipe == octavo.recipes.get("delayed", history_length=4)
    assert model[0].amax_history.window.shape == (3, 4)
    assert list(undo.recipes) == ["0"]
    trained(model)
    take_back(model, undo)
    assert model[0].amax_history.window.shape == (3, 16)
    assert (model[0].amax_history.window == -1).all(), "no scale is made from what is out of date"


def test_weight_cache_is_disabled_by_the_remedy_and_restored_by_undo():
    model = model_of(cache_weights=True)
    undo = apply_to_model(model, remedy(cache_weights=False))
    assert undo.cached == ("0", "2")
    assert [layer.weight_cache for layer in (model[0], model[2])] == [None, None]
    take_back(model, undo)
    assert None not in [layer.weight_cache for layer in (model[0], model[2])]
    assert not apply_to_model(model, remedy(cache_weights=True)).cached


def test_training_loop_remedy_changes_no_layer():
    undo = apply_to_model(model_of(), remedy(lr=1e-3, warmup=10, loss_scale="dynamic", precision_schedule=[]))
    assert not undo.recipes
    assert not undo.cached


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": {"0": "rowwise", "1": "bf16"}}, "no layer of this model is named '1'; its layers include 0, 2"),
        ({"skip": ["head"]}, "no layer of this model is named 'head'"),
        ({"overrides": {"0": "rowwise", "2": "finest"}}, "there is no recipe 'finest'"),
        ({"recipe_options": {"history_length": 0}}, "length must be a whole number of at least 1, not 0"),
    ],
)
def test_unsuitable_remedy_is_refused_and_changes_no_layer(changes, message):
    model = model_of("delayed")
    with pytest.raises(ConfigError, match=message):
        apply_to_model(model, remedy(**changes))
    assert recipes_of(model) == {"0": "delayed", "2": "delayed"}


def test_a_remedy_of_another_model_cannot_be_taken_back():
    undo = apply_to_model(model_of(), remedy(overrides={"2": "rowwise"}))
    with pytest.raises(ConfigError, match="this model has no layer '2'; take a remedy back where it was applied"):
        take_back(octavo.nn.Linear(4, 4), undo)
