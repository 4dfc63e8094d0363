"""What each recipe does to a model and to what surrounds it."""

from contextlib import nullcontext

import pytest
import torch

import octavo
from octavo.errors import ConfigError
from octavo.models import Llama
from octavo.training.config import Device, Precision, TrainingConfig
from octavo.training.precision import apply_recipe, resolve_device, surroundings
from tests.unit.training.tiny_runs import MODEL

CPU = torch.device("cpu")


def converted(**training):
    model = Llama(MODEL.llama(vocab_size=50, max_positions=8))
    return model, apply_recipe(model, TrainingConfig(**training))


def recipes_of(model):
    return {path: m.recipe.name for path, m in model.named_modules() if isinstance(m, octavo.nn.Linear)}


def test_fp32_converts_nothing():
    model, report = converted(recipe="fp32")
    assert report is None
    assert recipes_of(model) == {}
    assert isinstance(surroundings(TrainingConfig(recipe="fp32"), CPU, model), nullcontext)


def test_bf16_takes_every_linear_and_the_numbers_are_autocasts():
    model, _ = converted(recipe="bf16")
    assert set(recipes_of(model).values()) == {"bf16"}
    assert len(recipes_of(model)) == 8
    plain = Llama(MODEL.llama(vocab_size=50, max_positions=8))
    tokens = torch.randint(0, 50, (2, 8))
    with surroundings(TrainingConfig(recipe="bf16"), CPU, model):
        ours, theirs = model(tokens), plain(tokens)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    # The same products of BF16 operands; the order of sums may move a result by an ulp of BF16, 2^-8.
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=2**-12)


def test_fp8_takes_the_layers_and_leaves_the_head_in_bf16():
    model, report = converted(recipe="tensorwise")
    recipes = recipes_of(model)
    assert recipes.pop("lm_head") == "bf16"
    assert set(recipes.values()) == {"tensorwise"}
    assert report is not None
    assert set(report.converted) == set(recipes)
    assert torch.is_autocast_enabled("cpu") is False
    with surroundings(TrainingConfig(recipe="tensorwise"), CPU, model):
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_fp8_in_fp32_surroundings():
    model, _ = converted(recipe="rowwise", precision=Precision.FP32)
    assert "lm_head" not in recipes_of(model)
    assert isinstance(surroundings(TrainingConfig(recipe="rowwise", precision=Precision.FP32), CPU, model), nullcontext)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_in_fp16_surroundings(recipe):
    training = TrainingConfig(recipe=recipe, precision=Precision.FP16)
    model, _ = converted(recipe=recipe, precision=Precision.FP16)
    with surroundings(training, CPU, model):
        logits = model(torch.randint(0, 50, (2, 8)))
    assert logits.dtype is torch.float16
    assert recipes_of(model)["lm_head"] == "bf16"  # the preset that casts nothing


def test_options_patterns_and_manual_updates():
    model, report = converted(recipe="delayed", recipe_options={"history_length": 3}, skip=("*.q_proj",))
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.recipe.name == "bf16"
    assert layer.self_attn.k_proj.recipe.history.length == 3
    assert layer.self_attn.k_proj.scale_updates.manual
    assert report is not None
    assert "skip pattern" in report.skipped["model.layers.0.self_attn.q_proj"]


def test_overrides_head_and_cached_weights():
    down, q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    model, report = converted(
        recipe="delayed", recipe_options={"history_length": 3}, overrides={down: "bf16", "*.self_attn.*": "rowwise"},
        convert_head=True, cache_weights=True,
    )  # fmt: skip
    recipes = recipes_of(model)
    assert (recipes[down], recipes[q], recipes["lm_head"]) == ("bf16", "rowwise", "delayed")
    assert report is not None
    assert set(report.overridden.values()) == {"bf16", "rowwise"}
    assert all(m.weight_cache is not None for m in model.modules() if isinstance(m, octavo.nn.Linear))


def test_an_override_by_the_runs_own_recipe_keeps_its_options():
    overrides = {"*.q_proj": "delayed", "*": "rowwise"}
    model, _ = converted(recipe="delayed", recipe_options={"history_length": 3}, overrides=overrides)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.recipe.history.length == 3
    assert attention.k_proj.recipe.name == "rowwise"


def test_an_override_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"pattern 'layers.7.\*' matches no layer"):
        converted(recipe="tensorwise", overrides={"layers.7.*": "bf16"})
    with pytest.raises(ConfigError, match="override 'lm_head' has no effect"):
        converted(recipe="tensorwise", overrides={"lm_head": "rowwise"})


@pytest.mark.parametrize("precision", list(Precision))
def test_new_settings_replace_all_earlier_ones(precision):
    """Head and overrides on and off again; the delayed layers that stay keep what they have seen."""
    model = Llama(MODEL.llama(vocab_size=50, max_positions=8))
    first = TrainingConfig(recipe="delayed", precision=precision)
    apply_recipe(model, first)
    before = recipes_of(model)
    with surroundings(first, CPU, model):
        model(torch.randint(0, 50, (2, 8))).float().square().mean().backward()
    octavo.update_scales(model)
    state = octavo.scaling_state(model)
    apply_recipe(model, TrainingConfig(recipe="delayed", precision=precision, convert_head=True))
    apply_recipe(model, TrainingConfig(recipe="delayed", precision=precision, overrides={"*.q_proj": "bf16"}))
    after = octavo.scaling_state(model)
    assert recipes_of(model)["lm_head"] == "bf16"
    assert {key for key in state if key not in after} == {key for key in state if ".q_proj." in key}
    assert all(torch.equal(state[key], tensor) for key, tensor in after.items())
    apply_recipe(model, first)
    assert recipes_of(model) | {"lm_head": "bf16"} == before | {"lm_head": "bf16"}


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_device(d).type for d in (Device.AUTO, Device.CPU, Device.CUDA)] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [resolve_device(d).type for d in (Device.AUTO, Device.CPU)] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_device(Device.CUDA)
