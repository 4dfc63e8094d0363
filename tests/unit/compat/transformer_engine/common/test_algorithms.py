"""A caller's functions against a list of amaxes and plain arithmetic."""

import pytest
import torch

from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from octavo.errors import ConfigError

AMAXES = (3.0, 5.0, 1.0, 2.0, 8.0)


def _trained(recipe: DelayedScaling, amaxes=AMAXES) -> te.Linear:
    """A layer whose input had these amaxes, one a step, the last of them in a block that has not been left."""
    layer = te.Linear(4, 4)
    for amax in amaxes:
        with te.autocast(recipe=recipe):
            layer(torch.full((2, 4), amax)).sum().backward()
    with te.autocast(recipe=recipe):
        layer(torch.ones(2, 4))
    return layer


def _input_amax(layer: te.Linear) -> float:
    return layer.get_buffer("linear.amax_history.amax")[0].item()


def test_the_history_is_ordered_as_transformer_engine_has_it():
    seen = []

    def newest(amax_history):
        if amax_history[0] == AMAXES[-1]:
            seen.append(amax_history.clone())
        return amax_history[0]

    layer = _trained(DelayedScaling(amax_history_len=4, amax_compute_algo=newest))
    assert _input_amax(layer) == AMAXES[-1]
    assert [history.tolist() for history in seen] == [[[8.0], [5.0], [1.0], [2.0]]]


@pytest.mark.parametrize(("name", "function"), [("max", lambda h: h.amax(dim=0)), ("most_recent", lambda h: h[0])])
def test_a_function_that_does_what_a_word_says_changes_no_bit(name, function):
    torch.manual_seed(0)
    by_word = _trained(DelayedScaling(amax_history_len=3, amax_compute_algo=name))
    torch.manual_seed(0)
    by_function = _trained(DelayedScaling(amax_history_len=3, amax_compute_algo=function))
    for buffer in ("window", "amax", "steps"):
        path = f"linear.amax_history.{buffer}"
        assert torch.equal(by_word.get_buffer(path), by_function.get_buffer(path)), buffer
    for one, other in zip(by_word.parameters(), by_function.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_mean_of_the_window_scales():
    layer = _trained(DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history.mean()))
    assert _input_amax(layer) == 5.0


def test_a_function_of_the_scale_is_given_what_it_documents_and_scales_by_its_result():
    calls = []

    def power_of_two(amax, scale, fp8_max, recipe):
        calls.append((amax.clone(), scale.clone(), fp8_max.clone(), recipe))
        return torch.exp2(torch.floor(torch.log2(fp8_max / amax)))

    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=power_of_two)
    layer = _trained(recipe, (3.0, 6.0))
    assert 448 / _input_amax(layer) == 64  # the largest power of two with 6 * scale within 448
    of_input = [call for call in calls if call[2] == 448 and call[0] in (3.0, 6.0)]
    assert [(amax.tolist(), scale.tolist()) for amax, scale, _, _ in of_input] == [([3.0], [1.0]), ([6.0], [128.0])]
    assert {maximum.item() for _, _, maximum, _ in calls} == {448.0, 57344.0}
    assert all(given is recipe for *_, given in calls)


def test_a_step_without_an_amax_or_a_usable_scale_leaves_the_scale():
    zeros = _trained(DelayedScaling(amax_compute_algo=lambda history: history[0]), (4.0, 0.0))
    assert _input_amax(zeros) == 4.0
    infinite = DelayedScaling(scaling_factor_compute_algo=lambda amax, *_: amax / 0)
    assert _input_amax(_trained(infinite, (4.0,))) == 0.0  # as before the first step: scaled by each tensor's own


@pytest.mark.parametrize("wrong", [lambda _: 3.0, lambda history: history.expand(-1, 2)])
def test_a_function_that_returns_no_single_number_is_refused(wrong):
    with pytest.raises(ConfigError, match="amax_compute_algo must return a tensor with one number"):
        _trained(DelayedScaling(amax_compute_algo=wrong), (1.0,))
