"""The two tensor subclasses that FSDP2's all-gather hooks need.

FSDP2 reads the hooks ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` from the local tensor of a sharded parameter.
:class:`ShardedWeight` has them and is otherwise the plain tensor that it was: optimizers, checkpoints and collectives
read and write the same memory, and results of operations are plain.

:class:`GatheredWeight` stands in for the gathered weight: it has its shape and dtype and takes its gradient, but owns
no memory. Where the weight was gathered in high precision, operations read its values; where only codes were gathered,
they are refused.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["AllGather", "GatheredWeight", "ShardedWeight"]

_aten = torch.ops.aten
_RENAMED = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)
_VIEW = _aten.view.default
_SHAPES = ("zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty", "new_full")


class AllGather(Protocol):
    """The gather of one weight; methods are those of FSDP2's protocol."""

    def pre_all_gather(self, shard: Tensor, ranks: int) -> tuple[tuple[Tensor, ...], Any]:
        """Return tensors to gather from this rank's rows, and what :meth:`post_all_gather` needs besides."""
        ...

    def post_all_gather(self, outputs: tuple[Tensor, ...], gathered: Any) -> None:
        """Take the gathered tensors, in whose memory FSDP2 keeps the weight until it is sharded again."""
        ...

    def stand_in(self, dtype: torch.dtype) -> "GatheredWeight":
        """Return a tensor of the weight's shape for the layer's parameter."""
        ...

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the gathered values; refuse where codes were gathered."""
        ...


class ShardedWeight(Tensor):
    """Local tensor of a weight that FSDP2 has sharded; see the module's docstring."""

    all_gather: AllGather
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def of(tensor: Tensor, gather: AllGather) -> "ShardedWeight":
        """Make ``tensor`` itself a sharded weight."""
        tensor.__class__ = ShardedWeight
        assert isinstance(tensor, ShardedWeight)
        tensor.all_gather = gather
        return tensor

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """See :class:`AllGather`; with this argument alone torch lets shards be uneven."""
        return self.all_gather.pre_all_gather(self.detach(), mesh.size())

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], gathered: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """See :class:`AllGather`; the first time, FSDP2 makes the layer's parameter of what is returned."""
        self.all_gather.post_all_gather(outputs, gathered)
        return None if out is not None else (self.all_gather.stand_in(dtype), ())

    def new_zeros(self, *args: Any, **options: Any) -> Tensor:
        """A sharded weight: FSDP2 pads a loaded shard."""
        return ShardedWeight.of(super().new_zeros(*args, **options), self.all_gather)

    def narrow(self, *args: Any, **options: Any) -> Tensor:
        """A sharded weight: the rows of a padded one."""
        return ShardedWeight.of(super().narrow(*args, **options), self.all_gather)

    def to(self, *args: Any, **options: Any) -> Tensor:
        """A sharded weight: FSDP2 moves one from the CPU where it offloads."""
        moved = super().to(*args, **options)
        return moved if moved is self else ShardedWeight.of(moved, self.all_gather)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class GatheredWeight(Tensor):
    """Stand-in for a gathered weight; see the module's docstring."""

    all_gather: AllGather
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def __new__(cls, gather: AllGather, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """Make a tensor without memory."""
        stand_in = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        stand_in.all_gather = gather
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on the gathered values; on the shape alone where it reads no values."""
        if func in _RENAMED or (
            func is _VIEW and tuple(args[1]) == args[0].shape
        ):  # autograd, of a function's argument
            return args[0].all_gather.stand_in(args[0].dtype)
        shape_only = func.overloadpacket.__name__ in _SHAPES
        args, kwargs = tree_map_only(cls, cls._shape if shape_only else cls._values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _values(self) -> Tensor:
        return self.all_gather.values(self.dtype)

    def _shape(self) -> Tensor:
        """A tensor of the same properties with one element of memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"
