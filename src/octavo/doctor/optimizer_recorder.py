"""Statistics of an optimizer's step: gradient norms, gradient variance, and updates relative to the weights.

Each is a function of sums over elements. A rank that holds a part of a matrix sums over its part; the sums of all
matrices are then added over the ranks by one all-reduce for each dimension of the mesh that divides matrices.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.doctor.parts import first_row, over_parts
from octavo.doctor.statistics import spread
from octavo.errors import ConfigError
from octavo.kernels.tracing import is_distributed
from octavo.parallel.data_parallel import local

__all__ = ["OptimizerRecorder"]

SAMPLED_ELEMENTS = 1 << 12  # of each matrix


class OptimizerRecorder:
    """Measures the matrices of ``model`` that ``optimizer`` trains, before and after one of its steps.

    For each matrix: the norm of the gradient that the optimizer receives; the gradient's variance summed over the
    elements, from Adam's moments (v̂ - m̂²; NaN for other optimizers); and |Δw| / |w| on sampled rows.

    Args:
        model: the model, for the parameters' names.
        optimizer: any optimizer of ``torch.optim``.

    Raises:
        ConfigError: the optimizer trains none of the model's parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in self.groups for parameter in model.parameters()):
            raise ConfigError("the optimizer trains no parameter of this model; watch it with the one that does")
        self.matrices = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.ndim >= 2 and parameter.requires_grad and id(parameter) in self.groups
        }

    @staticmethod
    @contextmanager
    def recording(recorder: "OptimizerRecorder | None", numbers_by_name: dict[str, Tensor]) -> Iterator[None]:
        """Store PARAMETER_FIELDS of each matrix in ``numbers_by_name``, float64 [3]; do nothing without a recorder."""
        if recorder is None:
            yield
            return
        before: list[Tensor] = []
        norms: list[Tensor] = []

        def remember(*_: Any) -> None:
            before[:], norms[:] = recorder.samples(copies=True), recorder.norms()

        def compare(*_: Any) -> None:
            if before:
                numbers_by_name.update(zip(recorder.matrices, recorder.numbers(before, norms), strict=True))

        handles = [
            recorder.optimizer.register_step_pre_hook(remember),
            recorder.optimizer.register_step_post_hook(compare),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def samples(self, *, copies: bool = False) -> list[Tensor]:
        """Sampled rows of this rank's part of every matrix in FP32, copied if ``copies``."""
        return [_sample(parameter).to(torch.float32, copy=copies) for parameter in self.matrices.values()]

    @torch.no_grad()
    def norms(self) -> list[Tensor]:
        """Norm of this rank's part of every gradient: float64 []; NaN without a gradient."""
        gradients = [_part_of_gradient(p.grad, p) for p in self.matrices.values() if p.grad is not None]
        norms = iter(_norms(gradients))
        return [_nan(p) if p.grad is None else next(norms).double() for p in self.matrices.values()]

    @torch.no_grad()
    def numbers(self, before: list[Tensor], norms: list[Tensor]) -> list[Tensor]:
        """PARAMETER_FIELDS of every matrix: float64 [3].

        Args:
            before: sampled rows of each matrix before the step.
            norms: gradient norm of each matrix, of this rank's part.
        """
        if not before:
            return []
        updates = _norms([after - old for after, old in zip(self.samples(), before, strict=True)])
        squares = [torch.stack([each.double() for each in of]).square() for of in (norms, updates, _norms(before))]
        variances = [self._variance(parameter) for parameter in self.matrices.values()]
        sums = torch.stack([*squares, torch.stack(variances), _counts(before)])
        gradient, update, size, variance, count = over_parts(sums, list(self.matrices.values()))
        elements = count.new_tensor([parameter.numel() for parameter in self.matrices.values()])
        return list(torch.stack([gradient.sqrt(), variance / count * elements, (update / size).sqrt()], dim=1))

    def _variance(self, parameter: Tensor) -> Tensor:
        """Sum over this rank's sampled elements of v̂ - m̂², Adam's estimate of the gradient's variance: float64 []."""
        state, group = self.optimizer.state.get(parameter, {}), self.groups[id(parameter)]
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys() or "betas" not in group:
            return _nan(parameter)
        beta1, beta2 = group["betas"]
        step = state["step"]
        if not isinstance(step, Tensor) or step.device.type == "cpu":  # reading a GPU's step would wait for the device
            step = float(step)
        mean = _sample(state["exp_avg"]).float() / (1 - beta1**step)
        square = _sample(state["exp_avg_sq"]).float() / (1 - beta2**step)
        variance: Tensor = square.addcmul_(mean, mean, value=-1).clamp_(min=0)
        return variance.sum(dtype=torch.float64)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    norms: list[Tensor] = list(torch._foreach_norm(tensors, dtype=torch.float32)) if tensors else []  # noqa: SLF001
    return norms


def _counts(samples: list[Tensor]) -> Tensor:
    """Number of elements of each sample: float64."""
    return torch.tensor([each.numel() for each in samples], dtype=torch.float64, device=samples[0].device)


def _part_of_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient.coalesce().values()
    if is_distributed(gradient) and any(each.is_partial() for each in gradient.placements):
        gradient = gradient.redistribute(placements=getattr(parameter, "placements", None))
    return local(gradient)


@torch.no_grad()
def _sample(parameter: Tensor) -> Tensor:
    """This rank's part of the sampled rows of a matrix."""
    part = local(parameter.detach()).flatten(1)
    rows = spread(parameter.shape[0], SAMPLED_ELEMENTS // max(1, math.prod(parameter.shape[1:])))
    return part[slice((rows.start - first_row(parameter)) % rows.step, None, rows.step)]


def _nan(parameter: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=torch.float64, device=parameter.device)
