"""FP8 with accelerate on several ranks, by DDP or FSDP2.

torchrun --nproc-per-node 2 examples/accelerate_on_ranks.py [fsdp2]
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import octavo

SHARDED = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}


def train(*, fsdp2: bool = False, micro_batches: int = 1, **sharded: object) -> tuple[nn.Module, list[float]]:
    """Train a small network; return it and the losses of this rank."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it, accelerate lets ranks without a GPU train alone
        gradient_accumulation_steps=micro_batches,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **SHARDED | sharded) if fsdp2 else None,
    )
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    octavo.convert(model, "delayed")  # before prepare, which wraps or shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(128, 64) * torch.randn(128, 1).exp2()  # of magnitudes that differ between batches, and ranks
    batches = torch.utils.data.DataLoader(rows, batch_size=16)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    print(train(fsdp2="fsdp2" in sys.argv[1:])[1])
