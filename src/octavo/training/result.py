"""Result of a training run, read from its folder at the end."""

from dataclasses import dataclass
from pathlib import Path

from octavo.curves import Curve
from octavo.training.metrics import read_metrics

__all__ = ["TrainResult", "curves_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        run_dir: the run's folder.
        step: finished updates.
        stopped_by: the signal that stopped the run before its last update, such as "SIGTERM", or None.
        train_curve: (step, loss in nats) from metrics.jsonl, including earlier parts of a resumed run.
        validation_curve: (step, nats).
        tokens_per_second: tokens per update over the median duration of an update.
        peak_memory_bytes: peak of this process during training; see :mod:`octavo.training.memory`.
        checkpoint: the newest checkpoint.
        converted: number of linears converted to the FP8 recipe; 0 in an FP32 or BF16 run.
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
        """True if a signal stopped the run before its last update."""
        return self.stopped_by is not None


def curves_of(run_dir: Path) -> tuple[Curve, Curve]:
    """Return the (step, nats) curves of the training and the validation loss."""
    lines = read_metrics(run_dir)
    training = tuple((line["step"], line["loss"]) for line in lines if line["kind"] == "step")
    return training, tuple((line["step"], line["nats"]) for line in lines if line["kind"] == "evaluation")
