"""The truth about a layer is what converting it by hand and evaluating gives, to the bit."""

import copy
import math
import statistics

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.quantization.comparison.scores import WindowScore
from octavo.quantization.sensitivity.ablation import compare, floor_of, increase_of, measure
from octavo.quantization.sensitivity.bf16_reference import in_bf16
from octavo.quantization.sensitivity.fisher_estimate import estimate
from octavo.quantization.sensitivity.mix import Mix
from octavo.quantization.sensitivity.units import decoded_table, units_of
from tests.unit.quantization.sensitivity.small_models import small_llama, windows_of


def rounded(model):
    """A copy whose parameters are BF16's."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return copied


@torch.no_grad()
def by_hand(model, windows):
    """Mean loss of each window and log-probabilities, one token after the other."""
    nats, predictions = [], []
    for window in windows:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logits = model(window[None])[0].float()
        predictions.append(logits[:-1].log_softmax(-1))
        nats.append(F.nll_loss(predictions[-1], window[1:], reduction="none").double().mean().item())
    return nats, predictions


@pytest.mark.parametrize("choice", ["tensorwise", "rowwise", "blockwise", "weight_only"])
def test_a_layer_alone_is_converted_by_hand(choice):
    model, path = small_llama(), "model.layers.1.self_attn.o_proj"
    windows = windows_of(model, 3)
    with in_bf16(model):
        found = measure(model, units_of(model), [(path, choice)], windows)[path, choice]
    reference, changed = rounded(model), rounded(model)
    octavo.convert(reference, "bf16", convert_head=True)
    octavo.convert(changed, "bf16", overrides={path: choice}, convert_head=True)
    (known, before), (nats, after) = by_hand(reference, windows), by_hand(changed, windows)
    differences = [one - other for one, other in zip(nats, known, strict=True)]
    assert found.nats == statistics.fmean(differences)
    assert found.error == pytest.approx(statistics.stdev(differences) / math.sqrt(3), rel=1e-12)
    divergence = [(p.exp() * (p - q)).sum(-1).mean().item() for p, q in zip(before, after, strict=True)]
    assert found.divergence == pytest.approx(statistics.fmean(divergence), rel=1e-4)
    assert found.windows == 3


def test_a_tied_table_is_replaced_by_hand():
    model = small_llama()
    windows = windows_of(model, 2)
    with in_bf16(model):
        key = ("model.embed_tokens", "weight_only")
        found = measure(model, units_of(model), [key], windows)[key]
    reference, changed = rounded(model), rounded(model)
    codes = octavo.quantize(changed.lm_head.weight.detach(), octavo.E4M3, granularity=octavo.PerRow())
    changed.lm_head.weight.data = codes.dequantize()
    assert changed.model.embed_tokens.weight is changed.lm_head.weight
    for one in (reference, changed):
        octavo.convert(one, "bf16", convert_head=True)
    differences = [a - b for a, b in zip(by_hand(changed, windows)[0], by_hand(reference, windows)[0], strict=True)]
    assert found.nats == statistics.fmean(differences)


@pytest.mark.parametrize("tied", [True, False])
def test_a_mix_is_what_its_file_applied_gives(tied):
    model = small_llama(tied=tied)
    windows = windows_of(model, 9)  # more than one group
    with in_bf16(model):
        units, _ = estimate(model, units_of(model), windows[:1])
        chosen = {unit.path: unit.choices[index % len(unit.choices)] for index, unit in enumerate(units)}
        chosen["model.embed_tokens"] = "weight_only:0.75"
        nats, (found, nothing) = compare(model, units, [chosen, {}], windows)
    assert len({*chosen.values()}) >= 5
    reference, mixed = rounded(model), rounded(model)
    octavo.convert(reference, "bf16", convert_head=True)
    mix = Mix.of(units, chosen)
    assert len(mix.tables["model.embed_tokens"]) == 16
    mix.apply(mixed)
    known, changed = by_hand(reference, windows)[0], by_hand(mixed, windows)[0]
    assert nats == statistics.fmean(known)
    assert found.nats == statistics.fmean(a - b for a, b in zip(changed, known, strict=True))
    assert nothing.nats == 0
    assert abs(nothing.divergence) < 1e-7
    assert not torch.equal(decoded_table(model.lm_head.weight), model.lm_head.weight)


def test_the_floor_is_a_change_of_one_rounding_and_is_undone():
    model = small_llama()
    windows = windows_of(model, 2)
    with in_bf16(model):
        floor = floor_of(model, units_of(model), windows)
        assert compare(model, units_of(model), [{}], windows)[1][0].nats == 0
        worst = measure(model, units_of(model), [("model.layers.0.mlp.down_proj", "tensorwise")], windows)
    assert 0 < floor.divergence < 0.2 * next(iter(worst.values())).divergence


def test_one_window_has_no_standard_error():
    found = increase_of([WindowScore(nats=1 + math.log(1.25), agreement=1.0, divergence=0.25)], [1.0])
    assert (found.error, found.divergence, found.windows) == (math.inf, 0.25, 1)
    assert found.perplexity_increase == pytest.approx(0.25)
