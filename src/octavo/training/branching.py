"""New runs that begin at a checkpoint of another run, with the same model and text and otherwise any configuration.

The new run's folder receives that checkpoint under its own configuration, and the lines of metrics.jsonl up to it; from
then on the new run is an ordinary one that is resumed. Weights, the optimizer's moments, the loss scale and torch's
generators are the checkpoint's, and so is the step, on which batches and the learning rate depend. Amax histories are
kept for tensors whose scales are still delayed; others begin without one.
"""

from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from octavo.doctor.metrics_lines import METRICS, LineWriter, each_line
from octavo.errors import CheckpointError, ConfigError
from octavo.files import write_atomically
from octavo.models import Llama
from octavo.text.tokens import TokenData
from octavo.training.checkpoint import CheckpointState, latest, load_checkpoint, read_state, save_checkpoint
from octavo.training.checkpoint_files import STATE
from octavo.training.config import RunConfig
from octavo.training.precision import apply_recipe, resolve_device
from octavo.training.setup import build_loss_scaler, build_optimizer

__all__ = ["begin_from", "branch_state"]


def branch_state(checkpoint: Path, config: RunConfig, data: TokenData) -> CheckpointState:
    """Read the state of a checkpoint from which a run with this configuration can begin.

    Raises:
        CheckpointError: it is no checkpoint, is damaged, or was trained on other text.
        ConfigError: the new run has no step after it.
    """
    if not (checkpoint / STATE).is_file():
        example = latest(checkpoint) or "runs/mine/checkpoints/step-000100"
        raise CheckpointError(f"{str(checkpoint)!r} is no checkpoint (no {STATE}); name a folder such as {example}")
    state = read_state(checkpoint)
    if state.data_hash != data.content_hash:
        raise CheckpointError(
            f"{str(checkpoint)!r} was trained on other text (content hash {state.data_hash}, now {data.content_hash}); "
            "give the new run the same [data]"
        )
    if state.step >= config.training.steps:
        raise ConfigError(
            f"{str(checkpoint)!r} has finished step {state.step}, and the new run ends after "
            f"{config.training.steps}; set training.steps to more"
        )
    return state


def begin_from(checkpoint: Path, config: RunConfig, run_dir: Path, *, model: Llama, data: TokenData) -> None:
    """Write the first checkpoint and the metrics of a new run that begins at another run's checkpoint.

    Args:
        checkpoint: folder of the other run's checkpoint.
        config: the new run's configuration.
        run_dir: the new run's folder, which this process has claimed.
        model: the new run's initial model, which receives the checkpoint's weights.
        data: the token files.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model or text, or the new one cannot be written.
        ConfigError: the new run has no step after it.
        TrainingError: the metrics of the other run are not those that the checkpoint records.
    """
    state = branch_state(checkpoint, config, data)
    training, device = config.training, resolve_device(config.training.device)
    apply_recipe(model, training, step=state.step)
    optimizer, scaler = build_optimizer(model, training), build_loss_scaler(training, device)
    load_checkpoint(checkpoint, model=model, optimizer=optimizer, scaler=scaler, renews_scales=True)
    lines, text = LineWriter(), ""
    if state.metrics is not None and (source := checkpoint.resolve().parents[1] / METRICS).exists():
        until = islice(each_line(source, beginning=state.metrics), state.metrics.lines)
        text = "".join(map(lines.line, until))
    own = replace(
        state, config_hash=config.config_hash(), model=asdict(model.config), metrics=lines.written if text else None
    )
    save_checkpoint(run_dir, own, model=model, optimizer=optimizer, scaler=scaler)
    if text:
        write_atomically(run_dir / METRICS, text)
