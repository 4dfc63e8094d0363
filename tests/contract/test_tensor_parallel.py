"""Layers that ranks share by torch's tensor parallelism, on two and on four ranks with gloo between them.

Codes, scales and scaling state against those of the same layer in one process, bit for bit.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Callable[..., list[Any]]:
    """What each rank returned for a check of a theme; the program runs once for a number of ranks."""

    @cache
    def results(ranks: int) -> list[dict[str, Any]]:
        folder = shared_folder(tmp_path_factory, f"tensor parallel {ranks}")
        return results_of_ranks("tests.contract.tensor_parallel_program", folder, ranks)

    return lambda theme, check, ranks=2: of_check(results(ranks), f"{theme} {check}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_and_scales_are_those_of_one_process(found, ranks):
    """Gradients and outputs too, or, where ranks add to a sum, within the bound of another order of summation."""
    for differences in found("layers", "codes", ranks):
        assert len(differences) == 22
        assert not any(differences.values()), differences


def test_slices_may_differ_in_length(found):
    for differences in found("layers", "uneven", 4):
        assert not any(differences.values()), differences


def test_an_mlp_whose_slices_differ_in_length_passes_on_dtensors(found):
    for rank, results in enumerate(found("layers", "unequal_slices", 4)):
        for is_close, said in results.values():
            assert is_close
            assert said.startswith(
                f"this layer takes inputs [..., 50], not (8, {52 if rank < 3 else 44}); torch takes a"
            )
            assert said.endswith("so give the style before use_local_output=False")


@pytest.mark.parametrize(("ranks", "check"), [(2, "training"), (4, "sharded")])
def test_codes_of_a_decoder_are_those_of_one_process_that_sees_the_same_tensors(found, ranks, check):
    """With sequence parallelism and a parallel loss; on four ranks, FSDP2 over tensor parallelism."""
    for results in found("models", check, ranks):
        assert len(results) == (12 if ranks == 2 else 11)
        assert not any(each.unlike_codes for each in results.values()), results


@pytest.mark.parametrize(("ranks", "check"), [(2, "training"), (4, "sharded")])
def test_a_decoder_trains_as_in_one_process(found, ranks, check):
    """Losses, gradients and amaxes within bounds; one scaling state on all ranks."""
    for results in found("models", check, ranks):
        assert len(results) == (12 if ranks == 2 else 11)
        assert all(not each.unlike and each.equal_on_ranks for each in results.values()), results


def test_fsdp_gathers_slices_as_codes_of_the_whole_weight(found):
    """All operands are those of FSDP2's own gather; weights' are those of casting the whole weight, bit for bit."""
    for differences in found("gathers", "gathered_codes", 4):
        assert len(differences) == 17
        assert not any(differences.values()), differences


def test_slices_are_gathered_with_one_byte_an_element(found):
    """And their amaxes are reduced once a step over each dimension of the mesh whose ranks share scaling groups."""
    of_weights = {"blockwise": 1, "mxfp8": 0, "delayed": 0}
    for counts in found("gathers", "gathered_traffic", 4):
        in_bf16 = counts.pop("bf16")
        assert len(counts) == 6
        for recipe, each in counts.items():
            bar = 0.54 if recipe in ("blockwise", "mxfp8") else 0.52
            assert 0.5 <= each["bytes"] / in_bf16["bytes"] <= bar, (recipe, each, in_bf16)
            others = {"blockwise": 0, "mxfp8": 0, "delayed": 1}
            assert each["reduces"] == of_weights.get(recipe, 2) + others.get(recipe, 4), (recipe, each)


def test_a_weight_that_every_rank_of_tensor_parallelism_has_is_gathered_as_codes(found):
    for results in found("gathers", "replicated", 4):
        assert len(results) == 3
        for same, ratio in results.values():
            assert same
            assert 0.25 <= ratio < 0.3  # of float32's bytes


def test_slices_that_ranks_do_not_have_are_gathered_in_high_precision(found):
    for left in found("gathers", "not_gathered", 4):
        assert left == {"0": "tensor parallelism leaves ranks without a part of it"}


def test_reductions_are_those_of_scales_that_ranks_share(found):
    first, later = {}, {}
    for recipe, columns, rows in (
        *(("tensorwise", 2, 2), ("rowwise", 2, 2), ("rowwise_hp_grad_weight", 2, 2)),
        *(("blockwise", 0, 0), ("mxfp8", 0, 0), ("static", 1, 1), ("weight_only", 0, 1), ("bf16", 0, 0)),
    ):
        first[f"{recipe} N"] = later[f"{recipe} N"] = columns
        first[f"{recipe} K"] = later[f"{recipe} K"] = rows
    for recipe in ("delayed", "delayed_te", "article"):  # the first step has no amaxes of finished steps
        for divided in "NK":
            first[f"{recipe} {divided}"], later[f"{recipe} {divided}"] = 3, 1
    for counts in found("layers", "reductions"):
        assert counts == {name: [first[name], later[name]] for name in first}


def test_amaxes_of_weights_are_reduced_once_a_step(found):
    """By one collective for all layers and micro-batches; those of inputs and gradients by one a layer.

    In the first step, before an optimizer is known to hold the weights, each pass measures them.
    """
    for results in found("weights", "weight_reductions"):
        assert len(results) == 12
        for (recipe, pairs, micro), counts in results.items():
            others = micro * 2 * pairs  # a gradient of a layer by columns, an input of one by rows
            assert (
                counts
                == {
                    "tensorwise": ([others + micro, others + 1, others + 1], pairs + 1),
                    "rowwise": ([others + micro, others + 1, others + 1], pairs + 1),
                    "static": ([micro, 1, 1], 1),
                    "delayed": ([others + micro + 1, 1, 1], 0),  # the end of a step reduces its own
                }[recipe]
            ), (recipe, pairs, micro)


def test_garbage_that_one_rank_has_collected_changes_no_reduction(found):
    """An optimizer in a reference cycle gives way to one over half of the layers; two micro-batches a step."""
    for results in found("weights", "optimizers_dropped"):
        assert results == [[6, 5, 5, 5]] * 3


def test_no_write_to_a_weight_is_missed(found):
    """Every pass has the bits of one process, whose weights are written to in the same way."""
    for results in found("weights", "weights_written"):
        passes = dict.fromkeys(("through_data", "between_micro_batches", "cast_to_bfloat16", "frozen_and_loaded"), 5)
        passes |= {"later_layers": 6, "told": 4, "loaded": 8, "by_hand": 6, "restored": 4, "fused": 3}
        assert {name: len(same) for name, same in results.items()} == passes
        assert all(map(all, results.values())), results


def test_no_write_to_a_weight_by_row_is_missed(found):
    for differences in found("weights", "rows_written"):
        assert len(differences) == 5
        assert not any(differences.values()), differences


def test_refusals(found):
    for said in found("layers", "refused"):
        for name, size in (("columns", "384 out_features"), ("rows", "320 in_features")):
            assert f"layer '0' has {size}, which 2 ranks cannot divide into multiples of the 128" in said[name]
            assert "256 or 512 would work" in said[name]
        assert "256 would work" in said["few"]
        assert "96 out_features" in said["converted later"]
        assert "'mxfp8'; 64 or 128 would work" in said["autocast"]
        assert "give convert an amax_group with all ranks" in said["group"]
        assert "is a DTensor and its input is not" in said["plain input"]


@pytest.mark.parametrize("check", ["converted_later", "checkpointed"])
def test_training_is_the_same_bit_for_bit(found, check):
    """Where the model is converted after it was parallelized; where activation checkpointing repeats blocks."""
    for differences in found("use", check):
        assert differences == {"tensorwise": [], "delayed": [], "rowwise": [], "mxfp8": []}


def test_a_compiled_model_is_the_same(found):
    assert found("use", "compiled") == [[], []]


def test_cached_weights_are_cast_once_a_step_by_all_ranks(found):
    for results in found("use", "cached"):
        assert results == {
            "tensorwise": ([], [16, 15]),
            "delayed": ([], [9, 8]),
            "rowwise": ([], [10, 9]),
            "mxfp8": ([], [0, 0]),
        }


def test_layers_that_are_given_the_same_input_cast_it_once(found):
    """q, k and v; gate and up: of one block in three steps."""
    for results in found("use", "shared_inputs"):
        assert results == {"tensorwise": ([], 6), "rowwise": ([], 6), "mxfp8": ([], 6)}


def test_inputs_are_gathered_as_codes(found):
    """With results bit for bit those of gathered values; layers that cannot share a gather sum gradients apart.

    Two layers share an input of 65536 elements on each rank; three steps of training, then an evaluation, where each
    layer casts for itself. A recipe that casts the transpose by other groups sends both codes in training.
    """
    elements, rows, blocks = 65536, 4 * 256, 4 * 256 * 256
    sizes = {
        "tensorwise": (elements, elements, 1),
        **dict.fromkeys(("delayed", "delayed_te", "article"), (elements, elements, 2)),
        "rowwise": (2 * elements + rows, elements + rows, 1),
        "blockwise": (2 * (elements + blocks // 128), elements + blocks // 128, 1),
        "mxfp8": (2 * (elements + blocks // 128), elements + blocks // 128, 1),
    }
    for results in found("use", "gathered_inputs"):
        assert len(results) == 12
        for name, (differences, sent) in results.items():
            recipe, positions = name.split()
            training, evaluation, layers = sizes.get(recipe, (0, 0, 0)) if positions == "256" else (0, 0, 0)
            assert sent == [training] * 3 * layers + [evaluation] * 2 * bool(layers), name
            assert differences.pop("inputs") <= (0 if layers == 1 or recipe == "bf16" else 2e-7), name
            assert not any(differences.values()), name


def test_a_batch_without_sequences(found):
    """torch's own DTensor never returns from flattening one in high precision."""
    for results in found("use", "empty_batches"):
        assert len(results) == 22
        assert not any(results.values()), results


