"""Transformer Engine's tensor and sequence parallelism: layers whose parameters are this rank's slices.

| parallel_mode | weight [N, K] of a rank | input                   | output                         | bias         |
|---------------|-------------------------|-------------------------|--------------------------------|--------------|
| "column"      | N / tp_size rows        | whole; with sequence    | this rank's N / tp_size        | its slice    |
|               |                         | parallelism gathered    |                                |              |
| "row"         | K / tp_size columns     | this rank's K / tp_size | summed; with sequence          | whole, added |
|               |                         |                         | parallelism summed and divided | once         |

A call presents slices as DTensors to octavo's layer (:mod:`octavo.nn.tensor_parallel`), which has their collectives,
the scales of whole matrices, and the gather of codes. Transformer Engine scales a weight's slices apart; here a scale
is the whole matrix's, as in one process. Under ``reduce_amax=False``, or an ``amax_reduction_group`` without all of the
ranks, each rank scales by the delayed amaxes of its own slices, and inputs are gathered as values.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed, nn

from octavo import nn as octavo_nn
from octavo.errors import ConfigError
from octavo.nn.tensor_parallel import local_part, slices_of
from octavo.numerics.cast import check_float
from octavo.scaling import WEIGHT, Slices

__all__ = ["ParallelModule", "TensorParallel"]

COLUMN, ROW = "column", "row"
WRITERS = ("out", "fc2")  # layers by rows in a module with several


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Arguments of a module.

    Attributes:
        size: ranks that share its layers.
        group: these ranks; None until ``set_tensor_parallel_group``.
        sequence: whether they divide the positions outside of the layers.
    """

    size: int
    group: Any
    sequence: bool

    @classmethod
    def taken(cls, arguments: dict[str, Any]) -> "TensorParallel":
        """Take ``tp_group``, ``tp_size`` and ``sequence_parallel`` out of a module's arguments."""
        group, size = arguments.pop("tp_group", None), arguments.pop("tp_size", 1)
        sequence = arguments.pop("sequence_parallel", False)
        if group is not None:
            size = _size_of(group)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"tp_size must be a whole number of at least 1, not {size!r}")
        return cls(size=size, group=group, sequence=bool(sequence) and size > 1)

    def share(self, name: str, size: int) -> int:
        """Return this rank's share of ``size``.

        Raises:
            ConfigError: the ranks cannot share it equally.
        """
        if size % self.size:
            raise ConfigError(f"{self.size} ranks (tp_size) cannot share {name}={size} equally; set a multiple")
        return size // self.size

    def check_mode(self, what: str, *, set_parallel_mode: bool) -> None:
        """Raise ConfigError for a module of several layers that does not say that they are divided."""
        if self.size > 1 and not set_parallel_mode:
            raise ConfigError(f"{what} with tp_size={self.size} divides its layers; give it set_parallel_mode=True")


class ParallelModule(nn.Module):
    """A module whose layers ranks may share."""

    def divide_layers(self, arguments: TensorParallel, *, positions: int, mode: str | None = None) -> None:
        """Let the module's layers, built with this rank's sizes, be slices of whole ones.

        Args:
            arguments: of the module.
            positions: dimension of the layers' inputs that sequence parallelism divides.
            mode: of its only layer; None takes attention's and the MLP's output layers by rows, others by columns.
        """
        if arguments.size == 1:
            return
        for path, layer in list(self.named_modules()):
            if isinstance(layer, octavo_nn.Linear):
                layer.__class__ = SlicedLinear
                assert isinstance(layer, SlicedLinear)
                by_rows = path.rpartition(".")[2] in WRITERS if mode is None else mode == ROW
                layer.divide(by_rows, arguments, positions)
            elif arguments.sequence and isinstance(layer, octavo_nn.LayerNorm | octavo_nn.RMSNorm):
                for parameter in layer.parameters():
                    parameter.sequence_parallel = True  # type: ignore[attr-defined] # read by Megatron, which sums it

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the process group of the ranks that share the module's layers."""
        for layer in self.modules():
            if isinstance(layer, SlicedLinear):
                layer.set_group(tp_group)


class SlicedLinear(octavo_nn.Linear):
    """A layer whose plain parameters are this rank's slices."""

    shares_amaxes = False
    by_rows: bool
    size: int
    positions: int | None  # the dimension that sequence parallelism divides
    group: Any
    mesh: Any

    def divide(self, by_rows: bool, arguments: TensorParallel, positions: int) -> None:
        """Take the parameters as slices; ``in_features`` and ``out_features`` become those of the whole weight."""
        self.by_rows, self.size = by_rows, arguments.size
        self.positions = positions if arguments.sequence else None
        if by_rows:
            self.in_features *= self.size
        else:
            self.out_features *= self.size
        self.group, self.mesh = None, None
        if arguments.group is not None:
            self.set_group(arguments.group)

    def set_group(self, group: Any) -> None:
        """Set the ranks that have the other slices."""
        if _size_of(group) != self.size:
            raise ConfigError(
                f"{self.called} has one of {self.size} slices (tp_size), and the group has {_size_of(group)} ranks"
            )
        self.group, self.mesh = group, None

    def shared_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as DTensors."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        bias: Any = self.bias
        weight = DTensor.from_local(self.weight, self.mesh, (Shard(int(self.by_rows)),), run_check=False)
        if bias is not None:
            placement = Replicate() if self.by_rows else Shard(0)
            bias = DTensor.from_local(bias, self.mesh, (placement,), run_check=False)
        return weight, bias

    def weight_slice(self) -> tuple[Tensor, Slices] | None:
        """This rank's slice of the weight; None as long as its group is not known."""
        slices = None if self.group is None else slices_of("K" if self.by_rows else "N", self.group)[WEIGHT]
        return None if slices is None else (self.weight, slices)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's own name)
        """This rank's part of the input to its part of the output."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.group is None:
            raise ConfigError(
                f"{self.called} has one of {self.size} slices (tp_size) and no tp_group; call set_tensor_parallel_group"
            )
        if self.mesh is None:
            self.mesh = DeviceMesh.from_group(self.group, self.weight.device.type)
        check_float(input, "the input of a Linear")
        if input.ndim == 0 or input.shape[-1] != self.weight.shape[1]:
            raise ConfigError(f"this layer takes inputs [..., {self.weight.shape[1]}], not {tuple(input.shape)}")
        whole = Replicate() if self.positions is None else Shard(self.positions)
        given = Shard(input.ndim - 1) if self.by_rows else whole
        source = DTensor.from_local(input, self.mesh, (given,), run_check=False)
        y: Any = self._forward_slices(source, self.recipe_now())
        wanted = whole if self.by_rows else Shard(y.ndim - 1)
        return local_part(y.redistribute(placements=(wanted,)), wanted)


def _size_of(group: Any) -> int:
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise ConfigError(
            f"tp_group (of ops, tensor_parallel_group) must be a torch.distributed.ProcessGroup or None, not {group!r}"
        )
    return group.size()
