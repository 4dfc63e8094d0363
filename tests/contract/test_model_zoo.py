"""Ten architectures of transformers, small and without weights: converted, stepped, restored; how much runs in FP8.

Their numbers are compared with the plain model's, by a bound that wrong experts break.
"""

import math
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", reason="transformers is not installed: no models to convert")

from benchmarks.model_zoo import build, row, wrong_numbers
from octavo.convert import experts
from octavo.convert.experts import InterfaceExperts
from octavo.nn.grouped_linear import ExpertsProjection

NAMES = ("mixtral", "gpt-oss", "olmoe", "phimoe", "granite-moe", "qwen3-moe", "qwen2-moe", "llama4", "jetmoe", "gpt2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_nearly_all_of_it_runs_in_fp8_trains_and_comes_back(name):
    result = row(name, lambda: build(name))
    assert result.problem == ""
    assert result.before < 0.5
    assert result.after > (0.95 if name == "gpt2" else 0.9)


def scaled(factor):
    def fault(patch):
        forward = InterfaceExperts.forward
        patch.setattr(InterfaceExperts, "forward", lambda *args: factor * forward(*args))

    return fault


def no_activation(patch):
    def linear(self, hidden):
        gate, up = hidden.chunk(2, dim=-1)
        return gate * up

    forward = InterfaceExperts.forward

    def wrong(self, *args):
        self._apply_gate = linear.__get__(self)
        try:
            return forward(self, *args)
        finally:
            del self._apply_gate

    patch.setattr(InterfaceExperts, "forward", wrong)


def rows_of_the_neighbour(patch):
    offsets = experts._offsets
    patch.setattr(experts, "_offsets", lambda counts: offsets(counts.roll(1)))


def no_gradient_of_weights(patch):
    matrices = ExpertsProjection.matrices
    patch.setattr(
        ExpertsProjection, "matrices", lambda self: tuple(x if x is None else x.detach() for x in matrices(self))
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fault",
    [scaled(0.0), scaled(2.0), no_activation, rows_of_the_neighbour, no_gradient_of_weights],
    ids=["zeros", "2 times", "no activation", "rows of the neighbour", "no gradient of weights"],
)
def test_wrong_numbers_of_experts_are_beyond_rounding(fault, monkeypatch):
    fault(monkeypatch)
    assert "experts" in row("qwen3-moe", lambda: build("qwen3-moe")).problem


def test_the_bound_is_of_each_kind_and_not_a_number_is_beyond_it():
    expected = {"the output": torch.ones(4), "a.0.w": torch.ones(2), "a.1.w": torch.ones(2)}
    noisy = {name: x * 1.01 for name, x in expected.items()}
    near, far = ({**expected, "a.1.w": torch.full((2,), number)} for number in (1.02, 1.05))
    assert wrong_numbers(expected, near, [noisy]) == ""
    assert wrong_numbers(expected, far, [noisy]).startswith(
        "1 of 2 beyond rounding: a.*.w is 0.0354 off, the bound is 0.02"
    )
    assert wrong_numbers(expected, {**expected, "a.1.w": torch.full((2,), math.nan)}, [noisy])
    assert wrong_numbers(expected, {"the output": expected["the output"]}, [noisy])
