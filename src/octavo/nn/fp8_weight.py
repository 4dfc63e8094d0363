"""A linear layer that stores its frozen weight as FP8 codes, one byte an element.

The codes are a parameter with another name, so that neither a file nor a loop over parameters presents them as a
weight. ``weight`` still reads as the decoded values: code that reads the weight of a layer instead of calling it, such
as ``F.linear(x, layer.weight)``, computes right, and code that writes into it is refused.
"""

from collections.abc import Mapping
from typing import Any, NoReturn, Self, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.errors import ConfigError
from octavo.functional import quantize_operand
from octavo.kernels import quantize
from octavo.nn.guarded_tensors import DecodedWeight, WeightCodes, plain
from octavo.nn.linear import CODES, CodesLayout, Linear
from octavo.numerics import QuantizedTensor
from octavo.numerics.quantized import FP8_DTYPES

__all__ = ["FP8WeightLinear", "check_storable", "is_own_linear", "runs_in_fp8", "store_codes", "store_weight_as_codes"]


class FP8WeightLinear(Linear):
    """A :class:`Linear` whose frozen weight is stored as FP8 codes and their scale.

    ``weight_codes`` [N, K] is a parameter and ``weight_scale`` a buffer. The ``state_dict`` also has an empty
    ``weight``: every other model refuses its shape, also where it loads loosely. :func:`store_codes` makes such a layer
    of a :class:`Linear`.
    """

    codes_layout: CodesLayout
    codes_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The decoded weight [N, K]; see :class:`DecodedWeight`."""
        if CODES not in self._parameters:
            raise AttributeError("weight")
        codes: Any = self.weight_codes
        if is_traceable_wrapper_subclass(codes):  # sharded: its values are read where it is gathered
            return torch.empty(self.weight_codes.shape, dtype=self.codes_layout.hp_dtype, device="meta")
        decoded = self.stored_codes().dequantize()
        return decoded if torch.compiler.is_compiling() else decoded.as_subclass(DecodedWeight)

    @weight.setter
    def weight(self, _: Tensor) -> NoReturn:
        raise ConfigError(
            f"the weight of {self.called} is stored as FP8 codes and cannot be set; call octavo.restore(model), which "
            "decodes it, first, and give functional_call the named_parameters and named_buffers, not a state_dict"
        )

    @property
    def stored_weight(self) -> Tensor:
        """The codes [N, K]."""
        return self.weight_codes

    def stored_codes(self) -> QuantizedTensor:
        """The weight's codes and scale."""
        codes = plain(self.weight_codes)
        if codes.dtype is not self.codes_dtype:  # FSDP2's mixed precision casts a parameter by value, exactly here
            codes = codes.to(self.codes_dtype)
        return QuantizedTensor(codes, self.weight_scale, *self.codes_layout)

    def release_weight(self) -> None:
        """Become a :class:`Linear` with the decoded weight as its parameter."""
        decoded, bias = self.stored_codes().dequantize(), self._parameters.pop("bias")
        del self.weight_codes, self.weight_scale, self.codes_dtype
        self.__class__, self.codes_layout = Linear, None  # type: ignore[assignment]
        self.weight = torch.nn.Parameter(decoded, requires_grad=False)
        self.register_parameter("bias", bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Follow the model's device; codes and scale keep their dtype, and decode to the model's."""
        before = self.stored_codes()
        self.codes_layout = self.codes_layout._replace(
            hp_dtype=fn(torch.empty(0, dtype=self.codes_layout.hp_dtype)).dtype
        )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (codes that are cast are put back below)
            super()._apply(fn, recurse)
        if self.weight_codes.dtype is not before.data.dtype:
            device = self.weight_codes.device
            self.weight_codes = torch.nn.Parameter(before.data.to(device), requires_grad=False)
            self.weight_scale = before.scale.to(device)
        self._guard_codes()
        return self

    def _guard_codes(self) -> None:
        """Make codes that torch has put in place of others :class:`WeightCodes` again, unless they are sharded."""
        codes = self._parameters[CODES]
        assert codes is not None
        is_sharded: bool = is_traceable_wrapper_subclass(codes)
        if type(codes) is not WeightCodes and not is_sharded:
            self._parameters[CODES] = WeightCodes(plain(codes), requires_grad=codes.requires_grad)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("codes_dtype", self.weight_codes.dtype)
        self._guard_codes()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Refuse another ``weight``, such as one that is to be tied to an embedding's."""
        if name == "weight":
            raise ConfigError(
                f"the weight of {self.called} is stored as FP8 codes and cannot be set or tied; call "
                "octavo.restore(model), which decodes it, first"
            )
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + CODES] = plain(destination[prefix + CODES])
        destination[f"{prefix}weight"] = self._no_weight

    @property
    def _no_weight(self) -> Tensor:
        """Empty tensor whose shape names the formats, so that codes of other formats do not load by their size."""
        formats = (self.weight_scale.element_size(), FP8_DTYPES.index(self.codes_dtype))
        return torch.empty((0, *formats), device=self.weight_codes.device)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Load codes, also those that an earlier octavo saved as ``weight``; refuse a weight in high precision."""
        tensors = dict(state_dict)
        weight = tensors.pop(f"{prefix}weight", None)
        if weight is not None and weight.ndim == 2 and f"{prefix}{CODES}" not in tensors:  # not the empty one
            if weight.dtype not in FP8_DTYPES:
                *_, error_messages = rest
                error_messages.append(
                    f"{prefix}weight is {weight.dtype}, and this layer stores FP8 codes; load weights before "
                    "octavo.convert(model, frozen='fp8'), or call octavo.restore(model) first"
                )
                return
            tensors[f"{prefix}{CODES}"] = weight
        missing = [prefix + name for name in (CODES, "weight_scale") if prefix + name not in tensors]
        if len(missing) == 1:
            *_, missing_keys, _, error_messages = rest
            missing_keys.extend(missing)
            error_messages.append(f"{missing[0]} is missing: codes mean values only with their own scale; load both")
            return
        for name in (CODES, "weight_scale"):
            loaded, own = tensors.get(prefix + name), getattr(self, name)
            if loaded is not None and loaded.dtype is not own.dtype:
                was_cast = name == "weight_scale" and loaded.dtype in (torch.bfloat16, torch.float16, torch.float64)
                reason = (
                    "the scale was cast after it was saved, which loses its bits; load the state_dict as it was saved"
                    if was_cast
                    else "it was stored with another recipe; convert the model with that one"
                )
                rest[-1].append(f"{prefix}{name} is {loaded.dtype}, and this layer's is {own.dtype}: {reason}")
                return
        torch.nn.Module._load_from_state_dict(self, tensors, prefix, *rest)  # noqa: SLF001
        self._guard_codes()


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
    vars(layer)["codes_dtype"] = codes.data.dtype
    layer.weight_codes = WeightCodes(codes.data, requires_grad=False)
    layer.register_buffer("weight_scale", codes.scale)
    layer.register_parameter("bias", bias)


def is_own_linear(module: object) -> TypeGuard[Linear]:
    """Return whether a module is octavo's linear layer itself; a subclass may compute something of its own."""
    return type(module) in (Linear, FP8WeightLinear)


def runs_in_fp8(module: object) -> TypeGuard[Linear]:
    """Return whether a module is an octavo linear layer whose recipe casts, or whose weight is stored as FP8 codes."""
    return isinstance(module, Linear) and not (module.recipe.is_high_precision and module.codes_layout is None)
