"""A linear layer that stores its frozen weight as FP8 codes, one byte an element.

The codes are a parameter with another name, so that neither a file nor a loop over parameters presents them as a
weight. ``weight`` still reads as the decoded values: code that reads the weight of a layer instead of calling it, such
as ``F.linear(x, layer.weight)``, computes right, and code that writes into it is refused.
"""

from collections.abc import Mapping
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from octavo.errors import ConfigError
from octavo.functional import quantize_operand
from octavo.kernels import quantize
from octavo.nn.linear import CODES, FP8_DTYPES, CodesLayout, Linear
from octavo.numerics import QuantizedTensor

__all__ = ["FP8WeightLinear", "check_storable", "is_own_linear", "runs_in_fp8", "store_codes", "store_weight_as_codes"]


class DecodedWeight(Tensor):
    """Values of FP8 codes, decoded on each read: operations return plain tensors, and writes are refused.

    Views are decoded weights too. What writes past torch's functions, such as through ``numpy()``, is not seen.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions that write, and run all others on the plain values."""
        options = kwargs or {}
        if func is Tensor.requires_grad_ or func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            if next(iter((*args[1:], *options.values())), True):
                raise ConfigError("a weight stored as FP8 codes takes no gradient; octavo.restore(model) decodes it")
            return args[0]
        if _writes(func, options):
            raise ConfigError(
                "this weight is stored as FP8 codes, and what is written into its decoded values would be lost; call "
                "octavo.restore(model), which decodes it, before changing it, such as by merging an adapter"
            )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            result = func(*args, **options)
            return tree_map_only(Tensor, lambda each: each.as_subclass(cls) if _is_view(each, args) else each, result)


def _writes(func: Any, options: Mapping[str, Any]) -> bool:
    name = func.__name__
    in_place = name in _WRITING or (name.endswith("_") and not name.endswith("__")) or options.get("inplace") is True
    return in_place or isinstance(options.get("out"), DecodedWeight) or func == Tensor.data.__set__  # type: ignore[attr-defined]


def _is_view(result: Tensor, args: Any) -> bool:
    """Return whether a result shares memory with a decoded weight among the arguments."""
    storages = {each.untyped_storage().data_ptr() for each in args if isinstance(each, DecodedWeight)}
    return result.untyped_storage().data_ptr() in storages


_WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}


