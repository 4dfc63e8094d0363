"""One captured layer's forward and backward under one recipe, and what its GEMMs multiplied."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.doctor.capture import Capture
from octavo.functional import fp8_linear
from octavo.numerics import QuantizedTensor
from octavo.recipes import Recipe
from octavo.scaling import ROLES, AmaxHistory, LayerScaling, LayerWatch, Operand, Operands

__all__ = ["Products", "Rerun", "SeenOperands"]

Products = tuple[Tensor, Tensor, Tensor]  # output [M, N], grad_input [M, K], grad_weight [N, K]


class Rerun:
    """One recipe on one capture; called, it computes the three products.

    Args:
        capture: of finite tensors, on the device to compute on.
        recipe: what to run.
        ran: whether it is what ran, with the scales of that step; otherwise a delayed recipe makes its own from the
            captured window.
    """

    def __init__(self, capture: Capture, recipe: Recipe, *, ran: bool) -> None:
        self.capture, self.recipe = capture, recipe
        self.amaxes = capture.amax if ran else _amaxes(capture, recipe)

    def __call__(self, watch: LayerWatch | None = None) -> Products:
        """Output, grad_input and grad_weight; ``watch`` sees the operands."""
        tap = LayerScaling(amaxes=self.amaxes, input_scale=self.capture.input_scale, watch=watch)
        with torch.enable_grad():
            x, weight = self.capture.input.detach().requires_grad_(), self.capture.weight.detach().requires_grad_()
            y = fp8_linear(x, weight, None, self.recipe, scaling=tap)
            y.backward(self.capture.grad_output.to(y.dtype))
        assert x.grad is not None
        assert weight.grad is not None
        return y.detach(), x.grad, weight.grad


class SeenOperands:
    """Keeps what the three GEMMs multiply."""

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
        """Of codes and scales, each storage once; an operand in high precision has the size that its GEMM reads."""
        found: dict[int, int] = {}
        for left, right in self.by_gemm.values():
            for operand in (left, right):
                if isinstance(operand, QuantizedTensor):
                    for part in (operand.data, operand.scale):
                        found[part.untyped_storage().data_ptr()] = part.nbytes
                else:
                    assert isinstance(left, Tensor)
                    found[operand.untyped_storage().data_ptr()] = operand.numel() * left.itemsize
        return sum(found.values())

    def worst(self, capture: Capture, share: Callable[[Tensor, QuantizedTensor], float]) -> dict[str, float]:
        """By role, the largest share of its casts."""
        x, weight, grad_output = capture.input, capture.weight, capture.grad_output
        originals = {
            "output": (("input", x), ("weight", weight)),
            "grad_input": (("grad_output", grad_output), ("weight", weight.t())),
            "grad_weight": (("grad_output", grad_output.t()), ("input", x.t())),
        }
        found = dict.fromkeys(ROLES, 0.0)
        for gemm, operands in self.by_gemm.items():
            for (role, original), operand in zip(originals[gemm], operands, strict=True):
                if isinstance(operand, QuantizedTensor):
                    found[role] = max(found[role], share(original, operand))
        return found


def _amaxes(capture: Capture, recipe: Recipe) -> Tensor | None:
    """What a recipe would have made its scales from; None for the tensors themselves."""
    if recipe.history is None or capture.window is None:
        return None
    history = AmaxHistory(recipe.history, device=capture.window.device)
    known = min(recipe.history.length, capture.window.shape[1])
    history.window[:, :known].copy_(capture.window[:, :known])
    history.follow_window(torch.ones(len(ROLES), dtype=torch.bool, device=capture.window.device))
    return history.amax
