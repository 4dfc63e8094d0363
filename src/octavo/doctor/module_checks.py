"""Statistics of modules beyond casts: alignment of gate and up projections, drift of batch norms."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octavo.doctor.gated import gated_linears
from octavo.doctor.parts import over_parts, rows_alike
from octavo.nn.tensor_parallel import whole
from octavo.parallel.data_parallel import local

__all__ = ["alignments", "gated_pairs", "watching_batch_norms"]

BatchNorm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 (the common base of 1d, 2d, 3d and sync)


@torch.no_grad()
def alignments(model: nn.Module) -> dict[str, Tensor]:
    """Alignment of the gate and up projection of each gated MLP, by the path of their module.

    Where both rows align, a SwiGLU's output grows with the square of its input, which creates outliers in long runs
    (arXiv 2409.12517, section 4). The alignment is the largest |cosine| over all pairs of rows: float64 [1].

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
    pairs = gated_pairs(model)
    if not pairs:
        return {}
    largest = torch.stack([_alignment(local(gate), local(up)) for gate, up in pairs.values()])
    largest = over_parts(largest[None], [gate for gate, _ in pairs.values()], largest=True)[0]
    return {path: each.reshape(1) for path, each in zip(pairs, largest, strict=True)}


def _alignment(gate: Tensor, up: Tensor) -> Tensor:
    """The largest |cosine| over pairs of rows of [N, K]: float64 []; 0 without rows."""
    if not len(gate):
        return torch.zeros((), dtype=torch.float64, device=gate.device)
    return torch.nn.functional.cosine_similarity(gate.float(), up.float(), dim=1).abs().amax().double()


def gated_pairs(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights [N, K] of gate and up projection, by the path of their module; see :func:`gated_linears`.

    DTensors where each rank holds the same rows of both; otherwise whole, for which all ranks must call.
    """
    pairs = {}
    for path, module in model.named_modules():
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        shapes = {name: (child.out_features, child.in_features) for name, child in linears.items()}
        weights: list[Tensor] = [linears[name].weight for name in gated_linears(shapes)[0]]
        if not weights:
            continue
        if len(weights) == 2 and rows_alike(*weights):
            gate, up = weights
        else:
            gate, up = map(whole, weights) if len(weights) == 2 else whole(weights[0]).chunk(2)
        pairs[path] = (gate, up)
    return pairs


@contextmanager
def watching_batch_norms(model: nn.Module, distances: dict[str, Tensor]) -> Iterator[None]:
    """Store each batch norm's distance from its running statistics in ``distances``, by module path: float64 [2].

    The first number is the median over channels of |log2(batch variance / running variance)|, minus two standard
    deviations of this logarithm for n independent samples, and at least 0; the second is n, the number of rows of the
    batch. The logarithm of a Gaussian sample's variance has variance trigamma((n - 1) / 2). n is the batch's first
    dimension, since values within one row or image are not independent. Channels whose variance is below the norm's
    ``eps``, such as constant ones, are ignored; the first number is NaN if none remains.
    """

    def make_hook(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def measure(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(module, BatchNorm)
            if not inputs or module.running_var is None or not module.training:
                return
            x = inputs[0]
            if x.numel() > x.shape[1]:
                dims = [dim for dim in range(x.ndim) if dim != 1]
                variance = x.detach().float().var(dim=dims)
                binades = (variance / module.running_var).log2().abs()
                median = binades.masked_fill(variance < module.eps, math.nan).nanmedian()
                distance = (median - _scatter_of_log2_variance(x.shape[0])).clamp(min=0).double()
                distances[path] = torch.stack([distance, distance.new_tensor(x.shape[0])])

        return measure

    handles = [
        module.register_forward_pre_hook(make_hook(path))
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scatter_of_log2_variance(n: int) -> float:
    """Two standard deviations of log2 of the variance of ``n`` Gaussian values; a single value counts as two."""
    freedom = torch.tensor((max(n, 2) - 1) / 2, dtype=torch.float64)
    return 2 * math.sqrt(torch.special.polygamma(1, freedom).item()) / math.log(2)
