"""octavo under other people's training loops on two ranks, by DDP and FSDP2, against one process.

One process accumulates the micro-batches that the ranks share. Two terms of a sum have one order, so that everything is
equal bit for bit; but wrappers average gradients after the backward pass, in which each rank's are therefore twice
those of one process. Where shards sum the norm that clips the gradients, numbers differ by the order of that sum.
"""

from itertools import chain

import pytest
import torch

from tests.contract.rank_processes import of_check, results_of_ranks, shared_folder

pytestmark = pytest.mark.long

NORM_ORDER = 1e-6  # relative, as in test_training_ranks.py


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    for package in ("transformers", "accelerate", "pytorch_lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return results_of_ranks("tests.contract.wrappers_program", shared_folder(tmp_path_factory, "wrappers"), 2)


def assert_same_state(one, other, *, gradients=1, bound=0.0):
    assert one.keys() == other.keys()
    for name, value in one.items():
        factor = gradients if ".grad_output.amax" in name else 1
        entries = torch.where(value > 0, value * factor, value)  # -1 marks an entry of a window that is not used
        torch.testing.assert_close(entries, other[name], rtol=bound, atol=0, msg=name)


def assert_run_of_one(ranks, one, losses, *, bound=0.0):
    """Losses, weights and scaling state; losses of each micro-batch, or of steps where the loop averages them."""
    assert len(losses) >= 4
    assert losses == pytest.approx(one["losses"], rel=bound, abs=0)
    for rank in ranks:
        assert_same_state(one["state"], rank["state"], gradients=2, bound=bound)
        for weight, same in zip(one["weights"], rank["weights"], strict=True):
            torch.testing.assert_close(same, weight, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("check", "wrapper"), [("trainer ddp", "DistributedDataParallel"), ("trainer fsdp2", "FSDPLlamaForCausalLM")]
)
def test_transformers_trainer(two, check, wrapper):
    ranks = of_check(two, check)
    (one,) = of_check(two[:1], "of_one_process")
    bound = NORM_ORDER if check == "trainer fsdp2" else 0.0
    assert {run["wrapper"] for rank in ranks for run in rank} == {wrapper}
    for run in (0, 1):  # the whole one, and the one that was resumed after two steps
        assert_run_of_one([rank[run] for rank in ranks], one, ranks[0][run]["losses"], bound=bound)
        assert_same_state(ranks[0][run]["state"], ranks[1][run]["state"])
    assert_same_state(ranks[0][0]["state"], ranks[0][1]["state"])


@pytest.mark.parametrize(
    "check", ["accelerated ddp", "accelerated fsdp2", "accelerated ram", "lightning ddp", "lightning fsdp2"]
)
def test_accelerate_and_lightning(two, check):
    ranks = of_check(two, check)
    (others,) = of_check(two[1:], "of_one_process")
    losses = list(chain.from_iterable(zip(*(rank["losses"] for rank in ranks), strict=True)))
    assert_run_of_one(ranks, others[check.split()[0]], losses)
    assert_same_state(ranks[0]["state"], ranks[1]["state"])


def test_what_refuses_a_cpu(two):
    """Sentences that docs/how-to quotes: accelerate refuses nothing."""
    for lightning, shards in of_check(two, "fsdp_on_a_cpu"):
        assert lightning.startswith("The strategy `fsdp` requires a GPU accelerator, but received `accelerator='cpu'`")
        assert shards == ["DistributedDataParallel", "Linear"]
