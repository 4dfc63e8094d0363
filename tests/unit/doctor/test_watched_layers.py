"""The watcher on converted layers that are no ``nn.Linear``: GPT-2's ``Conv1D``, convolutions, experts alone."""

import math

import numpy as np
import pytest
import torch

import octavo
import octavo.doctor
from octavo.doctor.capture import Captures
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies.live import apply_to_model, take_back
from octavo.errors import ConfigError
from octavo.nn import GroupedLinear


def watched_steps(model, x, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = octavo.doctor.watch(model, optimizer, interval=1, **options)
    for _ in range(2):
        with watcher.step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watcher


def pair(kind):
    """A layer, the linear layer that computes the same, the former's weight as the latter's, and an input of both."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(12, 8)
    if kind == "Conv1D":
        other = pytest.importorskip("transformers").pytorch_utils.Conv1D(8, 12)
        x, weight = torch.randn(5, 12), lambda parameter: parameter.t()
    else:
        other, x = torch.nn.Conv2d(12, 8, 1), torch.randn(5, 12, 1, 1)
        weight = lambda parameter: parameter.flatten(1)  # noqa: E731
    with torch.no_grad():
        weight(other.weight).copy_(linear.weight)
        other.bias.copy_(linear.bias)
    return other, linear, weight, x.requires_grad_()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("kind", ["Conv1D", "Conv2d"])
def test_a_layer_is_sampled_as_the_linear_layer_that_it_is(kind, recipe):
    other, linear, _, x = pair(kind)
    models = torch.nn.Sequential(other), torch.nn.Sequential(linear)
    for model in models:
        octavo.convert(model, recipe, convolutions=True)
    sampled, expected = watched_steps(models[0], x), watched_steps(models[1], x.detach().flatten(1).requires_grad_())
    for sample, same in zip(sampled.samples, expected.samples, strict=True):
        assert sample.casts.keys() == same.casts.keys()
        assert {key.role for key in sample.casts} == {"input", "weight", "grad_output"}
        assert sample.products.keys() == same.products.keys()
        assert len(sample.products) == 3
        for key, numbers in sample.casts.items():
            np.testing.assert_allclose(numbers, same.casts[key], rtol=1e-6)
        for key, numbers in sample.products.items():
            np.testing.assert_allclose(numbers, same.products[key], rtol=1e-6)
        assert sample.layers == same.layers
        noise = "gradient_to_noise"
        assert sample.scalars[noise] == pytest.approx(same.scalars[noise], rel=1e-6)
        assert math.isfinite(sample.scalars[noise])
    assert [str(one) for one in sampled.findings()] == [str(one) for one in expected.findings()]


def test_a_conv1d_is_captured_with_its_weight_as_a_linear_layers(tmp_path):
    other, _, weight, x = pair("Conv1D")
    model = torch.nn.Sequential(other)
    octavo.convert(model, "delayed")
    watcher = octavo.doctor.watch(model, captures=tmp_path)
    with watcher.capturing(["0"]):
        model(x).sum().backward()
    (capture,) = Captures(tmp_path).of("0")
    assert torch.equal(capture.weight, weight(other.weight))
    assert torch.equal(capture.input, x)


def test_a_remedy_reaches_a_conv1d_by_its_path():
    other, _, _, _ = pair("Conv1D")
    model = torch.nn.Sequential(other)
    octavo.convert(model, "tensorwise")
    undo = apply_to_model(model, Remedy(text="", changes={"overrides": {"0": "rowwise"}}))
    assert other.layer("weight").recipe.name == "rowwise"
    take_back(model, undo)
    assert other.layer("weight").recipe.name == "tensorwise"


def test_experts_alone_are_watched():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"experts": GroupedLinear(3, 16, 8)})
    watcher = octavo.doctor.watch(model, interval=1)
    for _ in range(2):
        with watcher.step():
            model["experts"](torch.randn(9, 16), torch.tensor([0, 5, 6, 9])).square().sum().backward()
    assert watcher.samples[1].modules["most_expert_tokens"] == {"experts": 5.0}
    assert watcher.findings() == []


def test_a_model_whose_convolutions_stay_is_refused():
    model = torch.nn.Sequential(torch.nn.Conv2d(12, 8, 1))
    with pytest.warns(UserWarning, match="convert changed nothing"):
        octavo.convert(model, "tensorwise")
    with pytest.raises(ConfigError, match="no layer of this model is octavo's"):
        octavo.doctor.watch(model)
