"""``[parallel]``: sizes that fit a number of ranks, and that no result depends on."""

import dataclasses

import pytest

from octavo.errors import ConfigError
from octavo.training.config import ParallelConfig, RunConfig, config_from_dict, load_config, save_config
from octavo.training.run_folder import check_start

HASH_WITHOUT_LAYOUT = (
    "9b6a4d76e397dbd15facd909ca6e99a9"  # of the defaults, before there was a [parallel]: older runs resume
)


@pytest.mark.parametrize(
    ("sizes", "ranks", "replicas"),
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({"shard": 4}, 4, 1),
        ({"shard": 2}, 6, 3),
        ({"data": 2, "shard": 2}, 4, 2),
        ({"shard": 2, "tensor": 3}, 12, 2),
    ],
)
def test_replicas(sizes, ranks, replicas):
    assert ParallelConfig(**sizes).replicas(ranks) == replicas


@pytest.mark.parametrize(
    ("sizes", "ranks", "begins"),
    [
        ({"shard": 4}, 6, "[parallel] shard = 4 needs a multiple of 4 ranks, and 6 are running;"),
        ({"shard": 2}, 1, "[parallel] shard = 2 needs a multiple of 2 ranks, and 1 is running;"),
        ({"data": 2, "shard": 2}, 8, "[parallel] data = 2 and shard = 2 needs 4 ranks, and 8 are running;"),
        ({"tensor": 4}, 6, "[parallel] tensor = 4 needs a multiple of 4 ranks, and 6 are running;"),
        ({"shard": 2, "tensor": 2}, 2, "[parallel] shard = 2 and tensor = 2 needs a multiple of 4 ranks, and 2 are"),
    ],
)
def test_sizes_that_do_not_fit(sizes, ranks, begins):
    with pytest.raises(ConfigError) as error:
        ParallelConfig(**sizes).replicas(ranks)
    assert str(error.value).startswith(begins)


@pytest.mark.parametrize("key", ["data", "shard", "tensor", "check_interval"])
def test_negative_sizes_are_refused(key):
    with pytest.raises(ConfigError, match=f"parallel.{key} must be at least"):
        config_from_dict({"parallel": {key: -1}})


def test_ranks_that_share_layers_compute_the_same_micro_batches():
    assert ParallelConfig(tensor=2).micro_batches(6, 4) == 3
    with pytest.raises(ConfigError, match="which 2 groups of 2 ranks cannot share evenly; set a multiple of 2, and"):
        ParallelConfig(tensor=2).micro_batches(3, 4)


def test_positions_are_divided_by_ranks_that_share_layers():
    with pytest.raises(ConfigError, match=r"and parallel\.tensor is 1; set it to 2 or more"):
        ParallelConfig(sequence=True)


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"tensor": 2}])
def test_gradients_in_fp8_need_all_gradients_on_a_rank(sizes):
    with pytest.raises(ConfigError, match=r"^parallel\.fp8_gradients adds .* set both to 1, or leave it out$"):
        ParallelConfig(fp8_gradients=True, **sizes)


def test_gradients_in_fp8_are_another_configuration(tmp_path):
    config = dataclasses.replace(RunConfig(), parallel=ParallelConfig(fp8_gradients=True))
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert config.config_hash() != RunConfig().config_hash()
    with pytest.raises(
        ConfigError, match=r"was started with parallel\.fp8_gradients = True, not False; resume with its"
    ):
        check_start(tmp_path, RunConfig(), resume=True)
    assert "parallel.fp8_gradients" not in config.free_to_change
    other_layout = dataclasses.replace(config, parallel=ParallelConfig(fp8_gradients=True, data=2))
    assert other_layout.config_hash() == config.config_hash()


def test_layout_is_written_and_changes_no_result(tmp_path):
    config = dataclasses.replace(
        RunConfig(), parallel=ParallelConfig(data=2, tensor=4, sequence=True, check_interval=3)
    )
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert config.config_hash() == RunConfig().config_hash() == HASH_WITHOUT_LAYOUT
