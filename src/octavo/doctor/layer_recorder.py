"""Measurement of one layer's casts and GEMMs in sampled steps."""

import torch
from torch import Tensor

from octavo.doctor.series import CastKey, ProductKey
from octavo.doctor.statistics import CAST_SUMS, cast_sums, product_sums, spread, take_rows
from octavo.numerics import QuantizedTensor
from octavo.recipes import CastSpec, GemmSpec, Recipe
from octavo.scaling import Operand, Operands

__all__ = ["LayerRecorder"]

ROWS, COLUMNS = 16, 16  # compared, of a GEMM's result


class LayerRecorder:
    """Measures a layer's casts and GEMMs: the ``watch`` of an ``octavo.nn.Linear``.

    If a layer runs several times in a step (micro-batches, tied layers), the numbers of the last call are kept, or
    those of the first call with NaN or ±Inf.

    Args:
        path: the layer's path.
        casts: filled with a float64 vector of CAST_SUMS for each cast.
        products: filled with a float64 vector of PRODUCT_SUMS for each GEMM.
    """

    def __init__(self, path: str, casts: dict[CastKey, Tensor], products: dict[ProductKey, Tensor]) -> None:
        self.path, self.casts, self.products = path, casts, products
        self.weight: Tensor | None = None
        self.input_columns: dict[int, Tensor] = {}  # by the address of the operand that backward receives

    def forward(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        operands: Operands,
        kept: tuple[Operand | None, Operand | None],
    ) -> None:
        """Measure the output GEMM and all casts of input and weight, including those for backward."""
        self.weight = None if _is_quantized(weight) else weight.detach()
        self._measure_cast("input", "output", recipe.output.a, x, operands[0])
        if not _same_cast(recipe.output.a, recipe.grad_weight.b):
            self._measure_cast("input", "grad_weight", recipe.grad_weight.b, x.t(), kept[1])
        if self.weight is not None:
            self._measure_cast("weight", "output", recipe.output.b, weight, operands[1])
            if not _same_cast(recipe.output.b, recipe.grad_input.b):
                self._measure_cast("weight", "grad_input", recipe.grad_input.b, weight.t(), kept[0])
            self._measure_gemm("output", recipe.output, operands, x, weight)
        if isinstance(kept[1], QuantizedTensor):
            columns = x[:, spread(x.shape[1], COLUMNS)]
            self.input_columns[kept[1].data.data_ptr()] = columns.clone(memory_format=torch.contiguous_format)

    def backward(
        self, recipe: Recipe, grad_output: Tensor, grad_input: Operands | None, grad_weight: Operands | None
    ) -> None:
        """Measure the gradient's casts and the two backward GEMMs."""
        if grad_input is not None:
            self._measure_cast("grad_output", "grad_input", recipe.grad_input.a, grad_output, grad_input[0])
            if self.weight is not None:
                self._measure_gemm("grad_input", recipe.grad_input, grad_input, grad_output, self.weight.t())
        if grad_weight is not None:
            if grad_input is None or not _same_cast(recipe.grad_input.a, recipe.grad_weight.a):
                self._measure_cast("grad_output", "grad_weight", recipe.grad_weight.a, grad_output.t(), grad_weight[0])
            self._measure_grad_weight_gemm(recipe.grad_weight, grad_weight, grad_output)

    def _measure_cast(self, role: str, gemm: str, spec: CastSpec | None, x: Tensor, operand: Operand | None) -> None:
        if spec is None or not isinstance(operand, QuantizedTensor) or not x.numel():
            return
        key, sums = CastKey(self.path, role, gemm), cast_sums(x, operand, amax_floor=spec.amax_floor)
        self.casts[key] = sums if key not in self.casts else _keep_first_nonfinite(self.casts[key], sums)

    def _measure_gemm(self, gemm: str, spec: GemmSpec, operands: Operands, left: Tensor, right: Tensor) -> None:
        rows, columns = spread(left.shape[0], ROWS), spread(right.shape[0], COLUMNS)
        self._store_gemm_sums(gemm, spec, operands, (rows, columns), (left[rows], right[columns]))

    def _measure_grad_weight_gemm(self, spec: GemmSpec, operands: Operands, grad_output: Tensor) -> None:
        """Compare the grad_weight GEMM, whose right operand was saved for some columns of the input only.

        It is skipped if ``torch.autograd.graph.saved_tensors_hooks`` replaced the saved operand.
        """
        _, right = operands
        input_columns = (
            self.input_columns.pop(right.data.data_ptr(), None) if isinstance(right, QuantizedTensor) else None
        )
        if input_columns is not None and input_columns.shape[0] == grad_output.shape[0]:
            rows, columns = spread(grad_output.shape[1], ROWS), spread(right.shape[0], COLUMNS)
            self._store_gemm_sums(
                "grad_weight", spec, operands, (rows, columns), (grad_output.t()[rows], input_columns.t())
            )

    def _store_gemm_sums(
        self,
        gemm: str,
        spec: GemmSpec,
        operands: Operands,
        sampled: tuple[slice, slice],
        originals: tuple[Tensor, Tensor],
    ) -> None:
        left, right = operands
        if not isinstance(left, QuantizedTensor) or not isinstance(right, QuantizedTensor) or not left.data.numel():
            return
        left, right = take_rows(left, sampled[0]), take_rows(right, sampled[1])
        self.products[ProductKey(self.path, gemm)] = product_sums(left, right, originals, spec.accumulate)


def _is_quantized(weight: Tensor) -> bool:
    """True for FP8 codes, whose high-precision weight is not available."""
    return weight.dtype.itemsize == 1


def _keep_first_nonfinite(earlier: Tensor, later: Tensor) -> Tensor:
    return torch.where(earlier[CAST_SUMS.index("nonfinite")] > 0, earlier, later)


def _same_cast(one: CastSpec | None, other: CastSpec | None) -> bool:
    """True if casting with ``one`` and transposing equals transposing and casting with ``other``."""
    return one is not None and one == other and one.granularity.orientation_free
