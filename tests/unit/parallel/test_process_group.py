"""A process's place in a launch, by the variables of launchers, and what ranks note at its store."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from octavo.errors import ConfigError, TrainingError
from octavo.parallel.process_group import Launch, Place, _agreed_attempt, joined, place_of
from octavo.parallel.ranks import Ranks

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400",
    "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "40019"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        (
            TORCHRUN,
            Place(rank=5, size=8, local_rank=1, host="node0", port=29400, local_size=4, has_store=True),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"},
            Place(rank=1, size=2, host="job-0", port=23456),
        ),
        ({**STEP, "SLURM_STEP_NODELIST": "a1"}, Place(rank=0, size=2, host="a1", port=20019)),
        ({**STEP, "SLURM_STEP_NODELIST": "cn-[007,9-12]"}, Place(rank=0, size=2, host="cn-007", port=20019)),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[04-05,9]-ib,x"}, Place(rank=0, size=2, host="gpu04-ib", port=20019)),
        ({**STEP, "SLURM_STEP_NODELIST": "r[2,4]n[10-12]"}, Place(rank=0, size=2, host="r2n10", port=20019)),
        ({**STEP, "SLURM_STEP_NODELIST": "x,y3"}, Place(rank=0, size=2, host="x", port=20019)),
        ({**STEP, "MASTER_ADDR": "m", "MASTER_PORT": "77"}, Place(rank=0, size=2, host="m", port=77)),
        # A batch script has these, without srun; a shell that srun has started is a step of one task.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_place(variables, place):
    assert place_of(variables) == place


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}, {**STEP, "SLURM_STEP_NODELIST": "["}],
)
def test_variables_that_say_nothing(variables):
    with pytest.raises(ConfigError, match="the launcher's variables cannot be read: "):
        place_of(variables)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def test_ranks_that_do_not_come_are_named():
    place = Place(rank=0, size=3, port=free_port())
    with pytest.raises(TrainingError) as error, joined(place, timeout=timedelta(seconds=0.5)):
        pass
    assert str(error.value).startswith(
        f"ranks 1, 2 of 3 did not come to localhost:{place.port} in 0.5 seconds: start as many"
    )


def test_a_first_rank_that_cannot_be_reached_is_named():
    place = Place(rank=1, size=2, port=free_port())
    with pytest.raises(TrainingError) as error, joined(place, timeout=timedelta(seconds=0.5)):
        pass
    assert str(error.value).startswith(f"rank 1 cannot reach the first rank at localhost:{place.port}: ")


def agreed(store, *ranks: int, seconds: float) -> list[int]:
    """The attempts of those of three ranks that come."""
    places = [Place(rank=rank, size=3) for rank in ranks]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda place: _agreed_attempt(place, store, timedelta(seconds=seconds)), places))


def test_attempts_are_counted_over_those_that_were_killed_while_ranks_came():
    """An attempt whose first rank was killed is open for the next one's others, which may come before its first."""
    store = HashStore()
    assert agreed(store, 2, 1, 0, seconds=30) == [0, 0, 0]
    with pytest.raises(TrainingError, match=r"^rank 2 of 3 did not come"):
        agreed(store, 0, 1, seconds=0.5)
    with pytest.raises(TrainingError, match=r"^rank 2 of 3 did not come"):
        agreed(store, 1, seconds=0.5)
    assert agreed(store, 2, 1, 0, seconds=30) == [2, 2, 2]
    with pytest.raises(TrainingError, match=r"^rank 0 of 3 did not come"):
        agreed(store, 1, seconds=0.5)


def launches(attempt: int, store: HashStore) -> list[Launch]:
    return [Launch(Ranks(rank=rank, size=2), store, attempt) for rank in (0, 1)]


def test_notes_outlive_a_restart_and_counts_do_not():
    store = HashStore()
    first, second = launches(0, store)
    assert not second.was_noted("begun")
    first.note("begun")
    assert [first.has_failed(), first.note_failure(), second.note_failure(), second.has_failed()] == [
        False,
        True,
        False,
        True,
    ]
    again, _ = launches(1, store)
    assert again.was_noted("begun")
    assert not again.has_failed()


def test_others_follow_the_first_rank_and_learn_of_its_failure():
    first, second = launches(0, HashStore())
    order = []
    with first.first_goes_ahead("data"):
        order.append(0)
    with second.first_goes_ahead("data"):
        order.append(1)
    assert order == [0, 1]
    with pytest.raises(ValueError, match="mine"), first.first_goes_ahead("more"):
        raise ValueError("mine")
    assert second.has_failed()
    with pytest.raises(distributed.DistError, match="the first rank has failed"), second.first_goes_ahead("more"):
        pass
