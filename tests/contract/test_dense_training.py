"""A dense model that is converted and trained against the same model in plain PyTorch, bit for bit over steps.

The plain model's layers are written here: operands by the documentation's table and the scalar reference, and amax
histories as lists of numbers. GEMMs are those of the float64 oracle in both, since the order of a kernel's sums may
depend on how its operands lie in memory. What octavo builds for mixtures, for several ranks or for speed must not
change a code, a loss, a weight or a history of a model without experts.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.kernels.backend import MatmulProblem
from octavo.kernels.dispatch import BACKENDS
from octavo.models import Llama
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor
from octavo.recipes import History
from tests.contract.gemm_oracle import decode
from tests.contract.operand_oracle import expected_operand
from tests.contract.test_recipes import DELAYED, TABLE
from tests.tiny_llama import tiny_llama_config
from tests.unit.scaling.test_amax_history import PlainRole

STEPS, BATCH, TOKENS, VOCABULARY = 4, 2, 9, 64
INPUT, WEIGHT, GRAD = range(3)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of decoded operands, rounded once."""
    return (a.contiguous() @ b.contiguous().t()).float()


@pytest.fixture
def exact_gemms(monkeypatch):
    """The numbers of :func:`exact` for every GEMM of octavo's; the list has the number of calls."""
    calls = [0]

    def scaled_mm(
        _: object, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, problem: MatmulProblem
    ) -> Tensor:
        assert bias is None
        assert problem.out_dtype is torch.float32
        calls[0] += 1
        return exact(decode(a), decode(b))

    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "scaled_mm", scaled_mm)
    return calls


class PlainLinear(nn.Module):
    """A linear layer without bias in FP8, with nothing of ``octavo.nn`` and ``octavo.functional``."""

    def __init__(self, layer: nn.Linear, recipe: str) -> None:
        super().__init__()
        self.weight, self.recipe = layer.weight, recipe
        self.roles = [PlainRole(History()) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Gemms.apply(x, self.weight, self)
        return y

    def product(self, gemm: int, a: tuple[Tensor, int], b: tuple[Tensor, int]) -> Tensor:
        """The output's, grad_input's or grad_weight's GEMM of two tensors with their roles."""
        pair = TABLE[self.recipe][gemm]
        assert pair is not None
        operands = list[Tensor]()
        for row, (tensor, role) in zip(pair, (a, b), strict=True):
            assert row is not None
            past = self.roles[role].amax if self.recipe in DELAYED else None
            operands.append(decode(expected_operand(row, tensor, past_amax=past)))
        return exact(*operands)


class Gemms(torch.autograd.Function):
    """The three GEMMs of a :class:`PlainLinear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: PlainLinear) -> Tensor:
        rows = x.flatten(0, -2)
        ctx.save_for_backward(rows, weight)
        ctx.layer, ctx.leading = layer, x.shape[:-1]
        for role, tensor in ((INPUT, rows), (WEIGHT, weight)):
            layer.roles[role].record(float(tensor.abs().max()))
        return layer.product(0, (rows, INPUT), (weight, WEIGHT)).unflatten(0, ctx.leading)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        grad, (rows, weight) = gradients[0].flatten(0, -2), ctx.saved_tensors
        ctx.layer.roles[GRAD].record(float(grad.abs().max()))
        return (
            ctx.layer.product(1, (grad, GRAD), (weight.t(), WEIGHT)).unflatten(0, ctx.leading),
            ctx.layer.product(2, (grad.t(), GRAD), (rows.t(), INPUT)),
            None,
        )


def train(model: nn.Module) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for layer in model.modules():
            for role in layer.roles if isinstance(layer, PlainLinear) else ():
                role.close()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_losses_weights_and_histories_are_those_of_the_plain_model(recipe, exact_gemms):
    torch.manual_seed(0)
    model = Llama(tiny_llama_config(vocab_size=VOCABULARY))
    plain = copy.deepcopy(model)
    report = octavo.convert(model, recipe)
    assert len(report.converted) == 14
    for path in report.converted:
        layer = plain.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        plain.set_submodule(path, PlainLinear(layer, recipe))
    assert train(model) == train(plain)
    assert exact_gemms == [3 * STEPS * len(report.converted)]
    for (name, weight), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, expected), name
    if recipe in DELAYED:
        octavo.update_scales(model)
        for path in report.converted:
            ours, theirs = model.get_submodule(path), plain.get_submodule(path)
            assert isinstance(ours, Linear)
            assert isinstance(theirs, PlainLinear)
            assert ours.amax_history is not None
            for role, history in enumerate(theirs.roles):
                assert ours.amax_history.steps[role] == history.steps == STEPS
                assert ours.amax_history.window[role, :STEPS].tolist() == history.window
                assert ours.amax_history.amax[role] == history.amax
