"""What a function as the statistic of delayed scaling may be."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo.errors import ConfigError
from octavo.recipes import History


class HalfOfTheNewest:
    def __call__(self, window: Tensor, amax: Tensor) -> Tensor:
        return window[:, 0] / 2

    def method(self, window: Tensor, amax: Tensor) -> Tensor:
        return self(window, amax)


def _newest_over(window: Tensor, amax: Tensor, *, by: float) -> Tensor:
    return window[:, 0] / by


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "object": HalfOfTheNewest(),
    "method": HalfOfTheNewest().method,
    "partial": partial(_newest_over, by=2),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_may_be_any_callable_and_a_copied_layer_keeps_it(name):
    delayed = octavo.recipes.get("delayed")
    recipe = replace(delayed, history=History(statistic=STATISTICS[name]))
    layer = octavo.nn.Linear(4, 4, recipe=recipe, manual_scale_updates=True)
    for each in (layer, copy.deepcopy(layer)):
        for size in (1.0, 6.0):
            each(torch.full((1, 4), size)).sum().backward()
            octavo.update_scales(each)
        assert octavo.scaling_state(each)["input.amax"].item() == 3.0


def _trained(statistic: Callable[[Tensor, Tensor], Any]) -> Any:
    """A layer after three steps with inputs of 1, 2 and 3."""
    recipe = replace(octavo.recipes.get("delayed"), history=History(length=3, statistic=statistic))
    layer = octavo.nn.Linear(4, 4, recipe=recipe, manual_scale_updates=True)
    for size in (1.0, 2.0, 3.0):
        layer(torch.full((1, 4), size)).sum().backward()
        octavo.update_scales(layer)
    return layer


@pytest.mark.parametrize("amax", [float("inf"), float("nan"), -float("inf"), -1.0, 0.0])
def test_a_statistic_that_is_no_amax_keeps_the_one_in_force_and_the_state_loads(amax):
    layer = _trained(lambda window, _: torch.where(window[:, 0] > 2, amax, window[:, 0]))
    state = octavo.scaling_state(layer)
    assert state["input.amax"].item() == 2.0
    octavo.load_scaling_state(layer, state)


def test_a_double_beyond_float32_keeps_the_amax_in_force():
    layer = _trained(lambda window, _: window[:, 0].double().pow(1 + 999 * (window[:, 0] > 2)))
    assert octavo.scaling_state(layer)["input.amax"].item() == 2.0


def test_a_statistic_may_write_to_its_arguments():
    layer = _trained(lambda window, amax: amax.copy_(window.mul_(2)[:, 0]))
    state = octavo.scaling_state(layer)
    assert (state["input.amax"].item(), state["input.amax_history"].tolist()) == (6.0, [3.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("statistic", "returned"),
    [
        (lambda window, _: window, r"shape \[3, 3\]"),
        (lambda _, amax: amax[0], r"shape \[\]"),
        (lambda *_: 1.0, "float"),
    ],
)
def test_a_statistic_of_another_shape_is_refused(statistic, returned):
    with pytest.raises(ConfigError, match=rf"returned {returned}; it must return a tensor of shape \[3\]"):
        _trained(statistic)


def test_a_mean_of_encode_scales_is_ruled_by_one_tiny_amax_while_it_is_in_the_window():
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    octavo.convert(model, "article", convert_head=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    lost = []
    for step in range(48):
        x = torch.ones(2, 4, requires_grad=True)
        grad = torch.full((2, 4), 1e-20 if step == 5 else 1.0)
        model(x).backward(grad)
        optimizer.step()
        true = grad @ model[0].weight.detach()
        assert x.grad is not None
        lost.append(bool((x.grad - true).norm() > 0.999 * true.norm()))
    assert [step for step, is_lost in enumerate(lost) if is_lost] == [5, *range(8, 40)]
