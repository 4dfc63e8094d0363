"""What one layer's calls are measured by, in the steps that are looked at."""

import torch
from torch import Tensor

from octavo.doctor.series import CastKey, ProductKey
from octavo.doctor.statistics import CAST_SUMS, cast_sums, product_sums, spread, take_rows
from octavo.numerics import QuantizedTensor
from octavo.recipes import CastSpec, GemmSpec, Recipe
from octavo.scaling import Operand, Operands

__all__ = ["LayerRecorder"]

ROWS, COLUMNS = 16, 16  # of a GEMM's result, what is compared


class LayerRecorder:
    """Measures a layer's casts and GEMMs: the ``watch`` of an ``octavo.nn.Linear``.

    A layer that runs several times in a step (micro-batches, tied layers) keeps the last call's numbers, or those of
    the first call that held NaN or ±Inf.

    Args:
        path: the layer's.
        casts: where sums go, as float64 vectors of CAST_SUMS.
        products: where they go of GEMMs, PRODUCT_SUMS.
    """

    def __init__(self, path: str, casts: dict[CastKey, Tensor], products: dict[ProductKey, Tensor]) -> None:
        self.path, self.casts, self.products = path, casts, products
        self.weight: Tensor | None = None
        self.input_columns: dict[int, Tensor] = {}  # by the address of the operand that backward will bring

    def forward(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        operands: Operands,
        kept: tuple[Operand | None, Operand | None],
    ) -> None:
        """Measure the input's and the weight's casts, those for backward too, and the output GEMM."""
        self.weight = None if _is_held(weight) else weight.detach()
        self._cast("input", "output", recipe.output.a, x, operands[0])
        if not _same_cast(recipe.output.a, recipe.grad_weight.b):
            self._cast("input", "grad_weight", recipe.grad_weight.b, x.t(), kept[1])
        if self.weight is not None:
            self._cast("weight", "output", recipe.output.b, weight, operands[1])
            if not _same_cast(recipe.output.b, recipe.grad_input.b):
                self._cast("weight", "grad_input", recipe.grad_input.b, weight.t(), kept[0])
            self._product("output", recipe.output, operands, x, weight)
        if isinstance(kept[1], QuantizedTensor):
            columns = x[:, spread(x.shape[1], COLUMNS)]
            self.input_columns[kept[1].data.data_ptr()] = columns.clone(memory_format=torch.contiguous_format)

    def backward(
        self, recipe: Recipe, grad_output: Tensor, grad_input: Operands | None, grad_weight: Operands | None
    ) -> None:
        """Measure the gradient's casts and both of its GEMMs."""
        if grad_input is not None:
            self._cast("grad_output", "grad_input", recipe.grad_input.a, grad_output, grad_input[0])
            if self.weight is not None:
                self._product("grad_input", recipe.grad_input, grad_input, grad_output, self.weight.t())
        if grad_weight is not None:
            if grad_input is None or not _same_cast(recipe.grad_input.a, recipe.grad_weight.a):
                self._cast("grad_output", "grad_weight", recipe.grad_weight.a, grad_output.t(), grad_weight[0])
            self._product_of_columns(recipe.grad_weight, grad_weight, grad_output)

    def _cast(self, role: str, gemm: str, spec: CastSpec | None, x: Tensor, made: Operand | None) -> None:
        if spec is None or not isinstance(made, QuantizedTensor) or not x.numel():
            return
        key, found = CastKey(self.path, role, gemm), cast_sums(x, made, amax_floor=spec.amax_floor)
        self.casts[key] = found if key not in self.casts else _first_broken(self.casts[key], found)

    def _product(self, gemm: str, spec: GemmSpec, operands: Operands, left: Tensor, right: Tensor) -> None:
        rows, columns = spread(left.shape[0], ROWS), spread(right.shape[0], COLUMNS)
        self._compare(gemm, spec, operands, (rows, columns), (left[rows], right[columns]))

    def _product_of_columns(self, spec: GemmSpec, operands: Operands, grad_output: Tensor) -> None:
        """grad_weight's, whose right operand is known for some columns of the input only.

        It is not known where saved tensors were replaced on the way (``torch.autograd.graph.saved_tensors_hooks``).
        """
        _, right = operands
        known = self.input_columns.pop(right.data.data_ptr(), None) if isinstance(right, QuantizedTensor) else None
        if known is not None and known.shape[0] == grad_output.shape[0]:
            rows, columns = spread(grad_output.shape[1], ROWS), spread(right.shape[0], COLUMNS)
            self._compare("grad_weight", spec, operands, (rows, columns), (grad_output.t()[rows], known.t()))

    def _compare(
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


def _is_held(weight: Tensor) -> bool:
    """Whether it is codes, of which nobody knows what they were made of."""
    return weight.dtype.itemsize == 1


def _first_broken(known: Tensor, found: Tensor) -> Tensor:
    return torch.where(known[CAST_SUMS.index("nonfinite")] > 0, known, found)


def _same_cast(one: CastSpec | None, other: CastSpec | None) -> bool:
    """Whether the operand cast as ``one``, transposed, is the transpose cast as ``other``."""
    return one is not None and one == other and one.granularity.orientation_free
