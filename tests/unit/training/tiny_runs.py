"""The smallest run that still trains: a page of text, 300 tokens, one layer of width 16."""

import dataclasses
from pathlib import Path

from octavo.text.tokens import TokenData, prepare
from octavo.training.config import DataConfig, Device, ModelConfig, RunConfig, TrainingConfig

MODEL = ModelConfig(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1)
TRAINING = TrainingConfig(
    recipe="fp32", device=Device.CPU, threads=1, steps=6, batch_size=2, context=16, warmup=2, eval_interval=2,
    eval_tokens=64,
)  # fmt: skip


def tiny_config(**training) -> RunConfig:
    return RunConfig(model=MODEL, data=DataConfig(vocab_size=300), training=dataclasses.replace(TRAINING, **training))


def some_text() -> str:
    """About 20 kB that people wrote: a module of Python's library."""
    return Path(dataclasses.__file__).read_text(encoding="utf-8")[:20_000]


def tiny_data(folder: Path, text: str | None = None) -> TokenData:
    source = folder / "text.txt"
    source.write_text(text or some_text(), encoding="utf-8")
    return prepare(source, folder / "data", vocab_size=300)


def comparable(metrics: list[dict]) -> list[dict]:
    """Lines of metrics.jsonl without the one field that depends on the machine's mood."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics]
