"""Check that one micro-batch gives the same loss, outputs and gradients twice, bit for bit.

Otherwise a run cannot be resumed bit for bit, and differences between two runs mean nothing unless they are larger. The
first tensor that differs is reported: outputs of modules in the order of computation, then the gradients of these
outputs, then the parameters' gradients.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn

from octavo.doctor import Finding, Severity, Thresholds
from octavo.experiments.preflight.check import Check
from octavo.experiments.preflight.probe import Probe

__all__ = ["PassTrace", "digest", "first_difference", "replay_check", "replayed"]

NAME = "replay"


@dataclass(slots=True, kw_only=True)
class PassTrace:
    """Loss and gradients of one pass.

    Attributes:
        loss: the loss in nats.
        trace: (what, module path, digest) of every tensor, in the order of computation.
        gradients: the parameters' gradients by name.
    """

    loss: float = float("nan")
    trace: list[tuple[str, str, str]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def replay_check(probe: Probe, limits: Thresholds, *, step: int) -> Check:
    """Compare two passes; ``step`` is the number of the step that the micro-batch belongs to."""
    one, other = replayed(probe), replayed(probe)
    difference = first_difference(one, other)
    if difference is None:
        summary = f"loss {one.loss:.6g} and {len(one.gradients)} gradients are the same, bit for bit"
        return Check(name=NAME, said=summary)
    what, path = difference
    relative = _relative_difference(one.gradients, other.gradients)
    finding = Finding(
        code="nondeterministic",
        severity=Severity.FAIL if not relative <= limits.replay_difference else Severity.WARN,
        path=path,
        first_step=step,
        last_step=step,
        evidence={"gradient_difference": relative, "loss_difference": abs(one.loss - other.loss)},
        cause=f"the same micro-batch gives different numbers when it is run again: the first is the {what} of {path}",
        weight=relative,
    )
    return Check(name=NAME, said=f"the gradients differ by {relative:.2g} of their norm", findings=(finding,))


def replayed(probe: Probe) -> PassTrace:
    """Run one pass over the micro-batch."""
    result = PassTrace()
    with probe.step(), _tracing(probe.model, result.trace):
        loss = probe.loss()
        loss.backward()
        result.loss = loss.item()
        named = probe.model.named_parameters()
        result.gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
    result.trace += [("gradient", name, digest(gradient)) for name, gradient in result.gradients.items()]
    return result


def first_difference(one: PassTrace, other: PassTrace) -> tuple[str, str] | None:
    """First difference, and the path of its module or the name of its parameter; None without one."""
    for mine, theirs in zip_longest(one.trace, other.trace):
        if mine != theirs:
            what, path, _ = mine or theirs
            return what, path
    return None


def digest(tensor: Tensor) -> str:
    """Digest of a tensor's bits."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


@contextmanager
def _tracing(model: nn.Module, trace: list[tuple[str, str, str]]) -> Iterator[None]:
    """Append every module's output and later its gradient, inner modules before outer ones."""

    def make_hook(path: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def record(_module: nn.Module, _inputs: tuple[object, ...], output: object) -> None:
            if not isinstance(output, Tensor):
                return
            trace.append(("output", path, digest(output)))
            if output.requires_grad:
                output.register_hook(lambda grad: trace.append(("gradient of the output", path, digest(grad))))

        return record

    handles = [module.register_forward_hook(make_hook(path)) for path, module in model.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """|g - g'| / |g| over all parameters."""
    differences = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    norms = sum(gradient.double().square().sum() for gradient in one.values())
    return float((torch.as_tensor(differences) / torch.as_tensor(norms)).sqrt())
