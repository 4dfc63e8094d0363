"""Forward and backward pass of a module, and its memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.hopper.session import Rotation, Session

__all__ = ["Memory", "TrainingStep", "leaf", "memory_of"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one variant, as if it were alone; 0 in a rehearsal.

    Attributes:
        peak: bytes of the parameters and the largest extra memory of a step.
        kept: bytes in use between forward and backward, including the output.
    """

    peak: int
    kept: int


class TrainingStep:
    """Forward and backward; gradients of parameters and input are computed and freed.

    Args:
        run: the forward pass, which may be compiled.
        parameters: parameters with gradients.
        inputs: batches in turn, with gradients.
        grads: gradients of the output, in turn.
    """

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        parameters: Sequence[nn.Parameter],
        inputs: Rotation[Tensor],
        grads: Rotation[Tensor],
    ) -> None:
        self.run, self.parameters, self.inputs, self.grads = run, parameters, inputs, grads

    def __call__(self) -> None:
        """Run one step and free its gradients, also after an error, since other variants may share the parameters."""
        x = self.inputs()
        try:
            self.run(x).backward(self.grads())
        finally:
            self._drop(x)

    def kept(self, session: Session) -> int:
        """Bytes between forward and backward."""
        x, before = self.inputs(), session.allocated()
        y = self.run(x)
        kept = session.allocated() - before
        y.backward(self.grads())
        self._drop(x)
        return kept

    def _drop(self, x: Tensor) -> None:
        x.grad = None
        for parameter in self.parameters:
            parameter.grad = None


def memory_of(session: Session, step: TrainingStep) -> Memory:
    """Memory of a step; measured after its times, so that first-use allocations do not count."""
    own = sum(parameter.nbytes for parameter in step.parameters) if session.on_gpu else 0
    kept = step.kept(session)
    return Memory(own + session.peak_above(session.allocated(), step), kept)


def leaf(session: Session, *shape: int) -> Tensor:
    """Random BF16 input that requires a gradient."""
    return session.randn(*shape).requires_grad_()
