"""Check that the ranks of a data-parallel run start equal: same weights, same loss on the same micro-batch."""

import torch
from torch import distributed

from octavo.doctor import Finding, Severity
from octavo.experiments.preflight.check import Check
from octavo.experiments.preflight.probe import Probe
from octavo.experiments.preflight.replayed import digest

__all__ = ["ranks_check"]

NAME = "ranks"
BITS = 62  # of a digest, so that an int64 holds it and its negative


def ranks_check(probe: Probe, *, step: int) -> Check:
    """Compare the ranks' weights and losses in one collective; every rank must call it."""
    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if ranks == 1:
        return Check(name=NAME, said="one process: nothing to compare")
    with probe.step(), torch.no_grad():
        tensors = {**dict(probe.model.named_parameters()), "loss": probe.loss()}
    different = _different({name: digest(tensor) for name, tensor in tensors.items()}, probe.device)
    if not different:
        summary = f"{ranks} ranks have the same {len(tensors) - 1} parameters and the same loss"
        return Check(name=NAME, said=summary)
    first = different[0]
    what = "the loss of the same micro-batch" if first == "loss" else f"parameter {first!r}"
    finding = Finding(
        code="rank-mismatch",
        severity=Severity.FAIL,
        path="" if first == "loss" else first.rpartition(".")[0],
        first_step=step,
        last_step=step,
        evidence={"ranks": float(ranks), "different": float(len(different))},
        cause=f"{what} is not the same on all {ranks} ranks before the first step",
        weight=float(len(different)),
    )
    return Check(name=NAME, said=f"{len(different)} of {len(tensors)} differ between ranks", findings=(finding,))


def _different(digests: dict[str, str], device: torch.device) -> list[str]:
    """Names with different digests among the ranks."""
    codes = torch.tensor([int(one, 16) >> (64 - BITS) for one in digests.values()], dtype=torch.int64, device=device)
    both = torch.cat([codes, -codes])
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    largest, smallest = both[: len(codes)], -both[len(codes) :]
    return [name for name, same in zip(digests, (largest == smallest).tolist(), strict=True) if not same]
