"""Faults put in on purpose: the finding names the tensor where the fault is, not one it spread to."""

from contextlib import nullcontext

import pytest
import torch

from octavo.models import Llama
from octavo.parallel.ranks import Ranks
from octavo.training.nonfinite import _FirstNonFinite, first_nonfinite
from tests.unit.training.tiny_runs import MODEL


@pytest.fixture
def model():
    return Llama(MODEL.llama(vocab_size=50, max_positions=8))


def find(model, **options):
    tokens = torch.randint(0, 50, (2, 8))
    return first_nonfinite(model, [(tokens, tokens)], surroundings=nullcontext(), **options)


def test_finite_step_has_no_finding(model):
    assert find(model) is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_bad_parameter(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")
        model.lm_head.weight[0, 0] = float("inf")
    finding = find(model)
    assert finding.tensor == "parameter model.layers.0.mlp.up_proj.weight"
    assert (finding.bad, finding.elements) == (1, 16 * 32)
    assert str(finding) == "parameter model.layers.0.mlp.up_proj.weight (1 of 512 elements)"


def test_an_output_that_overflows(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(3e38)
        model.model.layers[0].input_layernorm.weight.fill_(9.0)
    assert find(model).tensor == "output of model.layers.0.self_attn.v_proj"


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_gradient_that_overflows(model):
    """Between the down projection and the product before it: the factors' gradients are the first bad ones."""
    down = model.model.layers[0].mlp.down_proj
    plain = down.forward
    down.forward = lambda x: plain(BadGradient.apply(x))
    assert find(model).tensor in {f"gradient of the output of model.layers.0.mlp.{x}_proj" for x in ("gate", "up")}


def test_a_parameter_gradient_alone(model):
    down = model.model.layers[0].mlp.down_proj
    down.forward = lambda x: torch.nn.functional.linear(x, BadGradient.apply(down.weight))
    assert find(model).tensor == "gradient of parameter model.layers.0.mlp.down_proj.weight"


def test_a_loss_scale_that_overflows(model):
    assert find(model, loss_scale=float("inf")).tensor.startswith("gradient of the output of lm_head")


def test_the_second_micro_batch(model):
    tokens = torch.randint(0, 50, (2, 8))
    calls = []

    def fail_on_second(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 2 else output

    model.model.norm.register_forward_hook(fail_on_second)
    finding = first_nonfinite(model, [(tokens, tokens)] * 3, surroundings=nullcontext())
    assert finding is not None
    assert finding.tensor == "output of model.norm"
    assert len(calls) == 2


class TwoRanks(Ranks):
    """The second of two ranks, which has seen ``first`` on the other one."""

    __slots__ = ("first",)
    first: object

    def gathered(self, value):
        return [self.first, value]


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [
        (["x", "mlp", "loss!"], ["x", "mlp!", "loss!"], (1,)),  # a loss that they share
        (["x", "mlp!", "loss!"], ["x", "mlp!", "loss!"], (0, 1)),  # a layer's output that they have summed
        (["gradient of parameter w!", "x", "y"], ["g", "x", "gradient of y!"], (1,)),
        (["x", "mlp", "loss"], ["x", "mlp", "loss"], None),
    ],
)
def test_the_rank_that_found_one_first(first, second, ranks):
    ends = []
    for names in (first, second):
        record = _FirstNonFinite(TwoRanks(rank=1, size=2))
        for name in names:
            record.look(name.removesuffix("!"), torch.tensor(float("nan") if name.endswith("!") else 0.0))
        ends.append(record)
    object.__setattr__(ends[1].ranks, "first", ends[0].finding)
    finding = ends[1].first()
    assert (None if finding is None else finding.ranks) == ranks
