"""What an optimizer's step did: gradients' norms and variance, and updates beside the weights they change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.doctor.statistics import spread

__all__ = ["OptimizerRecorder"]

SAMPLED_ELEMENTS = 1 << 15


class OptimizerRecorder:
    """Measures the matrices of ``model`` that ``optimizer`` trains, around one of its steps.

    Per matrix: the norm of its gradient as the optimizer sees it; its gradient's variance, summed over the elements,
    from Adam's moments (v̂ - m̂²; NaN with another optimizer); and |Δw| / |w| on sampled rows.

    Args:
        model: names the parameters.
        optimizer: any of ``torch.optim``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.optimizer = optimizer
        self.matrices = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.ndim >= 2 and parameter.requires_grad and id(parameter) in trained
        }

    @staticmethod
    @contextmanager
    def recording(recorder: "OptimizerRecorder | None", found: dict[str, Tensor]) -> Iterator[None]:
        """Put float64 vectors of PARAMETER_FIELDS into ``found``; without a recorder nothing."""
        if recorder is None:
            yield
            return
        before: dict[str, Tensor] = {}
        norms: dict[str, Tensor] = {}

        def remember(*_: Any) -> None:
            before.update({name: _sample(parameter).clone() for name, parameter in recorder.matrices.items()})
            norms.update(recorder.norms())

        def compare(*_: Any) -> None:
            for name, parameter in recorder.matrices.items():
                if name in before:
                    ratio = (_sample(parameter) - before[name]).norm() / before[name].norm()
                    found[name] = torch.stack([norms[name], recorder.variance(parameter), ratio.double()])

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
    def norms(self) -> dict[str, Tensor]:
        """Of every gradient: float64 []; NaN where there is none."""
        given = {name: parameter.grad for name, parameter in self.matrices.items() if parameter.grad is not None}
        norms = dict(zip(given, torch._foreach_norm(list(given.values())), strict=True)) if given else {}  # noqa: SLF001
        return {name: norms[name].double() if name in norms else _nan(p) for name, p in self.matrices.items()}

    @torch.no_grad()
    def variance(self, parameter: Tensor) -> Tensor:
        """Sum over the elements of v̂ - m̂², Adam's estimate of the gradient's variance: float64 []."""
        state = self.optimizer.state.get(parameter, {})
        group = next(g for g in self.optimizer.param_groups if any(parameter is p for p in g["params"]))
        if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys() or "betas" not in group:
            return _nan(parameter)
        beta1, beta2 = group["betas"]
        step = torch.as_tensor(state["step"], device=parameter.device).double()
        mean = _sample(state["exp_avg"]).double() / (1 - beta1**step)
        square = _sample(state["exp_avg_sq"]).double() / (1 - beta2**step)
        spread: Tensor = (square - mean.square()).clamp(min=0)
        return spread.mean() * parameter.numel()


@torch.no_grad()
def _sample(parameter: Tensor) -> Tensor:
    """Some rows of a matrix, evenly spread: a view of all where it is small."""
    matrix = parameter.detach().flatten(1)
    return matrix[spread(matrix.shape[0], SAMPLED_ELEMENTS // max(1, matrix.shape[1]))]


def _nan(parameter: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=torch.float64, device=parameter.device)
