"""Closing a step of delayed scaling for one layer, in one launch instead of some twenty.

For each role that ran, with its step's amax ``pending``:

    window = [pending, window[: -1]]  if pending > 0
    amax   = max(window), or the latest,  every ``interval`` steps;  amax / backoff  after an overflow
    pending = -1 (none),  overflowed = 0

``octavo.scaling.AmaxHistory`` defines it. One program does all of it: three roles by up to 4096 steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import launching

__all__ = ["close_step"]

_LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def close_step_kernel(
    window,  # float32 [ROLES, length] row-major, newest first; -1 where there is no amax
    amax, pending,  # float32 [ROLES]
    overflowed, steps,  # uint8 [ROLES]; int64 [ROLES]
    region,  # int64, one element: the autocast block of the last call; None without IF_LEFT
    length, now, interval,
    ROLES: tl.constexpr, IF_LEFT: tl.constexpr, LATEST: tl.constexpr, BACKOFF: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Close the step of all roles in place; roles that did not run keep all of their state.

    LENGTH is a power of two, length or more. The one program holds the window in registers, [4, LENGTH].
    """
    role = tl.arange(0, 4)  # three roles; a block's size is a power of two
    mine = role < ROLES
    last = tl.load(pending + role, mask=mine, other=-1.0)
    ran = last >= 0
    if IF_LEFT:  # decided on the device: the host would have to wait for `region`
        before = tl.load(region + tl.arange(0, 1))
        ran = ran & (before > 0) & (before != now)
    enters = ran & (last > 0)  # zeros fit every scale, and would push out what the next tensors need
    taken = tl.load(steps + role, mask=mine, other=0) + enters.to(tl.int64)
    at = tl.arange(0, LENGTH)
    here = role[:, None] * length + at[None, :]
    kept = mine[:, None] & (at < length)[None, :]
    # The window moves by one place, by a second load: Triton has no operation that shifts a block in registers.
    old = tl.load(window + here, mask=kept, other=-1.0)
    older = tl.load(window + here - 1, mask=kept & (at > 0)[None, :], other=-1.0)
    tl.debug_barrier()  # all of the window is read before any of it is written
    moved = tl.where((at == 0)[None, :], last[:, None], older)
    new_window = tl.where(kept, tl.where(enters[:, None], moved, old), -1.0)  # -1 beyond the length enters no maximum
    tl.store(window + here, new_window, mask=kept & enters[:, None])
    statistic = tl.max(tl.where((at == 0)[None, :] | (LATEST == 0), new_window, -1.0), axis=1)
    current = tl.load(amax + role, mask=mine, other=0.0)
    due = (taken % interval == 0) | (current <= 0)  # a role without an amax does not wait for the interval
    new_amax = tl.where(enters & due & (statistic > 0), statistic, current)
    had_nonfinite = tl.load(overflowed + role, mask=mine, other=0)
    if BACKOFF < 1:
        # FP64 and a limit at FP32's maximum, as torch's definition has, so that both find the same bits.
        less = current.to(tl.float64) / tl.full(current.shape, BACKOFF, tl.float64)
        less = tl.minimum(less, tl.full(current.shape, _LARGEST, tl.float64)).to(tl.float32)
        new_amax = tl.where((had_nonfinite != 0) & (current > 0), less, new_amax)
    done = mine & ran
    tl.store(steps + role, taken, mask=done)
    tl.store(amax + role, new_amax, mask=done)
    tl.store(overflowed + role, had_nonfinite * 0, mask=done)
    tl.store(pending + role, last * 0 - 1, mask=done)  # -1: a role that does not run in the next step records nothing


def close_step(
    window: Tensor,
    amax: Tensor,
    pending: Tensor,
    overflowed: Tensor,
    steps: Tensor,
    *,
    latest: bool,
    interval: int,
    backoff: float,
    left: tuple[Tensor, int] | None = None,
) -> None:
    """Close the step of a layer's roles, in place.

    Args:
        window: float32 [roles, length], newest first.
        amax: float32 [roles], from which the next step's scales are computed.
        pending: float32 [roles], the step's maxima; below 0 where a role did not run.
        overflowed: bool [roles].
        steps: int64 [roles], closed steps.
        latest: whether an amax is the newest of the window; otherwise the largest.
        interval: steps from one amax to the next.
        backoff: after an overflow amax becomes itself over this, unless it is 1.
        left: the autocast block of the last call, int64 [], and the number of the running one: the step closes if those
            differ and the former is not 0. None closes it in any case.
    """
    roles, length = window.shape
    region, now = (None, 0) if left is None else left
    with launching.on_device_of(window):
        launching.launch(
            close_step_kernel, (1,),
            window, amax, pending, overflowed.view(torch.uint8), steps, region,
            length, now, interval,
            ROLES=roles, IF_LEFT=left is not None, LATEST=latest, BACKOFF=backoff,
            LENGTH=launching.next_power_of_2(length), num_warps=4,
        )  # fmt: skip
