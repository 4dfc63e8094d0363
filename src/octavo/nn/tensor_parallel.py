"""Linear layers whose parameters are DTensors, as torch's ``parallelize_module`` makes them.

Ranks of a one-dimensional mesh divide one of the three dimensions of a layer's GEMMs, and each multiplies its slices:

| divided | torch's style       | input [M, K] | weight [N, K] | output [M, N]    | partial gradients    |
|---------|---------------------|--------------|---------------|------------------|----------------------|
| N       | ``ColwiseParallel`` | whole        | rows          | columns          | of the input         |
| K       | ``RowwiseParallel`` | columns      | columns       | whole, a partial | none                 |
| M       | none: weight whole  | rows         | whole         | rows             | of weight and bias   |
| none    | none: weight whole  | whole        | whole         | whole            | none                 |

Partial outputs and gradients are summed by DTensor, where the next placement needs it, in their own dtype. Scales are
those of the whole matrices (:mod:`octavo.scaling.slices`), and so the codes are, bit for bit, those of one process.

A layer by columns that is given an input whose rows are divided gathers it, as codes where that is the same
(:mod:`octavo.nn.row_gather`).

The layer works on the slices themselves and tells DTensor the result's placement. Sharding strategies for octavo's
operators would need one operator for the amax, one for its reduction and one for the cast, in place of one for all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, distributed

from octavo.errors import ConfigError
from octavo.kernels.tracing import finished, is_distributed
from octavo.nn.row_gather import RowGather
from octavo.recipes import Recipe
from octavo.scaling import GRAD_OUTPUT, INPUT, WEIGHT, ScaleUpdates, Slices
from octavo.scaling.scale_updates import share_amaxes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "DistributedTensors",
    "LocalTensors",
    "check_sizes",
    "check_slices",
    "local_part",
    "local_tensors",
    "slices_of",
    "weight_slice",
    "weight_slices",
    "whole",
]

_DIMS = {INPUT: "MK", WEIGHT: "NK", GRAD_OUTPUT: "MN"}  # rows and columns of the roles' matrices
_SIZES = {"N": "out_features", "K": "in_features"}


class _Layer(Protocol):
    recipe: Recipe
    sliced_recipe: Recipe | None
    codes_layout: Any
    in_features: int
    out_features: int
    scale_updates: ScaleUpdates
    watch: Any
    shares_amaxes: bool

    def keeps_own_amaxes(self, group: Any) -> bool:
        """Whether each rank of the group goes on with amaxes of its own."""
        ...

    def shared_parameters(self) -> tuple[Any, Any]:
        """Weight and bias as DTensors; the bias may be None."""
        ...

    @property
    def called(self) -> str:
        """Name of the layer in messages."""
        ...


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, for which all of its ranks must call; another tensor as it is."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


@dataclass(frozen=True)
class LocalTensors:
    """A layer's tensors on this rank.

    Attributes:
        x: [..., K] or a slice of it.
        weight: [N, K] or a slice of it.
        bias: [N] or a slice of it; zeros where another rank adds it to a sum over ranks.
        slices: of which the three tensors are one each, by role.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    slices: tuple[Slices | None, ...]


