"""The static recipe: an input scale that was calibrated, held by the layer, saved with the scaling state."""

import pytest
import torch

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.formats import E4M3
from octavo.nn import Linear
from tests.contract.gemm_oracle import recorded_products


def _model() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    octavo.convert(model, "static")
    return model


def _scales(first: float, second: float) -> dict[str, torch.Tensor]:
    return {"0.input.scale": torch.tensor(first), "1.input.scale": torch.tensor(second)}


def test_inputs_are_cast_with_the_loaded_scale_and_weights_with_their_own():
    model = _model().eval()
    octavo.load_scaling_state(model, _scales(0.5, 0.25))
    x = torch.randn(6, 4) * 100
    with recorded_products() as products, torch.no_grad():
        model(x)
    for product, layer, scale in zip(products, model, (0.5, 0.25), strict=True):
        assert isinstance(layer, Linear)
        assert product.a.scale.item() == scale
        assert torch.equal(product.b.scale, octavo.quantize(layer.weight.detach(), E4M3).scale)
    expected = octavo.quantize(x, E4M3, scale=torch.tensor(0.5)).data
    assert torch.equal(products[0].a.data.view(torch.uint8), expected.view(torch.uint8))


def test_without_a_scale_the_layer_says_which_and_what_to_do():
    model = _model()
    with pytest.raises(ConfigError, match="layer '0' has no scale for its static input; calibrate the model, or load"):
        model(torch.randn(1, 4))
    with pytest.raises(ConfigError, match="this layer has no scale for its static input"):
        Linear(2, 2, recipe="static")(torch.randn(1, 2))


def test_a_scale_that_a_wrapper_has_cast_is_refused():
    model = _model()
    octavo.load_scaling_state(model, _scales(0.0123456, 0.25))
    for buffer in model.buffers():
        buffer.data = buffer.data.bfloat16()  # as FSDP1 does
    with pytest.raises(ConfigError, match=r"layer '0' was cast to torch.bfloat16, .* buffer_dtype=torch.float32"):
        model(torch.randn(1, 4))


def test_the_state_round_trips_and_is_checked():
    model, other = _model(), _model()
    other.load_state_dict(model.state_dict())
    octavo.load_scaling_state(model, _scales(0.5, 0.25))
    assert {key: value.item() for key, value in octavo.scaling_state(model).items()} == {
        "0.input.scale": 0.5,
        "1.input.scale": 0.25,
    }
    octavo.load_scaling_state(other, octavo.scaling_state(model))
    x = torch.randn(3, 4)
    assert torch.equal(model(x), other(x))
    with pytest.raises(CheckpointError, match=r"1 entry \('1.input.scale'\) is missing"):
        octavo.load_scaling_state(model, {"0.input.scale": torch.tensor(1.0)})
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match=r"'1.input.scale' holds .*; a scale is positive and finite"):
            octavo.load_scaling_state(model, _scales(2.0, bad))
    assert octavo.scaling_state(model)["0.input.scale"].item() == 0.5, "nothing of a bad state is loaded"


def test_a_zero_tensor_gives_zeros_and_a_bad_element_its_own_row():
    model = _model().eval()
    octavo.load_scaling_state(model, _scales(0.5, 0.25))
    layer = model.get_submodule("0")
    clean = layer(torch.zeros(3, 4))
    assert torch.equal(clean, layer.get_parameter("bias").expand(3, 3))
    x = torch.zeros(3, 4)
    x[1, 2] = float("inf")
    broken = layer(x)
    assert not broken[1].isfinite().any()
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])


def test_gradients_are_those_of_the_surrounding_precision():
    layer = Linear(4, 3, recipe="static", bias=False)
    octavo.load_scaling_state(layer, {"input.scale": torch.tensor(0.01)})
    x, grad = torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)
    with recorded_products() as products:
        layer(x).backward(grad)
    assert len(products) == 1
    torch.testing.assert_close(x.grad, grad @ layer.weight.detach())
    torch.testing.assert_close(layer.weight.grad, grad.t() @ x.detach())


def test_training_refuses_it():
    from octavo.training.config import TrainingConfig

    with pytest.raises(ConfigError, match=r"training\.recipe must be one of .*, not 'static'"):
        TrainingConfig(recipe="static")
