"""Search for the first non-finite tensor of a step by replaying its batches.

The loop checks loss and gradient norm *before* the optimizer changes the weights, so the step can be replayed with the
same weights. The replay checks the parameters, then every module's output in the order of execution, then the loss,
then the gradients in the order of backward, and returns the first tensor with a NaN or an infinity.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from octavo.parallel.data_parallel import local
from octavo.parallel.ranks import ALONE, Ranks, named_ranks
from octavo.training.checkpoint import latest
from octavo.training.evaluate import token_loss

__all__ = ["NonFiniteTensor", "failure_sentence", "failure_values", "first_nonfinite", "last_good_checkpoint"]


_SUMMED = "gradient of parameter"  # over the ranks, perhaps


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteTensor:
    """The first non-finite tensor of a step.

    Attributes:
        tensor: description: "parameter …", "output of …", "loss", "gradient of the output of …" or "gradient of
            parameter …".
        bad: number of NaN or infinite elements.
        elements: number of elements.
        ranks: ranks that have it; empty for a run on one. Ranks that share a layer may all have what one of them has
            broken, as the sum over them is not finite on any.
    """

    tensor: str
    bad: int
    elements: int
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = f" on {named_ranks(self.ranks)}" if self.ranks else ""
        return f"{self.tensor} ({self.bad} of {self.elements} elements){place}"


def first_nonfinite(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    surroundings: AbstractContextManager[object],
    loss_scale: float = 1.0,
    ranks: Ranks = ALONE,
) -> NonFiniteTensor | None:
    """Replay a step's micro-batches; return None if every tensor is finite.

    Args:
        model: the model, with the weights before the step. Its gradients are overwritten.
        batches: inputs and targets, on the model's device; as many on each rank.
        surroundings: the context of the forward pass.
        loss_scale: factor of the loss before backward.
        ranks: ranks that replay the step together; all of them get the same answer.
    """
    record = _FirstNonFinite(ranks)
    for name, parameter in model.named_parameters():
        record.look(f"parameter {name}", parameter)
    if record.ends_replay():
        return record.first()
    model.zero_grad(set_to_none=True)
    handles = _add_hooks(model, record)
    try:
        for inputs, targets in batches:
            with surroundings:
                loss = token_loss(model(inputs), targets)
            record.look("loss", loss)
            if not record.ends_replay():
                (loss * loss_scale).backward()
            if record.ends_replay():
                break
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return record.first()


def failure_values(loss: float, grad_norm: float, finding: NonFiniteTensor | None) -> dict[str, float | str | None]:
    """Values of the "failure" line of metrics.jsonl; numbers that are not finite are None."""
    numbers = {"loss": loss, "grad_norm": grad_norm}
    plain = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {**plain, "tensor": finding.tensor if finding else None}


def failure_sentence(loss: float, grad_norm: float, finding: NonFiniteTensor | None) -> str:
    """Describe what is not finite, and where it began.

    Example:
        >>> failure_sentence(3.1, float("inf"), None)
        'the gradient norm is inf; a replay of its batches stayed finite'
    """
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
    first = f"the first non-finite tensor is the {finding}" if finding else "a replay of its batches stayed finite"
    return f"{what}; {first}"


def last_good_checkpoint(run_dir: Path) -> str:
    """Advice for a run that broke."""
    path = latest(run_dir)
    if path is None:
        return "there is no earlier checkpoint; lower the learning rate, or save more often with checkpoint_interval"
    return f"the last good checkpoint is {str(path)!r}"


class _FirstNonFinite:
    """Record of the first non-finite tensor, and its place in the order of inspection.

    Ranks that share layers run the same passes, so that this number says which of them had one first. What follows from
    it reaches the others in a later sum over the ranks: of a layer's output, the loss or a parameter's gradient.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.looks = 0
        self.finding: tuple[int, NonFiniteTensor] | None = None

    def ends_replay(self) -> bool:
        """Return whether a rank has found one; sharded models run the same passes on all ranks."""
        return any(finding is not None for finding in self.ranks.gathered(self.finding))

    def first(self) -> NonFiniteTensor | None:
        """Return the tensor that was found first, with the ranks that found it then; gradients of parameters last."""
        findings: list[tuple[int, NonFiniteTensor] | None] = self.ranks.gathered(self.finding)
        found = {rank: each for rank, each in enumerate(findings) if each is not None}
        order = {rank: (tensor.tensor.startswith(_SUMMED), moment) for rank, (moment, tensor) in found.items()}
        if not found:
            return None
        firsts = [rank for rank in found if order[rank] == min(order.values())]
        return replace(found[firsts[0]][1], ranks=tuple(firsts) if self.ranks.size > 1 else ())

    def look(self, name: str, value: object) -> None:
        self.looks += 1
        if self.finding or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        value = local(value.detach())
        bad = int((~torch.isfinite(value)).sum())
        if bad:
            self.finding = (self.looks, NonFiniteTensor(tensor=name, bad=bad, elements=value.numel()))


def _add_hooks(model: nn.Module, record: _FirstNonFinite) -> list[RemovableHandle]:
    """Add hooks on every module's output, its gradient, and every parameter's gradient."""
    names = {id(module): path or "the model" for path, module in model.named_modules()}
    handles = [module.register_forward_hook(_output_hook(record, names[id(module)])) for module in model.modules()]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_parameter_hook(record, name)))
    return handles


def _output_hook(record: _FirstNonFinite, name: str) -> Callable[[nn.Module, object, object], None]:
    def look(_module: nn.Module, _inputs: object, output: object) -> None:
        record.look(f"output of {name}", output)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: record.look(f"gradient of the output of {name}", gradient))

    return look


def _parameter_hook(record: _FirstNonFinite, name: str) -> Callable[[Tensor], None]:
    return lambda parameter: record.look(f"{_SUMMED} {name}", parameter.grad)
