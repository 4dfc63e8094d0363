"""Checks of :mod:`tests.contract.ranks_program`: the doctor's samples of a model that FSDP2 shards."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
import octavo.doctor
from tests.contract.rank_processes import Collectives

__all__ = ["ROWS_ALONE", "batches_of", "sampled_by_fsdp2", "sampled_steps"]

ROWS_ALONE = "rowwise_hp_grad_weight"  # whose scales are those of rows, on whichever rank


class Gated(nn.Module):
    """The MLP of a decoder, whose gate and up projection the doctor compares."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(24, 33), nn.Linear(24, 33), nn.Linear(33, 24)

    def forward(self, x: Tensor) -> Tensor:
        """As Llama's."""
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def batches_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 24, generator=generator) * (1 + rank) for _ in range(3)]


def sampled_steps(batches: list[Tensor], recipe: str, *, blocks: int, sharded: bool, **options: Any) -> Any:
    """The last sample of three steps with Adam, and the collectives of an unsampled step and of the sampled one."""
    torch.manual_seed(4)
    model: Any = nn.Sequential(*(Gated() for _ in range(blocks)))
    octavo.convert(model, recipe, amax_group=None if sharded else "rank")
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model, model):
            shard: Any = fully_shard(part, mesh=mesh, reshard_after_forward=True)
            shard.set_force_sum_reduction_for_comms(True)  # gradients are summed, as one process does
            shard.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watcher, counts = octavo.doctor.watch(model, optimizer, interval=3, **options), []
    for batch in batches:
        with Collectives() as counted, watcher.step():
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(counted.counts)
    return watcher.samples[-1], counts[1], counts[2]


def sampled_by_fsdp2(rank: int, _: Path) -> Any:
    """Collectives that a sampled step has besides, by the number of blocks; and samples by recipe."""
    counts, samples = [], {}
    for blocks, recipe in ((1, "delayed"), (4, "delayed"), (1, ROWS_ALONE)):
        sample, plain, sampled = sampled_steps(batches_of(rank), recipe, blocks=blocks, sharded=True)
        counts.append(dict(sampled - plain))
        tables = {name: getattr(sample, name) for name in ("casts", "products", "parameters")}
        samples[recipe] = tables | {"alignment": sample.modules["alignment"]}
    return counts, samples
