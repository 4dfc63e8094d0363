"""A run's configuration: four sections, frozen, written as TOML and read back to the same object.

```toml
[model]
hidden_size = 128
[data]
source = "builtin"
[training]
recipe = "tensorwise"
steps = 400
[parallel]
shard = 1
```

Every key has a default. An unknown key and a value of the wrong type or out of range raise an error with the name and
the allowed values; no value is corrected silently. ``run_dir/config.toml`` is the configuration that a run was started
with; resuming compares hashes.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigError, DataError
from octavo.files import write_atomically
from octavo.models import LlamaConfig
from octavo.models.llama import LARGEST
from octavo.parsing import did_you_mean, parse_json, read_toml
from octavo.recipes.engines import get
from octavo.text.sources import BUILTIN
from octavo.text.tokenizer import LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from octavo.training.config_values import check_at_least, check_member, section
from octavo.training.gradient_jump import Jump, check_jumps, jump_at
from octavo.training.metric_writers import LOGGERS, TENSORBOARD
from octavo.training.moments import Moments
from octavo.training.parallel_config import ParallelConfig
from octavo.training.precision_schedule import Phase, check_schedule, recipe_name_at
from octavo.training.recipe_choice import (
    PLAIN_RECIPES,
    check_module_casts,
    check_overrides,
    check_recipe,
    check_served_by,
)
from octavo.training.schedules import adjust_for_fp8

__all__ = [
    "DataConfig",
    "Device",
    "ModelConfig",
    "ParallelConfig",
    "Precision",
    "RunConfig",
    "TrainingConfig",
    "config_from_dict",
    "demo_config",
    "load_config",
    "save_config",
]

AUTO, DYNAMIC = "auto", "dynamic"
MOST_SEED = 2**63 - 1  # the largest integer of TOML and of torch's generators alike
LEAST = {
    **dict.fromkeys(
        ("steps", "batch_size", "context", "grad_accumulation", "autopilot_patience", "autopilot_flips"), 1
    ),
    **dict.fromkeys(("threads", "warmup", "seed", "eval_interval", "eval_tokens", "statistics_interval"), 0),
    **dict.fromkeys(("checkpoint_interval", "keep_checkpoints", "weight_decay", "clip_norm", "min_lr"), 0),
    **dict.fromkeys(("aligned_channels", "mu_base_width"), 0),
}
MOST = {
    "threads": 1024,  # thousands more end the process inside OpenMP
    "seed": MOST_SEED,
    "context": LARGEST["max_positions"],
    "grad_accumulation": 1 << 16,  # an update cannot be interrupted and reports no progress
}


_LATER: dict[str, dict[str, Any]] = {
    "model": {"qk_norm": False},
    "training": {
        "moments": str(Moments.FP32),
        "as_served_by": "",
        "gradient_jumps": [],
        "cast_norms": False,
        "smooth_swiglu": False,
        "aligned_channels": 0,
        "mu_base_width": 0,
    },
}  # keys of later releases, defaults
_FP8_GRADIENTS = "fp8_gradients"  # the only key of [parallel] that changes results
_LAYOUT = tuple(f"parallel.{each.name}" for each in fields(ParallelConfig) if each.name != _FP8_GRADIENTS)


class Precision(StrEnum):
    """Precision around the FP8 linears: attention, norms, embedding, head."""

    FP32 = "fp32"
    BF16 = "bf16"  # torch.autocast
    FP16 = "fp16"  # torch.autocast, and a loss scale


class Device(StrEnum):
    """Device of a run."""

    AUTO = "auto"  # CUDA if available
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the decoder, without vocabulary and context, which data and training determine.

    ``qk_norm`` gives each head's queries and keys a norm, as in Qwen3; other fields are those of ``LlamaConfig``.
    """

    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        self.llama(vocab_size=1, max_positions=1)

    def llama(self, *, vocab_size: int, max_positions: int) -> LlamaConfig:
        """Return the full shape."""
        shape = asdict(self) | {"qk_norm": "head" if self.qk_norm else None}
        return LlamaConfig(vocab_size=vocab_size, max_positions=max_positions, **shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Text source and tokenizer.

    Attributes:
        source: "builtin", a file, a folder or a dataset name (see ``octavo.text.sources``).
        vocab_size: tokens of the byte-pair encoding, 257 to 1,048,576.
    """

    source: str = BUILTIN
    vocab_size: int = 2048

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("data.source is empty; give a file, a folder or a dataset name, or 'builtin'")
        check_at_least("data.vocab_size", self.vocab_size, SMALLEST_VOCABULARY)
        _check_at_most("data.vocab_size", self.vocab_size, LARGEST_VOCABULARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Training settings.

    Attributes:
        recipe: "fp32" (everything FP32), "bf16" (torch.autocast) or one of octavo's FP8 recipes.
        recipe_options: the recipe's own options, such as ``history_length`` for "delayed".
        as_served_by: engine whose forward pass layers in FP8 have, one of ``octavo.engines.names()``; the recipe then
            gives the gradients, and the model around the layers computes in the engine's dtype. "" is none.
        precision: precision around the linears of an FP8 recipe; ignored by "fp32" and "bf16", and with
            ``as_served_by``.
        loss_scale: factor of the loss before backward, by which gradients are divided afterwards: "dynamic", a number,
            or "auto", which is dynamic for precision "fp16" and no scale otherwise. A dynamic scale starts at 2^16,
            halves and repeats the step when a gradient overflows, and doubles after 2000 steps without overflow.
        overrides: recipes of some layers of an FP8 run, by patterns of module paths; the first match counts. The run's
            own recipe keeps its options there; any other is the preset without options.
        precision_schedule: phases of an FP8 run; see :mod:`octavo.training.precision_schedule`. Empty for none.
        skip: patterns of module paths that an FP8 recipe leaves in high precision, in addition to the head.
        convert_head: also convert the head to the FP8 recipe.
        cache_weights: cast a weight to FP8 once per update instead of once per micro-batch.
        device: "auto", "cpu" or "cuda".
        threads: CPU threads; 0 uses torch's default.
        steps: optimizer updates.
        batch_size: sequences per micro-batch.
        context: tokens per sequence.
        grad_accumulation: micro-batches per update, of all ranks together.
        lr: peak learning rate.
        min_lr: learning rate of the last update.
        warmup: updates of linear warmup to the peak.
        adjust_for_fp8: apply ``schedules.adjust_for_fp8`` to an FP8 recipe.
        weight_decay: weight decay of matrices; vectors are not decayed.
        betas: AdamW's averaging factors.
        eps: AdamW's denominator floor.
        moments: precision of AdamW's moments; see :mod:`octavo.training.moments`.
        gradient_jumps: jumps of all gradients; see :mod:`octavo.training.gradient_jump`. Empty for none.
        cast_norms: cast the norms' weights to FP8, and decode them, as the recipe casts the weights of linears.
        smooth_swiglu: scale the channels between an FP8 run's SwiGLU and its last linear to one magnitude; see
            :mod:`octavo.nn.smooth_input`.
        aligned_channels: channels of every MLP that begin as outliers; see :mod:`octavo.training.initial_weights`.
        mu_base_width: width at which µP changes no weights and learning rates; see there; 0 for no µP.
        clip_norm: largest global gradient norm; 0 does not clip.
        seed: seed of weights and batches.
        eval_interval: updates between evaluations; 0 evaluates only at the end.
        eval_tokens: tokens per evaluation during training; 0 is the whole split.
        statistics_interval: updates between samples of the FP8 layers' tensors (``octavo.doctor``); 0 for none.
        autopilot: act on the doctor's findings; see :mod:`octavo.training.autopilot`.
        autopilot_patience: samples after which an act is judged.
        autopilot_flips: most changes and reversals of one layer.
        log: where the numbers are copied to: "tensorboard", "wandb", "mlflow", "trackio"; may be empty.
        checkpoint_interval: updates between checkpoints; 0 saves only at the end.
        keep_checkpoints: number of newest checkpoints to keep; 0 keeps all.
        async_checkpoints: train on while a checkpoint is written, from a copy in the CPU's memory.
    """

    recipe: str = "tensorwise"
    recipe_options: dict[str, Any] = field(default_factory=dict)
    as_served_by: str = ""
    precision: Precision = Precision.BF16
    loss_scale: str | float = AUTO
    overrides: dict[str, str] = field(default_factory=dict)
    precision_schedule: tuple[Phase, ...] = ()
    skip: tuple[str, ...] = ()
    convert_head: bool = False
    cache_weights: bool = False
    device: Device = Device.AUTO
    threads: int = 0
    steps: int = 400
    batch_size: int = 8
    context: int = 128
    grad_accumulation: int = 1
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup: int = 40
    adjust_for_fp8: bool = False
    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    moments: Moments = Moments.FP32
    gradient_jumps: tuple[Jump, ...] = ()
    cast_norms: bool = False
    smooth_swiglu: bool = False
    aligned_channels: int = 0
    mu_base_width: int = 0
    clip_norm: float = 1.0
    seed: int = 0
    eval_interval: int = 50
    eval_tokens: int = 16384
    statistics_interval: int = 10
    autopilot: bool = False
    autopilot_patience: int = 3
    autopilot_flips: int = 6
    log: tuple[str, ...] = (TENSORBOARD,)
    checkpoint_interval: int = 0
    keep_checkpoints: int = 2
    async_checkpoints: bool = False

    def __post_init__(self) -> None:
        check_recipe(self.recipe, self.recipe_options)
        check_served_by(self.as_served_by, self.recipe, self.recipe_options)
        check_overrides(self.overrides)
        check_schedule(self.precision_schedule, self.recipe)
        check_jumps(self.gradient_jumps)
        check_module_casts(
            self.recipe, self.recipe_options, norms=self.cast_norms, smooth=self.smooth_swiglu,
            served_by=self.as_served_by,
        )  # fmt: skip
        if self.smooth_swiglu and self.cache_weights:
            raise ConfigError("training.smooth_swiglu scales a weight anew in each micro-batch; turn cache_weights off")
        check_member("training.precision", self.precision, Precision)
        check_member("training.device", self.device, Device)
        check_member("training.moments", self.moments, Moments)
        for name in self.log:
            check_member("training.log", name, LOGGERS)
        _check_loss_scale(self.loss_scale)
        _check_autopilot(self)
        for name, least in LEAST.items():
            check_at_least(f"training.{name}", getattr(self, name), least)
        for name, most in MOST.items():
            _check_at_most(f"training.{name}", getattr(self, name), most)
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"training.{name} must be a positive number, not {getattr(self, name)}")
        if self.min_lr > self.lr:
            raise ConfigError(f"training.min_lr must be at most lr ({self.lr}), not {self.min_lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"training.betas must be two numbers from 0 to under 1, not {list(self.betas)}")

    @property
    def is_fp8(self) -> bool:
        """True if linears are converted to FP8."""
        return self.recipe not in PLAIN_RECIPES

    def recipe_at(self, step: int) -> str:
        """Return the name of the recipe of a step, 1 for the first."""
        return recipe_name_at(self.precision_schedule, step, steps=self.steps, own=self.recipe)

    def jump_at(self, step: int) -> float:
        """Return the factor of the gradients of a step, 1 for the first."""
        return jump_at(self.gradient_jumps, step, steps=self.steps)

    @property
    def surrounding(self) -> Precision:
        """Precision of embedding, attention, norms and head; parameters are always FP32."""
        if self.as_served_by:
            return Precision.FP32 if get(self.as_served_by).activations is torch.float32 else Precision.BF16
        return self.precision if self.is_fp8 else Precision(self.recipe)

    @property
    def scales_loss(self) -> bool:
        """True if the run uses a loss scale."""
        return self.loss_scale != AUTO or self.surrounding == Precision.FP16

    @property
    def peak_lr(self) -> float:
        """Peak learning rate, after ``adjust_for_fp8``."""
        return self._adjusted()[0]

    @property
    def warmup_steps(self) -> int:
        """Warmup updates, after ``adjust_for_fp8``."""
        return self._adjusted()[1]

    @property
    def tokens_per_step(self) -> int:
        """Tokens per update."""
        return self.batch_size * self.context * self.grad_accumulation

    def _adjusted(self) -> tuple[float, int]:
        applies = self.adjust_for_fp8 and self.is_fp8
        return adjust_for_fp8(self.lr, self.warmup) if applies else (self.lr, self.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Complete configuration of a run.

    Example:
        >>> config = RunConfig(training=TrainingConfig(recipe="bf16", steps=10))
        >>> config_from_dict(config.to_dict()) == config
        True
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        _check_weights(self.model, self.training, self.parallel)
        if self.training.as_served_by and not self.parallel.shard == self.parallel.tensor == 1:
            raise ConfigError(
                "training.as_served_by needs whole layers on each rank; set parallel.shard and tensor to 1"
            )

    @property
    def free_to_change(self) -> tuple[str, ...]:
        """Keys without effect on results: layout, loggers, and intervals (statistics' without the autopilot)."""
        saving = ("checkpoint_interval", "keep_checkpoints", "async_checkpoints")
        free = ("training.log", *(f"training.{key}" for key in saving), *_LAYOUT)
        return free if self.training.autopilot else (*free, "training.statistics_interval")

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers for TOML and JSON."""
        plain: dict[str, Any] = parse_json(json.dumps(asdict(self)), allow_nan=True)
        return plain

    def flat(self) -> dict[str, Any]:
        """Return the plain values by full name, such as "training.steps"."""
        return {f"{section}.{key}": value for section, keys in self.to_dict().items() for key, value in keys.items()}

    def with_training(self, **changes: Any) -> "RunConfig":
        """Return a copy with changed training values."""
        return replace(self, training=replace(self.training, **changes))

    def with_recipe(self, recipe: str, **options: Any) -> "RunConfig":
        """Return a copy with another recipe; high precision drops what only FP8 layers have."""
        none = {
            "precision_schedule": (), "autopilot": False, "as_served_by": "", "cast_norms": False,
            "smooth_swiglu": False,
        }  # fmt: skip
        only_fp8 = none if recipe in PLAIN_RECIPES else {}
        return self.with_training(recipe=recipe, recipe_options=options, **only_fp8)

    def config_hash(self) -> str:
        """Hash of all keys that affect results, that is all but ``free_to_change``."""
        plain = self.to_dict()
        plain["training"]["overrides"] = list(self.training.overrides.items())  # ordered: the first match counts
        for name in self.free_to_change:
            section, _, key = name.partition(".")
            del plain[section][key]
        for name, defaults in _LATER.items():  # runs from before a key have the hash of its default
            plain[name] = {key: value for key, value in plain[name].items() if defaults.get(key, ...) != value}
        if not plain["parallel"][_FP8_GRADIENTS]:  # all that is left of the section
            del plain["parallel"]
        return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def demo_config(*, quick: bool = False) -> RunConfig:
    """Configuration of ``octavo demo``: 1.3 million parameters on the built-in corpus, for three runs on two cores.

    At a learning rate of 3e-3 after 50 steps of warm-up, BF16 lay 0.04 to 0.08 nats from FP32 from step 100 on (one
    seed); at half of it, after 100 steps of warm-up, within 0.0005 nats up to step 150. The gentler one is used.

    Args:
        quick: run only a few steps, to check that everything works; the loss stays near the unigram entropy.
    """
    training = TrainingConfig(steps=450, batch_size=8, context=128, lr=1.5e-3, min_lr=1e-4, warmup=100)
    if quick:
        training = replace(training, steps=60, batch_size=4, lr=1e-3, warmup=10, eval_interval=10, eval_tokens=8192)
    return RunConfig(training=training)


def load_config(path: str | Path) -> RunConfig:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an invalid key or value.
    """
    try:
        raw = read_toml(Path(path))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}: {error.strerror}; name an existing TOML file"
        ) from error
    except DataError as error:
        raise ConfigError(f"{str(path)!r} is not TOML: {error}; correct that place") from error
    return config_from_dict(raw)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write a TOML file that ``load_config`` reads back to the same configuration."""
    import tomli_w

    write_atomically(Path(path), tomli_w.dumps(config.to_dict()))


def config_from_dict(raw: dict[str, Any]) -> RunConfig:
    """Create a configuration from plain dicts.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range, by name.
    """
    return section(RunConfig, raw, "")


def _check_autopilot(training: TrainingConfig) -> None:
    if training.autopilot and not training.is_fp8:
        raise ConfigError(
            f"training.autopilot needs FP8 layers, but a run of {training.recipe!r} has none; turn it off"
        )
    if training.autopilot and training.as_served_by:
        raise ConfigError(
            "training.autopilot changes casts, and training.as_served_by fixes them; leave one of them out"
        )
    if training.autopilot and not training.statistics_interval:
        raise ConfigError("training.autopilot needs statistics; set training.statistics_interval to at least 1, not 0")


def _check_weights(model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig) -> None:
    if training.smooth_swiglu and parallel.shard * parallel.tensor > 1:
        raise ConfigError(
            "training.smooth_swiglu scales whole weights; set parallel.shard and parallel.tensor to 1, or turn it off"
        )
    settings = {"training.moments": training.moments != Moments.FP32, "training.cast_norms": training.cast_norms}
    of_whole = [name for name, given in (settings | {"model.qk_norm": model.qk_norm}).items() if given]
    if of_whole and parallel.tensor > 1:
        raise ConfigError(
            f"{' and '.join(of_whole)} cannot be divided among ranks that share each layer; set parallel.tensor to 1, "
            "or leave it out"
        )
    if training.mu_base_width and model.tie_embeddings:
        raise ConfigError("training.mu_base_width needs a head of its own; set model.tie_embeddings to false")
    if training.aligned_channels > model.intermediate_size:
        raise ConfigError(
            f"training.aligned_channels must be at most model.intermediate_size ({model.intermediate_size}), not "
            f"{training.aligned_channels}"
        )


def _check_at_most(name: str, value: float, most: int) -> None:
    if value > most:
        raise ConfigError(f"{name} must be at most {most:,}, not {value:,}")


def _check_loss_scale(value: str | float) -> None:
    words = (AUTO, DYNAMIC)
    if isinstance(value, str) and value not in words:
        raise ConfigError(
            f"training.loss_scale must be {AUTO}, {DYNAMIC} or a number, not {value!r}{did_you_mean(value, [*words])}"
        )
    if not isinstance(value, str) and not 0 < value < math.inf:
        raise ConfigError(f"training.loss_scale must be a positive number, not {value}")
