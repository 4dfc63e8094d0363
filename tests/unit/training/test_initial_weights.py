"""µP's initial weights, learning rates and decay against the formulas written out; channels that begin aligned."""

import dataclasses
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.training.loop import train
from octavo.training.run_folder import load_run
from octavo.training.setup import build_model, build_optimizer
from tests.unit.training.tiny_runs import MODEL, tiny_config


def config_of(base, **model):
    config = tiny_config(mu_base_width=base, weight_decay=0.5)
    return dataclasses.replace(config, model=dataclasses.replace(MODEL, **model))


def test_weights_and_rates_follow_the_width():
    """A model four times as wide as its base: std / 2 in layers, / 4 in the head; a quarter of the learning rate."""
    config = config_of(4)
    model, _ = build_model(config, 300)
    usual = Llama(config.model.llama(vocab_size=300, max_positions=16), seed=0).state_dict()
    optimizer = build_optimizer(model, config.training)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_matrix, group = parameter.ndim == 2 and "embed" not in name, group_of[id(parameter)]
        divisor = (4 if name == "lm_head.weight" else 2) if is_matrix else 1
        assert torch.equal(parameter, usual[name] / divisor), name
        assert group.get("lr_factor", 1.0) == (0.25 if is_matrix else 1.0), name
        assert group["weight_decay"] == (2.0 if is_matrix else 0.5 if parameter.ndim == 2 else 0.0), name


def test_a_step_is_adamws_with_these_rates(tmp_path, data):
    """AdamW's first step is −lr · (sign(gradient) + decay · weight), within eps."""
    config = config_of(4)
    config = config.with_training(steps=1, warmup=0, eps=1e-30, clip_norm=0.0)
    before = {name: weight.clone() for name, weight in build_model(config, data.vocab_size)[0].state_dict().items()}
    train(config, tmp_path / "run", data=data)
    after, lr = load_run(tmp_path / "run").model.state_dict(), config.training.min_lr
    for name in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        rate, decay = (lr, 0.5) if "embed" in name else (lr / 4, 2.0)
        signs = (after[name] - before[name] * (1 - rate * decay)) / rate
        moved = signs.abs() > 0.5  # tokens that are not in the batch have no gradient
        assert moved.any()
        torch.testing.assert_close(signs[moved].abs(), torch.ones(int(moved.sum())), rtol=0, atol=2e-3)


def test_the_base_width_changes_nothing(tmp_path, data):
    runs = {}
    for base in (0, 16):
        train(tiny_config(mu_base_width=base), tmp_path / str(base), data=data)
        runs[base] = load_run(tmp_path / str(base)).model.state_dict()
    assert all(torch.equal(runs[0][name], runs[16][name]) for name in runs[0])


def test_aligned_channels_are_equal_and_large():
    model, _ = build_model(tiny_config(aligned_channels=3), 300)
    usual, _ = build_model(tiny_config(), 300)
    mlp: Any = model.model.layers[0].mlp
    same: Any = usual.model.layers[0].mlp
    assert torch.equal(mlp.gate_proj.weight[:3], 16 * same.gate_proj.weight[:3])
    assert torch.equal(mlp.up_proj.weight[:3], mlp.gate_proj.weight[:3])
    assert torch.equal(mlp.gate_proj.weight[3:], same.gate_proj.weight[3:])
    assert torch.equal(mlp.up_proj.weight[3:], same.up_proj.weight[3:])


def test_what_does_not_fit_the_model_is_refused():
    with pytest.raises(ConfigError, match="needs a head of its own"):
        config_of(8, tie_embeddings=True)
    with pytest.raises(ConfigError, match=r"at most model.intermediate_size \(32\), not 33"):
        tiny_config(aligned_channels=33)
