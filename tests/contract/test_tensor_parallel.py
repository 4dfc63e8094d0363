"""Layers that ranks share by torch's tensor parallelism, on two and on four ranks with gloo between them.

Codes, scales and scaling state against those of the same layer in one process, bit for bit.
"""

from typing import Any

import pytest

from tests.contract.rank_processes import of_check, results_of_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """What each rank returned, by check; by number of ranks."""
    program = "tests.contract.tensor_parallel_program"
    return {
        ranks: results_of_ranks(program, tmp_path_factory.mktemp(f"ranks{ranks}"), ranks, str(ranks))
        for ranks in (2, 4)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_and_scales_are_those_of_one_process(found, ranks):
    """Gradients and outputs too, or, where ranks add to a sum, within the bound of another order of summation."""
    for differences in of_check(found[ranks], "codes"):
        assert len(differences) == 22
        assert not any(differences.values()), differences


def test_slices_may_differ_in_length(found):
    for differences in of_check(found[4], "uneven"):
        assert not any(differences.values()), differences


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_of_a_decoder_are_those_of_one_process_that_sees_the_same_tensors(found, ranks):
    """With sequence parallelism and a parallel loss; on four ranks, FSDP2 over tensor parallelism."""
    for differences in of_check(found[ranks], "codes_of_models"):
        assert len(differences) == 10
        assert not any(differences.values()), differences


@pytest.mark.parametrize(("ranks", "check"), [(2, "models"), (4, "sharded")])
def test_a_decoder_trains_as_in_one_process(found, ranks, check):
    for results in of_check(found[ranks], check):
        assert len(results) == (16 if check == "models" else 5)
        assert all(each == ({}, True) for each in results.values()), results


def test_weights_that_ranks_divide_are_gathered_in_high_precision(found):
    for reasons in of_check(found[4], "gathered_as_codes"):
        assert len(reasons) == 14
        assert all("it was a DTensor before fully_shard" in reason for reason in reasons)


def test_reductions_are_those_of_scales_that_ranks_share(found):
    first, later = {}, {}
    for recipe, columns, rows in (
        *(("tensorwise", 2, 2), ("rowwise", 2, 2), ("rowwise_hp_grad_weight", 2, 3)),
        *(("blockwise", 0, 0), ("mxfp8", 0, 0), ("static", 1, 1), ("weight_only", 0, 1), ("bf16", 0, 0)),
    ):
        first[f"{recipe} N"] = later[f"{recipe} N"] = columns
        first[f"{recipe} K"] = later[f"{recipe} K"] = rows
    for recipe in ("delayed", "delayed_te", "article"):  # the first step has no amaxes of finished steps
        for divided in "NK":
            first[f"{recipe} {divided}"], later[f"{recipe} {divided}"] = 3, 1
    for counts in of_check(found[2], "reductions"):
        assert counts == {name: [first[name], later[name]] for name in first}


def test_refusals(found):
    for said in of_check(found[2], "refused"):
        for name, size in (("columns", "384 out_features"), ("rows", "320 in_features")):
            assert f"layer '0' has {size}, which 2 ranks cannot divide into multiples of the 128" in said[name]
            assert "256 or 512 would work" in said[name]
        assert "256 would work" in said["few"]
        assert "96 out_features" in said["converted later"]
        assert "'mxfp8'; 64 or 128 would work" in said["autocast"]
        assert "give convert an amax_group with all ranks" in said["group"]
        assert "is a DTensor and its input is not" in said["plain input"]
