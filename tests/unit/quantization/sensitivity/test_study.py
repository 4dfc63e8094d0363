"""The whole study on a small model: what is sensitive is found, budgets are kept or said to be out of reach."""

import copy
import math
import statistics
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.quantization import Budget, Mix, measure_sensitivity
from octavo.quantization.sensitivity import fisher_estimate, study
from octavo.quantization.sensitivity.ablation import Increase
from octavo.quantization.sensitivity.mix_selection import best_mix
from octavo.quantization.sensitivity.study import _costs, _pairs_to_measure
from octavo.quantization.sensitivity.summary import FORMAT, asked, headline, notes, record, worst_first
from octavo.quantization.sensitivity.units import BF16, Unit, bytes_of, units_of
from tests.tiny_mixtures import EXPERTS, VOCABULARY, starving
from tests.unit.quantization.sensitivity.small_models import small_llama, windows_of


@pytest.fixture(scope="module")
def sensitive():
    """A model one of whose layers has a row of its weight so loud that one scale for all rows flushes the others to
    zero. What it makes is all but ignored by the next layer.
    """
    model = small_llama()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[5] *= 2**18
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[:, 5] *= 2**-38
    return model, windows_of(model, 6), windows_of(model, 6, seed=9)


@pytest.fixture(scope="module")
def found(sensitive):
    phases = []
    result = measure_sensitivity(
        *sensitive,
        budget=Budget(perplexity=0.02, bytes_share=0.6),
        true_pairs=6,
        on_progress=lambda name, done, total: phases.append((name, done, total)),
    )
    return result, phases


@pytest.mark.long
def test_a_layer_built_to_be_sensitive_is_found_and_spared(found):
    result, _ = found
    path = "model.layers.1.mlp.up_proj"
    per_tensor = {key[0]: nats for key, nats in result.estimates.items() if key[1] == "tensorwise"}
    assert max(per_tensor, key=lambda one: per_tensor[one]) == path
    assert per_tensor[path] > 1.5 * sorted(per_tensor.values())[-2]
    assert result.estimates[path, "rowwise"] < 0.05 * per_tensor[path], "a scale a row is the remedy"
    assert result.measured[path, "tensorwise"].divergence > 0.3 * per_tensor[path]
    assert result.best is not None
    assert result.best.chosen[path] != "tensorwise"


@pytest.mark.long
def test_the_mix_is_within_its_budgets_and_its_bytes_are_counted(sensitive, found):
    model, result = sensitive[0], found[0]
    assert result.best is not None
    assert result.best.bytes == bytes_of(model, result.units, result.best.chosen)
    assert result.best.bytes_share == result.best.bytes / result.bf16_bytes <= 0.6
    assert result.best.on_chosen is not None
    assert result.best.on_chosen.nats + 2 * result.best.on_chosen.error <= math.log(1.02)
    assert result.best.verified is not None
    assert result.is_met == (result.best.verified.nats <= math.log(1.02))
    assert result.best.fp8_products > 0


def test_the_mix_applied_computes_what_was_verified(sensitive, found):
    """To the bit, on a model in FP32 whose weights nobody has rounded."""
    (model, _, windows), result = sensitive, found[0]
    reference, mixed = copy.deepcopy(model), copy.deepcopy(model)
    Mix(overrides={}).apply(reference)
    result.mix.apply(mixed)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        known, changed = ([score(one, window) for window in windows] for one in (reference, mixed))
    differences = [after - before for before, after in zip(known, changed, strict=True)]
    assert statistics.fmean(known) == result.bf16_nats
    assert statistics.fmean(differences) == result.best.verified.nats


def score(model, window):
    logits = model(window[None])[0, :-1].float()
    return F.cross_entropy(logits, window[1:], reduction="none").double().mean().item()


def test_the_front_and_the_presets_stand_beside_it(found):
    result, phases = found
    shares = [one.bytes_share for one in result.front]
    assert shares == sorted(shares)
    predictions = [one.predicted for one in result.front]
    assert predictions == sorted(predictions, reverse=True)
    smallest = sum(min(map(unit.bytes_as, unit.choices)) for unit in result.units)
    rest = result.bf16_bytes - sum(unit.bytes_as("bf16") for unit in result.units)
    assert result.front[0].bytes == smallest + rest
    assert [one.name for one in result.presets] == ["tensorwise", "rowwise", "blockwise", "weight_only"]
    assert all(one.verified is not None for one in (*result.front, *result.presets))
    assert all(0 < done <= total for _, done, total in phases)
    ends = {name: (done, total) for name, done, total in phases}
    assert all(done == total for done, total in ends.values())
    assert list(ends)[:2] == ["estimate", "measure layers"]


def test_study_record_agrees_with_the_result(found):
    result, _ = found
    told = record(result, {"model": "m"})
    assert (told["format"], told["model"]) == (FORMAT, "m")
    assert told["best"]["bytes"] == result.best.bytes
    assert len(told["layers"]) == len(result.units)
    assert told["layers"][0]["path"] == worst_first(result)[0].path
    measured = [c for layer in told["layers"] for c in layer["choices"].values() if "divergence" in c]
    assert len(measured) == len(result.measured) == 6
    assert f"{result.best.bytes_share:.3f} of BF16's bytes" in headline(result)
    assert told["ranked_pairs"] == result.agreement.pairs
    assert "rank correlation" in " ".join(notes(result))


