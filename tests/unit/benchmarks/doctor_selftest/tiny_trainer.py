"""A trainer of the smallest decoder that has every layer the faults go for."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.doctor_selftest.cases import Setting
from octavo.text.tokens import TokenData
from octavo.training.loop import Trainer
from octavo.training.setup import build_model
from tests.unit.training.tiny_runs import tiny_data

TINY = Setting(
    hidden_size=32, num_layers=2, vocab_size=300, start_steps=1, steps=2, rank_steps=4, batch_size=2, context=32
)


@contextmanager
def tiny_trainer(data: TokenData, **training) -> Iterator[Any]:
    config = TINY.config(seed=3, training={"precision": "fp32", **training})
    model, converted = build_model(config, data.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        yield Trainer(config, Path(folder), model, data=data, on_event=lambda _: None, converted=converted)


def data_in(folder: Path) -> TokenData:
    return tiny_data(folder)
