"""Check of the memory of a step on the device, estimated from one micro-batch.

Parameters, gradients and AdamW's two moments are FP32: 16 bytes a parameter. Tensors saved for
backward are counted in a forward pass. The gradient of the logits and its softmax are added, as the largest tensors of
backward. Other temporary tensors and the memory of libraries are not included.
"""

import torch
from torch import Tensor

from octavo.doctor import Finding, Severity
from octavo.experiments.preflight.check import Check
from octavo.experiments.preflight.probe import Probe
from octavo.memory import MIB, memory_bytes

__all__ = ["memory_check", "saved_bytes"]

NAME = "memory"
COPIES = 4  # weights, gradients, two moments


def memory_check(probe: Probe) -> Check:
    """Compare the estimate with the device's memory."""
    state = sum(COPIES * p.numel() * torch.float32.itemsize for p in probe.model.parameters())
    saved = saved_bytes(probe)
    logits = 2 * probe.inputs.numel() * probe.model.config.vocab_size * torch.float32.itemsize
    needed, available = state + saved + logits, memory_bytes(probe.device)
    summary = (
        f"about {needed / MIB:,.0f} of {available / MIB:,.0f} MiB: {state / MIB:,.0f} for parameters and optimizer, "
        f"{saved / MIB:,.0f} kept for backward, {logits / MIB:,.0f} for the logits' gradient"
    )
    if needed <= available:
        return Check(name=NAME, said=summary)
    finding = Finding(
        code="memory",
        severity=Severity.FAIL,
        evidence={"needed_mib": needed / MIB, "available_mib": available / MIB},
        cause=f"a step needs about {needed / MIB:,.0f} MiB, and {probe.device.type!r} has {available / MIB:,.0f}",
        weight=needed / available,
    )
    return Check(name=NAME, said=summary, findings=(finding,))


def saved_bytes(probe: Probe) -> int:
    """Bytes saved for backward by one forward pass, without parameters; shared storage counts once."""
    parameter_storages = {p.untyped_storage().data_ptr() for p in probe.model.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with probe.step(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        probe.loss()
    return sum(storages.values())
