"""Two processes with gloo between them: slow to start, so there is one test of each kind."""

import pytest

from benchmarks.doctor_selftest.cases import RunKind, SelftestCase, begin
from benchmarks.doctor_selftest.two_ranks import run_on_ranks
from octavo.errors import TrainingError
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import TINY, data_in


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    data = data_in(tmp_path_factory.mktemp("data"))
    return data, begin(TINY, data, 1)


def largest_ratio(room, kind: RunKind, name: str) -> float:
    data, start = room
    found = run_on_ranks(SelftestCase(kind=kind, name=name, seed=1), TINY, data, start)
    table = found.run.series.modules["rank_scale_ratio"]
    return float(table.values[-1].max())


def test_reduced_amaxes_give_both_ranks_one_scale_and_others_do_not(room):
    assert largest_ratio(room, RunKind.CLEAN, "two ranks, delayed") == 1.0
    assert largest_ratio(room, RunKind.FAULT, "amax of the wrong ranks") > 1.8


def test_failed_process_raises_training_error(room):
    data, start = room
    with pytest.raises(TrainingError, match="ended with"):
        run_on_ranks(SelftestCase(kind=RunKind.FAULT, name="no such fault", seed=1), TINY, data, start)
