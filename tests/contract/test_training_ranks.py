"""``octavo train``'s loop on two and four ranks: the run of one process, cut anywhere and resumed on any number.

An update's micro-batches are shared by the ranks, so that one process computes each of them as its rank does. With two,
whose sum has one order, everything is compared bit for bit. FSDP2 sums the gradients' norm by shards; where it clips by
that norm, numbers differ by the order of that sum.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, load  # type: ignore[attr-defined]
from typer.testing import CliRunner, Result

from octavo.cli.app import app
from octavo.training.checkpoint import latest, read_state
from octavo.training.checkpoint_files import stored_tensors
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import load_run
from tests.contract.rank_processes import of_check, once, results_of_ranks, shared_folder
from tests.contract.training_ranks_faults import NAN_LAYOUTS
from tests.contract.training_ranks_program import (
    CHAIN,
    CHAIN_STEPS,
    LAYOUTS_OF_FOUR,
    MOVED_RECIPES,
    RECIPES,
    STEPS,
    TENSOR_LAYOUTS_OF_FOUR,
    TENSOR_RUNS,
    config_of,
    loss_after_move,
    overflowing,
    run,
    stopping,
)
from tests.unit.training.tiny_runs import tiny_data

pytestmark = pytest.mark.long

PROGRAM = "tests.contract.training_ranks_program"
NORM_ORDER = 1e-6  # relative, of losses after clipping by a norm that shards have summed
FLIPPED_CODES = 5e-3  # relative, of losses, norms and amaxes: the order of a layer's sum moves values to other codes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of one process to compare with, and the first piece of the run that the ranks continue."""
    folder = shared_folder(tmp_path_factory, "training ranks")
    once(folder / "begun", partial(begin, folder))
    return folder


def begin(folder: Path) -> None:
    tiny_data(folder)
    assert stopping(config_of(**CHAIN), folder, "chain", after=2, resume=False) == ""
    assert run(config_of(**CHAIN), folder, "whole chain") == ""
    for recipe in MOVED_RECIPES:
        assert run(config_of(recipe=recipe, grad_accumulation=4), folder, f"moved {recipe}") == ""
        shutil.copytree(folder / f"moved {recipe}", folder / f"{recipe} of one")
    shutil.copytree(folder / "delayed of one", folder / "sliced")
    (folder / "of one").symlink_to(folder / "delayed of one")


@pytest.fixture(scope="module")
def two(folder):
    return results_of_ranks(PROGRAM, folder, 2)


@pytest.fixture(scope="module")
def four(folder, two):
    return results_of_ranks(PROGRAM, folder, 4)


def command(*arguments: str) -> Result:
    """Run octavo's command line in this process."""
    return CliRunner().invoke(app, arguments, prog_name="octavo")


def numbers(folder: Path) -> list[dict]:
    """What both runs write: losses and norms; the doctor samples each rank's last micro-batch."""
    keys = ("kind", "step", "loss", "lr", "grad_norm", "tokens", "nats", "perplexity", "loss_scale", "recipe")
    lines = [line for line in read_metrics(folder) if line["kind"] not in ("watched", "statistics")]
    return [{key: line[key] for key in keys if key in line} for line in lines]


def tensors(folder: Path, step: str = "") -> dict[str, torch.Tensor]:
    """Weights, moments and scaling state of a checkpoint, the newest by default; read by torch's own reader."""
    path = folder / "checkpoints" / step if step else latest(folder)
    reader = HuggingFaceStorageReader(str(path))
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    found = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in metadata.items()}
    with pytest.warns(UserWarning, match="load in a single process"):
        load(found, storage_reader=reader, no_dist=True)
    return found


