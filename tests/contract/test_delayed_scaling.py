"""Delayed scaling as documented, sentence by sentence, seen at the operands of a layer's three products.

The general check drives a layer through random sequences of training steps, evaluations and closings, beside a model
in plain Python that knows only lists of numbers.
"""

from collections.abc import Collection

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo.errors import ConfigError
from octavo.formats import E4M3, E5M2, Format
from octavo.nn import Linear
from octavo.nn.scaling_state import rescale_gradient_history, update_scales
from octavo.recipes import History, Statistic
from octavo.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from tests.contract.gemm_oracle import recorded_products
from tests.recorded_state import end_step, recorded_state
from tests.unit.scaling.test_amax_history import PlainRole, backoffs

WEIGHT_AMAX = 0.75


def _layer(*, manual: bool = False, **options) -> Linear:
    layer = Linear(2, 2, bias=False, recipe=octavo.recipes.get("delayed", **options), manual_scale_updates=manual)
    torch.nn.init.constant_(layer.weight, WEIGHT_AMAX)
    return layer


def _train(
    layer: Linear, amax: float, grad_amax: float = 1.0, *, broken: Collection[int] = ()
) -> tuple[float, float, float]:
    """One training forward and backward on constant tensors and an update by hand; the scales of the three roles.

    The last elements of the ``broken`` roles' tensors are infinite; their finite amax is the same.
    """
    x, grad = torch.full((1, 2), amax), torch.full((1, 2), grad_amax)
    for role, tensor in ((INPUT, x), (WEIGHT, layer.weight.data), (GRAD_OUTPUT, grad)):
        if role in broken:
            tensor[-1, -1] = float("inf")
    with recorded_products() as products:
        layer(x.requires_grad_()).backward(grad)
    torch.nn.init.constant_(layer.weight, WEIGHT_AMAX)
    output, grad_input, grad_weight = products
    assert torch.equal(output.b.scale, grad_input.b.scale)  # one cast, two products
    assert torch.equal(output.a.scale, grad_weight.b.scale)
    assert torch.equal(grad_input.a.scale, grad_weight.a.scale)
    return output.a.scale.item(), output.b.scale.item(), grad_input.a.scale.item()


@torch.no_grad()
def _evaluate(layer: Linear, amax: float) -> tuple[float, float]:
    layer.eval()
    with recorded_products() as products:
        layer(torch.full((1, 2), amax))
    layer.train()
    (product,) = products
    return product.a.scale.item(), product.b.scale.item()


def _scale(amax: float, fmt: Format, margin: int = 0) -> float:
    """The documented formula in numpy: float64 division, one rounding, float32 reciprocal."""
    quotient = np.float64(fmt.max * 2.0**-margin) / np.float64(np.float32(amax))
    encode_scale = np.float32(np.minimum(quotient, np.finfo(np.float32).max))
    return float(np.float32(1) / encode_scale)


amaxes = st.floats(2.0**-10, 2.0**10, width=32)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("train"), amaxes, amaxes, st.sets(st.sampled_from([INPUT, WEIGHT, GRAD_OUTPUT]))),
        st.tuples(st.just("evaluate"), amaxes),
        st.tuples(st.just("close")),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(
    actions=actions,
    manual=st.booleans(),
    length=st.integers(1, 4),
    statistic=st.sampled_from([Statistic.MAX, Statistic.LATEST]),
    margin=st.integers(0, 3),
    update_interval=st.integers(1, 3),
    backoff=backoffs,
)
def test_scales_follow_the_plain_model(actions, *, manual, length, statistic, margin, update_interval, backoff):
    spec = History(length=length, statistic=statistic, update_interval=update_interval, backoff=backoff)
    layer = _layer(
        manual=manual,
        history_length=length,
        statistic=statistic,
        margin=margin,
        update_interval=update_interval,
        backoff=backoff,
    )
    roles = [PlainRole(spec) for _ in range(3)]

    def past(role: int, own: float) -> float:
        known = roles[role].amax
        return own if known is None else known

    def close() -> None:
        for role in roles:
            role.close()

    for action, *values in actions:
        if action == "close":
            update_scales(layer)
            close()
        elif action == "evaluate":
            expected = tuple(_scale(past(role, own), E4M3, margin) for role, own in ((0, values[0]), (1, WEIGHT_AMAX)))
            assert _evaluate(layer, values[0]) == expected
        else:
            if not manual and roles[GRAD_OUTPUT].pending is not None:
                close()
            own = (values[0], WEIGHT_AMAX, values[1])
            formats = (E4M3, E4M3, E5M2)
            expected = tuple(_scale(past(role, own[role]), formats[role], margin) for role in range(3))
            assert _train(layer, values[0], values[1], broken=values[2]) == expected
            for role in range(3):
                roles[role].record(own[role], overflowed=role in values[2])