class FP8WeightLinear(Linear):
    """A :class:`Linear` whose frozen weight is stored as FP8 codes and their scale.

    ``weight_codes`` [N, K] is a parameter and ``weight_scale`` a buffer. The ``state_dict`` also has an empty
    ``weight``: every other model refuses its shape, also where it loads loosely. :func:`store_codes` makes such a layer
    of a :class:`Linear`.
    """

    codes_layout: CodesLayout

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The decoded weight [N, K]; see :class:`DecodedWeight`."""
        if CODES not in self._parameters:
            raise AttributeError("weight")
        codes: Any = self.weight_codes
        if is_traceable_wrapper_subclass(codes):  # sharded: its values are read where it is gathered
            return torch.empty(self.weight_codes.shape, dtype=self.codes_layout.hp_dtype, device="meta")
        decoded = self.stored_codes().dequantize()
        return decoded if torch.compiler.is_compiling() else decoded.as_subclass(DecodedWeight)

    @property
    def stored_weight(self) -> Tensor:
        """The codes [N, K]."""
        return self.weight_codes

    def stored_codes(self) -> QuantizedTensor:
        """The weight's codes and scale."""
        return QuantizedTensor(self.weight_codes.detach(), self.weight_scale, *self.codes_layout)

    def release_weight(self) -> None:
        """Become a :class:`Linear` with the decoded weight as its parameter."""
        decoded, bias = self.stored_codes().dequantize(), self._parameters.pop("bias")
        del self.weight_codes, self.weight_scale
        self.__class__, self.codes_layout = Linear, None  # type: ignore[assignment]
        self.weight = torch.nn.Parameter(decoded, requires_grad=False)  # type: ignore[misc]
        self.register_parameter("bias", bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Follow the model's device; codes and scale keep their dtype, and decode to the model's."""
        before = self.stored_codes()
        self.codes_layout = self.codes_layout._replace(
            hp_dtype=fn(torch.empty(0, dtype=self.codes_layout.hp_dtype)).dtype
        )
        super()._apply(fn, recurse)
        if self.weight_codes.dtype is not before.data.dtype:
            device = self.weight_codes.device
            self.weight_codes = torch.nn.Parameter(before.data.to(device), requires_grad=False)
            self.weight_scale = before.scale.to(device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self._no_weight

    @property
    def _no_weight(self) -> Tensor:
        """Empty tensor whose shape names the formats, so that codes of other formats do not load by their size."""
        formats = (self.weight_scale.element_size(), FP8_DTYPES.index(self.weight_codes.dtype))
        return torch.empty((0, *formats), device=self.weight_codes.device)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Load codes, also those that an earlier octavo saved as ``weight``; refuse a weight in high precision."""
        tensors = dict(state_dict)
        weight = tensors.pop(f"{prefix}weight", None)
        if weight is not None and f"{prefix}{CODES}" not in tensors:
            if weight.dtype not in FP8_DTYPES:
                *_, error_messages = rest
                error_messages.append(
                    f"{prefix}weight is {weight.dtype}, and this layer stores FP8 codes; load weights before "
                    "octavo.convert(model, frozen='fp8'), or call octavo.restore(model) first"
                )
                return
            tensors[f"{prefix}{CODES}"] = weight
        for name in (CODES, "weight_scale"):
            loaded, own = tensors.get(prefix + name), getattr(self, name)
            if loaded is not None and loaded.dtype is not own.dtype:
                rest[-1].append(
                    f"{prefix}{name} is {loaded.dtype}, and this layer's is {own.dtype}: it was stored with another "
                    "recipe; convert the model with that one"
                )
                return
        torch.nn.Module._load_from_state_dict(self, tensors, prefix, *rest)  # noqa: SLF001


@torch.no_grad()
def store_weight_as_codes(layer: Linear, *, scale: Tensor | None = None) -> None:
    """Quantize a layer's frozen weight and store its codes, one byte an element, and their scale in its place.

    The codes are those of the recipe's output GEMM and do not change with the recipe.

    Args:
        layer: becomes an :class:`FP8WeightLinear`.
        scale: decode scale, float32 in the shape of the recipe's granularity; None computes it by the recipe.

    Raises:
        ConfigError: the weight is still trained, the recipe casts no weight, the weight holds NaN or infinity, or the
            scale has another shape.
    """
    check_storable(layer)
    spec = layer.recipe.output.b
    assert spec is not None
    if layer.codes_layout is not None:
        return
    if scale is None:
        codes = quantize_operand(layer.weight, spec)
    else:
        codes = quantize(
            layer.weight,
            spec.format,
            granularity=spec.granularity,
            scale=scale.to(layer.weight.device),
            scale_format=spec.scale_format,
            nonfinite=spec.nonfinite,
        )
    store_codes(layer, codes)


def check_storable(layer: Linear) -> None:
    """Raise ConfigError where a layer's weight cannot be stored as FP8 codes; see :func:`store_weight_as_codes`."""
    if layer.stored_weight.requires_grad:
        raise ConfigError("only a frozen weight can be stored as FP8 codes; call weight.requires_grad_(False) first")
    if layer.recipe.output.b is None:
        raise ConfigError(f"recipe {layer.recipe.name!r} casts no weight; store one with an FP8 recipe")
    if layer.codes_layout is not None:
        return
    if layer.weight.is_meta:
        raise ConfigError(
            f"the weight of {layer.called} is on the meta device; load its values before storing it as FP8 codes"
        )
    if not layer.weight.isfinite().all():
        raise ConfigError(f"the weight of {layer.called} holds NaN or infinity; fix it before storing it as FP8 codes")


def store_codes(layer: Linear, codes: QuantizedTensor) -> None:
    """Store existing codes [N, K], such as a file's, instead of a weight; codes and scale are not changed.

    Raises:
        ConfigError: their shape is not that of this layer's weight.
    """
    if codes.shape != (layer.out_features, layer.in_features):
        raise ConfigError(
            f"the weight of {layer.called} is {[layer.out_features, layer.in_features]}, and these codes are "
            f"{list(codes.shape)}"
        )
    layer.codes_layout = CodesLayout(codes.granularity, codes.hp_dtype)
    if not isinstance(layer, FP8WeightLinear):
        del layer.weight
        layer.__class__ = FP8WeightLinear
    bias = layer._parameters.pop("bias")  # noqa: SLF001 (the order of parameters stays)
    layer.weight_codes = torch.nn.Parameter(codes.data, requires_grad=False)
    layer.register_buffer("weight_scale", codes.scale)
    layer.register_parameter("bias", bias)


def is_own_linear(module: object) -> TypeGuard[Linear]:
    """Return whether a module is octavo's linear layer itself; a subclass may compute something of its own."""
    return type(module) in (Linear, FP8WeightLinear)


def runs_in_fp8(module: object) -> TypeGuard[Linear]:
    """Return whether a module is an octavo linear layer whose recipe casts, or whose weight is stored as FP8 codes."""
    return isinstance(module, Linear) and not (module.recipe.is_high_precision and module.codes_layout is None)