def assert_same(one: Path, other: Path, *, norms: bool = True) -> None:
    left, right = (
        [{key: value for key, value in line.items() if norms or key != "grad_norm"} for line in numbers(each)]
        for each in (one, other)
    )
    assert left == right
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def assert_close(one: Path, other: Path, bound: float = NORM_ORDER) -> None:
    """The same lines, with numbers that differ by the order of a sum."""
    left, right = numbers(one), numbers(other)
    assert [list(line) for line in left] == [list(line) for line in right]
    for expected, found in zip(left, right, strict=True):
        values = {key: value for key, value in expected.items() if isinstance(value, float)}
        assert {key: found[key] for key in values} == pytest.approx(values, rel=bound)
        assert {**found, **values} == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_ddp_and_fsdp2_train_as_one_process(folder, two, recipe):
    assert of_check(two, "every_recipe") == [[""] * 15] * 2
    for clip, shard in ((1.0, 1), (0.0, 2)):
        name = f"{recipe}-one-{clip}"
        assert run(config_of(recipe=recipe, clip_norm=clip), folder, name) == ""
        assert_same(folder / name, folder / f"{recipe}-{shard}-{clip}-2", norms=shard == 1)


@pytest.mark.parametrize("layout", LAYOUTS_OF_FOUR)
def test_four_ranks(folder, four, layout):
    """Gradients of four ranks are summed in another order; until they are, everything is equal bit for bit."""
    assert of_check(four, "four_ranks") == [[""] * 5] * 4
    assert_close(folder / "of one", folder / f"four {layout}")
    assert numbers(folder / "of one")[1]["loss"] == numbers(folder / f"four {layout}")[1]["loss"]
    expected, found = tensors(folder / "of one"), tensors(folder / f"four {layout}")
    histories = [key for key in expected if key.endswith(".amax_history")]
    assert len(histories) == 3 * 7
    for key in histories:
        assert expected[key][STEPS - 1] == found[key][STEPS - 1] > 0, "the amax of the first step"
        assert found[key] == pytest.approx(expected[key], rel=NORM_ORDER), key


def test_ranks_that_share_layers(folder, two):
    """Each layer's codes are checked bit for bit in test_tensor_parallel.py; this is the decoder around them."""
    assert of_check(two, "tensor_parallel") == [[""] * 5] * 2
    runs = {recipe: [f"tensor {recipe} {sequence}"] for recipe, sequence in TENSOR_RUNS}
    runs["fp32"].append("tensor fp32 False")
    for recipe, names in (runs | {"delayed": ["tensor to shards"]}).items():
        assert run(config_of(recipe=recipe), folder, f"tensor {recipe} of one") == ""
        for name in names:
            bound = NORM_ORDER if recipe == "fp32" else FLIPPED_CODES
            assert_close(folder / f"tensor {recipe} of one", folder / name, bound)


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS_OF_FOUR)
def test_four_ranks_in_pairs_that_share_layers(folder, four, layout):
    assert of_check(four, "four_ranks") == [[""] * 5] * 4
    assert_close(folder / "of one", folder / f"four {layout}", FLIPPED_CODES)


def test_clipping_by_a_norm_of_shards_is_within_its_order(folder, two):
    assert run(config_of(recipe="delayed"), folder, "clipped") == ""
    assert tensors(folder / "clipped").keys() == tensors(folder / "delayed-2-1.0-2").keys()
    assert_close(folder / "clipped", folder / "delayed-2-1.0-2")


def test_collectives_of_an_update(two):
    """Gradients are summed once, by bucket or block; beside that, all losses have one, and all amaxes.

    FSDP2 gathers the weights of a block and of the rest for each of two micro-batches' two passes. The norm of shards
    takes one more, which DTensor hides.
    """
    replicas, shards = of_check(two, "collectives")[0]
    assert replicas == {"allreduce": 2, "allgather": 1}
    assert shards == {"allgather_base": 8, "reduce_scatter_base": 2, "allgather": 1, "allreduce": 1}