def test_the_first_step_is_dynamic_and_the_second_uses_the_first():
    layer = _layer()
    assert _train(layer, 3.0, 5.0) == (_scale(3.0, E4M3), _scale(WEIGHT_AMAX, E4M3), _scale(5.0, E5M2))
    assert _train(layer, 7.0, 9.0) == (_scale(3.0, E4M3), _scale(WEIGHT_AMAX, E4M3), _scale(5.0, E5M2))
    assert _train(layer, 1.0, 1.0) == (_scale(7.0, E4M3), _scale(WEIGHT_AMAX, E4M3), _scale(9.0, E5M2))


def test_values_beyond_the_amax_history_saturate():
    layer = _layer()
    _train(layer, 1.0)
    with recorded_products() as products:
        layer(torch.tensor([[100.0, -0.5]]))
    assert products[0].a.data.float().tolist() == [[448.0, -224.0]]


def test_micro_batches_of_a_step_count_with_their_maximum():
    layer = _layer(manual=True)
    for amax, grad_amax in ((2.0, 1.0), (9.0, 6.0), (3.0, 2.0)):
        input_scale, _, grad_scale = _train(layer, amax, grad_amax)
        assert (input_scale, grad_scale) == (_scale(amax, E4M3), _scale(grad_amax, E5M2)), "dynamic within the first"
    update_scales(layer)
    for amax in (1.0, 50.0):
        input_scale, _, grad_scale = _train(layer, amax, amax)
        assert (input_scale, grad_scale) == (_scale(9.0, E4M3), _scale(6.0, E5M2)), "the same for a whole step"


def test_evaluation_never_writes():
    layer = _layer()
    _train(layer, 3.0)
    before = {name: buffer.clone() for name, buffer in recorded_state(layer).items()}
    _evaluate(layer, 1000.0)
    layer.eval()
    x = torch.full((1, 2), 500.0, requires_grad=True)
    layer(x).sum().backward()  # a gradient in evaluation, as for saliency maps
    layer.train()
    with torch.inference_mode(), octavo.autocast(enabled=False):
        layer(x)
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in recorded_state(layer).items())


def test_training_mode_without_gradients_records_nothing():
    layer = _layer(manual=True)
    with torch.no_grad():
        layer(torch.full((1, 2), 77.0))
    assert (layer.get_submodule("amax_history").get_buffer("pending") < 0).all()


def test_evaluating_an_untrained_layer_is_dynamic_and_makes_no_history():
    layer = Linear(2, 2, bias=False, recipe="tensorwise").eval()
    x = torch.randn(4, 2)
    dynamic = layer(x)
    with torch.inference_mode(), octavo.autocast("delayed"):
        assert torch.equal(layer(x), dynamic)
    assert layer.amax_history is None
    layer.train()
    with octavo.autocast("delayed"):  # would fail on buffers made in inference mode
        layer(x).sum().backward()
    assert layer.amax_history is not None


def test_infinities_and_nan_neither_freeze_nor_enter_the_history():
    layer = _layer()
    x = torch.tensor([[2.0, float("inf")]], requires_grad=True)
    layer(x).backward(torch.tensor([[float("nan"), 4.0]]))
    end_step()
    _train(layer, 1.0)
    assert layer.amax_history is not None
    assert layer.amax_history.amax.tolist() == [2.0, WEIGHT_AMAX, 4.0], "the finite elements' amax"
    layer(torch.full((1, 2), float("nan"), requires_grad=True)).backward(torch.full((1, 2), float("inf")))
    end_step()
    input_scale, _, grad_scale = _train(layer, 1.0)
    assert (input_scale, grad_scale) == (_scale(2.0, E4M3), _scale(4.0, E5M2)), "no finite element: nothing new"


def test_zero_tensors_keep_the_previous_scale():
    layer = _layer(history_length=1)
    _train(layer, 3.0, 5.0)
    _train(layer, 0.0, 0.0)
    input_scale, _, grad_scale = _train(layer, 1.0, 1.0)
    assert (input_scale, grad_scale) == (_scale(3.0, E4M3), _scale(5.0, E5M2))


