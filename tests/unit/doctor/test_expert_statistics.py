"""Experts in the doctor: one line a layer with the worst expert and tokens per expert, and experts that starve."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import octavo
import octavo.doctor
from octavo import recipes
from octavo.convert import unfuse_experts
from octavo.doctor import Severity
from octavo.doctor.diagnose import diagnose
from octavo.doctor.rules.experts import starved_experts
from octavo.doctor.series import Sample, series_of
from octavo.doctor.thresholds import Thresholds
from octavo.nn import GroupedLinear
from octavo.numerics import sqnr_db
from tests.tiny_mixtures import EXPERTS, mixture

PATH = "model.layers.1.mlp.experts"


def watched_steps(layer, x, offsets, steps=1, recipe="tensorwise"):
    model = torch.nn.ModuleDict({"plain": torch.nn.Linear(16, 16), "experts": layer})
    octavo.convert(model, recipe)
    watcher = octavo.doctor.watch(model, interval=1)
    for _ in range(steps):
        with watcher.step():
            model["experts"](model["plain"](x), offsets).square().sum().backward()
    return watcher


def line_of(watcher, path="experts"):
    return {name: by_path[path] for name, by_path in watcher.samples[-1].modules.items() if path in by_path}


def test_the_worst_expert_has_the_lowest_sqnr_of_its_casts():
    torch.manual_seed(0)
    recipe, offsets = recipes.get("weight_only", granularity="tensor"), torch.tensor([0, 5, 5, 9])
    layer = GroupedLinear(3, 16, 8, recipe=recipe)
    with torch.no_grad():
        layer.weight[2] = torch.randn(8, 16).exp().pow(4)  # its small weights share a scale with large ones
    found = line_of(watched_steps(layer, torch.randn(9, 16), offsets))
    expected = [sqnr_db(each, octavo.quantize(each, octavo.E4M3).dequantize()) for each in layer.weight.detach()]
    assert found["worst_expert"] == min((0, 2), key=lambda expert: expected[expert])
    assert found["expert_sqnr_db"] == pytest.approx(min(expected[0], expected[2]), abs=1e-3)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
def test_the_worst_cast_of_all_roles_and_micro_batches_counts(place):
    """272 is half a step from 256 and from 288, where the largest element is 448; a gradient of ones has no noise."""
    torch.manual_seed(0)
    layer, offsets = GroupedLinear(1, 16, 8, recipe="tensorwise"), torch.tensor([0, 9])
    batches = [torch.randn(9, 16), torch.randn(9, 16)]
    batches[place] = torch.full((9, 16), 272.0)
    batches[place][0, 0] = 448.0
    model = torch.nn.ModuleDict({"plain": octavo.nn.Linear(16, 16), "experts": layer})
    watcher = octavo.doctor.watch(model, interval=1)
    with watcher.step():
        for x in batches:
            layer(x, offsets).sum().backward()
    casts = [*batches, layer.weight.detach()[0]]
    expected = [sqnr_db(each, octavo.quantize(each, octavo.E4M3).dequantize()) for each in casts]
    assert min(expected) == expected[place] < 25
    assert line_of(watcher)["expert_sqnr_db"] == pytest.approx(expected[place], abs=1e-3)


def test_tokens_are_counted_for_each_expert_over_all_steps():
    layer = GroupedLinear(3, 16, 8)
    watcher = watched_steps(layer, torch.randn(9, 16), torch.tensor([0, 5, 6, 9]), steps=2)
    found = line_of(watcher)
    assert (found["least_expert_tokens"], found["most_expert_tokens"]) == (1, 5)
    assert (found["least_expert"], found["idle_experts"]) == (1, 0)
    assert found["least_expert_share"] == pytest.approx(1 / 3)
    assert layer.experts_watch is None


def test_rows_of_zeros_are_no_tokens():
    layer = GroupedLinear(3, 16, 8)
    x = torch.randn(9, 16)
    x[1:5] = 0
    model = torch.nn.ModuleDict({"plain": octavo.nn.Linear(16, 16), "experts": layer})
    watcher = octavo.doctor.watch(model, interval=1)
    with watcher.step():
        model["plain"](torch.randn(9, 16))
        layer(x, torch.tensor([0, 4, 5, 9])).square().sum().backward()
    found = line_of(watcher)
    assert (found["least_expert_tokens"], found["most_expert_tokens"], found["idle_experts"]) == (0, 4, 1)


def test_tokens_are_counted_once_under_activation_checkpointing():
    layer, offsets = GroupedLinear(3, 16, 8), torch.tensor([0, 5, 6, 9])
    x, counts = torch.randn(9, 16, requires_grad=True), []
    model = torch.nn.ModuleDict({"plain": octavo.nn.Linear(16, 16), "experts": layer})
    for checkpoint in (False, True):
        watcher = octavo.doctor.watch(model, interval=1)
        with watcher.step():
            if checkpoint:
                y = torch.utils.checkpoint.checkpoint(layer, x, offsets, use_reentrant=False)
            else:
                y = layer(x, offsets)
            y.square().sum().backward()
        counts.append(line_of(watcher))
    assert counts[0]["most_expert_tokens"] == 5
    assert counts[1] == counts[0]


def test_tokens_of_experts_that_are_called_by_keyword_are_counted():
    experts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
    model = torch.nn.ModuleDict({"experts": experts})
    octavo.convert(model, "tensorwise")
    watcher = octavo.doctor.watch(model, interval=1)
    with watcher.step():
        for rows, expert in zip((5, 3), experts, strict=True):
            expert(input=torch.randn(rows, 16)).square().sum().backward()
    found = line_of(watcher)
    assert (found["least_expert_tokens"], found["most_expert_tokens"]) == (3, 5)


def test_llama_4s_expert_that_the_router_never_chooses_starves():
    """Llama 4 passes every token to every expert, times its score, which is 0 where the router chose another."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = llama4.Llama4TextConfig(
        hidden_size=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=32
    )
    torch.manual_seed(0)
    block = llama4.Llama4TextMoe(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
        block.router.weight[2] = 0
        block.router.weight[:, 0] = torch.tensor([0.0, 0.0, -100.0, 0.0])
    x = torch.randn(2, 12, 16)
    x[..., 0] = 1
    octavo.convert(block, "tensorwise")
    watcher = octavo.doctor.watch(block, interval=1)
    for _ in range(3):
        with watcher.step():
            block(x)[0].square().sum().backward()
    found = line_of(watcher)
    assert (found["least_expert"], found["idle_experts"], found["least_expert_tokens"]) == (2, 1, 0)
    (finding,) = [one for one in watcher.findings() if one.code == "starved-experts"]
    assert finding.evidence["expert"] == 2


def test_a_mixture_has_one_line_a_layer_and_names_the_expert_without_tokens():
    pytest.importorskip("transformers")
    model = mixture("Mixtral").model.requires_grad_(True).train()

    def away(_, __, outputs):
        logits, weights, index = outputs
        return logits, weights, torch.where(index == 2, EXPERTS, index)

    model.get_submodule("model.layers.1.mlp.gate").register_forward_hook(away)
    octavo.convert(model, "delayed")
    watcher = octavo.doctor.watch(model, interval=1)
    tokens = torch.arange(96).view(2, 48)
    for _ in range(3):
        with watcher.step():
            model(input_ids=tokens, labels=tokens).loss.backward()
    modules = watcher.samples[-1].modules
    assert set(modules["worst_expert"]) == {"model.layers.0.mlp.experts", PATH}
    assert 10 < modules["expert_sqnr_db"][PATH] < 40
    assert not any(".experts" in key.path for key in watcher.samples[-1].casts)
    (finding,) = [one for one in watcher.findings() if one.code == "starved-experts" and one.path == PATH]
    assert finding.severity is Severity.WARN
    assert finding.evidence["expert"] == 2
    assert finding.cause.startswith("expert 2 got 0.0% of an even share of the tokens of 3 sampled steps; 1 experts")


@pytest.mark.parametrize("began", [1, 3])
def test_a_nan_in_one_expert_is_found_there_and_explains_what_follows(began):
    pytest.importorskip("transformers")
    model: Any = mixture("Mixtral").model.requires_grad_(True).train()
    octavo.convert(model, "delayed")
    watcher = octavo.doctor.watch(model, interval=1)
    tokens = torch.arange(96).view(2, 48)
    for step in range(1, 5):
        if step == began:
            with torch.no_grad():
                model.get_submodule(PATH).down_proj[2, 0, 0] = float("nan")
        with watcher.step():
            model(input_ids=tokens, labels=tokens).loss.backward()
    for findings in (watcher.findings(), diagnose(series_of(lines_of(watcher.samples)))):
        assert [one.code for one in findings] == ["nonfinite"]
        (finding,) = findings
        assert (finding.path, finding.role, finding.first_step) == (f"{PATH}.down_proj", "weight", began)
        assert finding.evidence["expert"] == 2
        assert finding.evidence["nonfinite"] == 1
        assert finding.cause.startswith(
            "NaN or ±Inf reach this cast first (1 elements since the last sample, expert 2)"
        )
    modules = watcher.samples[began - 1].modules
    assert modules["expert_sqnr_db"][PATH] == -math.inf


def lines_of(samples):
    for sample in samples:
        yield {"kind": "watched", "step": sample.step, **sample.names()}
        yield {"kind": "statistics", "step": sample.step, **sample.values()}


def test_a_nan_between_samples_is_counted_at_its_expert():
    layer, offsets = GroupedLinear(3, 16, 8), torch.tensor([0, 5, 6, 9])
    model = torch.nn.ModuleDict({"plain": torch.nn.Linear(16, 16), "experts": layer})
    octavo.convert(model, "tensorwise")
    watcher = octavo.doctor.watch(model, interval=10)
    for step in range(1, 11):
        x = torch.randn(9, 16)
        with watcher.step():
            y = model["plain"](x)
            layer(torch.where(torch.arange(9)[:, None] == 5, math.nan, y) if step == 7 else y, offsets).sum().backward()
    assert watcher.samples[-1].modules["expert_nonfinite"]["experts input output"] == 16
    (finding,) = [one for one in watcher.findings() if one.code == "nonfinite"]
    assert (finding.path, finding.role) == ("experts", "input")
    assert "expert" not in finding.evidence


def test_healthy_experts_have_no_counts():
    watcher = watched_steps(GroupedLinear(3, 16, 8), torch.randn(9, 16), torch.tensor([0, 5, 6, 9]))
    assert "expert_nonfinite" not in watcher.samples[0].modules


def unfused(model):
    assert unfuse_experts(model) == {}


def listed(model):
    """Experts as older models have them: a list of modules, of which each is called with its tokens."""

    class Expert(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.w1, self.w3, self.w2 = layers

        def forward(self, x):
            return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))

    class Experts(torch.nn.ModuleList):
        def forward(self, x, index, weights):
            y = torch.zeros_like(x)
            for number, expert in enumerate(self):
                tokens, places = torch.where(index == number)
                y = y.index_add(0, tokens, expert(x[tokens]) * weights[tokens, places, None])
            return y

    unfused(model)
    for block in (f"model.layers.{layer}.mlp.experts" for layer in range(2)):
        made = Experts(Expert(each.values()) for each in model.get_submodule(block).experts())
        model.set_submodule(block, made)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in gradient_checkpointing_enable
