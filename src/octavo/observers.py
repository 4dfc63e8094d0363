"""What a layer remembers of the tensors that pass through it: non-finite elements, and amaxes for delayed scaling.

Delayed scaling reads only the past, so that a kernel may measure a tensor while it casts it. Two times must not be
mixed up:

- During a step, each call *records* its amax as pending; several micro-batches keep their maximum.
- *Closing* the step moves what is pending into the window, newest first, and derives the amax that the next step's
  scales are made from. A role that was not executed keeps its window as it is: a mask, not a zero.

Until a role has an amax from a finished step, its own tensor's is used: there is no guessed first scale. An amax of
zero, or of a tensor without a finite element, moves through the window but never becomes a scale: the previous one
stays.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from octavo.kernels import gpu
from octavo.numerics import Measurement, QuantizedTensor, Record
from octavo.recipes import Close, History, Recipe, Statistic

__all__ = [
    "GRAD_OUTPUT",
    "INPUT",
    "ROLES",
    "WEIGHT",
    "AmaxHistory",
    "LayerTap",
    "LayerWatch",
    "Operand",
    "Operands",
    "RoleTap",
    "ScaleUpdates",
    "StatefulModule",
    "inside_backward",
]

ROLES = ("input", "weight", "grad_output")
INPUT, WEIGHT, GRAD_OUTPUT = range(3)
EMPTY = -1.0  # no amax: amaxes are never negative
_REMIND_AFTER = 100
Operand = QuantizedTensor | Tensor  # a Tensor where the recipe leaves the GEMM in high precision
Operands = tuple[Operand, Operand]  # left and right, as a GEMM multiplies them
_LARGEST = torch.finfo(torch.float32).max


@dataclass(slots=True)
class ScaleUpdates:
    """Who closes the steps of a model's delayed layers, which share one of these.

    Attributes:
        manual: the training loop, by ``octavo.update_scales``; otherwise a training forward closes the step before.
        reminded: whether the user has been told of a manual model that nobody closes.
    """

    manual: bool = False
    reminded: bool = False


@dataclass(slots=True)
class RoleTap:
    """One role of one call: what its scale is made from, and where what is measured goes.

    The first measurement is recorded, in place; a second cast of the same tensor counts nothing twice.

    Attributes:
        amax: float32 [], of finished steps; 0 before the first.
        scale: float32 [], a static cast's.
        pending: float32 [], raised to the tensor's amax; None records none.
        overflowed: bool [], set where the tensor holds NaN or ±Inf; None does not.
        nonfinite: int64 [], raised by the count; None counts none.
    """

    amax: Tensor | None = None
    scale: Tensor | None = None
    pending: Tensor | None = None
    overflowed: Tensor | None = None
    nonfinite: Tensor | None = None

    def take(self) -> Record:
        """Where to record, once; whoever asks later records nothing."""
        taken = Record(self.pending, self.overflowed, self.nonfinite)
        self.pending = self.overflowed = self.nonfinite = None
        return taken

    def record(self, x: Tensor, found: Measurement) -> None:
        """Record what was found in ``x``; an empty tensor says nothing."""
        taken = self.take()
        if x.numel():
            taken.add(found)


class LayerWatch(Protocol):
    """Somebody who compares a layer's tensors with the operands that were made of them, such as the doctor.

    Operands are what the GEMMs multiply: a ``Tensor`` where a GEMM stays in high precision, None where it does not run.
    """

    def forward(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        operands: Operands,
        kept: tuple[Operand | None, Operand | None],
    ) -> None:
        """Look at x [M, K], weight [N, K] (codes where it is held as such), and the output GEMM's operands.

        ``kept`` is what backward will multiply: of the weight for grad_input, of the input for grad_weight. Where a
        recipe casts a tensor the same way for both of its GEMMs, and its groups know no orientation, it is that cast.
        """
        ...

    def backward(
        self, recipe: Recipe, grad_output: Tensor, grad_input: Operands | None, grad_weight: Operands | None
    ) -> None:
        """Look at grad_output [M, N] and the operands of grad_input's and grad_weight's GEMMs."""
        ...


@dataclass(slots=True)
class LayerTap:
    """What a layer's state gives to one call and takes from it; a None gives or takes nothing.

    Attributes:
        amaxes: float32 [3], what the roles' delayed scales are made from; 0 where there is no past.
        input_scale: float32 [], the decode scale of a static input.
        pending: float32 [3], raised to the amaxes of the three tensors.
        overflowed: bool [3], set where they hold NaN or ±Inf.
        nonfinite: int64 [3], raised by the numbers of their NaN and ±Inf elements.
        watch: looks at the call's tensors and operands.
    """

    amaxes: Tensor | None = None
    input_scale: Tensor | None = None
    pending: Tensor | None = None
    overflowed: Tensor | None = None
    nonfinite: Tensor | None = None
    watch: LayerWatch | None = None

    def of(self, role: int) -> RoleTap:
        """One role's share."""
        return RoleTap(
            amax=None if self.amaxes is None else self.amaxes[role],
            scale=self.input_scale if role == INPUT else None,
            pending=None if self.pending is None else self.pending[role],
            overflowed=None if self.overflowed is None else self.overflowed[role],
            nonfinite=None if self.nonfinite is None else self.nonfinite[role],
        )


