"""The estimate: its formula, taken apart by autograd; and that it says what the truth says."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo.errors import ConfigError
from octavo.language_model import logits_of
from octavo.quantization.sensitivity import fisher_estimate
from octavo.quantization.sensitivity.ablation import floor_of, measure
from octavo.quantization.sensitivity.bf16_reference import in_bf16
from octavo.quantization.sensitivity.fisher_estimate import estimate
from octavo.quantization.sensitivity.units import BF16, CHOICES, applied, units_of
from tests.tiny_mixtures import EXPERTS, VOCABULARY, starving
from tests.unit.quantization.sensitivity.small_models import LENGTH, WORDS, small_llama, windows_of

PATH = "model.layers.1.mlp.up_proj"


def added(model, path, change):
    """The model's logits where ``change`` is added to a layer's output, as a function of tokens."""

    def logits(tokens):
        handle = model.get_submodule(path).register_forward_hook(lambda _m, _i, y: y + change)
        try:
            return logits_of(model, tokens)
        finally:
            handle.remove()

    return logits


@pytest.mark.parametrize("choice", ["tensorwise", "weight_only"])
def test_the_formula_by_autograd_position_by_position(choice):
    model = small_llama()
    tokens = windows_of(model, 1)
    with in_bf16(model):
        _, found = estimate(model, units_of(model), tokens, seed=5)
        seen = []
        handle = model.get_submodule(PATH).register_forward_hook(lambda _m, i, y: seen.append((i[0], y)))
        with torch.no_grad():
            probabilities = logits_of(model, tokens)[0, :-1].float().softmax(-1)
        handle.remove()
        (x, y), labels = seen[0], torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(5))[:, 0]
        unit = next(unit for unit in units_of(model) if unit.path == PATH)
        with applied(model, unit, choice), torch.no_grad():
            change = model.get_submodule(PATH)(x).float() - y.float()
        zero = torch.zeros_like(y, dtype=torch.bfloat16, requires_grad=True)
        loss = F.cross_entropy(added(model, PATH, zero)(tokens)[0, :-1].float(), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, zero)
    noticed = [0.5 * float(gradient[0, t].double() @ change[0, t].double()) ** 2 for t in range(LENGTH)]
    assert found[PATH, choice] == pytest.approx(math.fsum(noticed) / (LENGTH - 1), rel=1e-4)


def test_rows_of_a_table_by_a_loop_over_words():
    """Where it is looked up and where the head multiplies by it; of a model that is all but certain of some words."""
    model = small_llama()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(4)
    tokens = windows_of(model, 1)
    with in_bf16(model):
        units, found = estimate(model, units_of(model), tokens, seed=7)
        table = next(unit for unit in units if unit.is_table)
        before = model.lm_head.weight.clone()
        with applied(model, table, "weight_only"):
            error = model.lm_head.weight - before
        streams = []
        handle = model.lm_head.register_forward_pre_hook(lambda _m, inputs: streams.append(inputs[0]))
        zero = torch.zeros(1, LENGTH, 32, requires_grad=True)
        logits = added(model, "model.embed_tokens", zero)(tokens)[0, :-1].float()
        handle.remove()
        assert logits.detach().softmax(-1).max() > 0.9
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(7))[:, 0]
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), zero)
    rows = torch.zeros(WORDS)
    for t, word in enumerate(tokens[0].tolist()):
        rows[word] += 0.5 * (gradient[0, t] @ error[word]) ** 2
    for word in range(WORDS):
        stream, row = streams[0][0, :-1].detach().bfloat16().float(), (before + error)[word].bfloat16().float()
        moved = (stream @ row).bfloat16().float() - logits.detach()[:, word]
        p = logits.detach().softmax(-1)[:, word]
        rows[word] += 0.5 * (p * (1 - p) * moved.square()).sum()
    # logits are BF16: another order of sums may move one by a step
    assert found["model.embed_tokens", "weight_only"] == pytest.approx(rows.sum().item() / (LENGTH - 1), rel=0.05)
    assert table.row_order is not None
    assert sorted(table.row_order.tolist()) == list(range(WORDS))
    for choice in table.choices[:-1]:
        codes = table.row_order[: WORDS - table.rows_in_bf16(choice)]
        assert found["model.embed_tokens", choice] == pytest.approx(rows[codes].sum().item() / (LENGTH - 1), rel=0.1)
        assert rows[codes].sum() <= 1.1 * rows.sort().values[: len(codes)].sum(), "those that cost least"


@pytest.mark.long
def test_fisher_estimate_agrees_with_the_measured_divergence():
    model = small_llama()
    tokens = windows_of(model, 24)
    with in_bf16(model):
        units, found = estimate(model, units_of(model), tokens)
        keys = [
            (unit.path, choice) for unit in units for choice in unit.choices if choice in ("rowwise", "weight_only")
        ]
        true, floor = measure(model, units, keys, tokens), floor_of(model, units, tokens).divergence
    beyond = {key: true[key].divergence - floor for key in keys}
    assert sum(beyond.values()) == pytest.approx(sum(found[key] for key in keys), rel=0.35)
    large = [key for key in keys if beyond[key] > 5 * floor]
    assert len(large) >= 8
    for key in large:
        assert 0.25 < found[key] / beyond[key] < 4, key


def test_from_one_nat_on_it_grows_linearly():
    half_square = fisher_estimate._half_square(torch.tensor([-0.5, 1.0, 15.0, -3.0]))
    assert half_square.tolist() == [0.125, 0.5, 14.5, 2.5]


def test_the_same_seed_gives_the_same_estimates():
    model = small_llama()
    tokens = windows_of(model, 2)
    with in_bf16(model):
        one, other, another = (estimate(model, units_of(model), tokens, seed=seed)[1] for seed in (1, 1, 2))
    assert one == other
    assert one != another


def test_a_layer_that_never_runs_is_named():
    model = small_llama()
    model.spare = nn.Linear(4, 4)
    tokens = windows_of(model, 1)
    with in_bf16(model), pytest.raises(ConfigError, match="the loss does not reach 'spare'"):
        estimate(model, units_of(model), tokens)


@pytest.mark.parametrize("merged", [False, True])
def test_an_expert_that_no_token_reaches_has_no_cost_in_fp8(merged):
    """Alone it stays in BF16; in a layer with one choice for all experts it leaves the others theirs."""
    pytest.importorskip("transformers", reason="transformers is not installed: no experts")
    model = starving(expert=2).model
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    unreached = {f"model.layers.1.mlp.experts.2.{name}" for name in ("w1", "w2", "w3")}
    with in_bf16(model):
        units, found = estimate(model, units_of(model, merged=merged), tokens)
    experts = {unit.path: unit.choices for unit in units if ".experts." in unit.path}
    assert len(experts) == 2 * 3 * EXPERTS
    assert experts == {path: (BF16,) if path in unreached and not merged else CHOICES for path in experts}
    for path in experts:
        estimated = {choice for choice in CHOICES if (path, choice) in found}
        assert estimated == ({BF16} if path in unreached else {*CHOICES})
