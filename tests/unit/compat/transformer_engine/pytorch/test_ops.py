from typing import Any

import pytest
import torch
from torch.nn import functional as F

import octavo
from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import Float8CurrentScaling
from octavo.compat.transformer_engine.pytorch import ops
from octavo.errors import ConfigError


def test_a_sequence_computes_its_parts_one_after_the_other():
    model: Any = ops.Sequential(ops.Linear(8, 6), ops.Identity(), ops.BasicLinear(6, 4), ops.Bias(4))
    torch.nn.init.normal_(model[3].bias)
    x = torch.randn(3, 8)
    hidden = F.linear(x, model[0].weight, model[0].bias)
    assert torch.equal(model(x), F.linear(hidden, model[2].weight) + model[3].bias)


def test_a_linear_part_runs_the_blocks_recipe():
    layer, x = ops.Linear(16, 8, bias=False), torch.randn(4, 16)
    ours = octavo.nn.Linear(16, 8, bias=False, recipe=Float8CurrentScaling().octavo_recipe())
    ours.load_state_dict(layer.linear.state_dict())
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    assert torch.equal(y, ours(x))
    assert not torch.equal(y, layer(x))


def test_checkpoints_have_the_names_of_the_basic_parts():
    weight, bias = torch.randn(4, 8), torch.randn(4)
    model: Any = ops.Sequential(ops.Linear(8, 4))
    model.load_state_dict({"0.basic_ops.0.weight": weight, "0.basic_ops.1.bias": bias})
    assert torch.equal(model[0].weight, weight)
    assert torch.equal(model[0].bias, bias)


@pytest.mark.parametrize(
    "arguments",
    [{"tensor_parallel_group": object()}, {"accumulate_into_main_grad": True}, {"tensor_parallel_mode": "diagonal"}],
)
def test_unsupported_arguments_of_operations_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ops.Linear(8, 8, **arguments)
    with pytest.raises(TypeError, match="colour"):
        ops.Bias(8, colour="red")


@pytest.mark.parametrize("name", ["LayerNorm", "GELU", "SwiGLU", "AllReduce", "GroupedLinear", "Quantize"])
def test_other_operations_can_be_imported_and_are_refused_by_name(name):
    operation = getattr(ops, name)
    with pytest.raises(ConfigError, match=f"octavo has no ops.{name}: ."):
        operation(8)


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(ops, "Convolution")
