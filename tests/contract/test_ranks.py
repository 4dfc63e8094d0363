"""Delayed scaling in two processes with gloo between them, against one process that sees both ranks' data.

Every rank's data are a micro-batch of the one process, whose steps count with the largest amax of their micro-batches.
"""

from typing import Any

import pytest
import torch

import octavo
from octavo.doctor.statistics import CAST_FIELDS
from octavo.scaling import EMPTY
from tests.contract import ranks_program as program
from tests.contract.calibrating_ranks import calibrated, rows_of, tokens_of, without_change
from tests.contract.overflowing_ranks import overflow_state
from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder
from tests.contract.sampled_ranks import ROWS_ALONE, batches_of, sampled_steps

RANKS = range(2)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank returned, by check."""
    return results_of_ranks("tests.contract.ranks_program", shared_folder(tmp_path_factory, "ranks"), len(RANKS))


def _truth(*, micro: int = 1) -> dict[str, Any]:
    """Losses by rank, averaged gradients and histories of the one process."""
    model = program.build()
    optimizer = program.optimizer_of(model)
    losses: list[list[float]] = [[], []]
    grads = []
    for both in zip(*(program.batches(rank, micro=micro) for rank in RANKS), strict=True):
        shares = []
        for rank, step in enumerate(both):
            optimizer.zero_grad()
            for batch in step:
                loss = model(batch).square().mean()
                loss.backward()
                losses[rank].append(loss.item())
            shares.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        grads.append([(one + other) / 2 for one, other in zip(*shares, strict=True)])
        for parameter, grad in zip(model.parameters(), grads[-1], strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return {"losses": losses, "grads": grads, "state": octavo.scaling_state(model)}


def _assert_same_state(state, expected) -> None:
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def _assert_true(ranks: list[dict[str, Any]], truth: dict[str, Any]) -> None:
    for rank in RANKS:
        assert ranks[rank]["losses"] == truth["losses"][rank]
        _assert_same_state(ranks[rank]["state"], truth["state"])
        for step, wanted in zip(ranks[rank].get("grads", []), truth["grads"], strict=False):
            for one, other in zip(step, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_ddp_scales_with_the_largest_amax_of_all_ranks(found, broadcast_buffers):
    _assert_true([each[broadcast_buffers] for each in of_check(found, "ddp")], _truth())


@pytest.mark.long
def test_micro_batches_under_ddp_are_one_step(found):
    _assert_true(of_check(found, "ddp_accumulating"), _truth(micro=3))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_scales_match_one_process(found, use_orig_params):
    _assert_true([each[use_orig_params] for each in of_check(found, "fsdp1")], _truth())


@pytest.mark.parametrize("wrapper", ["no_wrapper", "fsdp2"])
def test_other_wrappers_scale_like_one_process(found, wrapper):
    _assert_true(of_check(found, wrapper), _truth())


def _sharded_truth(recipe: str) -> dict[str, Any]:
    """What one process computes from both ranks' data; FSDP2 averages the ranks' gradients."""
    model = program.uneven(recipe)
    optimizer = program.momentum_of(model)
    losses: list[list[float]] = [[], []]
    grads = []
    for both in zip(*(program.uneven_batches(rank) for rank in RANKS), strict=True):
        for rank, batch in enumerate(both):
            loss = model(batch).square().mean()
            loss.backward()
            losses[rank].append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        grads.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    weights = [each.detach() for each in model.parameters()]
    return {"losses": losses, "grads": grads, "weights": weights, "state": octavo.scaling_state(model)}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("recipe", program.RECIPES)
def test_fsdp2_trains_bit_for_bit_as_one_process(found, recipe, checkpointed):
    ranks = [each[recipe, checkpointed] for each in of_check(found, "fully_sharded_training")]
    truth = _sharded_truth(recipe)
    before = [each.detach() for each in program.uneven(recipe).parameters()]
    assert all((one - other).abs().max() > 0.01 for one, other in zip(before, truth["weights"], strict=True))
    for rank in RANKS:
        assert ranks[rank]["losses"] == truth["losses"][rank]
        _assert_same_state(ranks[rank]["state"], truth["state"])
        assert len(ranks[rank]["grads"]) == program.STEPS
        for step, wanted in zip(ranks[rank]["grads"], truth["grads"], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(step, wanted, strict=True))
        assert all(map(torch.equal, ranks[rank]["weights"], truth["weights"]))


@pytest.mark.parametrize("recipe", [name for name in program.RECIPES if name != "bf16"])
def test_under_fsdp2_a_layer_keeps_no_more_for_backward_than_in_bf16(found, recipe):
    for rank in of_check(found, "kept_when_fully_sharded"):
        bf16, fp8 = rank["bf16"], rank[recipe]
        print(f"{recipe}: {fp8} bytes, bfloat16 {bf16}, at {program.ROWS} rows")
        assert bf16 == [2 * rows * program.WIDTH for rows in program.ROWS]
        assert all(own <= plain for own, plain in zip(fp8, bf16, strict=True))


@pytest.mark.parametrize(("recipe", "steps"), [("delayed", program.STEPS), ("delayed_te", 2 * program.STEPS)])
def test_layers_delayed_by_autocast_reduce_too(found, recipe, steps):
    one, other = (each[recipe] for each in of_check(found, "under_autocast"))
    _assert_same_state(one, other)
    largest = [batch.abs().max() for step in program.batches(1, micro=2) for batch in step]
    if recipe == "delayed":
        largest = [max(pair) for pair in zip(largest[::2], largest[1::2], strict=True)]
    assert one["0.input.steps"].item() == steps
    assert one["0.input.amax_history"][:steps].tolist() == [value.item() for value in reversed(largest)]


def test_a_group_or_this_rank_alone_can_be_named(found):
    ranks = of_check(found, "named_groups")
    for rank in RANKS:
        own = [batch.abs().max().item() for (batch,) in program.batches(rank)]
        for alone in ("rank", "manual, rank"):
            assert ranks[rank][alone]["0.input.amax_history"].tolist() == own[:0:-1]
        for named in ("group", "manual", "manual, group", "manual, named"):
            joint = [batch.abs().max().item() for (batch,) in program.batches(1)]
            assert ranks[rank][named]["0.input.amax_history"].tolist() == joint[:0:-1]


def test_a_layer_that_ran_on_one_rank_records_on_all_and_one_that_ran_on_none_nowhere(found):
    one, other = of_check(found, "unused_on_a_rank")
    _assert_same_state(one, other)
    own = [batch.abs().max().item() for (batch,) in program.batches(0)]
    assert one["1.input.amax_history"].tolist() == own[:0:-1]
    assert one["2.input.steps"].item() == 0
    assert set(one["2.input.amax_history"].tolist()) == {EMPTY}


def test_ranks_with_different_layers_get_an_explanatory_error(found):
    for text in of_check(found, "other_layers"):
        assert "the ranks' layers differ" in text
        assert 'amax_group="rank"' in text


def test_ranks_with_different_numbers_of_experts_get_an_explanatory_error(found):
    for text in of_check(found, "other_experts"):
        assert "the ranks' layers differ" in text
        assert "8 to 8, 2 experts" in text


def test_model_run_on_one_rank_only_is_reported_and_training_continues(found):
    """The ranks have said so together, so that neither waits for the other."""
    for said in of_check(found, "teacher_on_one_rank"):
        (text,) = said
        assert "rank 0 closes 4 layers, it alone step 2 of layer '0', 8 to 16; step 2 of layer '2', 16 to 4" in text
        assert "rank 1 closes 2 layers; train the same layers" in text


def test_rank_that_starts_later_is_reported(found):
    """No tensor of one step is taken for another's."""
    for said in of_check(found, "autocast_on_one_rank_first"):
        (text,) = said
        assert "rank 0 closes 1 layers, it alone step 1 of layer ''" in text
        assert "rank 1 closes 1 layers, it alone step 2 of layer ''" in text


