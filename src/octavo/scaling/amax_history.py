"""State of one layer's scaling: counts of non-finite elements, and the amax history of delayed scaling.

Delayed scaling reads only the past, so that a kernel may measure a tensor while it casts it. Two times must not be
mixed up:

- During a step, each call *records* its amax as pending; several micro-batches keep their maximum.
- *Closing* the step moves what is pending into the window, newest first, and derives the amax that the next step's
  scales are made from. A role that was not executed keeps its window as it is: a mask, not a zero.

Until a role has an amax from a finished step, its own tensor's is used: there is no guessed first scale. An amax of
zero, as of a tensor without a finite element, is masked too: zeros fit every scale, and in the window they would push
out the amaxes that the next tensors need.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from octavo.caller_warnings import warn_caller
from octavo.errors import ConfigError
from octavo.kernels import triton_bindings
from octavo.numerics.cast import is_eager_cpu
from octavo.recipes import Close, History, Statistic
from octavo.scaling.operand_scaling import ROLES
from octavo.scaling.stateful_module import StatefulModule
from octavo.scaling.step_amaxes import StepAmaxes

__all__ = ["EMPTY", "AmaxHistory", "ScaleUpdates", "WeightSeen", "close_histories"]

EMPTY = -1.0  # no amax: amaxes are never negative
_REMIND_AFTER = 100
_HELD = "_octavo_held"  # attribute of parameters that an optimizer has held at one of its steps
_LARGEST = torch.finfo(torch.float32).max
_STATE = ("window", "amax", "pending", "overflowed", "steps")
_MOST_TOGETHER = 1 << 20  # entries of windows that are copied at once


@dataclass(eq=False)
class ScaleUpdates:
    """Ends of the steps of a model's delayed layers, which share one; decided in :mod:`octavo.scaling.scale_updates`.

    Copies and pickles keep the first three attributes, so that a copied model waits for an optimizer of its own.

    Attributes:
        manual: whether only ``octavo.update_scales`` ends a step.
        reminded: whether the user has been warned of a model whose steps are never closed.
        group: the process group that takes the largest amax of its ranks; None is the default one, "rank" this rank
            alone.
        ran: whether a layer ran in training since the last step was closed.
        weights_seen: the layers' weights as the running step found them, by history, while no optimizer is known.
        called: histories of the layers that the running pass has called since it compared the weights.
        block: number of the autocast block that the layers last ran in, where ranks close together.
        closing_after: the backward pass at whose end the step closes.
        optimizers: those that have stepped while they held parameters of these layers, and are still alive. Only says
            whose saving is noticed: garbage is collected at other times on other ranks, and no step may end by it.
        has_optimizer: whether an optimizer has stepped, and its steps have not stayed away since.
        was_held: whether an optimizer has ever stepped that held parameters of these layers.
        optimizer_saved: whether an optimizer's state was saved since the last step.
        state_read: whether the scaling state was read since the last step.
        begins_anew: whether empty histories are right, as after a state was loaded or training in this process.
        reminded_of_state: whether the user has been warned of a checkpoint without scaling state.
        optimizer_steps: number of optimizer steps that ended steps of these layers.
        closed_steps: number of ended steps, whether or not a layer kept a history; ranks compare it.
        switch_logged: whether a change of recipe in mid-training has been logged.
        backwards_watched: whether a weight counts backward passes, for layers that are compiled.
        weight_amaxes: of weights that ranks divide by tensor parallelism.
    """

    manual: bool = False
    reminded: bool = False
    group: Any = None
    ran: bool = field(default=False, init=False)
    weights_seen: "weakref.WeakKeyDictionary[AmaxHistory, WeightSeen]" = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )
    called: "weakref.WeakSet[AmaxHistory]" = field(default_factory=weakref.WeakSet, init=False)
    block: int = field(default=0, init=False)
    closing_after: int = field(default=-1, init=False)
    optimizers: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet, init=False)
    has_optimizer: bool = field(default=False, init=False)
    was_held: bool = field(default=False, init=False)
    optimizer_saved: bool = field(default=False, init=False)
    state_read: bool = field(default=False, init=False)
    begins_anew: bool = field(default=False, init=False)
    reminded_of_state: bool = field(default=False, init=False)
    optimizer_steps: int = field(default=0, init=False)
    closed_steps: int = field(default=0, init=False)
    switch_logged: bool = field(default=False, init=False)
    backwards_watched: bool = field(default=False, init=False)
    weight_amaxes: StepAmaxes = field(default_factory=StepAmaxes, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.group, str) and self.group != "rank":
            raise ConfigError(f"amax_group must be a process group, None or 'rank', not {self.group!r}")

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """Note that an optimizer which holds these parameters has stepped."""
        self.has_optimizer = self.was_held = True
        for parameter in parameters:
            setattr(parameter, _HELD, True)  # no weak reference, with which torch cannot convert a DTensor

    def is_held(self, parameter: Tensor) -> bool:
        """Return whether an optimizer has stepped while it held a parameter of these layers."""
        return self.was_held and getattr(parameter, _HELD, False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScaleUpdates":
        return ScaleUpdates(self.manual, self.reminded, self.group)  # a process group has no copies

    def __reduce__(self) -> tuple[Any, ...]:
        return ScaleUpdates, (self.manual, self.reminded, self.group)


@dataclass(frozen=True, slots=True)
class WeightSeen:
    """A weight as a training forward found it.

    Attributes:
        version: autograd's counter.
        sample: some of its elements, since what is written through ``.data`` does not raise the counter.
    """

    version: int
    sample: Tensor


class AmaxHistory(StatefulModule):
    """The amaxes of one layer's three roles; of a layer of experts, of each expert's.

    Attributes:
        window: [3, length] float32, newest first; -1 where nothing was recorded. Of experts [3, experts, length], and
            the others [3, experts].
        amax: [3] float32, from which the current scales are computed; 0 before the first step is closed.
        pending: [3] float32, the running step's maximum; -1 where nothing was recorded.
        overflowed: [3] bool, whether the running step saw NaN or ±Inf.
        steps: [3] int64, closed steps whose amax entered the window.
        region: [] int64, the number of the autocast block of the last call, 0 outside of any. A tensor, so that a
            compiled graph reads it.

    The buffers are not part of a ``state_dict`` (see ``octavo.scaling_state``), follow the layer to its device, and
    stay float32 when the model is cast. A layer keeps its history beside its submodules: wrappers that broadcast, cast
    or average a model's buffers, as DDP does before each forward, would mix amaxes of different steps and ranks.

    Example:
        >>> from octavo.scaling import INPUT
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
        experts: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._shape = (len(ROLES),) if experts is None else (len(ROLES), experts)
        self.updates = ScaleUpdates() if updates is None else updates
        self.path = path
        self.unclosed_backwards = 0
        self._last_backward = -1
        self._has_past = (False,) * len(ROLES)
        self.start_state(device)

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Initial state: nothing recorded."""
        shape = self._shape
        return {
            "window": torch.full((*shape, self.spec.length), EMPTY, dtype=torch.float32, device=device),
            "amax": torch.zeros(shape, dtype=torch.float32, device=device),
            "pending": torch.full(shape, EMPTY, dtype=torch.float32, device=device),
            "overflowed": torch.zeros(shape, dtype=torch.bool, device=device),
            "steps": torch.zeros(shape, dtype=torch.int64, device=device),
            "region": torch.zeros((), dtype=torch.int64, device=device),
        }

    def follow(self, device: torch.device) -> None:
        """Move to where the layer's weight is: wrappers may have moved that alone."""
        self.to_empty(device=device) if self.amax.is_meta else self.to(device)

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Pending amaxes and overflow marks, in one dimension."""
        _, _, pending, overflowed, _ = self.state
        return (pending, overflowed) if pending.ndim == 1 else (pending.view(-1), overflowed.view(-1))

    def has_past(self) -> tuple[bool, ...]:
        """Return which roles have an amax of finished steps; a device is waited for until all of them have."""
        if not all(self._has_past):
            self._has_past = tuple((self.amax > 0).tolist())
        return self._has_past

    @torch.no_grad()
    def begin_forward(self, region: Tensor) -> None:
        """Close the step if its autocast block was left and that ends it; see :class:`octavo.recipes.Close`.

        Args:
            region: int64 [], the number of the outermost autocast block that the call stands in, 0 outside of any.
        """
        if self.spec.close == Close.AUTOCAST:
            self.close_if_left(region)
            self.region.fill_(region)  # from a CPU's scalar a copy to the GPU waits, a fill does not

    @property
    def ends_with_blocks(self) -> bool:
        """Return whether leaving an autocast block ends a step."""
        return self.spec.close == Close.AUTOCAST and not self.updates.manual

    @torch.no_grad()
    def close_if_left(self, region: Tensor) -> None:
        """Close the step, unless updates are manual, if it stood in another autocast block and that ends it."""
        if not self.ends_with_blocks:
            return
        if self._has_kernel:
            self._close_by_kernel(left=(self.region, int(region)))
            return
        self.close(condition=(self.region > 0) & (self.region != region))

    @torch.no_grad()
    def record(self, role: int, amax: Tensor) -> None:
        """Raise a role's pending amax to at least ``amax``."""
        self.pending[role].copy_(torch.maximum(self.pending[role], amax))

    @torch.no_grad()
    def close(self, *, condition: Tensor | None = None) -> None:
        """Finish the step: pending amaxes enter the window and the scales' amaxes follow.

        Args:
            condition: bool []; False leaves the step open, without a wait for the device. None closes it.
        """
        if condition is None and self._has_kernel:
            self._close_by_kernel()
            return
        self.unclosed_backwards = 0
        if condition is None and _is_closed(self.pending):
            return
        for old, new in zip(self.state, _closed(self.spec, self.state, condition), strict=True):
            old.copy_(new)

    @property
    def state(self) -> list[Tensor]:
        """Window, amax, pending, overflowed and steps, which closing a step changes."""
        return cast("list[Tensor]", [self._buffers[name] for name in _STATE])  # a module's attributes are slow

    @property
    def _has_kernel(self) -> bool:
        known = self.spec.statistic in (Statistic.MAX, Statistic.LATEST)
        return known and self.window.ndim == 2 and triton_bindings.closes_steps(self.window)

    def _close_by_kernel(self, *, left: tuple[Tensor, int] | None = None) -> None:
        """Run :meth:`close` in one launch; ``left`` is the kernel's condition."""
        triton_bindings.close_step(
            *(self.window, self.amax, self.pending, self.overflowed, self.steps),
            latest=self.spec.statistic == Statistic.LATEST,
            interval=self.spec.update_interval,
            backoff=self.spec.backoff,
            left=left,
        )
        self.unclosed_backwards = 0

    @torch.no_grad()
    def discard(self) -> None:
        """Discard the running step's amaxes."""
        self._has_past = (False,) * len(ROLES)  # the amaxes of finished steps may have been loaded
        self.pending.fill_(EMPTY)
        self.overflowed.fill_(False)
        self.region.zero_()
        self.unclosed_backwards = 0
        self.updates.weights_seen.pop(self, None)

    @torch.no_grad()
    def follow_window(self, roles: Tensor) -> None:
        """Compute the current amaxes from the window, where it has one and ``roles``, shaped like them, is true."""
        statistic = _statistic(self.window, self.amax, self.spec.statistic)
        self.amax.copy_(torch.where(roles & (statistic > 0), statistic, self.amax))

    @torch.no_grad()
    def rescale(self, role: int, factor: float) -> None:
        """Multiply a role's amaxes, past and pending, by ``factor``, as if its tensors had been."""
        for amaxes in (self.window[role], self.amax[role], self.pending[role]):
            scaled = (amaxes.double() * factor).clamp(max=_LARGEST).float()
            amaxes.copy_(torch.where(amaxes > 0, scaled, amaxes))

    def remind(self, _: Tensor) -> None:
        """Warn once, after a backward pass, that the model's steps have not been closed for long.

        Automatic updates continue without the optimizers known before. Watched weights end a step when they change, and
        need no warning.
        """
        task = torch._C._current_graph_task_id()  # noqa: SLF001 (a layer may be called several times in one pass)
        self.unclosed_backwards += task != self._last_backward
        self._last_backward = task
        updates = self.updates
        updates.called.clear()
        watched = not updates.manual and len(updates.weights_seen) > 0
        if self.unclosed_backwards < _REMIND_AFTER or updates.reminded or watched:
            return
        updates.reminded = True
        name = f"layer {self.path!r}" if self.path else "a layer"
        if updates.manual:
            warning = (
                f"{name} has run {_REMIND_AFTER} backward passes without octavo.update_scales(model): with manual "
                "scale updates the scales stay those of the last closed step; call it after each optimizer step"
            )
        else:
            updates.has_optimizer = False
            warning = (
                f"{name} has run {_REMIND_AFTER} backward passes without a step of a torch.optim optimizer that holds "
                "its parameters, and its scales stay those of the last closed step; unless these are micro-batches of "
                "one step, call octavo.update_scales(model) after each update of the weights"
            )
        warn_caller(warning)


