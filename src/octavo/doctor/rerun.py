"""Forward and backward of one captured layer under one recipe, and the operands of its GEMMs."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.doctor.capture import Capture
from octavo.functional import fp8_linear
from octavo.numerics import QuantizedTensor
from octavo.recipes import Recipe
from octavo.scaling import ROLES, AmaxHistory, LayerScaling, LayerWatch, Operand, Operands

__all__ = ["OperandRecorder", "Products", "Rerun"]

Products = tuple[Tensor, Tensor, Tensor]  # output [M, N], grad_input [M, K], grad_weight [N, K]


class Rerun:
    """Callable that computes the three GEMMs of one capture under one recipe.

    Args:
        capture: a capture with finite tensors, on the device to compute on.
        recipe: the recipe to run.
        ran: True for the layer as it ran, with the scales of that step; otherwise a delayed recipe computes its scales
            from the captured window.
    """

    def __init__(self, capture: Capture, recipe: Recipe, *, ran: bool) -> None:
        self.capture, self.recipe = capture, recipe
        self.amaxes = capture.amax if ran else _amaxes_from_window(capture, recipe)

    def __call__(self, watch: LayerWatch | None = None) -> Products:
        """Return output, grad_input and grad_weight; ``watch`` receives the operands."""
        tap = LayerScaling(amaxes=self.amaxes, input_scale=self.capture.input_scale, watch=watch)
        with torch.enable_grad():
            x, weight = self.capture.input.detach().requires_grad_(), self.capture.weight.detach().requires_grad_()
            y = fp8_linear(x, weight, None, self.recipe, scaling=tap)
            y.backward(self.capture.grad_output.to(y.dtype))
        assert x.grad is not None
        assert weight.grad is not None
        return y.detach(), x.grad, weight.grad


class OperandRecorder:
    """Records the operands of the three GEMMs."""

    def __init__(self) -> None:
        self.by_gemm: dict[str, Operands] = {}

    def forward(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        operands: Operands,
        kept: tuple[Operand | None, Operand | None],
    ) -> None:
        """See :class:`octavo.scaling.LayerWatch`."""
        self.by_gemm["output"] = operands

    def backward(
        self, recipe: Recipe, grad_output: Tensor, grad_input: Operands | None, grad_weight: Operands | None
    ) -> None:
        """See :class:`octavo.scaling.LayerWatch`."""
        assert grad_input is not None
        assert grad_weight is not None
        self.by_gemm |= {"grad_input": grad_input, "grad_weight": grad_weight}

    def bytes(self) -> int:
        """Size of codes and scales, each storage counted once; high-precision operands in the dtype of their GEMM."""
        bytes_by_storage: dict[int, int] = {}
        for left, right in self.by_gemm.values():
            for operand in (left, right):
                if isinstance(operand, QuantizedTensor):
                    for part in (operand.data, operand.scale):
                        bytes_by_storage[part.untyped_storage().data_ptr()] = part.nbytes
                else:
                    assert isinstance(left, Tensor)
                    bytes_by_storage[operand.untyped_storage().data_ptr()] = operand.numel() * left.itemsize
        return sum(bytes_by_storage.values())

    def worst(self, capture: Capture, share: Callable[[Tensor, QuantizedTensor], float]) -> dict[str, float]:
        """Largest share over the casts of each role."""
        x, weight, grad_output = capture.input, capture.weight, capture.grad_output
        originals = {
            "output": (("input", x), ("weight", weight)),
            "grad_input": (("grad_output", grad_output), ("weight", weight.t())),
            "grad_weight": (("grad_output", grad_output.t()), ("input", x.t())),
        }
        worst_by_role = dict.fromkeys(ROLES, 0.0)
        for gemm, operands in self.by_gemm.items():
            for (role, original), operand in zip(originals[gemm], operands, strict=True):
                if isinstance(operand, QuantizedTensor):
                    worst_by_role[role] = max(worst_by_role[role], share(original, operand))
        return worst_by_role


def _amaxes_from_window(capture: Capture, recipe: Recipe) -> Tensor | None:
    """Amaxes that a delayed recipe would have computed its scales from; None to use the tensors' own."""
    if recipe.history is None or capture.window is None:
        return None
    history = AmaxHistory(recipe.history, device=capture.window.device)
    length = min(recipe.history.length, capture.window.shape[1])
    history.window[:, :length].copy_(capture.window[:, :length])
    history.follow_window(torch.ones(len(ROLES), dtype=torch.bool, device=capture.window.device))
    return history.amax