def test_ddps_join_is_refused_and_runs_with_each_ranks_own_amaxes(found):
    one, other = of_check(found, "joined")
    assert (one["steps"], other["steps"]) == (2, 3)
    for rank in (one, other):
        assert "DistributedDataParallel.join()" in rank["said"]
        assert 'amax_group="rank"' in rank["said"]


def test_rank_with_one_extra_step_is_reported(found):
    said, nothing = of_check(found, "one_more_step")
    assert "rank 0 could not reduce its amaxes (step 2 of layer '0', 8 to 16; step 2 of layer '2', 16 to 4)" in said
    assert 'amax_group="rank"' in said
    assert nothing == "nothing was said"


def test_an_overflow_on_one_rank_backs_off_on_all(found):
    """Against one process, of whose two micro-batches one overflows."""
    truth = overflow_state(RANKS)
    assert truth["input.amax"].item() == torch.tensor(2.0 / 0.99).item()
    for state in of_check(found, "overflow_on_one_rank"):
        _assert_same_state(state, truth)


def test_every_layer_of_a_deep_model_is_reduced(found):
    largest = [max(program.amax_of(index, rank) for rank in RANKS) for index in range(program.MANY)]
    for each in of_check(found, "many_layers"):
        assert [each["state"][f"{index}.input.amax"].item() for index in range(program.MANY)] == largest


