"""Gradients through ``autograd.Function`` in a traced graph, in every torch that octavo supports."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.tracing import distinct


class _Doubled(torch.autograd.Function):
    """2x by operations that name its result three times; its gradient is a recognisable 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return distinct((x * 2).to(x.dtype).contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_a_result_with_several_names_keeps_its_gradient_in_a_traced_graph() -> None:
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(_Doubled.apply, backend="aot_eager", fullgraph=True)(x)
    y.backward(torch.ones(4))
    assert torch.equal(y, x * 2)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 3.0))  # torch 2.11 gave zeros


def test_outside_of_a_graph_it_is_the_result_itself() -> None:
    x = torch.randn(4)
    assert distinct(x) is x
