"""Steps within an optimizer's step: one step of delayed scaling, however many torch reports."""

from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo.scaling import EMPTY

RECIPE = octavo.recipes.get("delayed", history_length=4)


def _model() -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    octavo.convert(model, RECIPE)
    return model


def _run(model: nn.Module, amax: float) -> None:
    model.zero_grad()
    model(torch.full((2, 4), amax)).square().mean().backward()


def _window(model: nn.Module) -> list[float]:
    return octavo.scaling_state(model)["0.input.amax_history"].tolist()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets others take its steps, as ``ZeroRedundancyOptimizer`` does."""

    def __init__(self, parameters: list[nn.Parameter], *parts: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.parts = parts

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for part in self.parts:
            part.step()


class SteppingTwice(torch.optim.SGD):
    """An optimizer that steps once more from where its parent class's step led."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            if closure is not None:
                with torch.enable_grad():
                    closure()
            super().step()


def _wrapped(model: Any) -> Wrapper:
    return Wrapper([*model.parameters()], _sgd(model[0]), _sgd(model[2]))


def _stepping_twice(model: nn.Module) -> SteppingTwice:
    _sgd(nn.Linear(1, 1))  # torch reports the steps of a parent class as soon as one of it exists
    return SteppingTwice(model.parameters(), lr=0.01)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer_of", [_wrapped, _stepping_twice])
def test_the_steps_within_an_optimizers_step_end_with_it_once(optimizer_of, compiled):
    model = _model()
    optimizer = optimizer_of(model)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for amax in (8.0, 5.0, 0.5):
        _run(model, amax)
        step()
    assert _window(model) == [0.5, 5.0, 8.0, EMPTY]
    assert model[0].scale_updates.closed_steps == 3
    assert [*model[0].scale_updates.optimizers] == [optimizer]


def test_the_closures_between_steps_of_the_parent_class_are_one_step():
    model, amaxes = _model(), iter([8.0, 2.0, 4.0, 5.0])
    optimizer = _stepping_twice(model)
    for _ in range(2):
        optimizer.step(lambda: _run(model, next(amaxes)))
    assert _window(model) == [5.0, 8.0, EMPTY, EMPTY]


def test_after_an_optimizers_step_that_raises_steps_end_as_before():
    def fail() -> None:
        raise ArithmeticError

    model = _model()
    optimizer = _wrapped(model)
    with pytest.raises(ArithmeticError):
        optimizer.step(fail)
    for amax in (8.0, 5.0):
        _run(model, amax)
        optimizer.step()
    assert _window(model) == [5.0, 8.0, EMPTY, EMPTY]
    assert model[0].scale_updates.closed_steps == 2


def test_a_closure_that_trains_another_model_ends_that_ones_steps():
    model, inner = _model(), _model()
    optimizer, theirs = _wrapped(model), _sgd(inner)

    def closure() -> None:
        for amax in (8.0, 5.0):
            _run(inner, amax)
            theirs.step()
        _run(model, 7.0)

    optimizer.step(closure)
    assert _window(inner) == [5.0, 8.0, EMPTY, EMPTY]
    assert _window(model) == [7.0, EMPTY, EMPTY, EMPTY]
