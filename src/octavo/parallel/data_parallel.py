"""A model on several ranks: replicas by DDP, shards by FSDP2, or replicas of shards (HSDP).

Gradients are summed over the ranks and not averaged: each rank scales its losses as one process with all micro-batches
does. So every number of a micro-batch, and every code and scale of it, is that of one process, and only the order of
the gradients' sum depends on the number of ranks.
"""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from octavo.kernels.tracing import is_distributed
from octavo.parallel.gradients import GradientReduction, reduce_bucket

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["copied_to_cpu", "is_sharded", "laid_out_as", "local", "part_of", "replicated", "sharded", "synchronizing"]


def replicated(model: nn.Module, reduction: GradientReduction | None = None) -> DistributedDataParallel:
    """Wrap a model whose weights are equal on all ranks, to sum gradients over them; by ``reduction`` in FP8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames the argument, to a name that 2.11 lacks
        replica = DistributedDataParallel(model, broadcast_buffers=False)
    if reduction is None:
        replica.register_comm_hook(None, lambda _, bucket: _summed(bucket))
    else:
        replica.register_comm_hook((reduction, replica.process_group, False), reduce_bucket)
    return replica


def sharded(model: nn.Module, blocks: Iterable[nn.Module], mesh: "DeviceMesh") -> None:
    """Shard a model in place by FSDP2, gathered block by block.

    Args:
        model: the model, with equal weights on all ranks.
        blocks: its modules that are gathered one after the other; the rest is gathered with ``model``.
        mesh: the ranks that share each weight; with a dimension of replicas before them, those too.
    """
    from torch.distributed.fsdp import fully_shard

    # Nothing writes to the result in place; a linear's result of three dimensions is a view.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for module in (*blocks, model):
        part: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        part.set_gradient_divide_factor(1.0)


def synchronizing(model: nn.Module, *, now: bool) -> AbstractContextManager[object]:
    """Context of a micro-batch's forward and backward pass, whose gradients are summed over the ranks if ``now``."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now else model.no_sync()
    if is_sharded(model):
        model.set_requires_gradient_sync(now)  # type: ignore[operator]
    return nullcontext()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; another tensor as it is."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def part_of(tensor: Tensor) -> tuple[int, ...]:
    """Which part of a sharded tensor this rank holds: its place along the mesh's dimensions that divide the tensor."""
    place: Any = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    placements: Any = tensor.placements  # type: ignore[attr-defined]
    return tuple(index for index, each in zip(place, placements, strict=True) if not each.is_replicate())


def laid_out_as(layout: Tensor, values: Tensor) -> Tensor:
    """Return this rank's part of ``values``, which are the same on all ranks, sharded as ``layout`` is."""
    if not is_distributed(layout):
        return values
    from torch.distributed.tensor import distribute_tensor

    values = values.to(layout.device)
    return distribute_tensor(values, layout.device_mesh, layout.placements, src_data_rank=None)


def copied_to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy in the CPU's memory; of a sharded tensor this rank's part, in a tensor that is sharded alike."""
    copy = local(tensor.detach()).to("cpu", copy=True)
    if not is_distributed(tensor):
        return copy
    from torch.distributed.tensor import DTensor

    # DTensor.from_local would move the copy back to the mesh's device.
    return DTensor(copy, tensor._spec, requires_grad=False)  # noqa: SLF001


def is_sharded(model: nn.Module) -> bool:
    """Return whether :func:`sharded` was called with ``model``."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _summed(bucket: Any) -> "torch.futures.Future[Tensor]":
    """Sum of the ranks' gradients; DDP's own reduction divides by the number of ranks."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[list[Tensor]] = work.get_future()
    return future.then(lambda reduced: reduced.value()[0])
