"""Experts with linear layers of their own: what they compute, and under which names transformers writes them."""

import copy
from typing import Any

import pytest
import torch

import octavo
from octavo.convert import (
    UnfusedExperts,
    choose_layers,
    file_names,
    left_as_they_are,
    routers,
    undivided_experts,
    unfuse_experts,
)
from octavo.errors import ConfigError
from tests.tiny_mixtures import EXPERTS, HIDDEN, INTERMEDIATE, mixture

pytest.importorskip("transformers", reason="transformers is not installed: no experts to divide")
TOKENS = torch.arange(40).view(2, 20)
NAMES = {"Mixtral": ("block_sparse_moe", "w1", "w2", "w3"), "Qwen3Moe": ("mlp", "gate_proj", "down_proj", "up_proj")}
each_model = pytest.mark.parametrize("name", NAMES)


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS).logits


@each_model
def test_the_model_computes_the_same(name):
    model: Any = mixture(name).model
    expected = logits_of(model)
    assert unfuse_experts(model) == {}
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(copy.deepcopy(model)), expected, rtol=1e-5, atol=1e-5)


@each_model
def test_names_and_weights_are_those_that_transformers_writes(name):
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = mixture(name).model
    written = {key: tensor.clone() for key, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    unfuse_experts(model)
    names, state = file_names(model), model.state_dict()
    assert {names.tensor(key) for key in state} == written.keys()
    assert all(torch.equal(tensor, written[names.tensor(key)]) for key, tensor in state.items())
    assert all(names.reversed().tensor(names.tensor(key)) == key for key in state)
    block, gate, down, _ = NAMES[name]
    layer = f"model.layers.1.mlp.experts.3.{down}"
    assert names.tensor(f"{layer}.weight_scale") == f"model.layers.1.{block}.experts.3.{down}.weight_scale"
    assert model.get_submodule(layer).weight.shape == (HIDDEN, INTERMEDIATE)
    assert state[f"model.layers.1.mlp.experts.3.{gate}.weight"].shape == (INTERMEDIATE, HIDDEN)


@each_model
def test_layers_of_experts_are_converted_and_routers_stay(name):
    model: Any = mixture(name).model
    unfuse_experts(model)
    converted, _ = choose_layers(model)
    assert len([path for path in converted if ".experts." in path]) == 2 * EXPERTS * 3
    assert list(routers(model)) == ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"]
    expected = logits_of(model)
    report = octavo.convert(model, "rowwise")
    assert report.shares.multiplications > 0.8  # the head is a sixth
    assert 1e-3 < (logits_of(model) - expected).norm() / expected.norm() < 0.5


def test_an_index_beyond_the_last_expert_stands_for_none():
    x, weights = torch.randn(3, HIDDEN), torch.ones(3, 2)
    model: Any = mixture("Mixtral").model
    index = torch.tensor([[0, 1], [2, EXPERTS], [EXPERTS, EXPERTS]])
    model.set_experts_implementation("eager")  # "grouped_mm" leaves rows of no expert as memory had them
    expected = model.get_submodule("model.layers.0.mlp.experts")(x, index, weights)
    unfuse_experts(model)
    divided = model.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(divided, UnfusedExperts)
    torch.testing.assert_close(divided(x, index, weights), expected, rtol=1e-5, atol=1e-5)
    assert not divided(x, index, weights)[2].any()


def test_experts_that_files_have_in_one_weight_stay():
    model = mixture("GptOss").model
    expected = logits_of(model)
    reasons = unfuse_experts(model)
    assert reasons == dict.fromkeys(
        [f"model.layers.{index}.mlp.experts" for index in (0, 1)], "experts with biases or norms are not divided"
    )
    assert torch.equal(logits_of(model), expected)
    assert file_names(model).changed == {}
    assert undivided_experts(model) == reasons
    assert undivided_experts(mixture("Mixtral").model) == {}


def test_experts_that_run_a_recipe_are_restored_first():
    model = mixture("Mixtral").model
    octavo.convert(model, "tensorwise")
    in_fp8 = logits_of(model)
    with pytest.raises(ConfigError, match=r"^the experts 'model.layers.0.mlp.experts' run a recipe .* octavo.restore"):
        unfuse_experts(model)
    assert torch.equal(logits_of(model), in_fp8)
    octavo.restore(model)
    assert unfuse_experts(model) == {}


def test_what_handles_linear_layers_alone_names_experts():
    model = mixture("Mixtral").model
    sentence = "model.layers.0.mlp.experts and 1 more stay in high precision: the weights of experts and Conv1D are no"
    assert left_as_they_are(model).startswith(sentence)
    unfuse_experts(model)
    assert not left_as_they_are(model)
