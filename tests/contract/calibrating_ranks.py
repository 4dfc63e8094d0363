"""Checks of :mod:`tests.contract.ranks_program` of ranks that calibrate together, each on batches of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import octavo
from octavo.errors import OctavoError
from octavo.language_model import LanguageModel
from octavo.models import Llama
from octavo.quantization import Calibration
from octavo.text.tokenizer import train_tokenizer
from tests.contract.rank_processes import Collectives
from tests.tiny_llama import tiny_llama_config

__all__ = ["calibrated", "calibrated_together", "refused_calibrations", "rows_of", "tokens_of", "without_change"]

METHODS = ("max", "percentile", "mse", "entropy")
LARGE = 50.0


class Branches(nn.Module):
    """Two layers that share an input, one that only large inputs reach, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.unused, self.rare, self.second, self.first = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layers' results."""
        y: Tensor = self.first(x) + self.second(x)
        return y + self.rare(x / 3) if x.abs().max() > LARGE else y


def rows_of(rank: int) -> list[Tensor]:
    """Batches of a rank, over magnitudes; the second rank has one less, and alone large ones."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 24, generator=generator) * torch.logspace(-3, 2 * rank, 24) for _ in range(3 - rank)]


def tokens_of(rank: int) -> list[Tensor]:
    """Batches of token ids of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(300, (2, 16), generator=generator) for _ in range(2 + rank)]


def calibrated(rows: list[Tensor], tokens: list[Tensor], **options: Any) -> dict[str, Calibration]:
    """Calibrations of a module by every method, and of a language model with its KV cache."""
    model = LanguageModel(
        model=Llama(tiny_llama_config(), seed=3),
        tokenizer=train_tokenizer(["text"], vocab_size=300),
        context=32,
        source="a test",
    )
    found = {method: octavo.calibrate(Branches(), rows, method=method, **options) for method in METHODS}
    return found | {"kv cache": octavo.calibrate(model, tokens, kv_cache=True, **options)}


def calibrated_together(rank: int, _: Path) -> Any:
    """The calibrations of both ranks, and the collectives of one."""
    group = distributed.group.WORLD
    with Collectives() as counted:
        octavo.calibrate(Branches(), rows_of(rank), group=group)
    return calibrated(rows_of(rank), tokens_of(rank), group=group), dict(counted.counts)


def refused_calibrations(rank: int, _: Path) -> list[str]:
    """What is said of NaN on one rank, of a rank without batches, of other layers, and of a weight in slices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    batches, group = rows_of(rank), distributed.group.WORLD
    divided = parallelize_module(Branches(), init_device_mesh("cpu", (2,)), {"second": ColwiseParallel()})
    cases: list[tuple[nn.Module, list[Tensor], dict[str, Any]]] = [
        (Branches(), [each * torch.nan if rank else each for each in batches], {}),
        (Branches(), [] if rank else batches, {}),
        (Branches(), batches, {"skip": ["rare"] if rank else []}),
        (divided, batches, {}),
    ]
    said = []
    for model, rows, options in cases:
        try:
            octavo.calibrate(model, rows, group=group, **options)
        except OctavoError as error:
            said.append(str(error))
    return said


def without_change(calibration: Calibration) -> Calibration:
    """The calibration without what the last quarter of the batches changed, which several ranks do not measure."""
    return replace(calibration, health=tuple(replace(each, moved=None) for each in calibration.health))
