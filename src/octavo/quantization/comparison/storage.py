"""What a model's weights take: in a file, and in memory while it runs.

    a layer in FP8        codes, 1 byte an element, and FP32 scales (a static input's scale too)
    a layer in INT8       codes, 1 byte an element, and FP32 scales
    everything else       BF16, 2 bytes an element; as it is in a model that stays in FP32

A tensor that two modules share, such as a tied embedding and head, is counted once. The file's size is that of its
tensors: a safetensors header adds about 100 bytes a tensor. In memory small vectors (norms, biases) stay FP32 holding
BF16 values, which is why the second number is slightly larger than the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.state import scaling_state

__all__ = ["Storage", "file_tensors", "storage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bytes of a model's weights with all that is needed to read them.

    Attributes:
        file_bytes: of the tensors in a file.
        memory_bytes: of the parameters and buffers of the ``state_dict`` as this process holds them.
    """

    file_bytes: int
    memory_bytes: int


def storage_of(model: nn.Module, rest: torch.dtype = torch.bfloat16) -> Storage:
    """Measure a model.

    Args:
        model: of any kind of layers.
        rest: what a file keeps tensors in that are no codes or scales.

    Example:
        >>> storage_of(nn.Linear(8, 4, bias=False))
        Storage(file_bytes=64, memory_bytes=128)
    """
    return Storage(
        file_bytes=sum(tensor.nbytes for tensor in file_tensors(model, rest).values()),
        memory_bytes=sum(tensor.nbytes for _, tensor in _plain_tensors(model)),
    )


def file_tensors(model: nn.Module, rest: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All that a file needs, by name; a shared tensor under its first name only."""
    tensors = {
        name: tensor if _is_scale(name) or not tensor.is_floating_point() or tensor.element_size() == 1
        else tensor.to(rest)
        for name, tensor in _plain_tensors(model)
    }  # fmt: skip
    return tensors | scaling_state(model)


def _is_scale(name: str) -> bool:
    return name.endswith((".scale", "_scale"))


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state's tensors, each storage once, those of torchao's tensors one by one."""
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in model.state_dict().items():
        for part, plain in _parts(name, tensor):
            where = plain.device, plain.data_ptr()
            if plain.numel() and where not in seen:
                seen.add(where)
                yield part, plain


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A plain tensor itself; of a subclass that wraps several, those, under names of their own."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield name, tensor
        return
    inner, _ = wrapper.__tensor_flatten__()
    yield from ((f"{name}.{part}", getattr(wrapper, part)) for part in inner if getattr(wrapper, part) is not None)
