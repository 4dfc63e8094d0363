"""``gather_in_fp8``: FSDP2 gathers the weights of octavo's layers as codes and scales."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from octavo.convert.choice import all_paths, matches
from octavo.convert.fp8_storage import read_by_others
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.scaled_layer import ScaledLayer
from octavo.parallel.fsdp2 import ShardedParameter, fsdp_modules, sharded_parameters
from octavo.parallel.weight_gather import WeightGather, high_precision_reason
from octavo.scaling.step_amaxes import StepAmaxes

__all__ = ["gather_in_fp8"]


def gather_in_fp8(model: torch.nn.Module, *, skip: Sequence[str] = ()) -> dict[str, str]:
    """Let FSDP2 gather the weights of octavo's layers as FP8 codes and scales, one byte an element.

    Codes and scales are bit for bit those of quantizing the whole weight. Master weights, gradients, optimizer states
    and checkpoints stay as they are.

    Args:
        model: converted by ``octavo.convert``, then given to ``torch.distributed.fsdp.fully_shard``.
        skip: shell patterns of paths of layers whose weights are gathered in high precision.

    Returns:
        The paths of octavo's layers whose weights are still gathered in high precision, each with the reason.

    Raises:
        ConfigError: ``model`` has no layers of octavo that FSDP2 has sharded, or ``skip`` is a bare string.

    Example:
        >>> from torch import distributed
        >>> from torch.distributed.fsdp import fully_shard
        >>> import octavo
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
        >>> _ = octavo.convert(model, "rowwise", overrides={"1": "bf16"})
        >>> gather_in_fp8(fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,))))
        {'1': "recipe 'bf16' casts no weight"}
        >>> distributed.destroy_process_group()
    """
    if isinstance(skip, str):
        raise ConfigError(f"skip takes a sequence of patterns, such as [{skip!r}], not a bare string")
    sharded, paths, step, left = sharded_parameters(model), all_paths(model), StepAmaxes(), dict[str, str]()
    layers = [each for each in model.modules() if isinstance(each, Linear) and each.codes_layout is None]
    if not any(id(layer.weight) in sharded for layer in layers):
        raise ConfigError(
            "the model has no octavo layer that FSDP2 has sharded and not gathered; call octavo.convert, then "
            "fully_shard, then octavo.parallel.gather_in_fp8"
        )
    others_read = read_by_others(model)
    for layer in layers:
        weight, path = sharded.get(id(layer.weight)), paths[layer][0]
        reason = "skip names it" if any(matches(pattern, paths[layer]) for pattern in skip) else others_read.get(path)
        reason = reason or _reason(layer, weight)
        if reason is not None:
            left[path] = reason
        elif layer.weight_gather is None:
            layer.weight_gather = WeightGather(layer, sharded[id(layer.weight)], step)
            _run_eagerly(layer)
    left |= {
        path: "weights of experts and Conv1D are gathered in high precision"
        for path, each in model.named_modules()
        if isinstance(each, ScaledLayer) and not isinstance(each, Linear)
    }
    for module in fsdp_modules(model):
        module.register_forward_pre_hook(partial(_attach, _gathers(module)), prepend=True)
    for module in _outermost(fsdp_modules(model)):  # inside of it, torch's reentrant checkpoint disables gradients
        module.register_forward_pre_hook(step.note_gradients, prepend=True)
    _attach(_gathers(model))
    return left


def _reason(layer: Linear, weight: ShardedParameter | None) -> str | None:
    """Return why a weight is gathered in high precision."""
    if weight is None:
        return "FSDP2 has not sharded it"
    return weight.unsupported_reason() or high_precision_reason(layer, layer.recipe)


def _run_eagerly(layer: Linear) -> None:
    """Keep the layer out of graphs: torch.compile traces no operation on a weight that has no memory."""
    for name in ("forward", "forward_cast"):
        setattr(layer, name, torch._disable_dynamo(partial(getattr(layer, name))))  # type: ignore[attr-defined]  # noqa: SLF001


def _gathers(module: torch.nn.Module) -> list[WeightGather]:
    sources = (each.weight_gather for each in module.modules() if isinstance(each, Linear))
    return [source for source in sources if isinstance(source, WeightGather)]


def _outermost(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that are part of no other one."""
    parts = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in parts]


def _attach(gathers: list[WeightGather], *_: Any) -> None:
    """Attach gathers, before every forward pass."""
    for gather in gathers:
        gather.attach()
