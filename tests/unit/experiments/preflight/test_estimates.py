"""Memory, shapes and the gap: numbers that can be counted otherwise, and what becomes a finding."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from octavo.doctor import Thresholds
from octavo.errors import ConfigError
from octavo.experiments import Origin
from octavo.experiments.paired import PairedRuns
from octavo.experiments.preflight import memory
from octavo.experiments.preflight.gap import gap_check
from octavo.experiments.preflight.memory import memory_check, saved_bytes
from octavo.experiments.preflight.probe import Probe
from octavo.experiments.preflight.shapes import shapes_check, time_ratios

LIMITS = Thresholds()


def with_training(origin, **changes):
    return Origin(config=origin.config.with_training(**changes), data=origin.data)


def test_saved_bytes_grow_with_the_batch_and_shrink_with_fp8(origin):
    wide, narrow = (saved_bytes(Probe(with_training(origin, recipe="fp32", batch_size=n))) for n in (8, 4))
    assert wide == pytest.approx(2 * narrow, rel=0.02)  # the table of positions is all that does not double
    fp8 = saved_bytes(Probe(with_training(origin, recipe="tensorwise", precision="fp32", batch_size=8)))
    assert fp8 < wide


def test_saved_bytes_include_the_logits(origin):
    probe = Probe(with_training(origin, recipe="fp32"))
    assert saved_bytes(probe) >= probe.inputs.numel() * origin.data.vocab_size * 4


def test_memory_that_is_kept_twice_counts_once_and_parameters_not_at_all():
    layer = torch.nn.Linear(4, 1, bias=False)

    def loss():
        doubled = 2 * layer.weight
        return (doubled * doubled.view(4, 1).t() * layer.weight).sum()

    probe = SimpleNamespace(model=layer, step=nullcontext, loss=loss)
    product, doubled = 4 * 4, 4 * 4  # bytes of each, in FP32
    assert saved_bytes(cast("Probe", probe)) == product + doubled


def test_too_little_memory_fails(origin, monkeypatch):
    monkeypatch.setattr(memory, "memory_bytes", lambda _device: 1 << 16)
    (finding,) = memory_check(Probe(origin)).findings
    assert (finding.code, finding.severity) == ("memory", "fail")
    assert finding.evidence["available_mib"] == 1 / 16


def test_enough_memory_says_how_much(origin):
    check = memory_check(Probe(origin))
    assert check.findings == ()
    assert "for parameters and optimizer" in check.said


def test_every_distinct_shape_is_timed_once(origin):
    assert set(time_ratios(Probe(origin))) == {(16, 16), (16, 8), (16, 32), (32, 16)}


def test_small_layers_are_one_note(origin):
    (finding,) = shapes_check(Probe(origin), LIMITS, step=1).findings
    assert (finding.code, finding.severity) == ("slow-layer", "note")
    assert len(finding.places) == finding.evidence["layers"]
    assert "q_proj" in finding.cause
    assert "down_proj" in finding.cause
    assert shapes_check(Probe(with_training(origin, recipe="bf16")), LIMITS, step=1).findings == ()


@pytest.fixture
def losing(monkeypatch):
    """Let FP8 lie so many nats above BF16's 4 nats under each seed."""

    def install(*gaps):
        monkeypatch.setattr(PairedRuns, "_loss", lambda _self, high, order: 4.0 + (0.0 if high else gaps[order]))

    return install


@pytest.mark.parametrize(
    ("gaps", "severity"),
    [
        ((0.050, 0.052), "fail"),  # 1.3 %
        ((0.020, 0.021), "warn"),  # 0.5 %
        ((0.005, 0.006), None),  # 0.14 %, what FP8 may cost
        ((0.20, -0.10), None),  # 1.3 %, but chance
        ((-0.05, -0.05), None),
    ],
)
def test_a_gap_counts_when_it_is_larger_than_fp8_may_cost_and_than_chance(origin, losing, gaps, severity):
    losing(*gaps)
    check = gap_check(origin, LIMITS, steps=2, orders=2)
    assert [finding.severity for finding in check.findings] == ([] if severity is None else [severity])
    mean = sum(gaps) / 2
    assert f"{mean:+.4f} ± {abs(gaps[0] - gaps[1]) / 2:.4f} nats" in check.said
    assert f"a ratio of {1 + mean / 4:.4f}" in check.said


@pytest.mark.parametrize(("warmup", "known"), [(0, True), (2, True), (3, False), (100, False)])
def test_there_is_no_estimate_inside_a_warm_up(origin, losing, warmup, known):
    losing(0.0, 0.0)
    check = gap_check(with_training(origin, warmup=warmup), LIMITS, steps=4, orders=2)
    assert check.is_known == known
    assert check.said.startswith("no estimate: the updates that count begin at 3, in the warm-up of") != known
    losing(0.05, 0.05)
    check = gap_check(with_training(origin, warmup=warmup), LIMITS, steps=4, orders=2)
    assert check.is_known
    assert check.findings, "a gap is one, whenever it shows"


def test_one_seed_is_refused(origin):
    with pytest.raises(ConfigError, match="orders must be a whole number of at least 2"):
        gap_check(origin, LIMITS, steps=2, orders=1)


def test_without_fp8_there_is_no_gap(origin):
    assert gap_check(with_training(origin, recipe="bf16"), LIMITS, steps=2, orders=2).findings == ()
