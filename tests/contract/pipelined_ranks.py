"""Two stages of torch's own pipeline, against both in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

import octavo

__all__ = ["pipeline", "pipeline_compiled"]

STEPS, MICRO, ROWS, WIDTH = 3, 4, 4, 8
RECIPE = octavo.recipes.get("delayed", history_length=4)


class Stage(nn.Module):
    """Layers of one stage, whose activations may be checkpointed."""

    def __init__(self, index: int, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.checkpoints = checkpoints
        octavo.convert(self, RECIPE, amax_group="rank")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False) if self.checkpoints else self.layers(x)
        return y


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Input and target of all micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, MICRO * ROWS, WIDTH, generator=generator)
    return x * 2.0**-step, target


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def fill_memory(stage: nn.Module) -> None:
    """Let the next input, if it is what memory held, be large and not finite."""

    def fill(_: nn.Module, args: tuple[Tensor]) -> None:
        hook.remove()
        with torch.no_grad():
            args[0].fill_(1e30)[0, 0] = torch.nan

    hook = stage.register_forward_pre_hook(fill)


def results(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters, scaling state and numbers of non-finite elements."""
    counts = octavo.nonfinite_counts(stage)
    return {
        **stage.state_dict(),
        **octavo.scaling_state(stage),
        **{f"{k}.counts": torch.tensor(v) for k, v in counts.items()},
    }


def trained(rank: int, stage: nn.Module, given: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Results of a stage after some steps of torch's schedule."""
    runner = PipelineStage(given, rank, 2, torch.device("cpu"), **options)
    schedule = Schedule1F1B(runner, n_microbatches=MICRO, loss_fn=loss_of)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(STEPS):
        x, target = batch(step)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])
        optimizer.step()
        optimizer.zero_grad()
    return results(stage)


def in_one_process(rank: int) -> dict[str, Tensor]:
    """Results of this rank's stage where both run in this process."""
    stages = [Stage(index) for index in range(2)]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in stages]
    for step in range(STEPS):
        for x, target in zip(*(each.chunk(MICRO) for each in batch(step)), strict=True):
            loss_of(stages[1](stages[0](x)), target).backward()
        for stage, optimizer in zip(stages, optimizers, strict=True):
            for parameter in stage.parameters():
                assert parameter.grad is not None
                parameter.grad /= MICRO
            optimizer.step()
            optimizer.zero_grad()
    return results(stages[rank])


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not bit for bit as expected."""
    names = found.keys() | expected.keys()
    return sorted(
        name for name in names if not (name in found and name in expected and found[name].equal(expected[name]))
    )


def pipeline(rank: int, _: Path) -> Any:
    """What differs from one process, where shapes are inferred and where they are given; steps that were counted."""
    expected, found = in_one_process(rank), {}
    example = torch.empty(ROWS, WIDTH, requires_grad=True)
    for name, checkpoints, options in (
        ("inferred", False, {}),
        ("checkpointed", True, {}),
        ("given", False, {"input_args": example, "output_args": example}),
    ):
        stage = Stage(rank, checkpoints=checkpoints)
        if rank and not options:
            fill_memory(stage)
        found[name] = unlike(trained(rank, stage, stage, **options), expected)
    return found, int(expected["layers.0.grad_output.steps"])


def pipeline_compiled(rank: int, _: Path) -> Any:
    """What differs where a compiled stage is given its shapes, and what is said where it infers them."""
    expected, stage = in_one_process(rank), Stage(rank)
    example = torch.empty(ROWS, WIDTH, requires_grad=True)
    compiled: Any = torch.compile(stage, backend="eager")
    like: Any = torch.compile(Stage(0), backend="eager")
    found = unlike(trained(rank, stage, compiled, input_args=example, output_args=example), expected)
    torch.compiler.reset()  # the graph of one stage would serve a like one, untraced
    alone = PipelineStage(like, 0, 2, torch.device("cpu"))
    said = "nothing was said"
    try:  # without the schedule, in which the other rank would wait
        alone._forward_metadata_inference((example,), has_backward=True)
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        said = str(error)
    return found, said