def test_a_step_takes_one_all_reduce_whatever_the_number_of_layers(found):
    """The first step of a group's deepest model takes a second one; then the ranks have agreed on the length."""
    for each in of_check(found, "many_layers"):
        assert each["reduces"] == [{"allreduce": 2}, {"allreduce": 1}, {"allreduce": 1}]
        assert each["others"].startswith("the ranks' layers differ")


def test_a_step_of_all_models_takes_one_all_reduce(found):
    assert of_check(found, "reduces_a_step") == [3, 3]


def test_an_optimizer_whose_state_is_sharded_ends_one_step_on_every_rank(found):
    one, other = of_check(found, "zero_redundancy")
    assert (one["holds the layer"], other["holds the layer"]) in ((True, False), (False, True))
    assert (one["closed"], other["closed"]) == (program.STEPS, program.STEPS)
    _assert_same_state(one["state"], other["state"])
    assert one["state"]["1.input.amax_history"].tolist() == [one["largest"]] * 3


@pytest.mark.parametrize("ended", ["hand", "blocks"])
def test_a_state_read_before_the_ranks_reduce_leaves_that_step_out(found, ended):
    for windows in of_check(found, "read_before_the_reduction"):
        assert windows[ended] == [[64.0, EMPTY, EMPTY], [128.0, 64.0, EMPTY], [32.0, 128.0, 64.0]]


def test_stages_of_torchs_pipeline_train_as_in_one_process(found):
    """Schedule1F1B of 4 micro-batches; to infer shapes, the first step runs the last stage on what memory held."""
    for differences, steps in of_check(found, "pipeline"):
        assert differences == {"inferred": [], "checkpointed": [], "given": []}
        assert steps == 3


def test_compiled_stages_of_torchs_pipeline_are_given_their_shapes(found):
    for differences, said in of_check(found, "pipeline_compiled"):
        assert differences == []
        assert "give PipelineStage its input_args and output_args" in said


def test_each_rank_counts_its_own_nonfinite_elements_under_ddp(found):
    assert of_check(found, "nonfinite_of_one_rank") == [{}, {"0.input": 1}]


def test_torchs_distributed_checkpoint_resumes_bit_for_bit(found):
    for through, resumed in of_check(found, "distributed_checkpoint"):
        assert resumed["losses"] == through["losses"]
        _assert_same_state(resumed["state"], through["state"])


def test_a_graph_whose_steps_end_with_blocks_is_refused(found):
    for text in of_check(found, "compiled_blocks"):
        assert "ends steps with autocast blocks on all ranks" in text


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("default", [[20, 10], [20, 10]]),
        ("both", [[20, 10], [20, 10]]),
        ("alone", [[2, 1], [20, 10]]),
        ("kept", [[2, 1], [20, 10]]),
        ("one, then all", [[3, 20, 1], [30, 20, 10]]),
        ("calibrated", [[20, 10], [20, 10]]),
        ("calibrated alone", [[2, 1], [20, 10]]),
    ],
)
def test_the_ranks_of_a_blocks_amax_reduction_group_scale_alike(found, check, expected):
    for window, amaxes in zip(of_check(found, "transformer_engine_blocks"), expected, strict=True):
        assert window[check] == amaxes + [EMPTY] * (4 - len(amaxes))


