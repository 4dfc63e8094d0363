"""A run on several ranks: its layout, and what the ranks compare."""

import logging
import platform
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from octavo._lazy import own_version
from octavo.errors import ConfigError
from octavo.formats import E4M3
from octavo.kernels.tracing import is_distributed
from octavo.models import Llama
from octavo.nn import Linear
from octavo.nn.scaling_state import read_scaling_state
from octavo.nn.tensor_parallel import check_slices
from octavo.parallel import GradientReduction, gather_in_fp8
from octavo.parallel.agreement import refuse_difference, require_equal, require_equal_state
from octavo.parallel.data_parallel import local, part_of, replicated, sharded
from octavo.parallel.ranks import Ranks
from octavo.text.tokens import TokenData
from octavo.training.config import RunConfig, TrainingConfig
from octavo.training.parallel_config import ParallelConfig
from octavo.training.precision import apply_recipe, recipe_named, resolve_device
from octavo.training.recipe_choice import PLAIN_RECIPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "check_layout",
    "check_same_checkpoint",
    "check_same_run",
    "check_same_state",
    "check_same_step",
    "gradient_reduction",
    "on_ranks",
    "sharing_loss",
]

APART = (
    "from here on they train different models; resume from the last checkpoint, and suspect the machine of the rank "
    "that is alone"
)


def check_same_run(ranks: Ranks, config: RunConfig, data: TokenData) -> None:
    """Check that all ranks run the same octavo and torch with the same configuration on the same tokens.

    Raises:
        ConfigError: they do not, or :func:`check_layout` refuses the configuration, or two ranks would share a GPU.
    """
    if ranks.size > 1:
        versions = {"octavo's version": own_version(), "torch's version": torch.__version__}
        values = {**versions, **config.flat(), "the text's hash": data.content_hash}
        require_equal(ranks, values, advice="start all ranks with the same installation, configuration and text")
    check_layout(config, ranks.size)
    _check_gpus(ranks, config)


def check_layout(config: RunConfig, ranks: int) -> None:
    """Check that a configuration can be trained on so many ranks.

    Raises:
        ConfigError: ``[parallel]`` does not fit their number, they cannot share micro-batches or positions, the
            autopilot is on, or gradients in FP8 would have a loss scale that changes.
    """
    config.parallel.replicas(ranks)
    config.parallel.micro_batches(config.training.grad_accumulation, ranks)
    context, tensor = config.training.context, config.parallel.tensor
    if config.parallel.sequence and context % tensor:
        raise ConfigError(f"{tensor} ranks cannot share the {context} positions of training.context; set a multiple")
    if config.training.autopilot and ranks > 1:
        raise ConfigError(
            f"training.autopilot acts on one rank's statistics, and {ranks} ranks would part; turn it off, or train on "
            "one rank"
        )
    if config.parallel.fp8_gradients and config.training.scales_loss and isinstance(config.training.loss_scale, str):
        raise ConfigError(
            "parallel.fp8_gradients keeps a step's rounding errors for the next, and a dynamic loss scale changes the "
            "gradients' unit between them; set training.loss_scale to a number, or training.precision to bf16"
        )


def check_same_checkpoint(ranks: Ranks, checkpoint: Path | None) -> None:
    """Check that all ranks continue the same checkpoint: a folder over a network may be listed late.

    Raises:
        ConfigError: they found others.
    """
    if ranks.size > 1:
        found = {"the newest checkpoint": None if checkpoint is None else checkpoint.name}
        require_equal(ranks, found, advice="wait until all machines see the same files in the run's folder, and resume")


def _check_gpus(ranks: Ranks, config: RunConfig) -> None:
    """Check that each rank has a GPU of its own, if the run uses GPUs."""
    if ranks.size == 1 or resolve_device(config.training.device).type != "cuda":
        return
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    # By its UUID: under Slurm each rank may see a GPU of its own as number 0.
    identities = ranks.gathered(f"{own.name} {own.uuid} of {platform.node()}")
    for rank, identity in enumerate(identities):
        if (other := identities.index(identity)) != rank:
            raise ConfigError(
                f"ranks {other} and {rank} would share the GPU {identity}; start no more ranks "
                "on a machine than it has GPUs, or use --device cpu"
            )


def gradient_reduction(config: RunConfig, ranks: Ranks) -> GradientReduction | None:
    """Return what sends gradients as FP8 codes; None if the run does not, or on a rank alone, which sends none."""
    return GradientReduction(E4M3, error_feedback=True) if config.parallel.fp8_gradients and ranks.size > 1 else None


