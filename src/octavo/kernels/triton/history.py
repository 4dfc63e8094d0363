"""The end of a delayed step for one layer, in one launch instead of some twenty.

``octavo.scaling.AmaxHistory`` describes what it computes; here it is one program, since three roles have little to do.
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
    window, amax, pending, overflowed, steps, region,
    length, now, interval,
    ROLES: tl.constexpr, IF_LEFT: tl.constexpr, LATEST: tl.constexpr, BACKOFF: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """LENGTH is a power of two, length or more."""
    role = tl.arange(0, 4)
    mine = role < ROLES
    last = tl.load(pending + role, mask=mine, other=-1.0)
    ran = last >= 0
    if IF_LEFT:
        before = tl.load(region + tl.arange(0, 1))
        ran = ran & (before > 0) & (before != now)
    enters = ran & (last > 0)  # zeros fit every scale, and would push out what the next tensors need
    taken = tl.load(steps + role, mask=mine, other=0) + enters.to(tl.int64)
    at = tl.arange(0, LENGTH)
    here = role[:, None] * length + at[None, :]
    kept = mine[:, None] & (at < length)[None, :]
    old = tl.load(window + here, mask=kept, other=-1.0)
    older = tl.load(window + here - 1, mask=kept & (at > 0)[None, :], other=-1.0)
    tl.debug_barrier()  # all of the window is read before any of it is written
    moved = tl.where((at == 0)[None, :], last[:, None], older)
    held = tl.where(kept, tl.where(enters[:, None], moved, old), -1.0)
    tl.store(window + here, held, mask=kept & enters[:, None])
    found = tl.max(tl.where((at == 0)[None, :] | (LATEST == 0), held, -1.0), axis=1)
    current = tl.load(amax + role, mask=mine, other=0.0)
    due = (taken % interval == 0) | (current <= 0)
    followed = tl.where(enters & due & (found > 0), found, current)
    broken = tl.load(overflowed + role, mask=mine, other=0)
    if BACKOFF < 1:
        less = current.to(tl.float64) / tl.full(current.shape, BACKOFF, tl.float64)
        less = tl.minimum(less, tl.full(current.shape, _LARGEST, tl.float64)).to(tl.float32)
        followed = tl.where((broken != 0) & (current > 0), less, followed)
    done = mine & ran
    tl.store(steps + role, taken, mask=done)
    tl.store(amax + role, followed, mask=done)
    tl.store(overflowed + role, broken * 0, mask=done)
    tl.store(pending + role, last * 0 - 1, mask=done)


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
        amax: float32 [roles], what scales are made from.
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
