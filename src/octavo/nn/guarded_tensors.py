"""Tensors of a weight stored as FP8 codes, which refuse the writes that would be lost or would write wrong values.

torch casts what it copies into a float8 tensor by value: a float32 weight copied into codes is rounded without their
scale. And values decoded from codes are a copy, so that what is written into them reaches no layer. Views are guarded
like the tensor itself; results that share no memory with it are plain tensors.

Not seen are writes past torch's functions, such as through ``numpy()``, and those in a graph of ``torch.compile``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from octavo.errors import ConfigError

__all__ = ["DecodedWeight", "GuardedTensor", "WeightCodes", "plain"]

_UNFREEZES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_COPIES = ("copy_", "_foreach_copy_", "set_", "__setitem__")
_OPERATORS = tuple(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or"))
_KEEP_VALUES = ("requires_grad_", "share_memory_", "detach_", "swap_")
_CONVERSIONS = ("to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda")


class GuardedTensor(Tensor):
    """Tensor that checks what torch's functions write into it; see the module's docstring."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the function's writes, run it on plain values, and guard the views among its results."""
        options = kwargs or {}
        if torch.compiler.is_compiling() or isinstance(func, torch._ops.OpOverload):  # noqa: SLF001 (a graph's)
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return func(*args, **options)
        for tensor in _written(func, args, options):
            if isinstance(tensor, GuardedTensor):
                tensor.check_write(func, args, options)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            result = func(*args, **options)
            if not isinstance(result, Tensor | tuple | list):
                return result
            owners = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, GuardedTensor)]
            return tree_map_only(Tensor, lambda each: _guarded(each, owners, func), result)

    def check_write(self, func: Any, args: Any, options: Mapping[str, Any]) -> None:
        """Raise ConfigError unless ``func`` may write into this tensor."""
        raise NotImplementedError

    def guards(self, view: Tensor, func: Any) -> bool:
        """Return whether a result that shares memory with this tensor is guarded too."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def set_(self, *args: Any, **options: Any) -> Any:
        """As of ``torch.Tensor``, which alone of its methods does not ask ``__torch_function__``."""
        return self.__torch_function__(Tensor.set_, (type(self),), (self, *args), options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


class DecodedWeight(GuardedTensor):
    """Values of FP8 codes, decoded on each read: nothing may be written into them, for it would be lost."""

    def check_write(self, func: Any, args: Any, options: Mapping[str, Any]) -> None:
        """Refuse every write, and gradients."""
        if func in _UNFREEZES:
            if next(iter((*args[1:], *options.values())), True):
                raise ConfigError(
                    "a weight stored as FP8 codes takes no gradient; octavo.restore(model) decodes it, and a clone() "
                    "of its values can be trained"
                )
            return
        raise ConfigError(
            "this weight is stored as FP8 codes, and what is written into its decoded values would be lost; call "
            "octavo.restore(model), which decodes it, before changing it, such as by merging an adapter"
        )

    def guards(self, view: Tensor, func: Any) -> bool:
        """Guard all views but the results of conversions, which are copies unless the dtype is the same."""
        return func.__name__ not in _CONVERSIONS


class CodesView(GuardedTensor):
    """FP8 codes, into which only codes of the same format are written."""

    def check_write(self, func: Any, args: Any, options: Mapping[str, Any]) -> None:
        """Refuse everything but copies of tensors of this FP8 dtype."""
        if func in _UNFREEZES:
            return
        name = func.__name__
        if name in _COPIES or func == _SET_DATA:
            sources = tree_leaves((args[2:] if name == "__setitem__" else args[1:], dict(options)))
            tensors = [leaf for leaf in sources if isinstance(leaf, Tensor)]
            if tensors and all(each.dtype is self.dtype for each in tensors):
                return
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"these are FP8 codes ({self.dtype}), which mean values only with their scale: torch would write numbers "
            "into them without it; call octavo.restore(model), which decodes them, before changing weights, or load "
            "the state_dict of a model converted with frozen='fp8'"
        )

    def guards(self, view: Tensor, func: Any) -> bool:
        """Guard the views that have the codes' dtype: another one, such as uint8, reads them as bytes."""
        return view.dtype is self.dtype


class WeightCodes(CodesView, torch.nn.Parameter):
    """Parameter of FP8 codes; its views are :class:`CodesView`."""

    __deepcopy__ = torch.nn.Parameter.__deepcopy__
    __reduce_ex__ = torch.nn.Parameter.__reduce_ex__


def plain(tensor: Tensor) -> Tensor:
    """The same memory as a tensor without a guard and without gradients."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return tensor.detach()


def _written(func: Any, args: Any, options: Mapping[str, Any]) -> list[Any]:
    """Arguments of a torch function that it writes into."""
    name, targets = func.__name__, [options.get("out")]
    in_place = name in ("__setitem__", *_OPERATORS) or (name.endswith("_") and not name.endswith("__"))
    if (in_place and name not in _KEEP_VALUES) or func in _UNFREEZES or func == _SET_DATA or options.get("inplace"):
        targets.append(args[0] if args else [options.get(key) for key in ("input", "self", "tensor")])
    if name in ("embedding", "embedding_bag") and options.get("max_norm") is not None:
        targets.append(args[1] if len(args) > 1 else options.get("weight"))
    return tree_leaves(targets)


def _guarded(result: Tensor, owners: list[GuardedTensor], func: Any) -> Tensor:
    """The result, guarded like the first of the arguments whose memory it shares."""
    if isinstance(result, GuardedTensor):
        # A conversion returns its own argument where there is nothing to convert.
        return result if result.guards(result, func) else result.as_subclass(Tensor)
    for owner in owners:
        if _share_memory(result, owner) and owner.guards(result, func):
            return result.as_subclass(DecodedWeight if isinstance(owner, DecodedWeight) else CodesView)
    return result


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are views of one storage; sparse tensors and those of torch.func have none."""
    has_storage = torch._C._has_storage(one) and torch._C._has_storage(other)  # noqa: SLF001
    return has_storage and torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]  # noqa: SLF001