def test_steps_of_zeros_push_nothing_out_of_the_window():
    """As many as the window is long: the largest amax is still that of the steps before."""
    layer = _layer(history_length=4)
    for amax in (8.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0):
        seen = _train(layer, amax, amax)
    assert (seen[0], seen[2]) == (_scale(8.0, E4M3), _scale(8.0, E5M2))
    state = octavo.scaling_state(layer)
    assert state["grad_output.amax_history"].tolist() == [2.0, 2.0, 8.0, -1.0]
    assert state["grad_output.steps"].item() == 3


def test_an_output_that_the_loss_leaves_out_records_no_gradient():
    """Autograd gives a layer zeros where others' outputs count."""
    layer = _layer(history_length=2)
    _train(layer, 3.0, 5.0)
    for _ in range(3):
        x = torch.full((1, 2), 3.0, requires_grad=True)
        (layer(x) * torch.zeros(1, 2) + x).sum().backward()
        end_step()
    assert octavo.scaling_state(layer)["grad_output.amax_history"].tolist() == [5.0, -1.0]


def test_a_steady_amax_gives_the_codes_of_tensorwise():
    torch.manual_seed(1)
    weight = torch.randn(24, 32)
    operands: dict[str, list] = {}
    for recipe in ("tensorwise", "delayed"):
        layer = Linear(32, 24, bias=False, recipe=recipe)
        layer.weight = torch.nn.Parameter(weight.clone())
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            x, grad = (torch.randn(8, width, generator=generator).clamp(-2, 2) for width in (32, 24))
            x[0, 0], grad[0, 0] = 2.0, 2.0
            with recorded_products() as products:
                layer(x.requires_grad_()).backward(grad)
            operands[recipe] = operands.get(recipe, []) + products
    for dynamic, delayed in zip(operands["tensorwise"], operands["delayed"], strict=True):
        for one, other in ((dynamic.a, delayed.a), (dynamic.b, delayed.b)):
            assert torch.equal(one.data.contiguous().view(torch.uint8), other.data.contiguous().view(torch.uint8))
            assert torch.equal(one.scale, other.scale)


def test_frozen_weights_leave_their_history_and_codes_alone():
    layer = _layer(history_length=2)
    _train(layer, 1.0)
    _train(layer, 1.0)
    layer.weight.requires_grad_(False)
    history = layer.amax_history
    assert history is not None
    update_scales(layer)
    torch.nn.init.constant_(layer.weight, WEIGHT_AMAX / 4)  # a new amax would show
    kept = history.window[WEIGHT].clone()
    x = torch.full((1, 2), 4.0, requires_grad=True)
    for _ in range(4):
        layer(x).sum().backward()
        end_step()
    assert torch.equal(history.window[WEIGHT], kept)
    assert history.steps.tolist()[WEIGHT] == 2
    assert history.amax[WEIGHT].item() == WEIGHT_AMAX
    assert history.amax[INPUT].item() == 4.0, "the input's goes on"


def test_a_layer_that_takes_no_gradient_still_follows_its_input():
    layer = _layer(history_length=1).requires_grad_(False)
    for amax in (1.0, 8.0, 2.0):
        end_step()
        layer(torch.full((1, 2), amax))
    assert layer.amax_history is not None
    assert layer.amax_history.amax[INPUT].item() == 8.0


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputation_neither_closes_the_step_nor_sees_other_scales(use_reentrant):
    """A layer used twice in a step: when the second use's backward has run, the first use is computed again."""
    layer = _layer(history_length=4)
    scales: list[float] = []
    for step in range(3):
        x = torch.full((1, 2), 2.0**step, requires_grad=True)
        with recorded_products() as products:
            hidden = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
            hidden = hidden / hidden.detach().abs().amax() * 2.0**step  # the same amax again
            torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=use_reentrant).sum().backward()
        outputs = [product.a.scale.item() for product in products if product.a.format is E4M3]
        assert len(outputs) == 4, "two uses, each computed twice"
        assert len(set(outputs)) == 1
        scales.append(outputs[0])
        end_step()
    assert scales == [_scale(1.0, E4M3), _scale(1.0, E4M3), _scale(2.0, E4M3)]
    update_scales(layer)
    assert layer.amax_history is not None
    assert layer.amax_history.steps.tolist() == [3, 3, 3]
    assert layer.amax_history.window[INPUT].tolist() == [4.0, 2.0, 1.0, -1.0]