@pytest.mark.parametrize("divide", [unfused, listed])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_experts_of_linear_layers_have_the_line_of_fused_ones(divide, checkpoint):
    pytest.importorskip("transformers")
    tokens, lines = torch.arange(96).view(2, 48), []
    for change in (lambda _: None, divide):
        model: Any = mixture("Mixtral").model.requires_grad_(True).train()
        change(model)
        octavo.convert(model, "rowwise")
        if checkpoint:
            model.activation_checkpointing_enable()
        watcher = octavo.doctor.watch(model, interval=1)
        with watcher.step():
            model(input_ids=tokens, labels=tokens).loss.backward()
        lines.append(line_of(watcher, PATH))
        assert not any(each._forward_pre_hooks for each in model.get_submodule(PATH).modules())
    fused, separate = lines
    names = [name for name in fused if "worst" not in name and "sqnr" not in name]
    assert {name: separate[name] for name in names} == {name: fused[name] for name in names}
    assert separate["expert_sqnr_db"] == pytest.approx(fused["expert_sqnr_db"], abs=1)


def series_with(shares, idle=0.0):
    samples = [
        Sample(
            step=step,
            casts={},
            products={},
            parameters={},
            modules={"least_expert_share": {"e": share}, "least_expert": {"e": 5.0}, "idle_experts": {"e": idle}},
        )
        for step, share in enumerate(shares, 1)
    ]
    return series_of([], samples)


@pytest.mark.parametrize(
    ("shares", "severity"),
    [([0.05] * 5, Severity.NOTE), ([0.3] * 5, None), ([0.05], None), ([0.0, 0.05, 0.2, 0.3, 0.4], None)],
    ids=["starved", "fed", "one sample", "fed later"],
)
def test_when_an_expert_starves(shares, severity):
    findings = list(starved_experts(series_with(shares), Thresholds()))
    assert [one.severity for one in findings] == ([] if severity is None else [severity])
    warned = list(starved_experts(series_with([0.0] * 5, idle=2.0), Thresholds()))
    assert warned[0].severity is Severity.WARN
    assert "2 experts got none" in warned[0].cause


def test_numbers_survive_a_metrics_file():
    sample = watched_steps(GroupedLinear(3, 16, 8), torch.randn(9, 16), torch.tensor([0, 5, 6, 9])).samples[0]
    values = sample.values()["modules"]
    assert values["least_expert_tokens"] == {"experts": 1.0}
    assert math.isfinite(values["expert_sqnr_db"]["experts"])
    assert np.isfinite(list(sample.modules["least_expert_share"].values())).all()
