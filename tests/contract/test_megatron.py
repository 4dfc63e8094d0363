"""Megatron-Core's parallel layers in FP8, on two ranks with gloo between them, against octavo's layers in one process.

What no sum over ranks has touched is equal bit for bit, and so are the codes that it is computed from. A sum of two
parts is rounded once more, and torch's own products of float32 depend on the shape of a slice.
"""

from typing import Any

import pytest

from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

RANKS = 2
FLOAT32 = {"weight_only": {"weight0", "weight1"}, "rowwise_hp_grad_weight": {"weight0", "weight1"}}
ROUNDING = 2.0**-20


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank returned, by check."""
    return results_of_ranks("tests.contract.megatron_program", shared_folder(tmp_path_factory, "megatron"), RANKS)


@pytest.mark.long
@pytest.mark.parametrize("check", ["replicated", "sequence"])
def test_layers_compute_what_one_process_computes(found, check):
    """Three steps of every recipe, without and with sequence parallelism."""
    for errors in of_check(found, check):
        for recipe, worst in errors.items():
            exact = {"hidden", "weight0", "weight1"} - FLOAT32.get(recipe, set())
            assert {name: worst[name] for name in exact} == dict.fromkeys(exact, 0.0), recipe
            assert max(worst.values()) <= ROUNDING, recipe


@pytest.mark.long
def test_names_classes_and_checkpoints_stay_megatrons(found):
    for paths, classes, kept, restored in of_check(found, "restored"):
        assert paths == ("0",)
        assert classes == ["FP8ColumnParallelLinear", "RowParallelLinear"]
        assert kept
        assert restored == [True, True]


def test_what_is_refused_says_what_to_do(found):
    for fused, blocks, plain, given in of_check(found, "refusals"):
        assert "set gradient_accumulation_fusion=False" in fused
        assert "has 144 out_features" in blocks
        assert "256 would work" in blocks
        assert "octavo.convert takes nn.Linear" in plain
        assert given.startswith("layer '0' is given a weight that is not its own")


def test_ranks_that_keep_their_own_amaxes_wait_for_no_other(found):
    for amaxes, expected in of_check(found, "own_amaxes"):
        assert list(amaxes.values()) == expected


def test_a_language_model_trains_and_its_ranks_share_their_scales(found):
    (paths, (plain, coded), state), (_, _, other) = of_check(found, "language_model")
    layers = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    assert set(paths) == {f"decoder.layers.{index}.{layer}" for index in range(2) for layer in layers}
    assert coded[-1] < coded[0]
    assert coded == pytest.approx(plain, abs=0.02)
    assert coded != plain
    assert state
    assert all(state[name].equal(other[name]) for name in state)