@pytest.mark.long
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget(bytes_share=0.3), "The smallest mix has more bytes than that"),
        (Budget(perplexity=1e-9, bytes_share=0.52), "The nearest mix costs"),
    ],
)
def test_unreachable_budget_is_reported_without_a_mix(sensitive, budget, said):
    result = measure_sensitivity(*sensitive, budget=budget, true_pairs=0)
    assert result.best is None
    assert result.mix is None
    assert not result.is_met
    assert headline(result) == f"No mix was found with {asked(budget)}"
    assert any(line.startswith(said) for line in notes(result))
    assert record(result, {})["best"] is None


@pytest.mark.long
def test_a_sum_that_misleads_is_repaired(sensitive, monkeypatch):
    """Estimates a hundredth of the truth: the first mix costs too much, a later one does not."""
    model, chosen_on, verified_on = sensitive
    true_estimate = fisher_estimate.estimate

    def hundredth(*args, **options):
        units, found = true_estimate(*args, **options)
        return units, {key: nats / 100 for key, nats in found.items()}

    monkeypatch.setattr(study, "estimate", hundredth)
    budget, limit = Budget(perplexity=0.008), math.log(1.008)
    result = measure_sensitivity(model, chosen_on, verified_on, budget=budget, true_pairs=0)
    first, last = result.attempts[0], result.attempts[-1]
    assert first[1].nats + 2 * first[1].error > limit
    assert len(result.attempts) > 1
    assert last[0] < first[0]
    assert result.best is not None
    assert result.best.on_chosen is not None
    assert result.best.on_chosen.nats + 2 * result.best.on_chosen.error <= limit


@pytest.mark.long
@pytest.mark.parametrize(("share", "perplexity"), [(0.6, 0.002), (None, 0.004)])
def test_of_mixes_within_the_budgets_the_one_that_bought_most_is_kept(sensitive, monkeypatch, share, perplexity):
    """Each costs less than its parts, so the next one is asked to buy more: products in FP8, or bytes."""
    tried = []

    def cheap(self, mixes, on_forward):
        tried.append(self._measured_mix("budget", mixes[0], estimates[-1]))
        return [Increase(nats=perplexity / 4, error=0.0, divergence=0.001, windows=2)]

    estimates = []

    def costs(*args):
        estimates.append(_costs(*args))
        return estimates[-1]

    monkeypatch.setattr(study, "_costs", costs)
    monkeypatch.setattr(study._SensitivityStudy, "_increases", cheap)
    result = measure_sensitivity(*sensitive, budget=Budget(perplexity=perplexity, bytes_share=share), true_pairs=0)
    bought = [each.fp8_products if share else -each.bytes for each in tried]
    assert len(set(bought)) > 1
    assert result.best is not None
    assert (result.best.fp8_products if share else -result.best.bytes) == max(bought)


@pytest.mark.long
@pytest.mark.parametrize(("errors", "is_kept"), [(1.9, False), (2.1, True)])
def test_a_mix_is_kept_that_is_two_standard_errors_within(sensitive, monkeypatch, errors, is_kept):
    limit, error = math.log1p(0.01), 0.0002

    def near(self, mixes, on_forward):
        return [Increase(nats=limit - errors * error, error=error, divergence=0.001, windows=2) for _ in mixes]

    monkeypatch.setattr(study._SensitivityStudy, "_increases", near)
    result = measure_sensitivity(*sensitive, budget=Budget(perplexity=0.01), true_pairs=0)
    assert (result.best is not None) == is_kept


