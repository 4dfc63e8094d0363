"""Memory of a step on the device, estimated from one micro-batch.

Parameters, gradients and AdamW's two moments are FP32: 16 bytes a parameter. What backward needs of forward is counted,
tensor by tensor, in a forward pass. The gradient of the logits and its softmax are added: they are the largest tensors
of backward. Whatever else is alive for a moment is not in it, nor what the libraries take.
"""

import torch
from torch import Tensor

from octavo.doctor import Finding, Severity
from octavo.experiments.preflight.check import Check
from octavo.experiments.preflight.probe import Probe
from octavo.memory import memory_bytes

__all__ = ["memory_check", "saved_bytes"]

NAME = "memory"
MIB = 1 << 20
COPIES = 4  # weights, gradients, two moments


def memory_check(probe: Probe) -> Check:
    """Compare the estimate with the device's memory."""
    held = sum(COPIES * p.numel() * torch.float32.itemsize for p in probe.model.parameters())
    saved = saved_bytes(probe)
    logits = 2 * probe.inputs.numel() * probe.model.config.vocab_size * torch.float32.itemsize
    needed, there = held + saved + logits, memory_bytes(probe.device)
    said = (
        f"about {needed / MIB:,.0f} of {there / MIB:,.0f} MiB: {held / MIB:,.0f} for parameters and optimizer, "
        f"{saved / MIB:,.0f} kept for backward, {logits / MIB:,.0f} for the logits' gradient"
    )
    if needed <= there:
        return Check(name=NAME, said=said)
    finding = Finding(
        code="memory",
        severity=Severity.FAIL,
        evidence={"needed_mib": needed / MIB, "available_mib": there / MIB},
        cause=f"a step needs about {needed / MIB:,.0f} MiB, and {probe.device.type!r} has {there / MIB:,.0f}",
        weight=needed / there,
    )
    return Check(name=NAME, said=said, findings=(finding,))


def saved_bytes(probe: Probe) -> int:
    """Bytes that the graph of one forward keeps, parameters apart; memory that several tensors share counts once."""
    own = {p.untyped_storage().data_ptr() for p in probe.model.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with probe.step(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        probe.loss()
    return sum(storages.values())