def test_gradients_sent_as_codes(folder, two):
    """The first step's are those of exact sums but for two roundings, whose errors the doctor has; ranks stay equal."""
    first, second = of_check(two, "fp8_gradients")
    assert first == second
    assert first[0] == ""
    assert first[1].startswith("parallel.fp8_gradients keeps a step's rounding errors for the next, and a dynamic loss")
    exact, coded = (
        [line for line in read_metrics(folder / name) if line["kind"] == "step"]
        for name in ("delayed-1-1.0-2", "fp8 gradients")
    )
    assert coded[0]["loss"] == exact[0]["loss"]
    assert coded[0]["grad_norm"] != exact[0]["grad_norm"]
    assert coded[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.01)
    assert coded[-1]["loss"] != exact[-1]["loss"]
    assert coded[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=0.01)
    errors = {line["step"]: line["gradient_error"] for line in coded if "gradient_error" in line}
    assert list(errors) == [
        line["step"] for line in read_metrics(folder / "fp8 gradients") if line["kind"] == "statistics"
    ]
    assert len(errors) == 3, "the steps that the doctor samples"
    assert all(0.01 < error < 0.05 for error in errors.values())


@pytest.mark.parametrize("shard", [1, 2])
def test_loss_scale_after_the_same_overflows(folder, two, shard):
    assert of_check(two, "loss_scale") == [["", ""]] * 2
    one, several = folder / f"scaled-{shard}", folder / f"fp16-{shard}"
    assert overflowing(folder, one.name) == ""
    assert sum(line["kind"] == "overflow" for line in numbers(one)) > 5
    assert_same(one, several, norms=shard == 1)


def test_phases(folder, two):
    assert of_check(two, "phases") == [""] * 2
    schedule = (("bf16", 0.0), ("fp8", 0.5))
    config = config_of(recipe="delayed", precision_schedule=schedule, clip_norm=0.0)
    assert run(config, folder, "phases of one") == ""
    assert_same(folder / "phases of one", folder / "phases", norms=False)


@pytest.mark.parametrize(("shard", "whole"), [(1, "delayed-1-1.0-2"), (2, "delayed-2-1.0-2")])
def test_resumed_in_the_same_layout(folder, two, shard, whole):
    """Bit for bit; a signal to one rank stops all after the same step."""
    assert of_check(two, "interrupted") == [[""] * 4] * 2
    assert_same(folder / whole, folder / f"cut-{shard}")


def test_state_of_one_process_on_ranks(two, four):
    assert of_check(two, "loaded") == [[True] * 9] * 2
    assert of_check(four, "loaded") == [[True] * 9] * 4


def test_resumed_on_one_two_four_and_one_rank(folder, two, four):
    """One process, two shards, two replicas of two shards, one process: the curve of one process."""
    assert (of_check(two, "chain_of_two"), of_check(four, "chain_of_four")) == ([""] * 2, [""] * 4)
    shutil.copytree(folder / "chain", folder / "end of chain")
    assert run(config_of(**CHAIN), folder, "end of chain", resume=True) == ""
    assert load_run(folder / "end of chain").step == CHAIN_STEPS
    assert_close(folder / "whole chain", folder / "end of chain")


def test_moved_to_other_ranks_and_layouts(folder, four):
    """One process, two ranks, four, two, one: under DDP, FSDP2 and HSDP the same state, codes and scales."""
    one = [[each] for each in of_check(four, "moved")[0][: len(MOVED_RECIPES)]]
    for rank, losses in enumerate(of_check(four, "moved")):
        assert losses == [loss for _ in range(6 if rank < 2 else 2) for (loss,) in one]
    for recipe, (loss,) in zip(MOVED_RECIPES, one, strict=True):
        start, end = (latest(folder / name) for name in (f"{recipe} of one", f"moved {recipe}"))
        assert start is not None
        assert end is not None
        assert {path.name for path in end.glob("model*")} == {
            f"model-0000{each}-of-00002.safetensors" for each in (1, 2)
        }
        assert read_state(start) == read_state(end)
        assert_same(folder / f"{recipe} of one", folder / f"moved {recipe}")
        expected, found = (load_run(path.parent.parent).model.state_dict() for path in (start, end))
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert loss_after_move(folder, recipe, 1) == loss
        assert_same(folder / f"{recipe} of one", folder / f"moved {recipe}")


def test_moved_between_slices_and_shards(folder, four):
    """One process, tensor parallelism, FSDP2, DDP, FSDP2, tensor parallelism, FSDP2 over it: the same state."""
    of_check(four, "moved")
    paths = [latest(folder / name) for name in ("of one", "sliced")]
    assert [len(list(path.glob("model*"))) for path in paths if path is not None] == [1, 4]
    assert_same(folder / "of one", folder / "sliced")