def test_autocast_can_run_a_tensorwise_model_delayed():
    layer = Linear(2, 2, bias=False, recipe="tensorwise")
    torch.nn.init.constant_(layer.weight, WEIGHT_AMAX)
    with octavo.autocast("delayed"):
        _train(layer, 3.0)
        assert _train(layer, 1.0)[0] == _scale(3.0, E4M3)
    assert _train(layer, 1.0)[0] == _scale(1.0, E4M3)
    assert octavo.scaling_state(layer)["input.amax"].item() == 3.0


def test_two_delayed_recipes_do_not_share_one_history():
    layer = _layer(history_length=4)
    with (
        octavo.autocast(octavo.recipes.get("delayed", history_length=8)),
        pytest.raises(ConfigError, match=r"keeps a history for .* and cannot also run .*; use one delayed recipe"),
    ):
        layer(torch.zeros(1, 2))


def test_an_empty_batch_leaves_scales_finite_and_as_they_were():
    layer = _layer()
    _train(layer, 3.0, 5.0)
    layer(torch.zeros(0, 2, requires_grad=True)).backward(torch.zeros(0, 2))
    end_step()
    input_scale, _, grad_scale = _train(layer, 1.0, 1.0)
    assert (input_scale, grad_scale) == (_scale(3.0, E4M3), _scale(5.0, E5M2))


def test_an_empty_batch_pushes_nothing_out_of_the_window():
    layer = _layer(history_length=2)
    _train(layer, 3.0, 5.0)
    for _ in range(3):
        layer(torch.zeros(0, 2, requires_grad=True)).backward(torch.zeros(0, 2))
        end_step()
    state = octavo.scaling_state(layer)
    assert state["input.amax_history"].tolist() == [3.0, -1.0]
    assert state["grad_output.amax_history"].tolist() == [5.0, -1.0]


class TestTransformerEngines:
    """``delayed_te``: leaving the outermost autocast ends a step, whether or not a backward pass has run."""

    def test_each_outermost_block_is_a_step(self):
        layer = Linear(2, 2, bias=False, recipe=octavo.recipes.get("delayed_te", history_length=4))
        inputs = []
        for amax in (1.0, 8.0, 2.0, 4.0):
            with octavo.autocast(), recorded_products() as products:
                with octavo.autocast():  # an inner block ends nothing
                    layer(torch.full((1, 2), amax))
                layer(torch.full((1, 2), amax / 2))
            inputs.append({product.a.scale.item() for product in products})
        # The second call of a block is made from what the first was; the third block sees the second's maximum.
        assert inputs == [
            {_scale(1.0, E4M3), _scale(0.5, E4M3)},
            {_scale(1.0, E4M3)},
            {_scale(8.0, E4M3)},
            {_scale(8.0, E4M3)},
        ]
        assert octavo.scaling_state(layer)["input.amax_history"].tolist() == [4.0, 2.0, 8.0, 1.0]

    def test_an_inner_block_does_not_end_what_the_outer_one_began(self):
        layer = Linear(2, 2, bias=False, recipe="delayed_te")
        with octavo.autocast():
            layer(torch.full((1, 2), 3.0))
            with octavo.autocast():
                layer(torch.full((1, 2), 5.0))
            layer(torch.full((1, 2), 1.0))
        assert octavo.scaling_state(layer)["input.amax_history"][:2].tolist() == [5.0, -1.0]

    def test_the_window_forgets_after_its_length(self):
        layer = Linear(2, 2, bias=False, recipe=octavo.recipes.get("delayed_te", history_length=2))
        for amax in (64.0, 1.0, 2.0):
            with octavo.autocast():
                _train(layer, amax)
        assert octavo.scaling_state(layer)["input.amax"].item() == 2.0

    def test_a_backward_pass_inside_a_block_does_not(self):
        layer = Linear(2, 2, bias=False, recipe="delayed_te")
        with octavo.autocast():
            _train(layer, 3.0)
            _train(layer, 5.0)
        assert octavo.scaling_state(layer)["input.amax_history"][:2].tolist() == [5.0, -1.0]

    def test_outside_of_autocast_a_backward_pass_ends_the_step(self):
        layer = Linear(2, 2, bias=False, recipe="delayed_te")
        _train(layer, 3.0)
        assert _train(layer, 1.0)[0] == _scale(3.0, E4M3)

    def test_a_block_that_was_left_and_entered_again_is_over(self):
        layer = Linear(2, 2, bias=False, recipe="delayed_te")
        for amax in (5.0, 1.0):
            with octavo.autocast():
                x = torch.full((1, 2), amax, requires_grad=True)
                y = layer(x)
        with recorded_products() as products:
            y.sum().backward()
        assert octavo.scaling_state(layer)["input.steps"].item() == 2
        assert products, "the backward of the last block runs after it"


