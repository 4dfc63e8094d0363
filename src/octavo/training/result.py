"""What a run came to, read from its folder when it ends."""

from dataclasses import dataclass
from pathlib import Path

from octavo.training.metrics import read_metrics

__all__ = ["Curve", "TrainResult", "curves_of"]

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to.

    Attributes:
        run_dir: its folder.
        step: finished updates.
        stopped_by: the signal that stopped it before its last update, such as "SIGTERM"; None if none did.
        train_curve: (step, loss in nats), from metrics.jsonl, earlier parts of a resumed run included.
        validation_curve: (step, nats).
        tokens_per_second: tokens of an update over the median duration of one.
        peak_memory_bytes: of this process while it trained; see :mod:`octavo.training.memory`.
        checkpoint: the newest one.
        converted: how many linears the recipe took.
    """

    run_dir: Path
    step: int
    stopped_by: str | None
    train_curve: Curve
    validation_curve: Curve
    tokens_per_second: float
    peak_memory_bytes: int
    checkpoint: Path | None
    converted: int

    @property
    def interrupted(self) -> bool:
        """Whether a signal stopped it before its last update."""
        return self.stopped_by is not None


def curves_of(run_dir: Path) -> tuple[Curve, Curve]:
    """(step, nats) of the training loss, and of the validation loss."""
    lines = read_metrics(run_dir)
    training = tuple((line["step"], line["loss"]) for line in lines if line["kind"] == "step")
    return training, tuple((line["step"], line["nats"]) for line in lines if line["kind"] == "evaluation")
