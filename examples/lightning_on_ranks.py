"""FP8 with Lightning on several ranks, by DDP or by ModelParallelStrategy, which runs FSDP2.

torchrun --nproc-per-node 2 examples/lightning_on_ranks.py [fsdp2]
"""

import os
import sys

import pytorch_lightning as pl  # or: import lightning.pytorch as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.compat.lightning import ScalingStateCallback
from octavo.parallel import gather_in_fp8


class Autoencoder(pl.LightningModule):
    """A network of two layers, converted where it is built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        octavo.convert(self.network, "delayed")
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = (self.network(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; it is called after the module is sharded."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Autoencoder):
    """The same under ModelParallelStrategy, which leaves the sharding to the module."""

    def configure_model(self) -> None:
        """Shard the layers, and gather their weights as FP8 codes."""
        mesh = self.device_mesh["data_parallel"]
        for part in (self.network[0], self.network[2], self.network):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        gather_in_fp8(self.network)


def train(data: torch.Tensor, *, fsdp2: bool = False, ranks: int = 1, **options: object) -> Autoencoder:
    """Train on as many ranks as torchrun has started."""
    strategy = ModelParallelStrategy(ranks, 1) if fsdp2 else "ddp" if ranks > 1 else "auto"
    trainer = pl.Trainer(
        max_epochs=1, devices=ranks, strategy=strategy, callbacks=[ScalingStateCallback()], logger=False, **options
    )
    module = Sharded() if fsdp2 else Autoencoder()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
    return module


if __name__ == "__main__":
    torch.manual_seed(1)
    data = torch.randn(128, 64) * torch.randn(128, 1).exp2()  # of magnitudes that differ between batches, and ranks
    print(train(data, fsdp2="fsdp2" in sys.argv[1:], ranks=int(os.environ.get("WORLD_SIZE", "1"))).losses)
