"""Statistics of attention in FP8, one line a module.

| name                         | meaning                                                                          |
|------------------------------|----------------------------------------------------------------------------------|
| attention_logit              | largest magnitude of a logit whose probability is not 0                          |
| attention_divergence         | of the probabilities from those of the uncast queries and keys, in nats          |
| attention_gradient_imbalance | what the codes of a row of the scores' gradient add to its sum, over its         |
|                              | magnitude, mean of the rows                                                      |

The divergence is the mean over queries of Σ P log(P / P_fp8), with P ∝ P_fp8 · e^d and d the exact logits less those in
FP8. To first order it is half the variance of d under P: an error that all logits of a query share changes nothing.

Each row of the scores' gradient P · (dP - δ) adds up to zero. As codes it does not where its small elements become
zero, all of one sign beside a large one of the other: the query's gradient then has a part along the mean key, as with
a δ that is rounded to one side (Qiu and Yao, arXiv 2510.04212).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octavo.doctor.tables import Floats
from octavo.nn import DotProductAttention
from octavo.numerics import QuantizedTensor
from octavo.recipes import CastSpec
from octavo.scaling import GRAD_OUTPUT, Operand

__all__ = ["AttentionStatistics"]

_NAMES = ("attention_logit", "attention_divergence", "attention_gradient_imbalance")
_LOGIT, _DIVERGENCE, _IMBALANCE = range(len(_NAMES))


class _Casts:
    """The casts of one product: keeps the tensors of forward for the softmax that follows."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.matrices: dict[int, Sequence[Tensor]] = {}

    def cast(
        self,
        role: int,
        spec: CastSpec | None,
        matrices: Sequence[Tensor],
        operands: Sequence[Operand],
        experts: tuple[int, ...],
    ) -> None:
        """Keep the tensors, or measure the gradient."""
        if role != GRAD_OUTPUT:
            self.matrices[role] = matrices
            return
        shares = []
        for matrix, operand in zip(matrices, operands, strict=True):
            decoded = operand.dequantize() if isinstance(operand, QuantizedTensor) else operand
            magnitude = matrix.double().abs().sum(dim=-1)
            off = (decoded.double() - matrix.double()).sum(dim=-1).abs()
            shares.append((off / magnitude)[magnitude > 0])
        _raise(self.numbers, _IMBALANCE, torch.cat(shares).mean().nan_to_num(0.0))


class _Recorder:
    """The ``watch`` of one attention."""

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(len(_NAMES), dtype=torch.float64, device=device)
        self.scores = _Casts(self.numbers)
        self.output = _Casts(torch.zeros_like(self.numbers))  # its gradient's rows need not add up to anything

    @torch.no_grad()
    def softmax(self, logits: Tensor, probabilities: Tensor, scale: float) -> None:
        """Compare the logits with those of the tensors before their casts."""
        queries, keys = self.scores.matrices.values()
        exact = torch.cat([q.float() @ k.float().t() for q, k in zip(queries, keys, strict=True)])
        self.scores.matrices.clear()
        change = exact.view_as(logits) * scale - logits
        joint = probabilities.log() + change
        total = joint.logsumexp(dim=-1, keepdim=True)
        divergence = ((joint - total).exp() * (change - total)).sum(dim=-1)
        seeing = probabilities.sum(dim=-1) > 0
        _raise(self.numbers, _DIVERGENCE, divergence.masked_fill(~seeing, 0).sum() / seeing.sum().clamp_min(1))
        _raise(self.numbers, _LOGIT, logits.abs().masked_fill(probabilities == 0, 0).amax())


def _raise(numbers: Tensor, index: int, value: Tensor) -> None:
    numbers[index] = torch.maximum(numbers[index], value.to(numbers.dtype))


class AttentionStatistics:
    """Statistics of all attention of a model that runs in FP8."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {path: each for path, each in model.named_modules() if isinstance(each, DotProductAttention)}
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))

    @property
    def has_recipe(self) -> bool:
        """Whether some attention runs in FP8."""
        return any(module.recipe is not None for module in self.modules.values())

    @contextmanager
    def recording(self, measured: dict[str, Tensor]) -> Iterator[None]:
        """Measure a step; ``measured`` is filled with the numbers of each module at its end."""
        recorders = dict[str, _Recorder]()
        for path, module in self.modules.items():
            if module.recipe is not None:
                module.watch = recorders[path] = _Recorder(self._device)
        try:
            yield
            measured |= {path: recorder.numbers for path, recorder in recorders.items()}
        finally:
            for module in self.modules.values():
                module.watch = None

    def numbers(self, measured: Mapping[str, Floats]) -> dict[str, dict[str, float]]:
        """The numbers of the table above by name and path."""
        ran = {path: line for path, line in measured.items() if line[_LOGIT]}
        return {name: {path: float(line[i]) for path, line in ran.items()} for i, name in enumerate(_NAMES) if ran}
