"""A shadow measures what a layer would have measured of itself under the other recipe."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor import watch
from octavo.doctor.series import CastKey
from octavo.doctor.shadow import Shadow
from octavo.doctor.statistics import CAST_FIELDS


def trained_once(layer: torch.nn.Module, x: torch.Tensor, *, shadow: Shadow | None = None) -> None:
    """One step of SGD, seen by the shadow; the weight changes before anything is measured."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    if shadow is None:
        layer(x).square().sum().backward()
    else:
        with shadow.watching():
            layer(x).square().sum().backward()
    optimizer.step()


def layer_and_input() -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = octavo.nn.Linear(24, 16, bias=False, recipe="bf16")
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 24, generator=generator))
    x = torch.randn(3, 10, 24, generator=generator) * torch.tensor([1.0] * 23 + [300.0])
    return torch.nn.Sequential(layer), x.requires_grad_()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "delayed"])
def test_equals_the_layers_own_statistics_under_that_recipe(recipe):
    """ "delayed" without a past casts by its own amaxes, in the shadow as in the layer."""
    model, x = layer_and_input()
    twin = copy.deepcopy(model)
    octavo.convert(twin, recipe)
    watcher = watch(twin, interval=1)
    with watcher.step():
        twin(x).square().sum().backward()
    own = watcher.samples[0]
    shadow = Shadow("0", model[0], octavo.recipes.get(recipe))
    trained_once(model, x, shadow=shadow)
    found = shadow.sample(7)
    assert found is not None
    assert found.step == 7
    assert found.casts.keys() == own.casts.keys()
    assert found.layers["0"]["recipe"] == recipe
    for key, numbers in own.casts.items():
        if key.role != "grad_output":  # which the other recipe's output would have made another
            np.testing.assert_allclose(found.casts[key], numbers, rtol=1e-6)


def test_a_call_by_keyword_is_recorded():
    model, x = layer_and_input()
    shadow = Shadow("0", model[0], octavo.recipes.get("tensorwise"))
    with shadow.watching():
        model[0](input=x).square().sum().backward()
    assert shadow.sample(1) is not None


def test_training_does_not_see_it():
    (plain, x), (shadowed, _) = layer_and_input(), layer_and_input()
    trained_once(plain, x)
    trained_once(shadowed, x, shadow=Shadow("0", shadowed[0], octavo.recipes.get("tensorwise")))
    assert torch.equal(plain[0].weight, shadowed[0].weight)
    assert not shadowed[0]._forward_hooks
    assert shadowed[0].recipe.name == "bf16"


def test_a_delayed_scale_is_made_from_the_window():
    model, x = layer_and_input()
    window = torch.tensor([[5.0, 4000.0], [2.0, -1.0], [7.0, 1.0]])
    shadow = Shadow("0", model[0], octavo.recipes.get("delayed", history_length=2), window)
    trained_once(model, x, shadow=shadow)
    found = shadow.sample(1)
    assert found is not None
    g = {key.role: numbers[CAST_FIELDS.index("stale_ratio")] for key, numbers in found.casts.items()}
    assert g["input"] == pytest.approx(x.abs().max().item() / 4000, rel=1e-5)
    amax = found.casts[CastKey("0", "weight", "output")][CAST_FIELDS.index("amax")]
    assert g["weight"] == pytest.approx(amax / 2, rel=1e-5)


def test_shadow_returns_no_sample_without_a_finite_recorded_step():
    model, x = layer_and_input()
    shadow = Shadow("0", model[0], octavo.recipes.get("tensorwise"))
    assert shadow.sample(1) is None, "the layer did not run"
    x.data[0, 0, 0] = torch.nan
    trained_once(model, x, shadow=shadow)
    assert shadow.sample(1) is None
    with torch.no_grad(), shadow.watching():
        model(x)
