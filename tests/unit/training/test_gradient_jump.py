"""Jumps of gradients: runs of dynamic scales keep every bit, delayed scales meet what their history does not know."""

from typing import Any, cast

import pytest
import torch

from octavo.errors import ConfigError
from octavo.training.loop import Trainer, train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import load_run
from octavo.training.setup import build_model
from tests.unit.training.tiny_runs import comparable, tiny_config

JUMPS = ((0.5, 16), (0.7, 0))  # of steps 4 and 5 of 6


def trained(folder, data, **training):
    config = tiny_config(**training)
    train(config, folder, data=data)
    return comparable(read_metrics(folder)), load_run(folder).model.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "tensorwise", "mxfp8"])
def test_without_history_a_jump_changes_no_bit(tmp_path, data, recipe):
    lines, weights = trained(tmp_path / "with", data, recipe=recipe, gradient_jumps=JUMPS, statistics_interval=0)
    expected, same = trained(tmp_path / "without", data, recipe=recipe, statistics_interval=0)
    assert lines == expected
    assert all(torch.equal(weights[name], same[name]) for name in same)


def test_delayed_scales_meet_the_jump_unprepared(tmp_path, data):
    """Before the head, gradients are not cast yet: their amax is that of the other run, times the power."""
    amaxes: dict[str, list[float]] = {}
    norms = {}
    for name, jumps in (("with", JUMPS), ("without", ())):
        config = tiny_config(recipe="delayed", recipe_options={"history_length": 1}, gradient_jumps=jumps)
        model, converted = build_model(config, data.vocab_size)
        (tmp_path / name).mkdir()
        trainer = Trainer(config, tmp_path / name, model, data=data, on_event=lambda _: None, converted=converted)
        model.train()
        log = trainer.open_log()
        amaxes[name], layer = [], cast("Any", model.model.layers[-1]).mlp.down_proj
        for _ in range(4):
            trainer.train_step(log)
            amaxes[name].append(layer.amax_history.amax[2].item())
        norms[name] = layer.weight.grad.norm().item()
        log.close()
    assert amaxes["with"][:3] == amaxes["without"][:3]
    assert amaxes["with"][3] == amaxes["without"][3] * 2**16
    losses = [[line["loss"] for line in read_metrics(tmp_path / name) if line["kind"] == "step"] for name in amaxes]
    assert losses[0] == losses[1]
    assert norms["with"] < norms["without"] / 2  # the largest gradients saturated


@pytest.mark.parametrize(
    ("jumps", "sentence"),
    [
        (((0.0, 3),), "must increase, each above 0 and below 1, not 0.0"),
        (((0.5, 3), (0.5, 0)), "must increase"),
        (((0.5, 65),), "must be -64 to 64, not 65"),
    ],
)
def test_jumps_that_make_no_sense_are_refused(jumps, sentence):
    with pytest.raises(ConfigError, match=sentence):
        tiny_config(gradient_jumps=jumps)
