import pytest
import torch

import octavo
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from octavo.errors import ConfigError
from octavo.scaling import AmaxHistory


def _output(layer, x, **options):
    with torch.no_grad(), te.fp8_autocast(**options):
        return layer(x)


def test_the_recipe_of_the_block_is_what_runs():
    layer, x = te.Linear(64, 64), torch.randn(8, 64)
    ours = octavo.nn.Linear(64, 64, recipe="mxfp8")
    ours.load_state_dict(layer.linear.state_dict())
    exact, mxfp8 = torch.nn.functional.linear(x, layer.weight, layer.bias), ours(x)
    assert torch.equal(layer(x), exact), "high precision outside of a block"
    assert torch.equal(_output(layer, x, enabled=False), exact)
    assert torch.equal(_output(layer, x, fp8_recipe=MXFP8BlockScaling()), mxfp8)
    assert not torch.equal(mxfp8, exact)


def test_without_a_recipe_scaling_is_delayed_by_1024_steps():
    layer = te.Linear(16, 16)
    with te.autocast():
        layer(torch.full((2, 16), 3.0)).sum().backward()
    history = layer.get_submodule("linear.amax_history")
    assert isinstance(history, AmaxHistory)
    assert history.spec == DelayedScaling().octavo_recipe().history
    assert history.spec.length == 1024


def test_a_step_ends_when_the_outermost_block_is_left():
    layer = te.Linear(4, 4)
    for amax in (3.0, 5.0, 1.0):
        with te.fp8_autocast(), te.fp8_autocast(fp8_recipe=DelayedScaling()):
            loss = layer(torch.full((2, 4), amax)).sum() + layer(torch.full((2, 4), amax / 2)).sum()
        loss.backward()
    with te.fp8_autocast():
        layer(torch.ones(2, 4))
    assert layer.get_buffer("linear.amax_history.window")[0, :4].tolist() == [1.0, 5.0, 3.0, -1.0]


def test_a_recipe_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="recipe"), te.autocast(recipe="tensorwise"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("context", [te.quantized_model_init, te.fp8_model_init])
def test_weights_stay_in_high_precision_with_a_warning(context):
    with pytest.warns(UserWarning, match="high precision"), context(preserve_high_precision_init_val=True):
        layer = te.Linear(4, 4)
    assert layer.weight.dtype is torch.float32
    with context(enabled=False):
        te.Linear(4, 4)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()])
def test_checkpoint_changes_no_bit(recipe):
    results = []
    layer = te.TransformerLayer(16, 32, 2, attention_dropout=0.0, hidden_dropout=0.0)
    x = torch.randn(3, 2, 16, requires_grad=True)
    for recompute in (False, True):
        with te.autocast(recipe=recipe):
            y = (
                te.checkpoint(layer, x, attention_mask=None, use_reentrant=True, tp_group=None)
                if recompute
                else layer(x)
            )
        results.append(torch.autograd.grad(y.sum(), [x, *layer.parameters()]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_checkpoint_refuses_a_group():
    with pytest.raises(ConfigError, match="tp_group"):
        te.checkpoint(torch.exp, torch.ones(1), tp_group=object())


@pytest.mark.parametrize("options", [{"fp8_group": "x"}, {"fp8_group": 0}, {"fp8_group": [0, 1]}])
def test_invalid_process_group_is_refused(options):
    with (
        pytest.raises(TypeError, match=r"is a torch.distributed.ProcessGroup or None, not"),
        te.fp8_autocast(**options),
    ):
        pass
