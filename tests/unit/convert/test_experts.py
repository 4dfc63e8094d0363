"""Experts of transformers' interface: what they compute in FP8, what is found, and what is left with its reason."""

import copy
import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.convert import layers_not_run
from octavo.convert.experts import InterfaceExperts, kind_of
from octavo.convert.other_modules import ConvertedModule
from octavo.convert.routers import routers
from octavo.errors import ConfigError
from octavo.functional import fp8_linear

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no experts to convert")

EXPERTS, K, INTERMEDIATE, TOKENS = 4, 32, 48, 20
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
}
ALONE: dict[str, tuple[str, str, dict[str, Any]]] = {  # module, class, its configuration
    "no gate": ("nemotron_h.modeling_nemotron_h", "NemotronHExperts",
                {"n_routed_experts": EXPERTS, "hidden_size": K, "moe_intermediate_size": INTERMEDIATE,
                 "moe_latent_size": None, "mlp_hidden_act": "relu2"}),
    "post norm": ("muse_spark.modeling_muse_spark", "MuseSparkExperts",
                  {"num_local_experts": EXPERTS, "moe_hidden_size": K, "moe_intermediate_size": INTERMEDIATE,
                   "hidden_act": "silu", "post_norm_eps": 1e-6}),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", CONFIGS)


def build(name: str) -> Any:
    sizes = {"vocab_size": 40, "hidden_size": K, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **CONFIGS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # also biases, which begin as zeros
    return model


def routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    indices = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(TOKENS)])  # the last expert gets nothing
    return torch.randn(TOKENS, K), indices, torch.rand(TOKENS, 2)