def test_eval_and_export_read_what_ranks_wrote(folder, four, tmp_path):
    """Pieces along two dimensions; the export is read back by transformers' from_pretrained, in another process."""
    of_check(four, "moved")
    told, files = [], []
    for name in ("of one", "sliced"):
        export = ["export", str(folder / name), "--format", "hf-fp8", "--out", str(tmp_path / name)]
        assert command(*export, *([] if name == "sliced" else ["--no-verify"])).exit_code == 0
        files.append((tmp_path / name / "model.safetensors").read_bytes())
        told.append(command("eval", str(folder / name), "--data", str(folder / "text.txt"), "--split", "all", "--json"))
    one, other = ({key: value for key, value in json.loads(each.stdout).items() if key != "run"} for each in told)
    assert one == other
    assert files[0] == files[1]


def test_each_rank_writes_its_shards(folder, two):
    """Half of each matrix; what all ranks hold is shared out."""
    path = latest(folder / "delayed-2-1.0-2")
    assert path is not None
    first, second = (load_file(path / f"model-0000{rank}-of-00002.safetensors") for rank in (1, 2))
    whole = tensors(folder / "delayed-2-1.0-2")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(torch.cat([first[name], second[name]]), whole[name])
    path = latest(folder / "delayed-1-1.0-2")
    assert path is not None
    first, second = (load_file(path / f"model-0000{rank}-of-00002.safetensors") for rank in (1, 2))
    assert first
    assert second
    assert not first.keys() & second.keys()


def test_uneven_and_empty_shards(folder, four):
    rows = of_check(four, "uneven_shards")
    assert [each["fsdp5"] for each in rows] == [2, 2, 1, 0]
    assert [each["hsdp1"] for each in rows] == [1, 0, 1, 0]
    sums = json.loads((folder / "uneven" / "state.json").read_text())
    stored = stored_tensors(folder / "uneven", "model.safetensors", sums)
    assert len(stored) == 12
    for name, tensor in stored.items():
        assert torch.equal(tensor, torch.arange(3 * int(name[4:])).view(-1, 3)), name


@pytest.mark.parametrize("shard", [1, 2])
def test_checkpoint_written_while_training_goes_on(folder, two, shard):
    """The files are those of the step that was saved, though written after the next one."""
    assert of_check(two, "in_background") == [["", ""]] * 2
    assert_same(folder / f"delayed-{shard}-1.0-2", folder / f"background-{shard}")
    expected = tensors(folder / f"cut-{shard}", "step-000003")
    found = tensors(folder / f"background-{shard}", "step-000003")
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


@pytest.mark.parametrize(
    ("index", "name", "reason"),
    [
        (0, "sync", "rank 1: cannot save {}: File too large; free some space"),
        (1, "async", "rank 1: cannot save {}: File too large; free some space"),
        (2, "state", "rank 0: cannot save {}: No space left on device; free some space"),
    ],
)
def test_full_disk_of_one_rank(folder, two, index, name, reason):
    """A limit on file size makes every write of that rank fail, as a full disk does; /dev/full does for state.json."""
    first, second = (each[index] for each in of_check(two, "full_disk"))
    target = folder / f"full {name}" / "checkpoints" / "step-000002"
    assert first == second
    assert first.startswith(reason.format(repr(str(target))))
    assert [path.name for path in target.parent.iterdir()] == ["step-000001"]
    assert load_run(folder / f"full {name}").step == 1


@pytest.mark.parametrize(
    ("layout", "step", "elements"), [("ddp", 3, 512), ("fsdp2", 3, 512), ("tensor", 2, 512), ("sequence", 2, 256)]
)
def test_nan_on_one_rank_names_it(folder, two, layout, step, elements):
    """In the third call of a layer there; the sums over ranks that share layers, and their loss, are NaN on both."""
    index = list(NAN_LAYOUTS).index(layout)
    sentences = [each[index] for each in of_check(two, "nan_on_one_rank")]
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(f"at step {step} the loss is nan; the first non-finite tensor is the output of")
    assert f"model.layers.0.mlp ({elements} of {elements} elements) on rank 1;" in sentences[0]
    assert read_metrics(folder / f"nan-{layout}")[-1]["kind"] == "failure"