def on_ranks(model: Llama, config: RunConfig, ranks: Ranks, reduction: GradientReduction | None = None) -> nn.Module:
    """Lay the model out on the ranks as ``[parallel]`` says; return the module that a training forward calls.

    A rank alone keeps the model as it is: an experiment on a run need not have its layout.
    """
    parallel, training = config.parallel, config.training
    if ranks.size == 1:
        return model
    if parallel.shard == parallel.tensor == 1:
        return replicated(model, reduction)
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (parallel.replicas(ranks.size), parallel.shard, parallel.tensor)
    mesh = init_device_mesh(resolve_device(training.device).type, sizes, mesh_dim_names=("data", "shard", "tensor"))
    if parallel.tensor > 1:
        _divide(model, mesh["tensor"], training, sequence=parallel.sequence)
    if ranks.data_size > 1:
        if parallel.tensor > 1:  # it warns of gathers along two dimensions, which a save needs
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        sharded(model, model.model.layers, mesh["data", "shard"] if sizes[0] > 1 else mesh["shard"])
        if training.is_fp8:
            _gather_in_fp8(model, training)
    return model


def _divide(model: Llama, mesh: "DeviceMesh", training: TrainingConfig, *, sequence: bool) -> None:
    """Let ranks share each layer, whose slices fit the recipes of all phases."""
    from octavo.models.tensor_parallel import divide

    fp8 = [recipe_named(name, training) for name in _first_steps(training) if name not in PLAIN_RECIPES]
    dynamic = not any(recipe.is_delayed or recipe.has_static_input for recipe in fp8)
    divide(
        model, mesh, sequence=sequence, codes=bool(fp8) and dynamic
    )  # q, k and v share a gather if they share scales
    for step in _first_steps(training).values():
        apply_recipe(model, training, step=step)
        for layer in model.modules():
            if isinstance(layer, Linear):
                check_slices(layer, cast("DTensor", layer.weight), layer.recipe)
    apply_recipe(model, training)


def sharing_loss(ranks: Ranks) -> AbstractContextManager[object]:
    """Context of a run whose ranks may share the vocabulary: cross-entropy takes their parts of the logits."""
    if ranks.tensor == 1:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _gather_in_fp8(model: nn.Module, training: TrainingConfig) -> None:
    """Let FSDP2 gather weights as codes in all phases that have any: it takes no other gather once it has run."""
    fp8_steps = (step for recipe, step in _first_steps(training).items() if recipe not in PLAIN_RECIPES)
    apply_recipe(model, training, step=next(fp8_steps, 1))
    gather_in_fp8(model)
    apply_recipe(model, training)


def _first_steps(training: TrainingConfig) -> dict[str, int]:
    """The first step of each recipe of a run, in the order of steps."""
    first: dict[str, int] = {}
    for step in range(1, training.steps + 1):
        first.setdefault(training.recipe_at(step), step)
    return first


def check_same_step(steps: Sequence[float]) -> None:
    """Check that all ranks are in the same step, by the numbers that each has sent with its losses.

    Raises:
        ConfigError: they are not; all ranks raise together.
    """
    refuse_difference("the step", dict(enumerate(map(int, steps))), advice=APART)


def check_same_state(ranks: Ranks, model: nn.Module, parallel: ParallelConfig, *, step: int) -> None:
    """Compare scales, recipes, generators and the replicas' weights, if it is due after this step.

    Raises:
        ConfigError: they differ; all ranks raise together.
    """
    if ranks.size == 1 or not parallel.check_interval or step % parallel.check_interval:
        return
    recipes = {
        f"the recipe of layer {path!r}": f"{module.recipe.name} ({zlib.crc32(repr(module.recipe).encode()):08x})"
        for path, module in model.named_modules()
        if isinstance(module, Linear)
    }
    states = {"CPU": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["GPU"] = torch.cuda.get_rng_state()
    generators = {
        f"torch's {kind} generator": f"state {zlib.crc32(state.numpy().tobytes()):08x}"
        for kind, state in states.items()
    }
    has_copies = ranks.size > parallel.shard
    weights, shards = _weights(model) if has_copies else ({}, [])
    scales = {f"scaling state {name!r}": value for name, value in read_scaling_state(model).items()}
    require_equal_state(
        ranks,
        scales | weights,
        recipes | generators,
        shards=shards,
        advice=APART,
    )


def _weights(model: nn.Module) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Weights that each rank has whole, and this rank's parts of the others, by names that say which part.

    The parts are grouped by the dimensions of the mesh that divide a weight: ranks that hold other slices of the layers
    may hold the same shards of the norms.
    """
    weights, groups = dict[str, Tensor](), dict[object, dict[str, Tensor]]()
    for name, parameter in model.named_parameters():
        part = part_of(parameter) if is_distributed(parameter) else ()
        if part:
            layout = cast("DTensor", parameter)
            divided = tuple(not each.is_replicate() for each in layout.placements)
            group = groups.setdefault((layout.device_mesh.mesh_dim_names, divided), {})
            group[f"weight {name!r}, shard {', '.join(map(str, part))}"] = local(parameter)
        else:
            weights[f"weight {name!r}"] = local(parameter)
    return weights, list(groups.values())
