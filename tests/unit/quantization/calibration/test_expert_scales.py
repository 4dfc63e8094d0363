"""Static scales of experts: from their own tokens where these are enough, else the largest of the other experts'."""

from collections import Counter

import pytest
import torch

import octavo
from octavo.convert import unfuse_experts
from octavo.errors import ConfigError
from octavo.export.checkpoint_writer import save_quantized
from octavo.formats import E4M3
from octavo.quantization.calibration.expert_scales import fill_in
from octavo.quantization.calibration.result import NO_LINEAR_LAYERS, load_calibration
from tests.tiny_mixtures import EXPERTS, VOCABULARY, mixture, starving
from tests.unit.quantization.calibration.test_observers import recorded

pytest.importorskip("transformers", reason="transformers is not installed: no experts to calibrate")
BLOCK = "model.layers.1.mlp.experts"


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 24), generator=generator) for _ in range(4)]


def test_each_expert_has_the_scale_of_its_own_tokens():
    model = mixture("Qwen3Moe")
    unfuse_experts(model.model)
    found = octavo.calibrate(model, batches(), min_expert_tokens=1)
    layers = {path: model.model.get_submodule(path) for path in found.input_scales}
    assert len(layers) == 2 * (4 + 3 * EXPERTS)
    kept = recorded(model.model, layers, batches(), model.logits)
    for path, tensors in kept.items():
        everything = torch.cat([x.flatten() for x in tensors])
        assert torch.equal(found.input_scales[path], octavo.quantize(everything, E4M3).scale)
    health = {each.path: each for each in found.health}
    rows = {path: sum(x.shape[0] for x in tensors) for path, tensors in kept.items() if ".experts." in path}
    assert {path: health[path].tokens for path in rows} == rows
    assert health["model.layers.0.self_attn.q_proj"].tokens is None
    assert not any(each.borrowed for each in found.health)
    assert (f"{BLOCK}.0.gate_proj", f"{BLOCK}.0.up_proj") in found.groups


@pytest.mark.parametrize("least", [-1, 1.5, True])
def test_a_least_number_of_tokens_below_0_is_refused(least):
    with pytest.raises(ConfigError, match=r"^min_expert_tokens must be a whole number"):
        octavo.calibrate(torch.nn.Linear(4, 4), [torch.zeros(2, 4)], min_expert_tokens=least)


def test_an_expert_without_tokens_has_the_largest_scale_of_the_others(tmp_path):
    model = starving()
    found = octavo.calibrate(model, batches(), min_expert_tokens=1)
    for name in ("w1", "w2", "w3"):
        others = [found.input_scales[f"{BLOCK}.{expert}.{name}"] for expert in range(EXPERTS) if expert != 2]
        assert torch.equal(found.input_scales[f"{BLOCK}.2.{name}"], max(others, key=float))
    health = {each.path: each for each in found.health}
    assert Counter(each.borrowed for each in found.health)[True] == 3
    assert (health[f"{BLOCK}.2.w1"].tokens, health[f"{BLOCK}.2.w1"].amax) == (0, 0.0)
    sentence = (
        f"too few tokens reached '{BLOCK}.2' (0): they have the largest scale of the other experts in their layer"
    )
    assert any(warning.startswith(sentence) for warning in found.warnings())
    found.save(tmp_path / "scales")
    assert load_calibration(tmp_path / "scales").health == found.health
    found.apply(model, hold_weights=True)
    save_quantized(model, tmp_path / "m", format="modelopt", verify_folder=False)
    read = octavo.load_quantized(tmp_path / "m").model
    assert read.get_submodule(f"{BLOCK}.2.w2").input_scale == found.input_scales[f"{BLOCK}.2.w2"]


def test_a_borrowed_scale_has_not_moved():
    model = starving()
    health = octavo.calibrate(model, batches(), min_expert_tokens=10_000).health
    experts = [each for each in health if ".experts." in each.path]
    assert [each for each in experts if not each.borrowed or each.moved is not None] == []
    assert all(each.moved is not None for each in health if each not in experts)


def test_few_tokens_do_not_lower_an_experts_own_scale():
    scales = {f"e.{expert}.w": torch.tensor(scale) for expert, scale in enumerate((1.0, 2.0, 5.0))}
    paths = (*scales, "e.3.w")
    same = dict.fromkeys(paths, paths)
    tokens = dict(zip(paths, (90, 70, 3, 0), strict=True))
    assert fill_in(scales, same, tokens, 64) == {"e.2.w", "e.3.w"}
    assert [float(scales[path]) for path in paths] == [1.0, 2.0, 5.0, 2.0]


def test_as_many_tokens_as_asked_for_are_enough():
    """Such an expert keeps its own scale, and lends it where another has one token less."""
    paths = ("e.0.w", "e.1.w", "e.2.w")
    scales = {"e.0.w": torch.tensor(1.0), "e.1.w": torch.tensor(2.0)}
    tokens = dict(zip(paths, (64, 63, 0), strict=True))
    assert fill_in(scales, dict.fromkeys(paths, paths), tokens, 64) == {"e.1.w", "e.2.w"}
    assert [float(scales[path]) for path in paths] == [1.0, 2.0, 1.0]


def test_where_no_expert_has_enough_all_that_have_any_count():
    scales = {"e.0.w": torch.tensor(1.0), "e.1.w": torch.tensor(2.0)}
    same = dict.fromkeys(("e.0.w", "e.1.w", "e.2.w"), ("e.0.w", "e.1.w", "e.2.w"))
    assert fill_in(scales, same, {"e.0.w": 3, "e.1.w": 4, "e.2.w": 0}, 64) == same.keys()
    assert {float(scale) for scale in scales.values()} == {2.0}


def test_fused_experts_are_named_as_left_out():
    found = octavo.calibrate(mixture("Mixtral"), batches())
    assert found.left_out[BLOCK] == f"{NO_LINEAR_LAYERS}; octavo.convert.unfuse_experts gives experts such layers"
    said = f"left in high precision: '{BLOCK.replace('1', '0')}' and 1 more ({found.left_out[BLOCK]})"
    assert said in found.warnings()
    (one,) = octavo.calibrate(mixture("GptOss", num_hidden_layers=1), batches()).warnings()[-1:]
    assert one == (
        "left in high precision: 'model.layers.0.mlp.experts' (the weights are not those of linear layers and cannot "
        "be: experts with biases or norms are not divided)"
    )
