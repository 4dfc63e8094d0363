"""``is_first_microbatch``: a weight is recorded once an optimizer's step, however many micro-batches share it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import octavo
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(16, 16),
    "LayerNormLinear": lambda: te.LayerNormLinear(16, 16),
    "LayerNormMLP": lambda: te.LayerNormMLP(16, 32),
    "MultiheadAttention": lambda: te.MultiheadAttention(16, 2),
    "TransformerLayer": lambda: te.TransformerLayer(16, 32, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_recorded_once_a_step(name):
    module = MODULES[name]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _step in range(2):
        for micro in range(3):
            with te.autocast(recipe=DelayedScaling(amax_history_len=8)):
                y = module(torch.randn(4, 2, 16), is_first_microbatch=micro == 0)
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = {key: int(value) for key, value in octavo.scaling_state(module).items() if key.endswith("weight.steps")}
    assert steps
    assert set(steps.values()) == {2}


def test_without_it_every_block_records_its_weight():
    module = te.Linear(16, 16)
    for _micro in range(3):
        with te.autocast(recipe=DelayedScaling(amax_history_len=8)):
            module(torch.randn(4, 16)).sum().backward()
    assert octavo.scaling_state(module)["linear.weight.steps"].item() == 3
