"""Scaling state in the checkpoints of a real Lightning ``Trainer``."""

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import octavo

NAME = next(
    (name for name in ("lightning.pytorch", "pytorch_lightning") if importlib.util.find_spec(name.split(".")[0])), None
)
if NAME is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)
lightning: Any = importlib.import_module(NAME)

from octavo.compat.lightning import ScalingStateCallback  # noqa: E402 (needs Lightning)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of loaders, loggers and its dependencies


class Regression(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        octavo.convert(self.net, "delayed")
        self.losses = []

    def training_step(self, batch, _index):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def trained(folder, *, epochs, seed, checkpoint=None):
    batches = [torch.randn(5, 8, generator=torch.Generator().manual_seed(each)) * 1.5**each for each in range(4)]
    module = Regression(seed)
    trainer = lightning.Trainer(
        default_root_dir=folder, max_epochs=epochs, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ScalingStateCallback()],
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return trainer, module


def test_training_resumes_bit_for_bit(tmp_path):
    trainer, _ = trained(tmp_path, epochs=1, seed=3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, through = trained(tmp_path, epochs=2, seed=3)
    _, resumed = trained(tmp_path, epochs=2, seed=9, checkpoint=tmp_path / "half.ckpt")
    assert resumed.losses == through.losses[4:]
    state, same = octavo.scaling_state(resumed), octavo.scaling_state(through)
    assert all(torch.equal(state[key], same[key]) for key in same)
