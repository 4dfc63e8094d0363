"""Statistics of an optimizer's step: gradient norms, gradient variance, and updates relative to the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.doctor.statistics import spread
from octavo.errors import ConfigError
from octavo.kernels.tracing import is_distributed
from octavo.nn.tensor_parallel import whole

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
        """Sampled rows of every matrix in FP32, copied if ``copies``."""
        return [_sample(parameter).to(torch.float32, copy=copies) for parameter in self.matrices.values()]

    @torch.no_grad()
    def norms(self) -> list[Tensor]:
        """Norm of every gradient: float64 []; NaN without a gradient."""
        gradients = [parameter.grad for parameter in self.matrices.values() if parameter.grad is not None]
        norms = iter(_norms([grad.coalesce().values() if grad.is_sparse else whole(grad) for grad in gradients]))
        return [_nan(p) if p.grad is None else next(norms).double() for p in self.matrices.values()]

    @torch.no_grad()
    def numbers(self, before: list[Tensor], norms: list[Tensor]) -> list[Tensor]:
        """PARAMETER_FIELDS of every matrix: float64 [3].

        Args:
            before: sampled rows of each matrix before the step.
            norms: gradient norm of each matrix.
        """
        updates = _norms([after - old for after, old in zip(self.samples(), before, strict=True)])
        variances = [self._variance(parameter) for parameter in self.matrices.values()]
        ratios = [(update / size).double() for update, size in zip(updates, _norms(before), strict=True)]
        return [torch.stack(three) for three in zip(norms, variances, ratios, strict=True)]

    def _variance(self, parameter: Tensor) -> Tensor:
        """Sum over the elements of v̂ - m̂², Adam's estimate of the gradient's variance: float64 []."""
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
        return variance.mean(dtype=torch.float64) * parameter.numel()


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    if not tensors:
        return []
    if any(map(is_distributed, tensors)):
        return [whole(torch.linalg.vector_norm(tensor, dtype=torch.float32)) for tensor in tensors]
    norms: list[Tensor] = list(torch._foreach_norm(tensors, dtype=torch.float32))  # noqa: SLF001
    return norms


@torch.no_grad()
def _sample(parameter: Tensor) -> Tensor:
    """Sampled rows of a matrix."""
    matrix = whole(parameter.detach()).flatten(1)
    return matrix[spread(matrix.shape[0], SAMPLED_ELEMENTS // max(1, matrix.shape[1]))]


def _nan(parameter: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=torch.float64, device=parameter.device)
