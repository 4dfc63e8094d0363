"""``save_pretrained`` of a model that stores codes: a plain checkpoint with the decoded weights.

transformers writes the tensors of a ``state_dict``. It is given tensors of the right shape and dtype that decode when
their values are read, so that no more than one shard is decoded at a time.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.linear import CODES
from octavo.numerics import QuantizedTensor

__all__ = ["allow_save_pretrained", "guard_save_pretrained"]

SAVE, STATE_DICT = "save_pretrained", "state_dict"
PEFT_BASE = ".base_layer"  # a layer under an adapter
_DESCRIBE = {
    torch.Tensor.untyped_storage,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.size,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_meta", "is_sparse")),
}  # what may be asked of a tensor without its values


class DecodedWhenRead(torch.Tensor):
    """Tensor of a decoded weight's shape whose values are decoded by each function that reads them.

    Its own memory is never written, so that the system does not provide it.
    """

    codes: QuantizedTensor

    @classmethod
    def of(cls, codes: QuantizedTensor) -> Self:
        """The decoded values of these codes."""
        tensor = torch.empty(codes.shape, dtype=codes.hp_dtype, device="cpu").as_subclass(cls)
        tensor.codes = codes
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decode the arguments, unless the function only describes a tensor; refuse the address of the values."""
        if func is torch.Tensor.data_ptr:
            raise TypeError("the values are decoded when read and have no address; call contiguous() first")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            if func not in _DESCRIBE:
                args, kwargs = tree_map_only(cls, lambda each: each.codes.dequantize(), (args, kwargs))
            return func(*args, **(kwargs or {}))


def guard_save_pretrained(model: torch.nn.Module) -> None:
    """Make ``save_pretrained`` write decoded weights: ``from_pretrained`` would read codes as weights of up to 448.

    The method of the model and of each model inside it is covered by an attribute of the same name, which copies and
    pickles keep. peft's models write adapters alone and stay as they are.
    """
    peft = sys.modules.get("peft")
    for module in model.modules():
        writes_weights = peft is None or not isinstance(module, peft.PeftModel)
        if writes_weights and callable(getattr(type(module), SAVE, None)):
            vars(module)[SAVE] = partial(_save_pretrained, module)


def allow_save_pretrained(model: torch.nn.Module) -> None:
    """Undo :func:`guard_save_pretrained`, where no layer stores codes any more."""
    for module in model.modules():
        guard = vars(module).get(SAVE)
        if isinstance(guard, partial) and guard.func is _save_pretrained and not _coded_layers(module):
            del vars(module)[SAVE]


def _save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
    """Call the model's ``save_pretrained`` with decoded weights; adapters (transformers' own mark) have none."""
    save = type(model).save_pretrained
    paths = _coded_layers(model)
    if not paths or getattr(model, "_hf_peft_config_loaded", False):
        return save(model, *args, **options)
    call = inspect.signature(save).bind(model, *args, **options)
    takes_weights = STATE_DICT in inspect.signature(save).parameters  # diffusers' reads the model's own
    if not takes_weights or call.arguments.get("distributed_checkpoint"):
        raise ConfigError(
            f"this save_pretrained would write FP8 codes as weights ({paths[0]}.weight and {len(paths) - 1} more), and "
            "from_pretrained would read them as such; write codes with octavo.save_quantized, or call "
            "octavo.restore(model) first, which decodes them"
        )
    if wrapped := [path for path in paths if path.endswith(PEFT_BASE)]:
        raise ConfigError(
            f"save_pretrained would write {wrapped[0]}.weight and {len(wrapped) - 1} more under names that "
            "from_pretrained does not read as weights; save the adapter itself, or call the adapter's unload() first"
        )
    state_dict = call.arguments.get(STATE_DICT)
    call.arguments[STATE_DICT] = _decoded_state(model, paths, model.state_dict() if state_dict is None else state_dict)
    return save(*call.args, **call.kwargs)


def _decoded_state(model: torch.nn.Module, paths: Iterable[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dictionary with weights that decode when written in place of codes; those in high precision stay."""
    decoded = dict(state)
    for path in paths:
        codes, scale = decoded.pop(f"{path}.{CODES}", None), decoded.pop(f"{path}.weight_scale", None)
        if codes is not None:
            layer: Any = model.get_submodule(path)
            stored = QuantizedTensor(codes.to(layer.codes_dtype), scale, *layer.codes_layout)
            decoded[f"{path}.weight"] = DecodedWhenRead.of(stored)
    return decoded


def _coded_layers(model: torch.nn.Module) -> list[str]:
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, Linear)}
    return [path for path, layer in layers.items() if layer.codes_layout is not None]
