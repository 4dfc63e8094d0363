"""A rank that is killed at points of a step and of a save: what the others do, and the run that continues."""

import signal
from functools import partial

import pytest

from tests.contract.killed_ranks_program import KILL_STEP, LOST, VICTIMS, config
from tests.contract.rank_processes import once, results_of_ranks, shared_folder
from tests.contract.test_training_ranks import assert_same, numbers
from tests.contract.training_ranks_program import run
from tests.unit.training.tiny_runs import tiny_data

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = shared_folder(tmp_path_factory, "killed ranks")
    once(folder / "begun", partial(begin, folder))
    return folder


def begin(folder):
    tiny_data(folder)
    assert run(config(1), folder, "one") == ""


@pytest.fixture(scope="module")
def exit_codes(folder):
    return results_of_ranks("tests.contract.killed_ranks_program", folder, 1)[0]


@pytest.mark.parametrize("place", VICTIMS)
def test_a_killed_rank_loses_nothing(folder, exit_codes, place):
    """The other rank ends with a lost connection; two new ranks end with the run of one process, bit for bit."""
    (killed, continued), (victim, shard) = exit_codes[place], VICTIMS[place]
    assert (killed[victim], killed[1 - victim]) == (-signal.SIGKILL, LOST)
    assert continued == [0, 0]
    lines = numbers(folder / place)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, config(1).training.steps + 1))
    assert config(1).training.steps > KILL_STEP
    assert_same(folder / "one", folder / place, norms=shard == 1)
