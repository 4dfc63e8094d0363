"""Weights that FSDP2 gathers as codes, on two and on four ranks with gloo between them.

Codes and scales against those of the whole weight in one process; training against the same training under FSDP2
alone, bit for bit, which tests/contract/test_ranks.py compares with one process.
"""

from typing import Any

import pytest
import torch

from tests.contract.gathered_weights_training import RECIPES
from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """What each rank returned, by check; by number of ranks."""
    program = "tests.contract.gathered_weights_program"
    folders = {ranks: shared_folder(tmp_path_factory, f"gathered weights {ranks}") for ranks in (2, 4)}
    return {ranks: results_of_ranks(program, folder, ranks) for ranks, folder in folders.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_and_scales_are_those_of_the_whole_weight(found, ranks):
    """Uneven, padded and empty shards, and shards that cut a block of 128 rows."""
    assert of_check(found[ranks], "codes") == [[]] * ranks


@pytest.mark.parametrize("check", ["training", "gathered_once"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_of_weights_gathered_in_high_precision(found, check, recipe):
    assert [each[recipe] for each in of_check(found[2], check)] == [[], []]


@pytest.mark.parametrize("check", ["training_on_four", "hybrid"])
def test_training_on_four_ranks_and_on_a_mesh_of_two_dimensions(found, check):
    for differences in of_check(found[4], check):
        assert not any(differences.values()), differences


@pytest.mark.parametrize(
    "check",
    [
        *("switched_recipes", "micro_batches", "frozen", "modules"),
        *("unseen_writes", "counted_writes", "evaluating_alone"),
    ],
)
def test_training_is_the_same_in_other_loops(found, check):
    for differences in of_check(found[2], check):
        assert not any(differences.values()), differences


def test_activation_checkpointing_repeats_the_forward_pass_from_codes(found):
    for differences in of_check(found[2], "checkpointed"):
        assert all(each == [[], [], []] for each in differences.values()), differences


def test_a_repeated_forward_pass_counts_no_element_twice(found):
    """Each rank counts its own rows."""
    assert of_check(found[2], "nonfinite_weights") == [1, 0]


@pytest.mark.parametrize("check", ["offloaded", "prefetched", "compiled"])
def test_options_of_torch_change_nothing(found, check):
    assert of_check(found[2], check) == [[], []]


def test_models_that_train_apart_are_told_apart(found):
    assert all("losses" in each and "grads" in each for each in of_check(found[2], "differing_models"))


def test_bytes_gathered_and_collectives_of_a_step(found):
    for counts in of_check(found[2], "traffic"):
        for recipe, count in counts.items():
            ratio = count["bytes"] / counts["bf16"]["bytes"]
            print(f"{recipe}: {ratio:.4f} of bfloat16's bytes, {count['reduces']} all-reduces")
            if recipe != "bf16":
                assert 0.5 <= ratio <= (0.54 if recipe == "mxfp8" else 0.52)
                assert count["reduces"] == 1


def test_amaxes_are_reduced_until_there_are_those_of_finished_steps(found):
    """Never both, of any delayed cast of all checks, so that a cast need not choose between them."""
    assert of_check(found[2], "delayed_casts") == [{(True, False), (False, True)}] * 2


def test_mixed_precision_casts_no_codes(found):
    for result in of_check(found[2], "mixed_precision"):
        expected = {"codes": True, "parameter": torch.bfloat16, "gradients": {torch.float32}, "loss": True}
        assert result == expected


def test_optimizers_keep_plain_states(found):
    for result in of_check(found[2], "optimizers"):
        assert result == {"foreach": [], "fused": [], "state": {torch.Tensor}}


@pytest.mark.parametrize("how", ["copy", "assign", "assign blocks", "meta", "dcp"])
def test_loaded_weights_are_gathered_as_codes(found, how):
    assert [each[how] for each in of_check(found[2], "loaded")] == [([], True)] * 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_keeps_no_more_for_backward_than_in_bf16(found, recipe):
    for kept in of_check(found[2], "kept_for_backward"):
        assert all(own <= plain for own, plain in zip(kept[recipe], kept["bf16"], strict=True)), kept


def test_an_observer_sees_what_it_sees_without(found):
    assert of_check(found[2], "watched") == [([], True, 6)] * 2


def test_refusals_and_reasons(found):
    for said in of_check(found[2], "refused"):
        assert "for the forward pass of recipe 'mxfp8', and it was gathered for" in said["other recipe"]
        assert "was gathered as FP8 codes of recipe 'rowwise', and something reads its values" in said["high precision"]
        for name in ("not converted", "not sharded"):
            assert "call octavo.convert, then fully_shard, then octavo.parallel.gather_in_fp8" in said[name]
        assert "such as ['0'], not a bare string" in said["skip"]
        assert said["skipped"] == {"0": "skip names it"}
        assert "is not gathered now" in said["not gathered"]
        assert said["tied"] == {"2": "other modules use it too"}
        for name, reason in (("blocks", "ends steps inside of the forward pass"), ("group", "another group")):
            assert sorted(said[name]) == ["0", "2", "4"]
            assert all(reason in each for each in said[name].values())
