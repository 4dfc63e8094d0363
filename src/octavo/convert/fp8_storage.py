"""Frozen weights stored as FP8 codes, and the reasons why some cannot be."""

import sys
from collections.abc import Iterable, Mapping

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.convert.plain_checkpoint import guard_save_pretrained
from octavo.convert.weight_readers import has_fast_path, weight_readers
from octavo.errors import ConfigError
from octavo.kernels.tracing import is_distributed
from octavo.nn import Linear
from octavo.nn.fp8_weight import FP8WeightLinear, check_storable, store_weight_as_codes

__all__ = [
    "read_by_others",
    "refuse_sharded",
    "store_weights_as_codes",
]


def store_weights_as_codes(
    model: torch.nn.Module, paths: Iterable[str], *, scales: Mapping[str, torch.Tensor] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Store the frozen weights of converted layers as FP8 codes (:mod:`octavo.nn.fp8_weight`).

    Args:
        model: converted.
        paths: of the layers; those whose weight is still trained are skipped.
        scales: decode scales to use instead of the recipe's, by path.

    Returns:
        Paths of the layers that now store codes; and of those that cannot, with the reason.
    """
    others_read = read_by_others(model)
    stored, reasons = dict[str, Linear](), {}
    for path in paths:
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        if layer.codes_layout is not None or _is_trained(layer):
            continue
        if path in others_read:
            reasons[path] = others_read[path]
        elif (computed := _computed(layer)) is not None:
            reasons[path] = f"its {computed} is computed at every call (torch.nn.utils' weight_norm, prune or similar)"
        elif layer.recipe.output.b is None:
            reasons[path] = f"{layer.recipe.name} casts no weight"
        elif is_distributed(layer.weight):
            reasons[path] = "ranks share it by tensor parallelism"
        elif layer.weight.is_meta:
            reasons[path] = "it is on the meta device; load the model, then convert it again with frozen='fp8'"
        else:
            check_storable(layer)
            stored[path] = layer
    for path, layer in stored.items():  # all or, where one cannot be stored, none
        store_weight_as_codes(layer, scale=(scales or {}).get(path))
    if stored:
        guard_save_pretrained(model)
    return tuple(stored), reasons


def _is_trained(layer: Linear) -> bool:
    """Return whether the weight takes a gradient, or a parameter that weight_norm and similar compute it from."""
    return any(
        parameter.requires_grad
        for name, parameter in layer.named_parameters(recurse=False)
        if name.startswith("weight")
    )


def _computed(layer: Linear) -> str | None:
    """Parameter that a pre-hook of ``torch.nn.utils`` computes from others at every call; None if there is none."""
    return next((name for name in ("weight", "bias") if name not in layer._parameters), None)  # noqa: SLF001


def refuse_sharded(model: torch.nn.Module) -> None:
    """Raise ConfigError where FSDP2 has taken over octavo's layers, or the parameters of codes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapped = () if fsdp is None else (fsdp.FSDPModule,)
    inside = any(isinstance(module, wrapped) for module in model.modules())
    for path, layer in model.named_modules():
        codes = layer.stored_weight if isinstance(layer, FP8WeightLinear) else None
        taken_codes = codes is not None and (inside or is_traceable_wrapper_subclass(codes))
        if taken_codes or (isinstance(layer, Linear) and isinstance(layer, wrapped)):
            raise ConfigError(
                f"fully_shard has taken over layer {path!r}, which cannot be restored any more; call "
                "octavo.restore(model) before fully_shard"
            )


def read_by_others(model: torch.nn.Module) -> dict[str, str]:
    """Linear layers whose weight cannot be stored as codes because something else reads it too: path to reason.

    Example:
        >>> model = torch.nn.ModuleDict({"table": torch.nn.Embedding(9, 4), "up": torch.nn.Linear(4, 8)})
        >>> model["head"] = torch.nn.Linear(4, 9, bias=False)
        >>> model["head"].weight = model["table"].weight
        >>> read_by_others(model)
        {'head': 'other modules use it too'}
    """
    shared = _overlapping(tensor for module in model.modules() for tensor in module.parameters(recurse=False))
    fast_path, readers = _read_by_fast_path(model), weight_readers(model)
    reasons = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        if layer in fast_path:
            reasons[path] = "torch's fast path of nn.TransformerEncoderLayer reads it in high precision"
        elif id(layer.stored_weight if isinstance(layer, Linear) else layer.weight) in shared:
            reasons[path] = "other modules use it too"
        elif layer in readers:
            reasons[path] = f"{type(readers[layer].module).__name__} reads it in high precision"
    return reasons


def _overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Identities of the tensors that share bytes with others of them: the same tensors, or views of one storage.

    Those in a storage are visited in order of their first bytes: one that overlaps any before it overlaps the one among
    these that reaches the farthest.
    """
    shared, farthest = set[int](), (-1, 0, 0)
    for storage, start, stop, name in sorted(map(_span, tensors)):
        last_storage, last_stop, last_name = farthest
        overlaps = storage == last_storage and start < last_stop
        if overlaps:
            shared |= {name, last_name}
        if not overlaps or stop > last_stop:
            farthest = (storage, stop, name)
    return shared


def _span(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """A tensor's storage, first byte, end, and identity; one without a storage or a shape yet is its own."""
    if is_lazy(tensor) or not torch._C._has_storage(tensor):  # noqa: SLF001
        return id(tensor), 0, 1, id(tensor)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start, length = tensor.storage_offset(), reach if tensor.numel() else 0
    item = tensor.element_size()
    return tensor.untyped_storage()._cdata, int(start * item), int((start + length) * item), id(tensor)  # noqa: SLF001


def _read_by_fast_path(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Layers whose weights torch's encoder reads directly in evaluation, and their submodules (adapters)."""
    return {
        inner
        for layer in filter(has_fast_path, model.modules())
        for linear in (layer.linear1, layer.linear2)
        for inner in linear.modules()
    }
