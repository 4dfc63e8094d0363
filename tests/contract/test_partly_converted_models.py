"""Other libraries' models, of which not every weight can run a recipe: what does not run is named."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.convert import layers_not_run
from tests.contract.gemm_oracle import recorded_products

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no models to convert")

TOKENS = torch.arange(16).reshape(2, 8)


def _wavlm() -> tuple[nn.Module, Tensor]:
    config = transformers.WavLMConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        vocab_size=40,
        layerdrop=0.0,
        mask_time_prob=0.0,
    )
    return transformers.WavLMForCTC(config), torch.randn(2, 800)


def _mamba() -> tuple[nn.Module, Tensor]:
    config = transformers.MambaConfig(vocab_size=40, hidden_size=32, state_size=8, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config), TOKENS


def _gpt2() -> tuple[nn.Module, Tensor]:
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config), TOKENS


def _mixtral() -> tuple[nn.Module, Tensor]:
    config = transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
    )
    return transformers.MixtralForCausalLM(config), TOKENS


READS = "reads its weight and never calls the layer"


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (_wavlm, [f"wavlm.encoder.layers.{i}.attention.{n}_proj" for i in (0, 1) for n in ("k", "v", "q", "out")]),
        (_mamba, [f"backbone.layers.{i}.mixer.dt_proj" for i in (0, 1)]),
        (_mixtral, []),
    ],
)
def test_every_converted_layer_runs_and_every_one_that_never_would_is_named(build, left):
    model, x = build()
    exact = copy.deepcopy(model)
    report = octavo.convert(model, "rowwise")
    assert [path for path, reason in report.skipped.items() if reason.endswith(READS)] == left
    with recorded_products() as products:
        model(x)
    assert layers_not_run(model) == ()
    assert len(products) == len(report.converted)
    assert all(type(model.get_submodule(path)) is nn.Linear for path in left)
    assert exact.state_dict().keys() == model.state_dict().keys()


def _names(report, ending: str) -> set[str]:
    return {name for name in report.parameters if name.endswith(ending)}


def test_experts_convolutions_and_conv1d_stand_in_the_report():
    moe = octavo.convert(_mixtral()[0])
    assert len(moe.weights) == 4
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in moe.weights)
    assert all("router" in moe.parameters[name] for name in _names(moe, "gate.weight"))
    assert moe.shares.multiplications > 0.9
    left = octavo.convert(_mixtral()[0], skip=["*.experts"])
    for name in ("gate_up_proj", "down_proj", "gate.weight"):
        assert len(_names(left, name)) == 2
    assert left.shares.multiplications < 0.2 < min(left.shares.by_path["model.layers.0.mlp.experts.gate_up_proj"])
    assert len(_names(octavo.convert(_mamba()[0]), "conv1d.weight")) == 2
    gpt2 = octavo.convert(_gpt2()[0])
    assert len(gpt2.weights) == 8
    assert not gpt2.parameters
    with pytest.warns(UserWarning, match=r"convert changed nothing: .*c_fc\.weight, the largest: skip pattern"):
        gpt2 = octavo.convert(_gpt2()[0], skip=["*.c_*"])
    assert len(_names(gpt2, "c_attn.weight")) == len(_names(gpt2, "c_fc.weight")) == 2
    assert len(gpt2.parameters) == 8
    assert len(str(gpt2).splitlines()) == 2 + 3 + 4 + 1, "totals, layers, weights, what more would run"


@pytest.mark.parametrize("build", [_wavlm, _mamba, _gpt2, _mixtral])
def test_every_matrix_of_the_model_is_converted_or_has_its_reason(build):
    model, _ = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = octavo.convert(model)
    named = {f"{path}.weight" for path in (*report.converted, *report.skipped)} | report.parameters.keys()
    named |= set(report.weights)
    matrices = {n for n, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1}
    assert matrices <= named


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_of_experts_parameters_are_named():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, x = _mixtral()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
        adapted = peft.get_peft_model(model, config)
    report = octavo.convert(adapted, "rowwise")
    left = [path for path, reason in report.skipped.items() if reason == f"ParamWrapper {READS}"]
    assert len(left) == 4
    assert all("mlp.experts.lora_" in path for path in left)
    assert sum("q_proj.lora_" in path for path in report.converted) == 4
    adapted(x)
    assert layers_not_run(adapted) == ()


def _torchao(config: str) -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 64))
        quantization.quantize_(model, getattr(quantization, config)(), filter_fn=lambda _, path: path in ("0", "2"))
    return model


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_weights_that_torchao_has_quantized_stay_and_run(config):
    model, x = _torchao(config), torch.randn(2, 64)
    before = model(x)
    report = octavo.convert(model)
    assert report.converted == ("3",)
    assert all("which another library has quantized or packed" in report.skipped[path] for path in ("0", "2"))
    assert {type(model[i]) for i in (0, 2)} == {nn.Linear}
    octavo.restore(model)
    assert torch.equal(model(x), before)


def test_weights_that_are_bare_codes_stay():
    codes = nn.Linear(8, 8)
    codes.weight = nn.Parameter(codes.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model = nn.Sequential(codes, nn.Linear(8, 8))
    report = octavo.convert(model)
    assert report.converted == ("1",)
    assert (
        report.skipped["0"]
        == "its weight is torch.float8_e4m3fn, codes of another library and no numbers in high precision"
    )


def test_sharded_weights_are_converted_and_run():
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
        plain = copy.deepcopy(model)
        octavo.convert(plain, "rowwise")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert octavo.convert(model, "rowwise").converted == ("0",)
        assert torch.equal(model(x), plain(x))
    finally:
        torch.distributed.destroy_process_group()
