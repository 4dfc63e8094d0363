"""Parts of a run before its first step: checks, model, optimizer, loss scaler and watcher."""

from pathlib import Path

import torch
from torch import nn

from octavo.doctor import Watcher, watch
from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.text.tokens import TokenData
from octavo.training.config import AUTO, DYNAMIC, RunConfig, TrainingConfig
from octavo.training.initial_weights import align_channels, parameter_groups, scale_to_width
from octavo.training.loss_scaling import LossScaler
from octavo.training.memory import check_run_fits
from octavo.training.moments import keep_in_fp8
from octavo.training.precision import apply_recipe, resolve_device
from octavo.training.run_folder import CAPTURES

__all__ = ["build_loss_scaler", "build_model", "build_optimizer", "build_watcher", "check_data"]


def check_data(data: TokenData, config: RunConfig) -> None:
    """Check that the data is long enough for the context, and that model and batches fit in memory.

    Raises:
        DataError: a split is shorter than the context.
        ConfigError: the device is not available, or the model or a micro-batch does not fit in its memory.
    """
    check_run_fits(config, data.vocab_size)
    training = config.training
    data.batch(0, batch_size=1, context=training.context, seed=training.seed)
    data.windows(training.context, max_tokens=1)


def build_model(config: RunConfig, vocab_size: int) -> tuple[Llama, int]:
    """Create the initial model on its device, converted; return it and the number of linears in FP8.

    Linears that run octavo's BF16 recipe, as those around the FP8 layers do under autocast, do not count.

    Raises:
        ConfigError: the device is not available, the model does not fit in memory, or the recipe cannot be applied.
    """
    training = config.training
    device = resolve_device(training.device)
    torch.manual_seed(training.seed)
    shape = config.model.llama(vocab_size=vocab_size, max_positions=training.context)
    try:
        model = Llama(shape, seed=training.seed).to(device)
        scale_to_width(model, training.mu_base_width)
        align_channels(model, training.aligned_channels)
    except RuntimeError as error:
        raise ConfigError(
            f"a model of hidden_size {shape.hidden_size} and {shape.num_layers} layers does not fit in the memory of "
            f"{device.type!r} ({str(error).splitlines()[0]}); make it smaller"
        ) from error
    report = apply_recipe(model, training)
    return model, len(report.converted) if report and training.is_fp8 else 0


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW in one pass over each tensor, in the groups of :mod:`octavo.training.initial_weights`."""
    groups = parameter_groups(model, weight_decay=training.weight_decay, base_width=training.mu_base_width)
    beta1, beta2 = training.betas
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=(beta1, beta2), eps=training.eps, fused=True)
    keep_in_fp8(optimizer, training.moments)
    return optimizer


def build_watcher(
    training: TrainingConfig, model: nn.Module, optimizer: torch.optim.Optimizer, run_dir: Path | None
) -> Watcher | None:
    """Watcher of the FP8 layers every ``statistics_interval`` updates; None for a run without either.

    Captures go to ``run_dir``; with None there are none.
    """
    if not training.is_fp8 or not training.statistics_interval:
        return None
    return watch(model, optimizer, interval=training.statistics_interval, captures=run_dir and run_dir / CAPTURES)


def build_loss_scaler(training: TrainingConfig, device: torch.device) -> LossScaler | None:
    """Loss scaler of a run; None if the settings need none."""
    if not training.scales_loss:
        return None
    return LossScaler(DYNAMIC if training.loss_scale == AUTO else training.loss_scale, device=device)
