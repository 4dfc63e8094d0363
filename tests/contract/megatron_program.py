"""One of two ranks with Megatron-Core's parallel layers: ``python -m tests.contract.megatron_program FOLDER RANKS``.

Megatron allocates some buffers on the
current CUDA device, which is the CPU here, and draws its dropout from a CUDA generator, which is left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

import octavo
from octavo.compat import megatron
from octavo.errors import ConfigError
from tests.contract.rank_processes import named, run_ranks

RANKS, STEPS = 2, 3
WIDTH, INNER = 128, 256  # a rank's slices are blocks of 128
RECIPES = tuple(name for name in octavo.recipes.names() if name not in ("bf16", "static"))


def parallel(rank: int, *, sequence_parallel: bool = False, recipe: str | None = None) -> Any:
    """A column-parallel layer and a row-parallel one, of the weights of :func:`alone`."""
    config = ModelParallelConfig(
        tensor_model_parallel_size=RANKS, use_cpu_initialization=True, sequence_parallel=sequence_parallel
    )
    options = {"config": config, "init_method": nn.init.xavier_normal_, "skip_bias_add": False}
    columns = ColumnParallelLinear(WIDTH, INNER, gather_output=False, **options)
    rows = RowParallelLinear(INNER, WIDTH, bias=True, input_is_parallel=True, **options)
    wanted = alone()
    with torch.no_grad():
        columns.weight.copy_(wanted[0].weight.chunk(RANKS)[rank])
        columns.bias.copy_(wanted[0].bias.chunk(RANKS)[rank])
        rows.weight.copy_(wanted[1].weight.chunk(RANKS, dim=1)[rank])
        rows.bias.copy_(wanted[1].bias)
    model = nn.ModuleList([columns, rows])
    if recipe is not None:
        megatron.convert(model, recipe)
    return model


def alone(recipe: str | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))
    if recipe is not None:
        octavo.convert(model, recipe)
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, WIDTH, generator=generator) * 2.0**step for step in range(STEPS)]


def steps(model: Any, layers: Any, rank: int, *, sequence_parallel: bool = False) -> list[dict[str, Tensor]]:
    """What the layers compute in a few steps; Megatron's return their bias too, which is None here."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    for batch in batches():
        gradient = batch.flip(0) / 64
        x = batch.chunk(RANKS)[rank] if sequence_parallel else batch
        x = x.clone().requires_grad_()
        hidden, y = layers(x)
        y.backward(gradient.chunk(RANKS)[rank] if sequence_parallel else gradient)
        grads = [each.weight.grad for each in model]
        found.append({"hidden": hidden, "y": y, "x": x.grad, "weight0": grads[0], "weight1": grads[1]})
        found[-1] = {name: each.detach().clone() for name, each in found[-1].items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def compared(rank: int, *, sequence_parallel: bool) -> Any:
    """Of each recipe and step: the largest difference from one process, over the largest number of that tensor."""
    errors: dict[str, dict[str, float]] = {}
    for recipe in RECIPES:
        model, one = parallel(rank, sequence_parallel=sequence_parallel, recipe=recipe), alone(recipe)

        def ours(x: Tensor, model: Any = model) -> tuple[Tensor, Tensor]:
            hidden, _ = model[0](x)
            return hidden, model[1](hidden)[0]

        def wanted(x: Tensor, one: Any = one) -> tuple[Tensor, Tensor]:
            hidden = one[0](x)
            return hidden, one[1](hidden)

        found = steps(model, ours, rank, sequence_parallel=sequence_parallel)
        worst: dict[str, float] = {}
        for a, b in zip(found, steps(one, wanted, rank), strict=True):
            part = {
                "hidden": b["hidden"].chunk(RANKS, dim=-1)[rank],
                "y": b["y"].chunk(RANKS)[rank] if sequence_parallel else b["y"],
                "x": b["x"].chunk(RANKS)[rank] if sequence_parallel else b["x"],
                "weight0": b["weight0"].chunk(RANKS)[rank],
                "weight1": b["weight1"].chunk(RANKS, dim=1)[rank],
            }
            for name, whole in part.items():
                error = float((a[name] - whole).abs().max() / whole.abs().max())
                worst[name] = max(worst.get(name, 0.0), error)
        errors[recipe] = worst
    return errors


def replicated(rank: int, _folder: Path) -> Any:
    return compared(rank, sequence_parallel=False)


def sequence(rank: int, _folder: Path) -> Any:
    return compared(rank, sequence_parallel=True)


def restored(rank: int, _folder: Path) -> Any:
    """Whether conversion and restoring leave the state_dict's names and the classes as they were."""
    model = parallel(rank)
    names, printed = list(model.state_dict()), repr(model[1])
    paths = megatron.convert(model, "delayed", skip=["1"])
    converted = [type(each).__name__ for each in model]
    assert repr(model[1]) == printed
    kept = list(model.state_dict()) == names
    octavo.restore(model)
    return paths, converted, kept, [type(each) is cls for each, cls in zip(model, CLASSES, strict=True)]


CLASSES = (ColumnParallelLinear, RowParallelLinear)


def refusals(rank: int, _folder: Path) -> Any:
    said = []
    fused, odd = parallel(rank), nn.ModuleList([parallel(rank)[0]])
    fused[0].gradient_accumulation_fusion = True
    odd[0].weight = nn.Parameter(torch.zeros(72, WIDTH))
    for model, recipe in ((fused, "tensorwise"), (odd, "blockwise"), (nn.Linear(4, 4), "tensorwise")):
        try:
            megatron.convert(model, recipe)
        except ConfigError as error:
            said.append(str(error))
    model = parallel(rank, recipe="tensorwise")
    try:
        model[0](batches()[0], weight=model[0].weight.detach())
    except ConfigError as error:
        said.append(str(error))
    return said


def language_model(_rank: int, _folder: Path) -> Any:
    """Converted paths, losses in high precision and in FP8, and the scaling state, of a GPTModel of two layers."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=RANKS,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(2))
    losses: list[list[float]] = []
    for recipe in (None, "delayed"):
        torch.manual_seed(3)
        model: Any = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=64)
        paths = () if recipe is None else megatron.convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        positions = torch.arange(32).expand(2, 32)
        mask = torch.ones(1, 1, 32, 32).triu(1).bool()
        losses.append([])
        for _ in range(STEPS):
            loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return paths, losses, octavo.scaling_state(model)


def own_amaxes(rank: int, _folder: Path) -> Any:
    """Newest amaxes of a rank alone after two steps, in which the second rank's output is not used."""
    model: Any = nn.ModuleList([parallel(rank)[0]])
    megatron.convert(model, "delayed", amax_group="rank")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in batches()[:2]:
        (model[0](batch)[0].sum() * (1 - rank)).backward()
        optimizer.step()
    state = octavo.scaling_state(model)
    return {role: state[f"0.{role}.amax"].item() for role in ("input", "weight", "grad_output")}, [
        float(batches()[1].abs().max()),
        float(model[0].weight.abs().max()),
        1.0 - rank,
    ]


CHECKS = (replicated, sequence, restored, refusals, language_model, own_amaxes)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Megatron's groups, its buffers on the CPU, and no generator of a GPU."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=nullcontext()),
    ):
        yield


if __name__ == "__main__":
    run_ranks(lambda _: named(*CHECKS), around=without_gpu)
