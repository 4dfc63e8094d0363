"""One micro-batch twice: the same bits, or the name of the first tensor that is not the same."""

import itertools

import pytest
import torch

from octavo import scaling_state, update_scales
from octavo.doctor import Thresholds
from octavo.experiments.preflight.probe import Probe
from octavo.experiments.preflight.replayed import digest, replay_check, replayed

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def probe(origin):
    return Probe(origin)


def check(probe):
    return replay_check(probe, Thresholds(), step=1)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "tensorwise", "delayed", "mxfp8"])
def test_every_recipe_replays_to_the_last_bit(origin, recipe):
    own = type(origin)(config=origin.config.with_training(recipe=recipe), data=origin.data)
    found = check(Probe(own))
    assert found.findings == ()
    assert "bit for bit" in found.said


def test_a_replay_leaves_no_trace_in_scaling_state(probe):
    before = scaling_state(probe.model)
    replayed(probe)
    update_scales(probe.model)  # which would make a step's amaxes past, if one had been left
    after = scaling_state(probe.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_generators_are_part_of_the_state(probe):
    """Operations that draw on torch's generator draw the same again, as in a resumed run."""
    probe.model.get_submodule(UP).register_forward_hook(lambda _m, _x, out: torch.nn.functional.dropout(out, 0.5))
    assert check(probe).findings == ()


@pytest.mark.parametrize(("size", "severity"), [(0.008, "warn"), (10.0, "fail")])
def test_the_first_output_that_differs_is_named(probe, size, severity):
    count = itertools.count()
    probe.model.get_submodule(UP).register_forward_hook(lambda _m, _x, out: out * (1 + size * next(count)))
    (finding,) = check(probe).findings
    assert (finding.code, finding.path, finding.severity) == ("nondeterministic", UP, severity)
    assert f"the first is the output of {UP}" in finding.cause


def test_a_backward_that_differs_is_named_where_its_gradient_arrives(probe):
    count = itertools.count()

    def disturb(_module, _inputs, out):
        out.register_hook(lambda grad: grad * (1 + 0.1 * next(count)))

    down = "model.layers.0.mlp.down_proj"
    probe.model.get_submodule(down).register_forward_hook(disturb)
    (finding,) = check(probe).findings
    assert "gradient of the output" in finding.cause
    assert finding.path in (down, UP)


def test_a_digest_knows_every_bit():
    x = torch.zeros(3)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(-x)
    assert digest(torch.full((3,), torch.nan)) == digest(torch.full((3,), torch.nan))
    assert digest(torch.arange(6.0).reshape(2, 3).t()) == digest(torch.arange(6.0).reshape(2, 3).t().contiguous())
