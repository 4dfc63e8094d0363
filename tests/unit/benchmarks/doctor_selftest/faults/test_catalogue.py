"""Every fault on a tiny model: it runs, it leaves nothing behind, and the doctor has a code for it."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks.doctor_selftest.cases import RunKind, SelftestCase, begin, run_case
from benchmarks.doctor_selftest.faults import FAULTS
from octavo.doctor.findings import CAUSES, Finding, Severity
from octavo.functional import saved_operands
from octavo.nn import Linear
from octavo.training import loop
from tests.unit.benchmarks.doctor_selftest.tiny_trainer import TINY, data_in

ALONE = [fault for fault in FAULTS if fault.ranks == 1]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    data = data_in(tmp_path_factory.mktemp("data"))
    return data, begin(TINY, data, 1)


def patched_names() -> tuple[object, ...]:
    closing = vars(loop)["update_scales"]
    return saved_operands.cast_operand, saved_operands.cast_both_ways, closing, loop.Trainer._clip


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 16
    assert all({fault.code, *fault.also} <= CAUSES.keys() for fault in FAULTS)
    assert sum(fault.is_remediable for fault in FAULTS) >= 10


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.name)
def test_it_runs_and_leaves_nothing_behind(fault, room):
    data, start = room
    before, kept = patched_names(), []
    genuine = loop.Trainer.__init__

    def remember(trainer, *args, **keywords):
        genuine(trainer, *args, **keywords)
        kept.append((trainer, list(trainer.model.named_modules())))

    with mock.patch.object(loop.Trainer, "__init__", remember):
        found = run_case(SelftestCase(kind=RunKind.FAULT, name=fault.name, seed=1), TINY, data, start)
    assert patched_names() == before
    ((trainer, modules),) = kept
    assert [path for path, _ in trainer.model.named_modules()] == [path for path, _ in modules]
    for _, module in modules:
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not isinstance(module, Linear) or not any(map(vars(module).get, ("_layer_scaling", "watch")))
    assert (found.run.failure is None) or "finite" in found.run.failure
    assert all(torch.isfinite(torch.tensor([loss for _, loss in found.run.losses])))


def test_a_fault_is_named_by_code_place_and_role():
    fault = next(one for one in FAULTS if one.name == "wrong scale")
    right = Finding(code="inexact-amax", severity=Severity.FAIL, path="model.layers.2.mlp.up_proj", role="input")
    assert fault.is_named_by(right, 2)
    assert not fault.is_named_by(right, 1)
    assert not fault.is_named_by(replace(right, code="saturation"), 2)
    assert not fault.is_named_by(replace(right, path="model.layers.2.mlp.gate_proj"), 2)
    assert not fault.is_named_by(replace(right, role="weight"), 2)
