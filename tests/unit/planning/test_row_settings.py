"""Settings of a training that rows write in their own ways: layouts, batches, and words in notes."""

from typing import Any

import pytest

from octavo.planning import fitted_constants, predict_row
from octavo.planning.jobs import Recompute, Sharding
from octavo.planning.rows import Row, training_job

CONSTANTS = fitted_constants()
LLAMA = {"model": "Llama-3.1-8B", "gpus": 64, "seq": 8192, "micro_batch": 1, "precision": "float8 tensorwise"}


def row(**cells):
    base = {"id": "row", "kind": "train", "hardware": "H100", "metric": "tokens_per_s_per_gpu"} | LLAMA
    return Row({name: str(value) for name, value in (base | cells).items()})


def job(**cells):
    return training_job(row(**cells))


def predicted(**cells) -> Any:
    return predict_row(row(**cells), CONSTANTS)


def test_a_cell_that_leaves_a_pipeline_one_micro_batch_is_the_ranks_whole_batch():
    pipeline = {"model": "Llama-3.1-405B", "hardware": "H100 96GB", "gpus": 512, "tp": 8, "pp": 8, "notes": "full AC"}
    pipeline |= {"dp_or_fsdp": "fsdp8", "global_batch": 256}
    assert job(micro_batch=32, **pipeline) == job(micro_batch=1, **pipeline)
    assert job(micro_batch=32, **pipeline).micro_batches == 32
    assert predicted(micro_batch=32, **pipeline).reason is None
    assert job(micro_batch=4, **pipeline).micro_batch == 4
    assert job(micro_batch=16, **pipeline | {"pp": 1, "global_batch": 1024}).micro_batch == 16


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_context_parallel_ranks_shard_weights_too(cp):
    """FSDP divides weights among data and context-parallel ranks, and its number counts the former."""
    layout = job(gpus=8, cp=cp, dp_or_fsdp=f"fsdp{8 // cp}").layout
    assert (layout.shard_ranks, layout.sharding) == (8, Sharding.FSDP)
    assert predicted(gpus=8, cp=8, seq=262144, dp_or_fsdp="fsdp1", notes="full AC").reason is None


@pytest.mark.parametrize(
    ("cell", "notes", "ranks", "sharding"),
    [
        ("fsdp16 x dp4", "", 16, Sharding.FSDP),
        ("FSDP2", "", 64, Sharding.FSDP),
        ("", "FSDP2", 64, Sharding.FSDP),
        ("fsdp2 x dp32", "", 2, Sharding.FSDP),
        ("ZeRO-3", "", 64, Sharding.FSDP),
        ("zero stage 3", "", 64, Sharding.FSDP),
        ("FULL_SHARD", "", 64, Sharding.FSDP),
        ("ZeRO-2", "", 64, Sharding.ZERO2),
        ("fsdp64 (SHARD_GRAD_OP)", "", 64, Sharding.ZERO2),
        ("ZeRO-1", "", 64, Sharding.ZERO1),
        ("dp64", "", 64, Sharding.ZERO1),
        ("ddp64", "DDP", 64, Sharding.DDP),
    ],
)
def test_how_weights_are_sharded(cell, notes, ranks, sharding):
    layout = job(dp_or_fsdp=cell, notes=notes).layout
    assert (layout.shard_ranks, layout.sharding) == (ranks, sharding)


def test_a_two_of_two_ranks_is_a_number():
    assert job(gpus=2, dp_or_fsdp="fsdp2").layout.shard_ranks == 2
    assert str(Recompute.FULL) == "full"
