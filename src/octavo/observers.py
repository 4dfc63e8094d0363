"""What a layer remembers of the tensors that pass through it: the amaxes of finished steps, for delayed scaling.

Delayed scaling reads only the past, so that measuring a tensor and casting it need not wait for each other. Two times
must not be mixed up:

- During a step, each call *records* its amax as pending; several micro-batches keep their maximum.
- *Closing* the step moves what is pending into the window, newest first, and derives the amax that the next step's
  scales are made from. A role that was not executed keeps its window as it is: a mask, not a zero.

Until a role has an amax from a finished step, its own tensor's is used: there is no guessed first scale. An amax of
zero, or of a tensor without a finite element, moves through the window but never becomes a scale: the previous one
stays.
"""

import warnings
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from octavo.numerics import amax as measure_amax
from octavo.recipes import History, Statistic

__all__ = ["GRAD_OUTPUT", "INPUT", "ROLES", "WEIGHT", "AmaxHistory"]

ROLES = ("input", "weight", "grad_output")
INPUT, WEIGHT, GRAD_OUTPUT = range(3)
EMPTY = -1.0  # no amax: amaxes are never negative
_WARN_AFTER = 100


class AmaxHistory(torch.nn.Module):
    """The amaxes of one layer's three roles.

    Attributes:
        window: [3, length] float32, newest first; -1 where nothing was recorded.
        amax: [3] float32, what the current scales are made from; 0 before the first step is closed.
        pending: [3] float32, the running step's maximum; -1 where nothing was recorded.
        steps: [3] int64, closed steps in which the role was executed.

    The buffers are not part of a ``state_dict`` (see ``octavo.scaling_state``), follow the model to its device, and
    stay float32 when the model is cast.

    Example:
        >>> history = AmaxHistory(History(length=2))
        >>> for value in (3.0, 5.0, 1.0, 2.0):
        ...     history.record(INPUT, torch.tensor(value))
        ...     history.close()
        >>> history.amax[INPUT].item()  # 5 left the window
        2.0
    """

    window: Tensor
    amax: Tensor
    pending: Tensor
    steps: Tensor

    def __init__(self, spec: History, *, manual: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.manual = manual
        self.unclosed_calls = 0
        roles = len(ROLES)
        self.register_buffer("window", torch.full((roles, spec.length), EMPTY, device=device), persistent=False)
        self.register_buffer("amax", torch.zeros(roles, device=device), persistent=False)
        self.register_buffer("pending", torch.full((roles,), EMPTY, device=device), persistent=False)
        self.register_buffer("steps", torch.zeros(roles, dtype=torch.int64, device=device), persistent=False)

    @torch.no_grad()
    def begin_forward(self, x: Tensor, weight: Tensor, *, training: bool, recording: bool) -> Tensor:
        """The amaxes [3] that this call's scales are made from.

        Args:
            x: what this call is given.
            weight: the layer's; one that takes no gradient keeps its history, and so its codes, as they are.
            training: unless updates are manual, close the step first if its backward pass has run, or if none will.
            recording: record the amaxes of input and weight.
        """
        recomputing = _inside_backward()  # activation checkpointing repeats a forward of the running step
        if training and not self.manual and not recomputing:
            awaits_backward = x.requires_grad or weight.requires_grad
            self.close(where=self.pending[GRAD_OUTPUT] >= 0 if awaits_backward else None)
        own = torch.stack([measure_amax(x), measure_amax(weight), self.amax.new_zeros(())])
        if recording and x.numel():  # an empty batch says nothing about its tensors
            self.record(INPUT, own[INPUT])
            if weight.requires_grad:
                self.record(WEIGHT, own[WEIGHT])
            if not recomputing:
                self._warn_if_never_closed()
        return torch.where(self.amax > 0, self.amax, own)

    @torch.no_grad()
    def record(self, role: int, amax: Tensor) -> None:
        """Raise a role's pending amax to at least ``amax``."""
        self.pending[role].copy_(torch.maximum(self.pending[role], amax))

    @torch.no_grad()
    def close(self, *, where: Tensor | None = None) -> None:
        """Finish the step: pending amaxes enter the window and the scales' amaxes follow.

        Args:
            where: a boolean scalar tensor; the step stays open where it is False.
        """
        ran = self.pending >= 0 if where is None else (self.pending >= 0) & where
        self.steps.add_(ran)
        shifted = torch.cat([self.pending[:, None], self.window[:, :-1]], dim=1)
        self.window.copy_(torch.where(ran[:, None], shifted, self.window))
        due = (self.steps % self.spec.update_interval == 0) | (self.amax <= 0)
        statistic = _statistic(self.window, self.spec.statistic)
        self.amax.copy_(torch.where(ran & due & (statistic > 0), statistic, self.amax))
        self.pending.copy_(torch.where(ran, EMPTY, self.pending))
        self.unclosed_calls = 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model's device, not its dtype: an amax is float32 whatever the model is cast to."""
        dtypes = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        originals = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            moved, original = self._buffers[name], originals[name]
            if moved is not None and original is not None and moved.dtype is not dtype:
                self._buffers[name] = original.to(moved.device)
        return self

    def _warn_if_never_closed(self) -> None:
        if not self.manual or torch.compiler.is_compiling():
            return
        self.unclosed_calls += 1
        if self.unclosed_calls == _WARN_AFTER:
            warnings.warn(
                f"{_WARN_AFTER} training forwards without octavo.update_scales(model): with manual scale updates the "
                "scales stay those of the last closed step; call it after each optimizer step",
                stacklevel=2,
            )


def _inside_backward() -> bool:
    """Whether autograd is running on this thread; a traced graph is never traced from inside it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # noqa: SLF001


def _statistic(window: Tensor, statistic: Statistic) -> Tensor:
    """One amax a role from its window [3, length]; not positive where the window has none."""
    match statistic:
        case Statistic.MAX:
            return window.amax(dim=1)
        case Statistic.LATEST:
            return window[:, 0]
        case Statistic.MEAN:  # the mean of the encode scales maximum / amax is that of the amaxes' harmonic mean
            positive = window > 0
            reciprocals = torch.where(positive, window.double().reciprocal(), 0.0)
            return (positive.sum(dim=1) / reciprocals.sum(dim=1)).nan_to_num(nan=0.0).float()