def experts_alone(kind: str) -> Any:
    module, name, sizes = ALONE[kind]
    made = pytest.importorskip(f"transformers.models.{module}", reason="an older transformers").__dict__[name]
    torch.manual_seed(0)
    experts = made(SimpleNamespace(**sizes, _experts_implementation="eager"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    return experts


def experts_of(model: nn.Module) -> Any:
    return model.get_submodule("model.layers.0.mlp.experts")


@each_model
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"])
def test_outputs_and_gradients_are_near_those_of_the_plain_experts(name, recipe):
    model, (x, indices, weights) = build(name), routing()
    grad = torch.randn(TOKENS, K)
    results = []
    for _ in ("plain", "converted"):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = experts_of(model)(leaf, indices, weights)
        y.backward(grad)
        found = {key: p.grad for key, p in experts_of(model).named_parameters()}
        results.append({"output": y.detach(), "input": leaf.grad, **found})
        octavo.convert(model, recipe)
    plain, converted = results
    for key, expected in plain.items():
        assert converted[key].dtype is expected.dtype
        error = (converted[key] - expected).norm() / expected.norm()
        assert 0 < error < 0.12, (key, error)
    assert not converted["down_proj"][-1].any()


@each_model
def test_codes_are_those_of_a_linear_layer_for_each_expert(name):
    model, (x, indices, weights) = build(name), routing()
    octavo.convert(model, "rowwise")
    module, recipe = experts_of(model), recipes.get("rowwise")
    expected = torch.zeros(TOKENS, K)
    rows = torch.zeros(TOKENS, 2, K)
    for expert in range(EXPERTS):
        token, place = torch.where(indices == expert)
        if not len(token):
            continue
        up, down = (getattr(module, each)[expert] for each in ("gate_up_proj", "down_proj"))
        biases = [
            getattr(module, f"{each}_bias")[expert] if module.has_bias else None
            for each in ("gate_up_proj", "down_proj")
        ]
        if module.is_transposed:
            up, down = up.t(), down.t()
        hidden = module._apply_gate(fp8_linear(x[token], up, biases[0], recipe))
        rows[token, place] = fp8_linear(hidden, down, biases[1], recipe) * weights[token, place, None]
    expected = rows.sum(1)
    assert torch.equal(module(x, indices, weights), expected)


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_gate_and_with_a_norm_after_it_an_expert_is_linear_layers_too(kind, dtype):
    module, (x, indices, weights) = experts_alone(kind).to(dtype), routing()
    x = x.to(dtype)
    plain = module(x, indices, weights)
    octavo.convert(module, "rowwise")
    recipe, rows = recipes.get("rowwise"), torch.zeros(TOKENS, 2, K)
    for expert in range(EXPERTS - 1):
        token, place = torch.where(indices == expert)
        if kind == "no gate":
            hidden = torch.relu(fp8_linear(x[token], module.up_proj[expert], None, recipe)).square()
        else:
            gate, up = fp8_linear(x[token], module.gate_up_proj[expert], None, recipe).chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * up
        output = fp8_linear(hidden, module.down_proj[expert], None, recipe)
        output = output if kind == "no gate" else module.post_expert_norm(output)
        rows[token, place] = output * weights[token, place, None]
    found = module(x, indices, weights)
    assert found.dtype is dtype
    assert torch.equal(found, rows.sum(1).to(dtype))
    assert (found - plain).norm() < 0.15 * plain.norm()


@each_model
def test_copies_files_and_state_dicts_keep_working(name):
    model, tokens = build(name), torch.arange(16).reshape(2, 8)
    plain, classes = copy.deepcopy(model), [type(module) for module in model.modules()]
    octavo.convert(model, "delayed")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
    model(tokens)[0].sum().backward()
    octavo.update_scales(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for each in copies:
        assert torch.equal(each(tokens)[0], model(tokens)[0])
        assert experts_of(each).layer("down_proj").stored_weight is experts_of(each).down_proj
    with octavo.autocast(enabled=False):
        assert torch.equal(model(tokens)[0], plain(tokens)[0])
    octavo.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(tokens)[0], plain(tokens)[0])


def test_in_high_precision_the_plain_forward_runs_and_no_layer_is_said_not_to():
    model, (x, indices, weights) = build("Mixtral"), routing()
    expected = experts_of(model)(x, indices, weights)
    octavo.convert(model, "bf16")
    assert torch.equal(experts_of(model)(x, indices, weights), expected)
    not_run = [path for path in layers_not_run(model) if "experts" in path]
    assert not_run == [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


def test_a_recipe_of_the_second_weight_alone_runs():
    model, (x, indices, weights) = build("Mixtral"), routing()
    octavo.convert(model, "bf16")
    down = experts_of(model).layer("down_proj")
    down.set_recipe(recipes.get("rowwise"), down.scale_updates, path=down.path)
    y = experts_of(model)(x, indices, weights)
    octavo.convert(model, "rowwise")
    assert not torch.equal(y, experts_of(model)(x, indices, weights))
    octavo.restore(model)
    assert not torch.equal(y, experts_of(model)(x, indices, weights))


def test_an_expert_that_no_token_is_sent_to_keeps_its_history_through_steps():
    model, (x, indices, weights) = build("Mixtral"), routing()
    octavo.convert(model, "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        experts_of(model)(x, indices, weights).sum().backward()
        optimizer.step()
    state = octavo.scaling_state(model)
    assert state["model.layers.0.mlp.experts.fp8_down_proj.weight.steps"].tolist() == [3, 3, 3, 0]
    assert state["model.layers.1.mlp.experts.fp8_down_proj.input.steps"].tolist() == [0, 0, 0, 0]


def test_an_index_beyond_the_experts_stands_for_none():
    model, (x, indices, weights) = build("Mixtral"), routing()
    octavo.convert(model, "rowwise")
    alone = experts_of(model)(x, torch.where(indices == 0, EXPERTS, indices), torch.where(indices == 0, 7.0, weights))
    assert torch.equal(alone, experts_of(model)(x, indices, torch.where(indices == 0, 0.0, weights)))


def test_routers_stay_also_where_they_are_linear_layers():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts_of(build("Mixtral"))
            self.gate = nn.Linear(K, EXPERTS, bias=False)
            self.shared = nn.Sequential(nn.Linear(K, EXPERTS))

    block = Block()
    assert list(routers(block)) == ["gate.weight"]
    report = octavo.convert(block)
    assert report.converted == ("shared.0",)
    assert "router" in report.skipped["gate"]
    assert report.weights == ("experts.gate_up_proj", "experts.down_proj")


def test_patterns_filters_and_sizes_leave_experts_with_the_reason():
    asked = []

    def smaller(path: str, layer: nn.Linear) -> bool:
        asked.append((path, layer.in_features, layer.out_features))
        return not path.endswith("_up_proj")

    model = build("GptOss")
    report = octavo.convert(model, layer_filter=smaller)
    assert ("model.layers.0.mlp.experts.gate_up_proj", K, 2 * INTERMEDIATE) in asked
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert report.parameters[name] == "filter"
    assert report.parameters["model.layers.0.mlp.experts.down_proj"] == "filter"
    for option in ({"skip": ["*.experts.down_proj"]}, {"overrides": {"*.experts.down_proj": "bf16"}}):
        with pytest.raises(
            ConfigError, match=r"matches a weight, and patterns match whole modules; write '\*\.experts'"
        ):
            octavo.convert(model, **option)
    assert octavo.convert(model, skip=["*.experts"]).parameters[name] == "skip pattern '*.experts'"
    with pytest.warns(UserWarning, match="changed nothing"):
        small = octavo.convert(build("GptOss"), min_weight_elements=2 * K * INTERMEDIATE)
    assert small.parameters[name] == "shape: 1536 weights, fewer than 3072"
    assert "block 0" in octavo.convert(model, keep_first_blocks=1).parameters[name]
    report = octavo.convert(model, overrides={"*.experts": "rowwise"})
    assert report.overridden[name] == "rowwise"
    again = octavo.convert(model, "tensorwise", skip=["*.experts"])
    assert (
        again.parameters["model.layers.1.mlp.experts.down_proj"] == "skip pattern '*.experts'; keeps its recipe rowwise"
    )


def test_a_share_below_strict_is_refused_and_the_model_is_restored():
    model = build("Mixtral")
    with pytest.raises(ConfigError, match=r"less than strict=0.99.*lm_head"):
        octavo.convert(model, strict=0.99)
    assert not any(isinstance(each, octavo.nn.Linear | ConvertedModule) for each in model.modules())
    octavo.convert(model, strict=0.9)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        octavo.convert(model, strict=90.0)


def test_experts_that_transformers_spreads_over_ranks_stay():
    model = build("Mixtral")
    experts_of(model)._is_expert_parallel = True
    report = octavo.convert(model)
    assert "spread over ranks" in report.parameters["model.layers.0.mlp.experts.down_proj"]


def test_only_what_follows_the_interface_is_taken_for_experts():
    class Lookalike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2 * INTERMEDIATE, K))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.gate_up_proj[0].t()

    assert kind_of(Lookalike()) is None
    assert kind_of(experts_of(build("Mixtral"))) is InterfaceExperts
    report = octavo.convert(nn.Sequential(Lookalike(), nn.Linear(K, K)))
    assert "4 matrices in one" in report.parameters["0.gate_up_proj"]


def test_frozen_experts_are_named_as_not_stored_and_run():
    model = build("Mixtral").requires_grad_(False)
    report = octavo.convert(model, frozen="fp8")
    assert all("keep their weights" in report.not_stored[name] for name in report.weights)
    assert model(torch.arange(8)[None])[0].isfinite().all()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in peft
def test_adapters_of_experts_run_in_fp8_with_the_weights_that_they_change_and_merge_exactly():
    peft = pytest.importorskip("peft")
    plain, tokens = build("Mixtral"), torch.arange(40).view(2, 20)
    converted = copy.deepcopy(plain)
    octavo.convert(converted, "rowwise")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = peft.get_peft_model(converted, peft.LoraConfig(r=4, target_modules=[], target_parameters=names))
    adapters = [each for each in adapted.parameters() if each.requires_grad]
    assert len(adapters) == 2 * 2 * 2
    generator = torch.Generator().manual_seed(0)
    for each in adapters:
        each.data = torch.randn(each.shape, generator=generator) / 8
    found = adapted(input_ids=tokens, labels=tokens)
    found.loss.backward()
    assert all(each.grad is not None and each.grad.any() for each in adapters)
    octavo.restore(adapted)
    merged = adapted.merge_and_unload()
    assert not torch.equal(merged.model.layers[0].mlp.experts.down_proj, plain.model.layers[0].mlp.experts.down_proj)
    octavo.convert(merged, "rowwise")
    assert torch.equal(merged(input_ids=tokens).logits, found.logits)