@torch.no_grad()
def close_histories(histories: Sequence[AmaxHistory], *, condition: Tensor | None = None) -> None:
    """Finish the step of many histories: as :meth:`AmaxHistory.close` does, those that are alike in a few operations.

    A layer's few numbers take less time than the operations on them.
    """
    alike: dict[object, list[AmaxHistory]] = {}
    for history in histories:
        alike.setdefault((history.spec, history.window.shape, history.window.device), []).append(history)
    for members in alike.values():
        first = members[0]
        on_device = None if condition is None else condition.to(first.window.device)
        if not isinstance(first.spec.statistic, Statistic) or (condition is None and first._has_kernel):  # noqa: SLF001
            for each in members:
                each.close(condition=on_device)
            continue
        size = max(1, _MOST_TOGETHER // first.window.numel())
        for start in range(0, len(members), size):
            _close_alike(members[start : start + size], on_device)


def _close_alike(histories: Sequence[AmaxHistory], condition: Tensor | None) -> None:
    for history in histories:
        history.unclosed_backwards = 0
    states = list(zip(*(history.state for history in histories), strict=True))
    if condition is None and _is_closed(torch.stack(states[_STATE.index("pending")])):
        return
    closed = _closed(histories[0].spec, map(torch.stack, states), condition)
    for old, new in zip(states, closed, strict=True):
        torch._foreach_copy_(old, new.unbind())


def _is_closed(pending: Tensor) -> bool:
    """Return whether one of many optimizers has closed the step; no GPU is waited for."""
    return is_eager_cpu(pending) and pending.max().item() < 0


def _closed(spec: History, state: Iterable[Tensor], condition: Tensor | None) -> tuple[Tensor, ...]:
    """The state after :meth:`AmaxHistory.close`, of one history or of many in a leading dimension."""
    window, amax, pending, overflowed, steps = state
    ran = pending >= 0 if condition is None else (pending >= 0) & condition
    enters = ran & (pending > 0)
    steps = steps + enters
    shifted = torch.cat([pending[..., None], window[..., :-1]], dim=-1)
    window = torch.where(enters[..., None], shifted, window)
    due = (steps % spec.update_interval == 0) | (amax <= 0)
    statistic = _statistic(window, amax, spec.statistic)
    followed = torch.where(enters & due & (statistic > 0), statistic, amax)
    if spec.backoff < 1:
        backed_off = (amax.double() / spec.backoff).clamp(max=_LARGEST).float()
        followed = torch.where(overflowed & (amax > 0), backed_off, followed)
    amax = torch.where(ran, followed, amax)
    return window, amax, torch.where(ran, EMPTY, pending), overflowed & ~ran, steps


def _statistic(window: Tensor, amax: Tensor, statistic: Statistic | Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """One finite amax a role, or a role's expert, from its window; not positive where the window has none."""
    if not isinstance(statistic, Statistic):
        return _returned(statistic(window.clone(), amax.clone()), amax)  # the function may write to its arguments
    match statistic:
        case Statistic.MAX:
            return window.amax(dim=-1)
        case Statistic.LATEST:
            return window[..., 0]
        case Statistic.MEAN:  # the mean of the encode scales maximum / amax is that of the amaxes' harmonic mean
            positive = window > 0
            reciprocals = torch.where(positive, window.double().reciprocal(), 0.0)
            return (positive.sum(dim=-1) / reciprocals.sum(dim=-1)).nan_to_num(nan=0.0).float()


def _returned(result: object, amax: Tensor) -> Tensor:
    """Amaxes that a user's function has returned, without NaN and ±Inf."""
    if not isinstance(result, Tensor) or result.shape != amax.shape:
        returned = f"shape {list(result.shape)}" if isinstance(result, Tensor) else f"{type(result).__name__}"
        raise ConfigError(
            f"the function that is a history's statistic returned {returned}; it must return a tensor of shape "
            f"{list(amax.shape)}, the next amaxes of {', '.join(ROLES)}"
        )
    return result.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
