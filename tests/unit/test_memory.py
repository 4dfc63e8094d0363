"""What cannot be in memory is refused before anything is built, and what can is not."""

import resource
import subprocess
import sys
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.formats import FP32
from octavo.inference import EngineConfig
from octavo.inference.engine import Engine
from octavo.inference.kv_cache import PagedKVCache
from octavo.inference.model_runner import ModelRunner
from octavo.memory import check_fits, memory_bytes
from octavo.models import Llama, LlamaConfig
from octavo.recipes import get
from octavo.text.tokenizer import train_tokenizer
from octavo.training.config import config_from_dict
from octavo.training.memory import check_run_fits

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 32,
}


@pytest.fixture(autouse=True)
def nothing_large(monkeypatch):
    """A machine of 64 MiB: what slips through is built on the real one, and then seen to be."""
    monkeypatch.setattr("octavo.memory.memory_bytes", lambda _: 64 << 20)
    monkeypatch.setattr("octavo.training.memory.memory_bytes", lambda _: 64 << 20)


def test_check_fits_is_exact_to_one_byte():
    check_fits("a thing", 64 << 20, CPU, remedy="shrink it")
    with pytest.raises(ConfigError, match=r"^a thing does not fit in the memory of 'cpu': it .* 64 MiB of 64; shrink"):
        check_fits("a thing", (64 << 20) + 1, CPU, remedy="shrink it")


@pytest.mark.long
def test_memory_is_the_lowest_limit():
    read = "import torch; from octavo.memory import memory_bytes; print(memory_bytes(torch.device('cpu')))"
    limit = 3 << 30

    def run(limited):
        def prepare():
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

        done = subprocess.run(
            [sys.executable, "-c", read],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=prepare if limited else None,
        )
        return int(done.stdout)

    assert run(limited=True) == limit
    assert run(limited=False) > limit or memory_bytes(CPU) <= limit


MIB = 1 << 20


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/\n", {"memory.max": f"{MIB}\n"}, MIB),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/b/memory.max": f"{MIB}\n", "a/memory.max": "max\n"}, MIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{2 * MIB}\n", "a/memory.max": f"{MIB}\n"}, MIB),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": f"{MIB}\n"}, MIB),
        ("4:memory:/outside\n", {"memory/memory.limit_in_bytes": f"{MIB}\n"}, MIB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None),
        ("4:cpu:/\n", {"memory/memory.limit_in_bytes": f"{MIB}\n"}, None),
    ],
)
def test_the_lowest_limit_of_control_groups_counts(groups, own, files, found):
    free = memory_bytes(CPU)  # of a machine without control groups
    groups(own, files)
    assert memory_bytes(CPU) == (free if found is None else found)


@pytest.mark.parametrize("biases", [{}, {"qkv_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_estimate_matches_model(biases, tied):
    config = LlamaConfig(**SHAPE, tie_embeddings=tied, **biases)
    assert config.parameters == sum(p.numel() for p in Llama(config).parameters())


LARGE = {
    "num_layers": (10**9, "num_layers must be at most 10,000, not 1,000,000,000"),
    "vocab_size": (10**12, "vocab_size must be at most 16,777,216"),
    "max_positions": (10**12, "max_positions must be at most 16,777,216"),
    "hidden_size": (10**40 * 8, "does not fit in the memory"),
    "intermediate_size": (10**9, "does not fit in the memory"),
}


@pytest.mark.parametrize("key", LARGE)
def test_model_size_is_checked_before_building(key):
    value, message = LARGE[key]
    with pytest.raises(ConfigError, match=message):
        Llama(LlamaConfig(**SHAPE | {key: value}))


def test_rotary_tables_are_included():
    with pytest.raises(ConfigError, match="does not fit in the memory"):
        Llama(LlamaConfig(**SHAPE | {"max_positions": 1 << 22}))


RUNS = {
    "context": ("training", 10**15, "training.context must be at most 16,777,216"),
    "grad_accumulation": ("training", 10**9, "training.grad_accumulation must be at most 65,536"),
    "vocab_size": ("data", 10**15, "data.vocab_size must be at most 1,048,576"),
    "num_layers": ("model", 10**15, "num_layers must be at most 10,000"),
    "intermediate_size": ("model", 10**15, "in training, does not fit in the memory"),
    "batch_size": ("training", 10**15, "batch_size 1000000000000000 and context 128 does not fit"),
}


@pytest.mark.parametrize("key", RUNS)
def test_run_size_is_checked_before_reading_text(key):
    section, value, message = RUNS[key]
    with pytest.raises(ConfigError, match=message):
        check_run_fits(config_from_dict({section: {key: value}}), vocab_size=300)


def test_run_estimate_includes_gradients_and_moments(monkeypatch):
    config = config_from_dict({"training": {"batch_size": 1}})
    parameters = config.model.llama(vocab_size=300, max_positions=128).parameters
    monkeypatch.setattr("octavo.memory.memory_bytes", lambda _: 16 * parameters)
    check_run_fits(config, vocab_size=300)
    monkeypatch.setattr("octavo.memory.memory_bytes", lambda _: 16 * parameters - 1)
    with pytest.raises(ConfigError, match="does not fit"):
        check_run_fits(config, vocab_size=300)


def test_vocabulary_size_is_checked_before_training_it():
    for size in (10**9, 10**19):
        with pytest.raises(ConfigError, match="vocab_size must be at most 1,048,576"):
            train_tokenizer(["some text"], vocab_size=size)


def test_history_size_is_checked_before_allocation():
    with pytest.raises(ConfigError, match="length must be at most 65,536 steps, not 1,000,000,000,000"):
        get("delayed", history_length=10**12)


def test_cache_size_is_checked_before_allocation():
    with pytest.raises(
        ConfigError, match=r"a cache of .* positions does not fit in the memory of 'cpu': .*cache_positions"
    ):
        PagedKVCache(2, 2, 8, max_positions=10**15, fmt=FP32)
    runner = ModelRunner(Llama(LlamaConfig(**SHAPE)))
    tokenizer = train_tokenizer(["some text"], vocab_size=300)
    with pytest.raises(ConfigError, match="does not fit in the memory"):
        Engine(runner, tokenizer, config=EngineConfig(cache_positions=10**15))
    with pytest.raises(ConfigError, match="max_running must be at most 65,536"):
        EngineConfig(max_running=10**9, step_rows=10**9)