class StatefulModule(torch.nn.Module):
    """A module with buffers that are no part of its ``state_dict``.

    They follow the model to its device but not to its dtype, and start anew when they leave the ``meta`` device.
    """

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Every such buffer's first value."""
        raise NotImplementedError

    def start_state(self, device: torch.device | None) -> None:
        """Register the buffers at their first values."""
        for name, tensor in self.fresh_state(device).items():
            self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        originals = {name: self._buffers[name] for name in self.fresh_state(torch.device("meta"))}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, original in originals.items():
            moved = self._buffers[name]
            assert moved is not None
            assert original is not None
            if original.is_meta and not moved.is_meta:  # to_empty leaves whatever the memory held
                self._buffers[name] = self.fresh_state(moved.device)[name]
            elif moved.dtype is not original.dtype:
                self._buffers[name] = original.to(moved.device)
        return self


class AmaxHistory(StatefulModule):
    """The amaxes of one layer's three roles.

    Attributes:
        window: [3, length] float32, newest first; -1 where nothing was recorded.
        amax: [3] float32, what the current scales are made from; 0 before the first step is closed.
        pending: [3] float32, the running step's maximum; -1 where nothing was recorded.
        overflowed: [3] bool, whether the running step saw NaN or ±Inf.
        steps: [3] int64, closed steps in which the role was executed.
        region: [] int64, the number of the autocast block of the last call, 0 outside of any. A tensor, so that a
            compiled graph reads it.

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
    overflowed: Tensor
    steps: Tensor
    region: Tensor

    def __init__(
        self,
        spec: History,
        *,
        updates: ScaleUpdates | None = None,
        path: str = "",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.updates = ScaleUpdates() if updates is None else updates
        self.path = path
        self.unclosed_backwards = 0
        self.start_state(device)

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Nothing recorded."""
        roles = len(ROLES)
        return {
            "window": torch.full((roles, self.spec.length), EMPTY, dtype=torch.float32, device=device),
            "amax": torch.zeros(roles, dtype=torch.float32, device=device),
            "pending": torch.full((roles,), EMPTY, dtype=torch.float32, device=device),
            "overflowed": torch.zeros(roles, dtype=torch.bool, device=device),
            "steps": torch.zeros(roles, dtype=torch.int64, device=device),
            "region": torch.zeros((), dtype=torch.int64, device=device),
        }

    @torch.no_grad()
    def begin_forward(self, *, awaits_backward: bool, region: Tensor) -> None:
        """Close the step before, unless updates are manual or it goes on.

        Args:
            awaits_backward: whether the call that begins takes part in a backward pass; if not, none will tell that
                the step is over, and every call is one.
            region: int64 [], the number of the outermost autocast block that the call stands in, 0 outside of any.
        """
        if not awaits_backward and not self.updates.manual:
            self.close()
        self.close_if_over(region)
        if self.spec.close == Close.AUTOCAST:
            self.region.fill_(region)  # from a CPU's scalar a copy to the GPU waits, a fill does not

    @torch.no_grad()
    def close_if_over(self, region: Tensor) -> None:
        """Close the step, unless updates are manual, if what ends it has happened; see :class:`octavo.recipes.Close`.

        A step that stood in no autocast block ends with a backward pass under either rule.
        """
        if self.updates.manual:
            return
        if self._has_kernel:
            self._close_by_kernel(over=(self.region, int(region)) if self.spec.close == Close.AUTOCAST else False)
            return
        over = self.pending[GRAD_OUTPUT] >= 0
        if self.spec.close == Close.AUTOCAST:
            over = torch.where(self.region > 0, self.region != region, over)
        self.close(where=over)

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
        if where is None and self._has_kernel:
            self._close_by_kernel(over=True)
            return
        ran = self.pending >= 0 if where is None else (self.pending >= 0) & where
        self.steps.add_(ran)
        shifted = torch.cat([self.pending[:, None], self.window[:, :-1]], dim=1)
        self.window.copy_(torch.where(ran[:, None], shifted, self.window))
        due = (self.steps % self.spec.update_interval == 0) | (self.amax <= 0)
        statistic = _statistic(self.window, self.spec.statistic)
        followed = torch.where(due & (statistic > 0), statistic, self.amax)
        if self.spec.backoff < 1:
            backed_off = (self.amax.double() / self.spec.backoff).clamp(max=_LARGEST).float()
            followed = torch.where(self.overflowed & (self.amax > 0), backed_off, followed)
        self.amax.copy_(torch.where(ran, followed, self.amax))
        self.overflowed &= ~ran
        self.pending.copy_(torch.where(ran, EMPTY, self.pending))
        self.unclosed_backwards = 0

    @property
    def _has_kernel(self) -> bool:
        return self.spec.statistic != Statistic.MEAN and gpu.closes_steps(self.window)

    def _close_by_kernel(self, *, over: tuple[Tensor, int] | bool) -> None:
        """One launch for the twenty of :meth:`close`; ``over`` says when, as the kernel takes it."""
        gpu.close_step(
            *(self.window, self.amax, self.pending, self.overflowed, self.steps),
            latest=self.spec.statistic == Statistic.LATEST,
            interval=self.spec.update_interval,
            backoff=self.spec.backoff,
            over=over,
        )
        self.unclosed_backwards = 0

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the running step."""
        self.pending.fill_(EMPTY)
        self.overflowed.fill_(False)
        self.region.zero_()
        self.unclosed_backwards = 0

    @torch.no_grad()
    def follow_window(self, roles: Tensor) -> None:
        """Make the current scales from the window as it is, where ``roles`` [3] says so and it holds an amax."""
        statistic = _statistic(self.window, self.spec.statistic)
        self.amax.copy_(torch.where(roles & (statistic > 0), statistic, self.amax))

    @torch.no_grad()
    def rescale(self, role: int, factor: float) -> None:
        """Multiply a role's amaxes, past and pending, by ``factor``, as if its tensors had been."""
        for amaxes in (self.window[role], self.amax[role], self.pending[role]):
            scaled = (amaxes.double() * factor).clamp(max=_LARGEST).float()
            amaxes.copy_(torch.where(amaxes > 0, scaled, amaxes))

    def remind(self, _: Tensor) -> None:
        """After each backward pass of a manual model: say once a model that nobody closes its steps."""
        self.unclosed_backwards += 1
        if self.unclosed_backwards < _REMIND_AFTER or self.updates.reminded:
            return
        self.updates.reminded = True
        warnings.warn(
            f"{f'layer {self.path!r}' if self.path else 'a layer'} has run {_REMIND_AFTER} backward passes without "
            "octavo.update_scales(model): with manual scale updates the scales stay those of the last closed step; "
            "call it after each optimizer step",
            stacklevel=2,
        )


def inside_backward() -> bool:
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
