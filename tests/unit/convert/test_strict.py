"""A conversion that is refused changes nothing, whatever the model was before."""

import math
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError

REFUSED = [
    (
        {"strict": 0.99},
        r"^0\.667 of the multiplications would run in FP8, less than strict=0\.99; .* is 2: skip pattern",
    ),
    ({"strict": 2}, "strict must be a share from 0 to 1 or None, not 2$"),
    ({"strict": math.nan}, "not nan$"),
    ({"strict": -0.1}, "not -0.1$"),
    ({"strict": "0.9"}, "not '0.9'$"),
    ({"strict": True}, "not True$"),
    ({"amax_group": "everyone"}, "amax_group"),
    ({"attention": "tensorwise"}, "no attention"),
]
refusals = pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=str)


def model_of_three():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))


def tensors_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def bytes_of(tensor):
    return tensor.flatten().view(torch.uint8).tolist()


def assert_same(model, tensors):
    assert model.state_dict().keys() == tensors.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is tensors[name].dtype
        assert bytes_of(tensor) == bytes_of(tensors[name]), name


@refusals
def test_frozen_weights_of_a_plain_model_keep_their_bytes(arguments, words):
    model = model_of_three().requires_grad_(False)
    before = tensors_of(model)
    with pytest.raises(ConfigError, match=words):
        octavo.convert(model, frozen="fp8", skip=["2"], **arguments)
    assert_same(model, before)
    assert [type(layer) for layer in model] == [nn.Linear] * 3


@refusals
def test_a_converted_model_stays_converted_with_its_codes_and_histories(arguments, words):
    model = model_of_three()
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.convert(model, "delayed", frozen="fp8", scale_updates="manual", overrides={"2": "bf16"})
    model(torch.randn(8, 32)).square().sum().backward()
    octavo.update_scales(model)
    before, state = tensors_of(model), {key: each.clone() for key, each in octavo.scaling_state(model).items()}
    with pytest.raises(ConfigError, match=words):
        octavo.convert(model, "rowwise", frozen="fp8", skip=["2"], **arguments)
    assert_same(model, before)
    assert [layer.recipe.name for layer in model] == ["delayed", "delayed", "bf16"]
    assert octavo.scaling_state(model).keys() == state.keys()
    assert all(torch.equal(each, state[key]) for key, each in octavo.scaling_state(model).items())


@pytest.mark.parametrize("arguments", [{"amax_group": "everyone"}, {"attention": "delayed"}], ids=str)
def test_projections_of_attention_are_taken_away_again(arguments):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with pytest.raises(ConfigError):
        octavo.convert(model, attention_projections=True, **arguments)
    assert type(model.layers[1].self_attn) is nn.MultiheadAttention


def test_the_share_that_is_refused_is_the_one_that_the_report_has():
    model = model_of_three()
    share = octavo.convert(model, skip=["2"], overrides={"0": "bf16"}).shares.multiplications
    assert share == 1 / 3
    octavo.restore(model)
    assert octavo.convert(model, skip=["2"], overrides={"0": "bf16"}, strict=share).shares.multiplications == share
