"""Models that are converted before they have values: every way to load them afterwards ends in a model that trains."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import octavo
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.fp8_weight import store_weight_as_codes

RECIPES = ("tensorwise", "delayed", "rowwise")


def _mlp(device: str | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, device=device), nn.ReLU(), nn.Linear(16, 4, device=device))


def _trained(model: nn.Module) -> list[Tensor]:
    """Gradients of three steps, and then a forward of an infinity, which layers count."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        model(torch.randn(3, 8, generator=generator)).square().sum().backward()
        results += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    model(torch.full((1, 8), torch.inf))
    return results


def _state(model: nn.Module) -> dict[str, Tensor]:
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, Linear)}
    return octavo.scaling_state(model) | {path: layer.nonfinite_counts for path, layer in layers.items()}


def _assert_as_if_loaded_first(model: nn.Module, weights: dict[str, Tensor], recipe: str) -> None:
    """Bitwise what a model does that had its values when it was converted, its counts and histories included."""
    other = _mlp()
    other.load_state_dict(weights)
    octavo.convert(other, recipe)
    assert all(torch.equal(a, b) for a, b in zip(_trained(model), _trained(other), strict=True))
    state, expected = _state(model), _state(other)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert state["0"].tolist() == [8, 0, 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_assigned_weights_initialize_the_scaling_state(recipe):
    weights, model = _mlp().state_dict(), _mlp("meta")
    octavo.convert(model, recipe)
    model.load_state_dict({key: value.clone() for key, value in weights.items()}, assign=True)
    _assert_as_if_loaded_first(model, weights, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_assigned_after_a_move_to_the_meta_device_reset_the_state(recipe):
    weights, model = _mlp().state_dict(), _mlp()
    octavo.convert(model, recipe)
    _trained(model)
    model.to("meta").load_state_dict({key: value.clone() for key, value in weights.items()}, assign=True)
    _assert_as_if_loaded_first(model, weights, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_to_empty_starts_the_state_at_its_first_values(recipe):
    weights, model = _mlp().state_dict(), _mlp("meta")
    octavo.convert(model, recipe)
    for _ in range(2):  # the second time nothing is on the meta device any more
        model.to_empty(device="cpu")
        model.load_state_dict(weights)
    _assert_as_if_loaded_first(model, weights, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_moving_to_the_meta_device_and_back_resets_the_state(recipe):
    weights, model = _mlp().state_dict(), _mlp()
    octavo.convert(model, recipe)
    _trained(model)
    model.to("meta")
    assert model(torch.empty(2, 8, device="meta")).device.type == "meta"
    model.to_empty(device="cpu").load_state_dict(weights)
    _assert_as_if_loaded_first(model, weights, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_accelerates_empty_weights_load_and_dispatch(recipe, tmp_path: Path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    weights = _mlp().state_dict()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        model = _mlp()
    octavo.convert(model, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = accelerate.load_checkpoint_and_dispatch(
            model, str(tmp_path / "model.safetensors"), device_map={"": "cpu"}
        )
    _assert_as_if_loaded_first(model, weights, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_that_accelerate_keeps_on_disk_compute_the_same(recipe, tmp_path: Path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    weights, x = _mlp().state_dict(), torch.randn(3, 8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        model = _mlp()
    octavo.convert(model, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = accelerate.load_checkpoint_and_dispatch(
            model,
            str(tmp_path / "model.safetensors"),
            device_map={"0": "cpu", "1": "cpu", "2": "disk"},
            offload_folder=str(tmp_path),
        )
    assert model[2].weight.is_meta
    other = _mlp()
    other.load_state_dict(weights)
    octavo.convert(other, recipe)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_a_static_scale_that_was_loaded_survives_the_weights():
    weights, model = _mlp().state_dict(), _mlp("meta")
    octavo.convert(model, "static")
    octavo.load_scaling_state(model, dict.fromkeys(octavo.scaling_state(model), torch.tensor(0.02)))
    model.to_empty(device="cpu").load_state_dict(weights)
    other = _mlp()
    other.load_state_dict(weights)
    octavo.convert(other, "static")
    octavo.load_scaling_state(other, dict.fromkeys(octavo.scaling_state(other), torch.tensor(0.02)))
    x = torch.randn(3, 8)
    assert torch.equal(model(x), other(x))


def test_meta_weight_is_not_stored_and_the_report_names_the_remedy():
    model = _mlp("meta").requires_grad_(False)
    reason = "it is on the meta device; load the model, then convert it again with frozen='fp8'"
    with pytest.warns(UserWarning, match=f"stored none of the 2 weights as codes: 0: {reason}"):
        report = octavo.convert(model, frozen="fp8")
    assert report.not_stored == {"0": reason, "2": reason}
    with pytest.raises(ConfigError, match="the weight of layer '0' is on the meta device; load its values before"):
        store_weight_as_codes(model[0])  # type: ignore[arg-type]
    model.load_state_dict(_mlp().state_dict(), assign=True)
    assert octavo.convert(model.requires_grad_(False), frozen="fp8").stored == ("0", "2")


@pytest.mark.parametrize("on_meta", ["converted", "moved"])
@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_state_that_is_loaded_after_assigned_weights_is_kept(recipe, on_meta):
    torch.manual_seed(0)
    weights, trained = _mlp().state_dict(), _mlp()
    octavo.convert(trained, recipe)
    if recipe == "static":
        octavo.load_scaling_state(trained, dict.fromkeys(octavo.scaling_state(trained), torch.tensor(0.02)))
    else:
        _trained(trained)
    state = octavo.scaling_state(trained)
    model = _mlp("meta" if on_meta == "converted" else None)
    octavo.convert(model, recipe)
    model.to("meta").load_state_dict({key: value.clone() for key, value in weights.items()}, assign=True)
    octavo.load_scaling_state(model, state)
    loaded = octavo.scaling_state(model)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    x = torch.randn(3, 8)
    trained.load_state_dict(weights)
    octavo.load_scaling_state(trained, state)
    assert torch.equal(model(x), trained(x))


def test_state_is_not_loaded_before_the_weights():
    trained = _mlp()
    octavo.convert(trained, "delayed")
    _trained(trained)
    model = _mlp("meta")
    octavo.convert(model, "delayed")
    with pytest.raises(ConfigError, match=r"the weight of its layer is on the meta device; load the weights first"):
        octavo.load_scaling_state(model, octavo.scaling_state(trained))
