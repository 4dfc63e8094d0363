"""The private state of FSDP2 that octavo reads, all of it here.

torch documents the all-gather hooks only by their use; the state behind ``FSDPModule`` has private names. Tested with
torch 2.13 (tests/contract/test_gathered_weights.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from octavo.errors import ConfigError
from octavo.nn.tensor_parallel import weight_slices
from octavo.parallel.gathered_tensors import AllGather, ShardedWeight
from octavo.scaling import Slices

__all__ = ["ShardedParameter", "fsdp_modules", "set_reduce_scatter", "sharded_parameters"]


class ShardedParameter:
    """A parameter that FSDP2 has sharded.

    Args:
        group: FSDP2's parameter group, which is gathered by one collective.
        parameter: FSDP2's record of the parameter.
    """

    def __init__(self, group: Any, parameter: Any) -> None:
        self._group, self._parameter = group, parameter
        self.shape: tuple[int, int] = tuple(parameter._orig_size)  # noqa: SLF001 (of a DTensor, of this rank's slice)

    def unsupported_reason(self) -> str | None:
        """Return why the parameter cannot be gathered as codes; None where it can."""
        parameter, spec = self._parameter, self._parameter._unsharded_dtensor_spec  # noqa: SLF001
        slices = () if spec is None else spec.placements
        shards = parameter.sharded_param.placements[: -len(slices) or None]
        if parameter._module_info.shared_modules:  # noqa: SLF001
            return "other modules use it too"
        if len(slices) > 1:
            return "it was a DTensor of a mesh of several dimensions before fully_shard"
        if any(_has_empty_slice(spec.shape, each, spec.mesh.size()) for each in slices):
            return "tensor parallelism leaves ranks without a part of it"
        if shards[-1].is_replicate() or parameter.fsdp_placement.dim:
            return "fully_shard does not share its rows among the ranks"
        if self._group._use_post_forward_mesh:  # noqa: SLF001
            return "fully_shard's reshard_after_forward is a number, and torch shards no codes after forward"
        return "it is empty" if 0 in self.shape else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 gathers the parameter and the layer gets its gradient."""
        return self.gathered_dtype(self._parameter.sharded_param.dtype)

    @property
    def device(self) -> torch.device:
        """The device that it is gathered on."""
        device: torch.device = self._parameter.device
        return device

    def gathered_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that FSDP2's mixed precision gives a parameter of ``dtype``."""
        return self._parameter.param_dtype or dtype

    def local_tensor(self) -> Tensor:
        """This rank's rows."""
        local: Tensor = self._parameter.sharded_param._local_tensor  # noqa: SLF001
        return local

    def version(self) -> int:
        """Version of the sharded parameter, which a write to it raises on all ranks."""
        version: int = self._parameter.sharded_param._version  # noqa: SLF001
        return version

    def group(self) -> Any:
        """The process group of the ranks that share the rows."""
        return self._parameter.mesh_info.shard_process_group

    def slices(self) -> Slices | None:
        """The slices of tensor parallelism of which the rows are part; None of a weight that is not divided so."""
        spec = self._parameter._unsharded_dtensor_spec  # noqa: SLF001
        return None if spec is None else weight_slices(spec.placements, spec.mesh)

    def ranks_and_rank(self) -> tuple[int, int]:
        """The number of ranks that share the rows, and this one among them."""
        mesh = self._parameter.mesh_info
        return mesh.shard_mesh_size, mesh.shard_mesh_rank

    def stays_gathered(self) -> bool:
        """Return whether the next pass may find the parameter as it was gathered for this one."""
        return not (self._group._reshard_after_forward and self._group.reshard_after_backward)  # noqa: SLF001

    def attach(self, gather: AllGather) -> bool:
        """Let FSDP2 gather the parameter by ``gather``; return False where it does already."""
        local = self.local_tensor()
        if type(local) is ShardedWeight:
            return False
        ShardedWeight.of(local, gather)
        self._parameter._init_extensions()  # noqa: SLF001
        return True


def _has_empty_slice(shape: torch.Size, placement: Any, ranks: int) -> bool:
    """Return whether a rank has no part of a DTensor, which torch divides as ``torch.chunk`` does."""
    size = shape[placement.dim] if placement.is_shard() else ranks
    return (ranks - 1) * -(-size // ranks) >= size


def fsdp_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of ``model`` that ``fully_shard`` was called with."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sharded_parameters(model: torch.nn.Module) -> dict[int, ShardedParameter]:
    """The parameters of ``model`` that FSDP2 has sharded, by the identities of the sharded tensors."""
    states: list[Any] = [module._get_fsdp_state() for module in fsdp_modules(model)]  # type: ignore[operator]  # noqa: SLF001
    return {
        id(parameter.sharded_param): ShardedParameter(group, parameter)
        for state in states
        for group in state._fsdp_param_groups  # noqa: SLF001
        for parameter in group.fsdp_params
    }


def set_reduce_scatter(module: Any, reduce_scatter: Callable[..., None]) -> None:
    """Let a module that ``fully_shard`` was called with reduce its gradients by another function.

    Args:
        module: the module.
        reduce_scatter: called with this rank's result, the gradients, the process group and ``average=``.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class Replaced(ReduceScatter):
        def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            if op not in (ReduceOp.SUM, ReduceOp.AVG):
                raise ConfigError(
                    "gradients in FP8 are summed or averaged; leave out FSDP2's set_gradient_divide_factor"
                )
            reduce_scatter(output_tensor, input_tensor, group, average=op == ReduceOp.AVG)

    module.set_custom_reduce_scatter(Replaced())
