"""The BF16 reference, and forward passes from a block on."""

import pytest
import torch

from octavo.convert import convert
from octavo.errors import ConfigError
from octavo.language_model import logits_of
from octavo.quantization.sensitivity.bf16_reference import ResumableForward, in_bf16
from octavo.quantization.sensitivity.units import applied, units_of
from tests.unit.quantization.sensitivity.small_models import small_llama, windows_of


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def broken_off(model):
    with in_bf16(model):
        raise RuntimeError("on the way")


def test_model_is_restored_after_in_bf16_even_after_an_error():
    model = small_llama().train()
    before, classes = state(model), [type(module) for module in model.modules()]
    with in_bf16(model):
        assert not any(module.training for module in model.modules())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    with pytest.raises(RuntimeError, match="on the way"):
        broken_off(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [type(module) for module in model.modules()] == classes
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_converted_model_is_refused():
    model = small_llama()
    convert(model, "rowwise")
    with (
        pytest.raises(ConfigError, match=r"layer 'model.layers.0.self_attn.q_proj' is already octavo's"),
        in_bf16(model),
    ):
        pass


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_from_a_block_on_gives_the_whole_pass_to_the_bit(tied, monkeypatch):
    model = small_llama(tied=tied, layers=3)
    tokens = windows_of(model, 1)
    with in_bf16(model):
        stages = ResumableForward(model, tokens)
        assert torch.equal(stages.logits, logits_of(model, tokens))
        for unit in units_of(model):
            for choice in (unit.choices[0], "bf16"):
                with applied(model, unit, choice):
                    whole = logits_of(model, tokens)
                    assert torch.equal(stages.recompute(unit), whole)
                    assert torch.equal(whole, stages.logits) == (choice == "bf16")
        calls = []
        monkeypatch.setattr(model.model.layers[0], "forward", lambda *_: calls.append(0))
        stages.recompute(next(unit for unit in units_of(model) if unit.depth == 1))
        assert not calls, "blocks before the changed one are not run again"