@pytest.mark.parametrize(
    ("check", "begins"),
    [
        ("altered_scale", "the ranks differ: scaling state 'model.layers.0.mlp.up_proj.input.amax', element 0 is"),
        ("altered_weight", "the ranks differ: weight 'model.layers.0.self_attn.o_proj.weight', element 32 is"),
        ("altered_norm", "the ranks differ: weight 'model.norm.weight', element 3 is"),
        (
            "altered_nan",
            "the ranks differ: scaling state 'model.layers.0.mlp.up_proj.input.amax_history', bits of elem",
        ),
        (
            "altered_step",
            "the ranks differ: the step is 3 on rank 0 and 4 on rank 1; from here on they train different",
        ),
        ("other_generator", "the ranks differ: torch's CPU generator is 'state "),
        ("other_recipe", "the ranks differ: training.recipe is 'rowwise' on rank 0 and 'delayed' on rank 1; start"),
        ("other_checkpoint", "the ranks differ: the newest checkpoint is 'step"),
        ("other_version", "the ranks differ: octavo's version is '9.0' on rank 0 and '9.1' on rank 1; start"),
    ],
)
def test_ranks_that_differ_are_named(two, check, begins):
    first, second = of_check(two, check)
    assert first == second
    assert first.startswith(begins)
    assert " on rank 0 and " in first
    assert " on rank 1; " in first


@pytest.mark.parametrize(
    ("check", "part", "other"),
    [
        ("altered_shard", "'model.layers.0.self_attn.o_proj.weight', shard 1, element 32", 3),
        ("altered_shard_of_norm", "'model.norm.weight', shard 0, element 3", 0),
    ],
)
def test_replicas_of_a_shard_that_differ_are_named(four, check, part, other):
    """Ranks 1 and 3 hold one of two shards of the weights; of slices of the layers, ranks 0 and 1 one of the norms'."""
    said = of_check(four, check)
    assert said == [said[0]] * 4
    assert said[0].startswith(f"the ranks differ: weight {part} is ")
    first, second = sorted((1, other))
    assert f" on rank {first} and " in said[0]
    assert f" on rank {second}; from here on" in said[0]


LAYER = " of layer 'model.layers.0'"


@pytest.mark.parametrize(
    ("index", "waited", "layer"), [(0, "backward", LAYER), (1, "backward", LAYER), (2, f"forward{LAYER}", "")]
)
def test_stalled_rank_is_named(two, index, waited, layer):
    """A rank that sleeps, while the other waits until a time-out of two seconds; lastly for the weights of a layer."""
    first, second = (each[index] for each in of_check(two, "stalled"))
    assert first.startswith(f"rank 1 did not come to a collective in which rank 0 waited in step 2, {waited}, until to")
    assert f"until torch's time-out: rank 1 was last seen in step 2, forward{layer} (asleep.<locals>.sl" in first
    assert "did not come" not in second


def test_settings_that_do_not_fit_the_ranks(two):
    batches, shards, autopilot, blocks, heads, width, positions = of_check(two, "refused")[0]
    assert batches.startswith("an update has 3 micro-batches (training.grad_accumulation), which 2 ranks cannot share")
    assert shards.startswith("[parallel] shard = 4 needs a multiple of 4 ranks, and 2 are running;")
    assert autopilot.startswith("training.autopilot acts on one rank's statistics")
    assert "q_proj' has 16 out_features, which 2 ranks cannot divide into multiples of the 32 elements" in blocks
    assert blocks.endswith("; 64 would work, or another recipe")
    assert heads.startswith("2 ranks cannot share 2 query heads and 1 key-value heads; set model.num_heads and")
    assert width.startswith(
        "2 ranks cannot share 33 channels of the MLP; set model.intermediate_size to a multiple of 2"
    )
    assert positions == "2 ranks cannot share the 15 positions of training.context; set a multiple"
