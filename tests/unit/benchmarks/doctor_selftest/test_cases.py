import pytest
import torch

from benchmarks.doctor_selftest.cases import CLEAN, RunKind, SelftestCase, begin, plan_of, run_case
from benchmarks.doctor_selftest.faults import FAULTS, nothing
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import TINY, data_in


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    data = data_in(tmp_path_factory.mktemp("data"))
    return data, begin(TINY, data, 1)


def test_there_are_clean_runs_of_every_recipe():
    assert len(CLEAN) >= 20
    recipes = {plan.training.get("recipe", "tensorwise") for plan in CLEAN.values()}
    assert {"tensorwise", "delayed", "delayed_te", "rowwise", "blockwise", "mxfp8", "rowwise_hp_grad_weight"} == recipes


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_cured_run_keeps_the_fault_and_a_reference_does_not(fault):
    faulty, cured, reference = (
        plan_of(SelftestCase(kind=kind, name=fault.name, seed=0))
        for kind in (RunKind.FAULT, RunKind.CURED, RunKind.REFERENCE)
    )
    assert cured.around == faulty.around == (fault.workload, fault.inject)
    assert reference.around == (fault.workload,)
    assert not reference.recipes
    assert not reference.training
    assert fault.inject is not nothing or faulty.training or faulty.recipes


def test_runs_of_a_seed_are_the_same_to_the_last_bit_and_start_where_it_begins(room):
    data, start = room
    case = SelftestCase(kind=RunKind.CLEAN, name="tensorwise, learning rate 0.0015", seed=1)
    one, other = (run_case(case, TINY, data, start) for _ in range(2))
    assert one.run.losses == other.run.losses
    assert one.run.losses[0][0] == TINY.start_steps + 1
    again = begin(TINY, data, 1)
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in start.weights.items())
