"""Forward passes on parameters that are rounded to a server's dtype, while an optimizer keeps them in FP32.

Under ``torch.autocast`` the residual stream and the norms compute in FP32. A server loads all parameters in BF16, and
everything between its layers is BF16 too. Inside :class:`rounded_parameters` the model computes so; gradients pass
through the rounding to the FP32 parameters.
"""

from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError

__all__ = ["round_parameters", "rounded_parameters", "wide_parameters"]


class rounded_parameters:  # noqa: N801 (a context, named as torch.no_grad)
    """Context in which a model's floating parameters, but for codes, are rounded to a dtype; can be entered again.

    A backward pass that repeats the forward, as activation checkpointing does, has to run inside it. Codes of FP8
    weights stay as they are.

    Args:
        model: with parameters of its own; not under FSDP2, which sets them itself.
        dtype: float32, bfloat16 or float16.

    Raises:
        ConfigError: it is entered while it is active.

    Example:
        >>> model, x = nn.Linear(4, 2), torch.ones(1, 4, dtype=torch.bfloat16)
        >>> with rounded_parameters(model, torch.bfloat16):
        ...     y = model(x)
        >>> y.sum().backward()
        >>> y.dtype, model.weight.dtype, model.weight.grad.dtype
        (torch.bfloat16, torch.float32, torch.float32)
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._originals: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []

    def __enter__(self) -> None:
        if self._originals:
            raise ConfigError("rounded_parameters is active already; leave it before it is entered again")
        rounded: dict[int, Tensor] = {}  # tied parameters stay tied
        self._originals = list(wide_parameters(self._model))
        for table, name, parameter in self._originals:
            if id(parameter) not in rounded:
                rounded[id(parameter)] = parameter.to(self._dtype)
            table[name] = rounded[id(parameter)]  # type: ignore[assignment]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for table, name, parameter in self._originals:
            table[name] = parameter
        self._originals = []


@torch.no_grad()
def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's parameters to the values that :class:`rounded_parameters` gives them; they keep their dtypes.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 1 / 3)
        >>> round_parameters(layer, torch.bfloat16)
        >>> layer.weight.item(), layer.weight.dtype
        (0.333984375, torch.float32)
    """
    for _, _, parameter in wide_parameters(model):
        parameter.copy_(parameter.to(dtype))


def wide_parameters(model: nn.Module) -> Iterator[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
    """Yield each module's table of parameters with the name and value of each of 16 bits and more, floating."""
    for module in model.modules():
        table = module._parameters  # noqa: SLF001 (layers with codes refuse assignments)
        for name, parameter in list(table.items()):
            if parameter is not None and parameter.is_floating_point() and parameter.element_size() > 1:
                yield table, name, parameter