def test_the_trainer_s_steps_end_on_all_ranks_together(found, tmp_path):
    """After a step every amax is the larger of what each rank's seed gives alone."""
    alone = [program.trained_state(tmp_path / str(rank), seed=rank) for rank in RANKS]
    ranks = of_check(found, "trainer")
    assert any(not torch.equal(one, other) for one, other in zip(*(each.values() for each in alone), strict=True))
    for state in ranks:
        _assert_same_state(state, {key: torch.maximum(value, alone[1][key]) for key, value in alone[0].items()})


def test_a_sampled_step_has_as_many_collectives_for_any_number_of_layers(found):
    """Four all-reduces: sums of the optimizer's step, alignment of gates, the casts' sums, and their extremes."""
    for counts, _ in of_check(found, "sampled_by_fsdp2"):
        assert counts == [{"allreduce": 4}] * 3


def test_statistics_of_shards_are_those_of_one_process_with_both_batches(found):
    """All rows are sampled; two ranks' weights are one process's twice, which no statistic shows."""
    both = [torch.cat(pair) for pair in zip(*map(batches_of, RANKS), strict=True)]
    truth, *_ = sampled_steps(both, ROWS_ALONE, blocks=1, sharded=False, group="alone")
    for _, samples in of_check(found, "sampled_by_fsdp2"):
        sample = samples[ROWS_ALONE]
        for table in ("casts", "products", "parameters"):
            expected = getattr(truth, table)
            assert sample[table].keys() == expected.keys()
            for key, numbers in expected.items():
                assert sample[table][key] == pytest.approx(numbers, rel=1e-4, abs=1e-7, nan_ok=True), key
        assert sample["alignment"] == pytest.approx(truth.modules["alignment"], rel=1e-6)


def test_a_scaling_group_on_several_ranks_is_as_stale_as_its_largest_part(found):
    """The second rank's batches are twice as large, and its amax the group's."""
    for _, samples in of_check(found, "sampled_by_fsdp2"):
        for key, numbers in samples["delayed"]["casts"].items():
            largest, least = (numbers[CAST_FIELDS.index(name)] for name in ("stale_ratio", "least_stale_ratio"))
            assert largest == least > 0.6, key


def test_ranks_calibrate_as_one_process_with_all_batches(found):
    """Scales of every method and health bit for bit; mean keys but for the order of their sum."""
    rows, tokens = ([each for rank in RANKS for each in batches(rank)] for batches in (rows_of, tokens_of))
    truth = {name: without_change(each) for name, each in calibrated(rows, tokens).items()}
    assert truth["max"].left_out == {"unused": "no batch reached it"}
    assert truth["max"].groups == (("second", "first"),)
    for together, collectives in of_check(found, "calibrated_together"):
        assert collectives["allreduce"] == 2, "of amaxes and of histograms"
        for name, one in truth.items():
            ranks = together[name]
            assert ranks.to_record() == one.to_record()
            assert ranks.input_scales == one.input_scales
            assert {path: each.tolist() for path, each in ranks.weight_scales.items()} == {
                path: each.tolist() for path, each in one.weight_scales.items()
            }
            assert ranks.kv_scales == one.kv_scales
            torch.testing.assert_close(ranks.key_means, one.key_means, rtol=1e-6, atol=1e-7)
        assert len(together["kv cache"].kv_scales) == 2


def test_ranks_that_cannot_calibrate_together_all_say_why(found):
    first, second = of_check(found, "refused_calibrations")
    of_nan, of_nothing, of_layers, of_slices = second
    assert of_nan.startswith("in batch 1 layer 'first' received NaN or infinity")
    assert of_nothing.startswith("there is no batch to calibrate on")
    assert of_layers == "ranks 0 and 1 calibrate different layers; give all ranks the same model and options"
    assert of_slices.startswith("ranks divide the weight of layer 'second'; calibrate the model before it is divided")
    told = [f"rank 1 could not calibrate: {sentence}" for sentence in second[:2]]
    assert first == [*told, of_layers, of_slices]
