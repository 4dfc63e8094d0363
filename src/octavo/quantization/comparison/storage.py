"""Size of a model's weights in a file, and in memory while it runs.

    a layer in FP8        codes, 1 byte an element, and FP32 scales (including a static input's scale)
    a layer in INT8       codes, 1 byte an element, and FP32 scales
    everything else       BF16, 2 bytes an element; unchanged in a model that stays in FP32

A tensor that two modules share, such as a tied embedding and head, is counted once. The file size is the sum of its
tensors: a safetensors header adds about 100 bytes a tensor. In memory small vectors (norms, biases) stay FP32 with BF16
values, so the second number is slightly larger than the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.nn.scaling_state import scaling_state

__all__ = ["Storage", "file_tensors", "storage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bytes of a model's weights, including their scales.

    Attributes:
        file_bytes: of the tensors in a file.
        memory_bytes: of the parameters and buffers of the ``state_dict`` in memory.
    """

    file_bytes: int
    memory_bytes: int


def storage_of(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Storage:
    """Storage of a model.

    Args:
        model: any module.
        dtype: file dtype of tensors that are neither codes nor scales.

    Example:
        >>> storage_of(nn.Linear(8, 4, bias=False))
        Storage(file_bytes=64, memory_bytes=128)
    """
    return Storage(
        file_bytes=sum(tensor.nbytes for tensor in file_tensors(model, dtype).values()),
        memory_bytes=sum(tensor.nbytes for _, tensor in _plain_tensors(model)),
    )


def file_tensors(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors of a file by name; a shared tensor under its first name only."""
    tensors = {
        name: tensor if _is_scale(name) or not tensor.is_floating_point() or tensor.element_size() == 1
        else tensor.to(dtype)
        for name, tensor in _plain_tensors(model)
    }  # fmt: skip
    return tensors | scaling_state(model)


def _is_scale(name: str) -> bool:
    return name.endswith((".scale", "_scale"))


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the ``state_dict``, each storage once; wrapper subclasses are replaced by their inner tensors."""
    seen_storages: set[tuple[torch.device, int]] = set()
    for name, tensor in model.state_dict().items():
        for part, plain in _parts(name, tensor):
            storage = plain.device, plain.data_ptr()
            if plain.numel() and storage not in seen_storages:
                seen_storages.add(storage)
                yield part, plain


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a plain tensor, or the inner tensors of a wrapper subclass under ``name.part``."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield name, tensor
        return
    inner, _ = wrapper.__tensor_flatten__()
    yield from ((f"{name}.{part}", getattr(wrapper, part)) for part in inner if getattr(wrapper, part) is not None)