def test_backing_off_after_an_overflow():
    """The article's hysteresis: the encode scale shrinks by the factor, instead of following the window."""
    layer = _layer(history_length=1, backoff=0.5)
    _train(layer, 4.0, 8.0)
    layer(torch.tensor([[float("inf"), 1.0]], requires_grad=True)).backward(torch.tensor([[float("nan"), 0.5]]))
    end_step()
    assert _train(layer, 1.0)[0] == _scale(8.0, E4M3), "4 / 0.5, not the step's finite amax of 1"
    state = octavo.scaling_state(layer)
    assert state["input.amax"].item() == 1.0, "and the next step follows the window again"
    plain = _layer(history_length=1)
    _train(plain, 4.0)
    plain(torch.tensor([[float("inf"), 1.0]], requires_grad=True)).sum().backward()
    end_step()
    assert _train(plain, 1.0)[0] == _scale(1.0, E4M3)


@pytest.mark.parametrize("role", [INPUT, WEIGHT, GRAD_OUTPUT])
def test_backing_off_is_each_roles_own(role):
    layer = _layer(backoff=0.5)
    _train(layer, 4.0, 8.0)
    _train(layer, 4.0, 8.0, broken=[role])
    expected = [_scale(4.0, E4M3), _scale(WEIGHT_AMAX, E4M3), _scale(8.0, E5M2)]
    expected[role] *= 2
    assert list(_train(layer, 4.0, 8.0)) == expected


def test_a_first_step_with_an_overflow_has_nothing_to_back_off_from():
    layer = _layer(backoff=0.5)
    _train(layer, 4.0, 8.0, broken=[INPUT, WEIGHT, GRAD_OUTPUT])
    assert _train(layer, 1.0) == (_scale(4.0, E4M3), _scale(WEIGHT_AMAX, E4M3), _scale(8.0, E5M2))


class TestLossScale:
    """grad_output carries the loss scale, and so do its amaxes: when the scale changes, they must."""

    @pytest.mark.parametrize("recipe", ["delayed", "delayed_te"])
    @pytest.mark.parametrize("factor", [2.0, 0.5, 2.0**-7])
    def test_after_a_change_the_codes_are_those_of_no_change(self, recipe, factor):
        def gradient_codes(*, changed: bool) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(4)
            layer = Linear(16, 8, bias=False, recipe=recipe, manual_scale_updates=True)
            torch.nn.init.normal_(layer.weight, generator=generator)
            codes, loss_scale = [], 2.0**10
            for step in range(6):
                if step == 3 and changed:
                    rescale_gradient_history(layer, factor)
                    loss_scale *= factor
                with recorded_products() as products:
                    x, grad = (torch.randn(4, width, generator=generator) for width in (16, 8))
                    layer(x.requires_grad_()).backward(grad * loss_scale)
                update_scales(layer)
                codes.append(products[1].a.data.view(torch.uint8))
            return codes

        for one, other in zip(gradient_codes(changed=False), gradient_codes(changed=True), strict=True):
            assert torch.equal(one, other)

    def test_pending_amaxes_are_rescaled_and_other_roles_are_not(self):
        layer = _layer(manual=True)
        _train(layer, 3.0, 5.0)
        update_scales(layer)
        _train(layer, 3.0, 7.0)
        rescale_gradient_history(layer, 2)
        update_scales(layer)
        state = octavo.scaling_state(layer)
        assert state["grad_output.amax_history"][:3].tolist() == [14.0, 10.0, -1.0]
        assert state["grad_output.amax"].item() == 14.0
        assert state["input.amax_history"][:3].tolist() == [3.0, 3.0, -1.0]
        assert state["weight.amax"].item() == WEIGHT_AMAX

    @pytest.mark.parametrize("factor", [0, -2.0, float("inf"), float("nan"), True, "2"])
    def test_a_factor_that_no_loss_scale_changes_by_is_refused(self, factor):
        with pytest.raises(ConfigError, match="a positive, finite factor"):
            rescale_gradient_history(_layer(), factor)
