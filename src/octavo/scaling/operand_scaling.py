"""Scaling of one call's operands: the amaxes or scale to cast with, and where to record what a cast measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.numerics import AmaxRecord, CastSpec, Measurement, QuantizedTensor
from octavo.recipes import Recipe
from octavo.scaling.slices import Slices

__all__ = [
    "GRAD_OUTPUT",
    "INPUT",
    "ROLES",
    "WEIGHT",
    "ExpertsWatch",
    "LayerScaling",
    "LayerWatch",
    "Operand",
    "OperandScaling",
    "Operands",
    "inside_backward",
]

ROLES = ("input", "weight", "grad_output")
INPUT = 0
WEIGHT = 1
GRAD_OUTPUT = 2
Operand = QuantizedTensor | Tensor  # a Tensor where the recipe leaves the GEMM in high precision
Operands = tuple[Operand, Operand]  # left and right, as a GEMM multiplies them


@dataclass(slots=True)
class OperandScaling:
    """Scaling of one role in one call: the source of its scale, and the buffers for its measurement.

    The first measurement is recorded, in place; a second cast of the same tensor counts nothing twice.

    Attributes:
        amax: float32 [], of finished steps; 0 before the first.
        scale: float32 [], a static cast's.
        pending: float32 [], raised to the tensor's amax; None records none.
        overflowed: bool [], set where the tensor holds NaN or ±Inf; None does not.
        nonfinite: int64 [], raised by the count; None counts none.
        slices: of which the tensor is one; None where it is whole.
        reduced: float32 [], the amax of all of the slices, once it is reduced.
    """

    amax: Tensor | None = None
    scale: Tensor | None = None
    pending: Tensor | None = None
    overflowed: Tensor | None = None
    nonfinite: Tensor | None = None
    slices: Slices | None = None
    reduced: Tensor | None = None

    def take(self) -> AmaxRecord:
        """Return the buffers to record into once; later calls return an empty record."""
        record = AmaxRecord(self.pending, self.overflowed, self.nonfinite)
        self.pending = self.overflowed = self.nonfinite = None
        return record

    def record(self, x: Tensor, measurement: Measurement) -> None:
        """Record the measurement of ``x``, unless ``x`` is empty."""
        record = self.take()
        if x.numel():
            record.add(measurement)


class LayerWatch(Protocol):
    """Observer that compares a layer's tensors with the operands cast from them, such as the doctor.

    Operands are what the GEMMs multiply: a ``Tensor`` where a GEMM stays in high precision, None where it does not run.
    """

    def forward(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        operands: Operands,
        kept: tuple[Operand | None, Operand | None],
    ) -> None:
        """Inspect x [M, K], weight [N, K] (codes where it is stored so), and the output GEMM's operands.

        ``kept`` is what backward will multiply: of the weight for grad_input, of the input for grad_weight. Where a
        recipe casts a tensor the same way for both of its GEMMs, and its groups know no orientation, it is that cast.
        """
        ...

    def backward(
        self, recipe: Recipe, grad_output: Tensor, grad_input: Operands | None, grad_weight: Operands | None
    ) -> None:
        """Inspect grad_output [M, N] and the operands of grad_input's and grad_weight's GEMMs."""
        ...


class ExpertsWatch(Protocol):
    """Observer of the casts of a layer of experts, such as the doctor."""

    def cast(
        self,
        role: int,
        spec: CastSpec | None,
        matrices: Sequence[Tensor],
        operands: Sequence[Operand],
        experts: tuple[int, ...],
    ) -> None:
        """Inspect a tensor of each of these experts, and the operand cast from it."""
        ...


@dataclass(slots=True)
class LayerScaling:
    """Scaling state that one call of a layer reads and updates; a None is neither read nor updated.

    Attributes:
        amaxes: float32 [3], from which the roles' delayed scales are computed; 0 where there is no history.
        input_scale: float32 [], the decode scale of a static input.
        pending: float32 [3], raised to the amaxes of the three tensors.
        overflowed: bool [3], set where they hold NaN or ±Inf.
        nonfinite: int64 [3], raised by the numbers of their NaN and ±Inf elements.
        watch: inspects the call's tensors and operands.
        records_weight: whether the weight's amax and overflows are recorded.
        slices: of which the tensors are one each, on several ranks; None where they are whole.
        weight_is_parameter: whether the weight is a parameter's memory, also where autograd does not take it for one.
        experts_watch: inspects the casts of experts.
    """

    amaxes: Tensor | None = None
    input_scale: Tensor | None = None
    pending: Tensor | None = None
    overflowed: Tensor | None = None
    nonfinite: Tensor | None = None
    watch: LayerWatch | None = None
    records_weight: bool = True
    slices: tuple[Slices | None, ...] = (None,) * len(ROLES)
    weight_is_parameter: bool = False
    experts_watch: ExpertsWatch | None = None

    def with_amaxes(self, amaxes: Tensor | None) -> "LayerScaling":
        """Return a copy with other amaxes; written out, since each field of dataclasses.replace would guard a graph."""
        return LayerScaling(
            amaxes,
            self.input_scale,
            self.pending,
            self.overflowed,
            self.nonfinite,
            self.watch,
            self.records_weight,
            self.slices,
            self.weight_is_parameter,
            self.experts_watch,
        )

    def of(self, role: int) -> OperandScaling:
        """Return the scaling of one role."""
        records = role != WEIGHT or self.records_weight
        return OperandScaling(
            amax=None if self.amaxes is None else self.amaxes[role],
            scale=self.input_scale if role == INPUT else None,
            pending=self.pending[role] if self.pending is not None and records else None,
            overflowed=self.overflowed[role] if self.overflowed is not None and records else None,
            nonfinite=None if self.nonfinite is None else self.nonfinite[role],
            slices=self.slices[role],
        )


def inside_backward() -> bool:
    """Return whether autograd is running on this thread; a traced graph is never traced from inside it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # noqa: SLF001