def test_transformer_engines_layers(found):
    """All operands, what no sum over ranks has touched, and sums within their rounding."""
    for differences in found("use", "engine_linear"):
        assert len(differences) == 16
        assert not any(differences.values()), differences


def test_transformer_engines_transformer_layer(found):
    for differences in found("use", "engine_layer"):
        assert list(differences) == ["False", "True"]
        for values in differences.values():
            assert len(values) == 14
            assert max(values.values()) < 1e-6, values


def test_ranks_that_keep_their_own_amaxes_wait_for_no_other(found):
    """Bit for bit as layers of their own; then, with ``reduce_amax=True`` again, with the amaxes of all ranks."""
    one, other = found("use", "engine_own_amaxes")
    assert list(one) == list(other) == ["column False", "column True", "row False", "row True"]
    for name in one:
        for same, compared, newest in (one[name], other[name]):
            assert same
            assert compared == 2 + 9
            assert newest == one[name][2]
            assert all(amax > 0 for amax in newest.values())


def test_transformer_engines_arguments(found):
    for rank, (said, amax) in enumerate(found("use", "engine_arguments")):
        no_group, sizes, other_group, no_process_group, mode, heads = said
        assert no_group.endswith("has one of 2 slices (tp_size) and no tp_group; call set_tensor_parallel_group")
        assert sizes == "2 ranks (tp_size) cannot share out_features=513 equally; set a multiple"
        assert other_group.endswith("one of 2 slices (tp_size), and the group has 1 ranks")
        assert no_process_group.startswith(
            "tp_group (of ops, tensor_parallel_group) must be a torch.distributed.ProcessGroup"
        )
        assert mode.endswith("with tp_size=2 divides its layers; give it set_parallel_mode=True")
        assert "cannot share num_attention_heads=3 equally" in heads
        assert amax == 1 + rank, "reduce_amax=False keeps a rank's own"


