"""Convolutions that are matrix products, run in FP8: 1×1 kernels, and embeddings of patches.

Where each input enters one patch at most, and every kernel sees all channels, a convolution multiplies each patch,
flattened to K = channels · product of the kernel's sizes, by a matrix [N, K]: the kernel itself, flattened. Others
would read an input several times, which a cast beforehand does not save; they stay in high precision.
"""

import torch
from torch import Tensor

from octavo.convert.other_modules import ConvertedModule, OwnersProjection
from octavo.nn.scaled_layer import ScaledLayer

__all__ = ["ConvertedConvolution", "is_product"]


def is_product(module: torch.nn.Module) -> bool:
    """Return whether a module is a convolution of patches that do not overlap, without padding or groups.

    Example:
        >>> is_product(torch.nn.Conv2d(3, 8, kernel_size=16, stride=16)), is_product(torch.nn.Conv2d(3, 8, 3))
        (True, False)
    """
    if type(module) not in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d):
        return False
    assert isinstance(module, torch.nn.modules.conv._ConvNd)  # noqa: SLF001 (the one base of all convolutions)
    is_apart = all(size <= step for size, step in zip(module.kernel_size, module.stride, strict=True))
    is_dense = all(size == 1 or gap == 1 for size, gap in zip(module.kernel_size, module.dilation, strict=True))
    is_padded = module.padding not in ("valid", (0,) * len(module.kernel_size))
    return is_apart and is_dense and not is_padded and module.groups == 1


class ConvertedConvolution(ConvertedModule):
    """A convolution that :func:`is_product`."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]

    def weights(self) -> tuple[str, ...]:
        """Its one kernel, [N, channels, *sizes]."""
        return ("weight",)

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer that multiplies patches [..., K] by the flattened kernel."""
        return OwnersProjection(self, _flattened)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, *places] to [B, N, *patches]; without B too."""
        layer, dims = self.layer("weight"), len(self.kernel_size)
        if self.is_high_precision_now():
            return super().forward(x)  # type: ignore[no-any-return]
        first = x.ndim - dims  # place; channels are before it
        for i in range(dims):
            x = x.unfold(first + i, self.kernel_size[i], self.stride[i])
        patches = x.movedim(first - 1, -dims - 1).flatten(-dims - 1)
        return layer(patches).movedim(-1, first - 1)  # type: ignore[no-any-return]


def _flattened(kernel: Tensor) -> Tensor:
    return kernel.flatten(1)