@dataclass(frozen=True, kw_only=True)
class DistributedTensors(LocalTensors):
    """Those of DTensors.

    Attributes:
        mesh: the ranks.
        placement: of the output.
        shape: of the whole output.
        gather: of the input's codes, where ``x`` is this rank's rows of the input that the layer multiplies.
    """

    mesh: Any
    placement: "Placement"
    shape: torch.Size
    gather: RowGather | None = None

    def output(self, y: Tensor) -> Tensor:
        """Return the DTensor of which ``y`` is this rank's part."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        local: Tensor = _Waited.apply(y)  # type: ignore[no-untyped-call]
        return DTensor.from_local(local, self.mesh, (self.placement,), run_check=False, shape=self.shape, stride=stride)


class _Waited(torch.autograd.Function):
    """A tensor, and its gradient, that no collective is writing to any more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return finished(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return finished(grad_output)


def local_tensors(layer: _Layer, x: Tensor, recipe: Recipe) -> DistributedTensors:
    """Return a layer's tensors on this rank; its input is distributed first as its weight demands.

    Args:
        layer: its weight is a DTensor, or its slice.
        x: its input, a DTensor [..., K].
        recipe: of the call.

    Raises:
        ConfigError: the input is no DTensor, or a case that :func:`check_slices` refuses.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    weight, bias = layer.shared_parameters()
    if not is_distributed(x):
        raise ConfigError(
            f"the weight of {layer.called} is a DTensor and its input is not; parallelize it with torch's "
            "ColwiseParallel or RowwiseParallel, or give it a DTensor"
        )
    if recipe is not layer.sliced_recipe:
        check_slices(layer, weight, recipe)
        layer.sliced_recipe = recipe
    last, divided = x.ndim - 1, _divided(layer, weight)
    given, gather = x.placements[0], _code_gather(layer, x, recipe) if divided == "N" else None
    wanted = _input_placement(given, divided, last) if gather is None else given
    if given != wanted:
        x = x.redistribute(placements=(wanted,))
    divided = "M" if not divided and wanted.is_shard() else divided
    gradient = Partial() if divided == "M" else Replicate()  # of what is whole
    if bias is not None:
        bias = local_part(bias, Shard(0) if divided == "N" else gradient)
    if bias is not None and divided == "K" and weight.device_mesh.get_local_rank() > 0:
        bias = bias - bias.detach()
    local = DistributedTensors(
        x=local_part(x, Partial() if divided == "N" and gather is None else wanted),
        weight=local_part(weight, weight.placements[0] if divided in ("N", "K") else gradient),
        bias=bias,
        slices=slices_of(divided, weight.device_mesh.get_group(), divides_rows=gather is not None),
        mesh=weight.device_mesh,
        placement={"N": Shard(last), "K": Partial()}.get(divided, wanted),
        shape=torch.Size((*x.shape[:-1], layer.out_features)),
        gather=gather,
    )
    if divided == "M":
        _check_rows(layer, recipe, local)
    return local


def _code_gather(layer: _Layer, x: "DTensor", recipe: Recipe) -> RowGather | None:
    """The gather of an input's codes for a layer by columns; None where the input's values are gathered.

    Those are needed by a GEMM in high precision and by the doctor; and codes are other codes where ranks have rows that
    are no multiple of the blocks that share a scale, or scale by amaxes of their own.
    """
    (given,) = x.placements
    spec, transposed_spec = recipe.output.a, recipe.grad_weight.b
    if not given.is_shard() or given.is_shard(x.ndim - 1) or spec is None or transposed_spec is None:
        return None
    dim: int = given.dim  # type: ignore[attr-defined]
    ranks = x.device_mesh.size()
    rows = x.shape[dim:-1].numel() // ranks
    if layer.watch is not None or x.dtype is torch.float64 or x.shape[dim] % ranks or rows % _block("M", recipe):
        return None
    if ranks == 1 or not rows or (recipe.is_delayed and layer.keeps_own_amaxes(x.device_mesh.get_group())):
        return None
    return RowGather(x.device_mesh, dim, x.to_local().shape)


def _input_placement(given: "Placement", divided: str, last: int) -> "Placement":
    """The placement in which a layer takes its input, whose last dimension is ``last``."""
    from torch.distributed.tensor import Replicate, Shard

    if divided == "K":
        return Shard(last)
    return Replicate() if divided == "N" or given.is_partial() or given.is_shard(last) else given


def check_slices(layer: _Layer, weight: "DTensor", recipe: Recipe) -> None:
    """Raise ConfigError where ranks cannot scale their slices of a layer's matrices as one process scales the whole.

    That is a weight on a mesh of more than one dimension, or divided otherwise than by its rows or columns, or stored
    as codes; slices that are no multiples of a recipe's blocks; amaxes of finished steps that are not reduced over all
    ranks of the mesh.
    """
    if layer.codes_layout is not None:
        raise ConfigError(
            f"the weight of {layer.called} is stored as FP8 codes, which ranks cannot divide; call "
            "octavo.restore(model) before parallelize_module, and convert without frozen='fp8'"
        )
    divided, ranks = _divided(layer, weight), weight.device_mesh.size()
    must_share = layer.shares_amaxes and recipe.is_delayed and ranks > 1
    if must_share and not share_amaxes(layer.scale_updates, weight.device_mesh.mesh.flatten().tolist()):
        raise ConfigError(
            f"{layer.called} shares its tensors with other ranks, whose amaxes recipe {recipe.name!r} needs; give "
            "convert an amax_group with all ranks of the tensor-parallel mesh, or none"
        )
    if not divided:
        return
    check_sizes(layer.called, divided, getattr(layer, _SIZES[divided]), ranks, recipe)


def check_sizes(called: str, divided: str, size: int, ranks: int, recipe: Recipe) -> None:
    """Raise ConfigError where ``ranks`` slices of a layer's dimension are no multiples of a recipe's blocks.

    Args:
        called: name of the layer in the message.
        divided: the dimension of the GEMMs, "N" or "K".
        size: of the whole dimension.
        ranks: number of slices.
        recipe: the layer's.
    """
    block = _block(divided, recipe)
    slice_size = -(-size // ranks)
    if slice_size % block and slice_size < size:
        step = ranks * block
        below, above = size // step * step, (size // step + 1) * step
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"{called} has {size} {_SIZES[divided]}, which {ranks} ranks cannot divide into multiples of the "
            f"{block} elements that share a scale under recipe {recipe.name!r}; {sizes} would work, or another recipe"
        )


def weight_slice(weight: "DTensor") -> tuple[Tensor, Slices] | None:
    """Return this rank's slice of a weight [N, K] that a mesh of one dimension divides; None of another."""
    slices = None if weight.is_meta else weight_slices(weight.placements, weight.device_mesh)
    return None if slices is None else (weight.to_local(), slices)


def weight_slices(placements: Sequence["Placement"], mesh: "DeviceMesh") -> Slices | None:
    """Return the slices of a weight [N, K] that a mesh of one dimension divides; None of another."""
    if len(placements) > 1:
        return None
    divided = next((name for dim, name in enumerate(_DIMS[WEIGHT]) if placements[0].is_shard(dim)), "")
    return slices_of(divided, mesh.get_group())[WEIGHT]


def _divided(layer: _Layer, weight: "DTensor") -> str:
    """The dimension of the GEMMs that a weight's placement divides; "" for a whole weight."""
    placements = weight.placements
    if len(placements) == 1:
        (placement,) = placements
        for dim, name in enumerate(_DIMS[WEIGHT]):
            if placement.is_shard(dim):
                return name
        if placement.is_replicate():
            return ""
    raise ConfigError(
        f"the weight of {layer.called} is placed as {tuple(placements)}; octavo's layers take one mesh dimension, "
        "along which the weight is divided by rows or by columns, or whole"
    )


def slices_of(divided: str, group: Any, *, divides_rows: bool = False) -> tuple[Slices | None, ...]:
    """Return the slices of the roles' matrices.

    Args:
        divided: a dimension of the GEMMs, "M", "N" or "K"; "" for none.
        group: the ranks.
        divides_rows: whether the input's rows are divided too, and its codes gathered.
    """
    if not divided or distributed.get_world_size(group) == 1:
        return (None,) * len(_DIMS)
    dims = {role: _DIMS[role].find(divided) for role in sorted(_DIMS)}
    if divides_rows:
        dims[INPUT] = 0
    return tuple(None if dim < 0 else Slices(dim, group) for dim in dims.values())


def _block(divided: str, recipe: Recipe) -> int:
    """Size that slices must be multiples of: the blocks of all casts of a recipe, along the divided dimension."""
    casts = {
        INPUT: (recipe.output.a, recipe.grad_weight.b),
        WEIGHT: (recipe.output.b, recipe.grad_input.b),
        GRAD_OUTPUT: (recipe.grad_input.a, recipe.grad_weight.a),
    }  # of the matrix, and of its transpose
    blocks = (
        Slices(_DIMS[role].index(divided), None).block(spec.granularity, transposed=bool(transposed))
        for role in _DIMS
        for transposed, spec in enumerate(casts[role])
        if divided in _DIMS[role] and spec is not None
    )
    return math.lcm(*blocks)


def _check_rows(layer: _Layer, recipe: Recipe, local: DistributedTensors) -> None:
    """Raise ConfigError where rows that lie together in this rank's slice are no multiple of a recipe's blocks."""
    dim: int = local.placement.dim  # type: ignore[attr-defined]
    rows, block = local.x.shape[dim:-1].numel(), _block("M", recipe)
    if rows % block:
        raise ConfigError(
            f"{layer.called} gets {rows} rows of its input's dimension {dim} on this rank, no multiple of the {block} "
            f"elements that share a scale under recipe {recipe.name!r}; give the layer its whole input, or another "
            "recipe"
        )


def local_part(tensor: "DTensor", gradient: "Placement") -> Tensor:
    """Return this rank's part of a tensor, whose gradient is placed as ``gradient``."""
    local: Tensor = _Waited.apply(tensor.to_local(grad_placements=(gradient,)))  # type: ignore[no-untyped-call]
    return local