def test_checkpoints_are_those_of_parallelized_linear_layers(found):
    """A checkpoint of two ranks is read by the ranks and by one process, scaling state too."""
    assert found("use", "saved") == [{"alike": True, "ranks": True, "one process": True}] * 2


def test_high_precision_is_that_of_torch(found):
    """Inside of ``octavo.autocast(enabled=False)``, and after ``octavo.restore``."""
    assert found("use", "restored") == [(True, True, True)] * 2


def test_bfloat16_layers_and_autocast(found):
    for results in found("use", "half_precision"):
        assert len(results) == 8
        assert all(results.values()), results


def test_a_layer_keeps_no_more_for_backward_than_in_bf16(found):
    for kept in found("use", "kept_for_backward"):
        assert all(size <= kept["bf16"] for size in kept.values()), kept


def test_ranks_may_divide_the_rows_of_an_input(found):
    for results in found("use", "rows"):
        assert "gets 16 rows of its input's dimension 0 on this rank, no multiple of the 32" in results["refused"]
        assert [results[name] for name in results if name != "refused"] == [True] * 5


def test_the_doctor_sees_parameters_of_all_ranks(found):
    assert found("use", "watched") == [[], []]


def test_a_model_made_in_inference_mode_reads_its_weights(found):
    assert found("use", "inferred") == [True, True]


def test_what_is_not_done_is_said(found):
    for said in found("use", "not_done"):
        assert "is stored as FP8 codes and cannot be set or tied" in said["codes"]
        assert "is stored as FP8 codes, which ranks cannot divide" in said["rows of codes"]
        assert "ranks share it by tensor parallelism" in said["stored later"]
        assert "pass x.full_tensor(), or x.to_local()" in said["quantize"]
        assert "quantization-aware training takes whole layers" in said["qat"]