def test_measured_pairs_are_the_largest_estimates_and_a_spread_of_the_rest():
    estimates = {(str(index), "tensorwise"): float(index) for index in range(100)}
    estimates |= {("table", "weight_only:0.5"): 1e3, ("0", "bf16"): 0.0}
    pairs = _pairs_to_measure(estimates, 10)
    assert [int(path) for path, _ in pairs[:5]] == [99, 98, 97, 96, 95]
    assert len(set(pairs)) == 10
    assert {int(path) // 19 for path, _ in pairs[5:]} == {0, 1, 2, 3, 4}, "spread through the rest"
    assert _pairs_to_measure(estimates, 0) == []
    assert len(_pairs_to_measure(estimates, 1000)) == 100


def test_measured_divergence_replaces_an_estimate_it_clearly_differs_from():
    units = units_of(small_llama())
    table, layer, other = units[0], units[1].path, units[2].path
    estimates = {(unit.path, choice): 0.01 for unit in units for choice in unit.choices}
    estimates |= {(table.path, "weight_only"): 0.04, (other, "rowwise"): 0.0001}

    def of(divergence):
        return Increase(nats=0, error=0, divergence=divergence, windows=2)

    measured = {
        (table.path, "weight_only"): of(0.021),
        (layer, "rowwise"): of(0.004),
        (layer, "tensorwise"): of(0.0005),
        (other, "rowwise"): of(0.0012),
    }
    costs = _costs(units, estimates, measured, of(0.001))
    assert costs[table.path, "weight_only"] == pytest.approx(0.02)
    assert costs[table.path, "weight_only:0.75"] == pytest.approx(0.005), "every share by the same factor"
    assert costs[layer, "rowwise"] == pytest.approx(0.003)
    assert costs[layer, "tensorwise"] == 0, "less than the floor is nothing"
    assert costs[other, "rowwise"] == 0.0001, "neither stands out: the estimate stays"
    assert costs[layer, "weight_only"] == 0.01, "not measured"


def test_an_expert_without_an_estimate_counts_as_the_costliest_beside_it():
    """Per projection and choice, by what the others cost in the search: a measurement where there is one."""
    layer = "model.layers.0.mlp.experts"
    paths = [f"{layer}.{expert}.{name}" for expert in range(3) for name in ("w1", "w2")]
    units = tuple(
        Unit(path=path, paths=(path,), shape=(8, 8), choices=("rowwise", BF16), group=f"{layer}.*") for path in paths
    )
    nats = dict(zip(paths, (0.01, 0.05, 0.02, 0.03), strict=False))  # none of the last expert
    estimates = {(path, "rowwise"): cost for path, cost in nats.items()} | {(path, BF16): 0.0 for path in paths}
    floor = Increase(nats=0, error=0, divergence=0.001, windows=2)
    measured = {(paths[0], "rowwise"): replace(floor, divergence=0.101)}
    costs = _costs(units, estimates, measured, floor)
    assert costs[f"{layer}.2.w1", "rowwise"] == pytest.approx(0.1)
    assert costs[f"{layer}.2.w2", "rowwise"] == 0.05
    assert costs[f"{layer}.2.w2", BF16] == 0
    most = sum(unit.bytes_as("rowwise") for unit in units)
    assert set((best_mix(units, costs, byte_limit=most) or {}).values()) == {"rowwise"}
    assert set((best_mix(units, costs, nats=sum(nats.values()) + 0.1) or {}).values()) == {BF16}


@pytest.mark.long
def test_an_expert_without_tokens_takes_the_choice_of_its_layer_and_is_named():
    pytest.importorskip("transformers", reason="transformers is not installed: no experts")
    model = starving(expert=2).model
    windows = torch.randint(0, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(2))
    budget = Budget(bytes_share=0.7)
    result = measure_sensitivity(
        model, windows[:2], windows[2:], budget=budget, tables=False, merged=True, true_pairs=400
    )
    assert result.best is not None
    layer = "model.layers.1.mlp.experts"
    chosen = {choice for path, choice in result.best.chosen.items() if path.startswith(layer)}
    assert chosen == {"weight_only"}
    for name in ("w1", "w2", "w3"):
        others = [result.costs[f"{layer}.{expert}.{name}", "rowwise"] for expert in range(EXPERTS) if expert != 2]
        assert result.costs[f"{layer}.2.{name}", "rowwise"] == max(others) > 0
        assert (f"{layer}.2.{name}", "rowwise") not in result.measured
    layers = {each["path"]: each for each in record(result, {})["layers"]}
    assert layers[f"{layer}.2.w2"]["choices"]["rowwise"]["estimated_nats"] is None
    assert layers[f"{layer}.1.w2"]["choices"]["rowwise"]["estimated_nats"] > 0
    assert any(note.startswith(f"No token reached {layer}.2.w1 and 2 more layers of experts") for note in notes(result))


def test_bad_arguments(sensitive):
    model, windows, _ = sensitive
    budget = Budget(perplexity=0.01)
    with pytest.raises(ConfigError, match="at least two windows of two tokens to choose on, not 1 x 24"):
        measure_sensitivity(model, windows[:1], windows, budget=budget)
    with pytest.raises(ConfigError, match="to verify on"):
        measure_sensitivity(model, windows, windows[0], budget=budget)
    with pytest.raises(ConfigError, match="true_pairs must be 0 or more"):
        measure_sensitivity(model, windows, windows_of(model, 2, seed=5), budget=budget, true_pairs=-1)
    with pytest.raises(ConfigError, match="a window to verify on is also one to choose on"):
        measure_sensitivity(model, windows, torch.cat([windows_of(model, 1, seed=5), windows[2:3]]), budget=budget)
    for options, said in (
        ({}, "needs perplexity, bytes_share or both"),
        ({"perplexity": 0.0}, "a fraction above 0"),
        ({"bytes_share": 1.5}, "at most 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            Budget(**options)
    assert len(units_of(model)) == 15


def test_a_model_that_predicts_nan_is_refused():
    model = small_llama()
    chosen, verified = windows_of(model, 2), windows_of(model, 2, seed=1)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] = math.nan
    with pytest.raises(ConfigError, match="predicts NaN or infinity; sensitivity needs a model with finite weights"):
        measure_sensitivity(model, chosen, verified, budget=Budget(perplexity=0.01))
