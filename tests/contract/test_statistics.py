"""What a function as the statistic of delayed scaling may be."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import octavo
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
