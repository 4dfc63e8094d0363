"""Group testing: the right layers, their shares, and where it stops; on made-up losses, then on a model with faults."""

from contextlib import contextmanager

import pytest
import torch

from octavo.errors import ConfigError
from octavo.experiments import Origin, bisect
from octavo.experiments.paired import PairedRuns
from tests.unit.training.tiny_runs import tiny_config, tiny_data

BLOCK = "model.layers.0"
NOISE = 1e-4


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return Origin(config=tiny_config(recipe="tensorwise"), data=tiny_data(tmp_path_factory.mktemp("data")))


@pytest.fixture
def losing(monkeypatch):
    """Let a run's loss be 2 nats and what the layers that are not in BF16 cost, give or take NOISE."""

    def install(cost):
        def loss(self, high, order):
            self.made += 1
            jitter = NOISE * ((len(high) * 7 + order * 3) % 5 - 2) / 2
            return 2.0 + cost(frozenset(self.layers) - high) + jitter

        monkeypatch.setattr(PairedRuns, "_loss", loss)

    return install


def test_two_layers_are_found_with_their_shares(origin, losing):
    costs = {f"{BLOCK}.self_attn.k_proj": 0.06, f"{BLOCK}.mlp.down_proj": 0.02}
    losing(lambda low: sum(costs.get(path, 0.0) for path in low))
    found = bisect(origin, steps=2)
    assert found.gap.nats == pytest.approx(0.08, abs=2 * NOISE)
    assert [part.layers for part in found.parts] == [(path,) for path in costs]
    assert [part.share for part in found.parts] == pytest.approx([0.75, 0.25], abs=0.01)
    assert found.layers == 7
    assert found.runs < 2 * 2**3 * 2  # fewer than every group of a tree of depth 3, under two orders


def test_layers_that_only_hurt_together_are_named_together(origin, losing):
    """Either of them in FP8 costs everything: no half saves anything, and nothing is blamed on one."""
    pair = {f"{BLOCK}.self_attn.q_proj", f"{BLOCK}.mlp.up_proj"}
    losing(lambda low: 0.05 if pair & low else 0.0)
    (part,) = bisect(origin, steps=2).parts
    assert len(part.layers) == 7
    assert part.share == pytest.approx(1.0)


def test_a_gap_in_the_noise_is_not_divided(origin, losing):
    losing(lambda low: 0.2 * NOISE * len(low) / 7)
    found = bisect(origin, steps=2)
    assert not found.is_measurable
    assert found.parts == ()
    assert found.runs == 2 * 4  # all in FP8, all in BF16, each half


def test_fp8_that_trains_better_is_no_gap(origin, losing):
    losing(lambda low: -0.01 * len(low))
    assert bisect(origin, steps=2).parts == ()


@pytest.mark.parametrize("arguments", [{"steps": 1}, {"orders": 1}])
def test_too_few_steps_or_orders_are_refused(origin, arguments):
    with pytest.raises(ConfigError, match="at least 2, not 1"):
        bisect(origin, **arguments)


def test_a_recipe_that_casts_nothing_is_refused(origin):
    plain = Origin(config=tiny_config(recipe="bf16"), data=origin.data)
    with pytest.raises(ConfigError, match="casts no layer to FP8"):
        bisect(plain)


@pytest.mark.long
def test_a_layer_that_is_broken_in_fp8_is_found_by_training(origin):
    bad = f"{BLOCK}.mlp.down_proj"

    @contextmanager
    def fault(trainer):
        layer = trainer.model.get_submodule(bad)
        if layer.recipe.is_high_precision:
            yield
            return
        handle = layer.register_forward_hook(lambda _module, _inputs, out: out + 10 * torch.randn_like(out))
        yield
        handle.remove()

    made: list[int] = []
    learning = Origin(config=origin.config.with_training(lr=3e-2), data=origin.data)
    found = bisect(learning, steps=12, around=fault, on_run=made.append)
    assert [part.layers for part in found.parts] == [(bad,)]
    assert found.parts[0].share == pytest.approx(1.0, abs=0.1)
    assert made == list(range(1, found.runs + 1))
