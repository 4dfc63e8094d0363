"""Numbers of modules that are no cast: gate and up projections that align, batch norms that wander."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octavo.doctor.gated import gated_linears

__all__ = ["alignments", "gated_pairs", "watching_batch_norms"]

BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 (the common base of 1d, 2d, 3d and sync)


@torch.no_grad()
def alignments(model: nn.Module) -> dict[str, Tensor]:
    """How far rows of a gate projection and of its up projection point the same way, by the path of their module.

    A SwiGLU's output grows with the square of its input where both rows agree, which is how outliers are born in long
    runs (arXiv 2409.12517, section 4). The number is the largest |cosine| of any row's pair: float64 [1].

    Example:
        >>> class MLP(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_proj, self.up_proj = nn.Linear(4, 8), nn.Linear(4, 8)
        ...         self.down_proj = nn.Linear(8, 4)
        >>> mlp = MLP()
        >>> _ = mlp.gate_proj.weight.data.copy_(mlp.up_proj.weight.data)
        >>> round(alignments(mlp)[""].item(), 4)
        1.0
    """
    found = {}
    for path, (gate, up) in gated_pairs(model).items():
        cosines = torch.nn.functional.cosine_similarity(gate.float(), up.float(), dim=1)
        found[path] = cosines.abs().amax().double().reshape(1)
    return found


def gated_pairs(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights [N, K] of gate and up projection, by the path of the module that has them; see :func:`gated_linears`."""
    found = {}
    for path, module in model.named_modules():
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        shapes = {name: (child.out_features, child.in_features) for name, child in linears.items()}
        weights = [linears[name].weight for name in gated_linears(shapes)[0]]
        if weights:
            gate, up = weights if len(weights) == 2 else weights[0].chunk(2)
            found[path] = (gate, up)
    return found


@contextmanager
def watching_batch_norms(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    """Put into ``found``, by module path, how far each batch norm's batch lies from its running statistics.

    The first number is the median over channels of |log2(batch variance / running variance)|, less two standard
    deviations of what it scatters by where n independent values of one variance are drawn, 0 at least; the second is
    n, how many rows the batch has: float64 [2]. The logarithm of a Gaussian sample's variance has the variance
    trigamma((n - 1) / 2); n is the batch's first dimension, since what stands in one row or image is not independent.
    A channel whose variance in the batch is below the norm's ``eps``, such as a constant one, has no size to speak of
    and does not count; the first number is NaN where no channel does.
    """

    def watch(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(module, BatchNorm)
            if not inputs or module.running_var is None or not module.training:
                return
            x = inputs[0]
            if x.numel() > x.shape[1]:
                dims = [dim for dim in range(x.ndim) if dim != 1]
                variance = x.detach().float().var(dim=dims)
                binades = (variance / module.running_var).log2().abs()
                median = binades.masked_fill(variance < module.eps, math.nan).nanmedian()
                distance = (median - _scatter(x.shape[0])).clamp(min=0).double()
                found[path] = torch.stack([distance, distance.new_tensor(x.shape[0])])

        return look

    handles = [
        module.register_forward_pre_hook(watch(path))
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scatter(n: int) -> float:
    """Two standard deviations of log2 of the variance of ``n`` Gaussian values; of two where there is one only."""
    freedom = torch.tensor((max(n, 2) - 1) / 2, dtype=torch.float64)
    return 2 * math.sqrt(torch.special.polygamma(1, freedom).item()) / math.log(2)
