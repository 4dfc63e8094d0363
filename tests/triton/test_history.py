"""The kernel that closes a delayed step, against ``octavo.scaling.AmaxHistory``, which closes it by torch."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.triton import history as kernels
from octavo.recipes import Close, History, Statistic
from octavo.scaling import AmaxHistory

STATE = ("window", "amax", "pending", "overflowed", "steps", "region")
SPECS = [
    History(length=length, statistic=statistic, update_interval=interval, backoff=backoff, close=close)
    for length, statistic, (interval, backoff), close in itertools.product(
        (1, 5, 16), (Statistic.MAX, Statistic.LATEST), ((1, 1.0), (3, 0.99)), Close
    )
]
SPECS += [History(length=length) for length in (1024, 4096)]  # over many warps, which must not overtake each other


def recorded(history: AmaxHistory, step: int) -> None:
    """What a step might leave: roles that did not run, zeros, numbers near the ends of FP32, overflows."""
    generator = torch.Generator().manual_seed(step)
    amaxes = torch.randn(3, generator=generator).exp() * 2.0 ** torch.randint(-126, 127, (3,), generator=generator)
    ran = torch.rand(3, generator=generator) < 0.8
    zero = torch.rand(3, generator=generator) < 0.1
    pending = torch.where(ran, torch.where(zero, 0.0, amaxes.clamp(max=torch.finfo(torch.float32).max)), -1.0)
    history.pending.copy_(pending.to(history.pending.device))
    history.overflowed.copy_((ran & (torch.rand(3, generator=generator) < 0.3)).to(history.pending.device))


def by_kernel(history: AmaxHistory, left: tuple[Tensor, int] | None = None) -> None:
    kernels.close_step(
        *(history.window, history.amax, history.pending, history.overflowed, history.steps),
        latest=history.spec.statistic == Statistic.LATEST,
        interval=history.spec.update_interval,
        backoff=history.spec.backoff,
        left=left,
    )


def same(ours: AmaxHistory, theirs: AmaxHistory) -> None:
    for name in STATE:
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_step_closes_as_torch_closes_it(spec: History, device: Any) -> None:
    ours, theirs = AmaxHistory(spec).to(device), AmaxHistory(spec)
    for step in range(12):
        recorded(ours, step)
        recorded(theirs, step)
        by_kernel(ours)
        theirs.close()
        same(ours, theirs)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.close == Close.AUTOCAST], ids=str)
def test_a_step_closes_only_when_its_block_was_left(spec: History, device: Any) -> None:
    """Blocks as they come: outside of any, the same one again, the next."""
    ours, theirs = AmaxHistory(spec).to(device), AmaxHistory(spec)
    closed = 0
    for step, number in enumerate((0, 0, 1, 1, 2, 0, 0, 3, 17, 17, 18, 0)):
        recorded(ours, step)
        recorded(theirs, step)
        by_kernel(ours, left=(ours.region, number))
        before = theirs.steps.sum()
        theirs.close_if_left(torch.tensor(number))
        for history in (ours, theirs):
            history.region.fill_(number)
        same(ours, theirs)
        closed += int(theirs.steps.sum() > before)
    assert 0 < closed < 12
