"""The cache benchmark: what it says of a runner, designs that are what their names say, a small model through all."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from benchmarks import kv_cache
from benchmarks.kv_cache import FIRST, design_lines, designs, key_statistics, runner_lines
from benchmarks.quantization import CACHE_NATS
from octavo import E4M3, PerRow, quantize
from octavo.formats import BF16
from octavo.inference import ModelRunner
from octavo.models import Llama
from octavo.quantization.comparison.kv_cache_round_trip import as_cached, cached, key_means
from tests.unit.quantization.tiny_models import HEAD_DIM, HEADS, language_model, windows


@pytest.fixture(scope="module")
def found():
    keys = key_statistics(language_model(), windows())
    k, v = 3 * torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    return k, v, keys, {name: design(0, k, v) for name, design in designs(keys).items()}


def test_statistics_are_those_of_all_keys():
    model, text, seen = language_model(), windows(), list[torch.Tensor]()

    def note(layer, keys, values):
        seen.extend([keys] if layer == 1 else [])
        return keys, values

    with torch.no_grad():
        model.logits(text, note)
    keys = key_statistics(model, text)
    torch.testing.assert_close(keys.amax[1], seen[0].abs().amax((0, 1)))
    torch.testing.assert_close(keys.mean[1], key_means(model, text)[1])


def power_of_two_scales(x):
    largest = x.double().abs().amax(-1, keepdim=True)
    scale = (largest / E4M3.max).log2().ceil().exp2().float()
    return quantize(x, E4M3, granularity=PerRow(), scale=scale).dequantize()


def test_designs_change_only_their_part(found):
    k, v, keys, decoded = found
    by_two = (power_of_two_scales(k), power_of_two_scales(v))
    mean, amax = keys.mean[0], keys.amax[0]
    expected = {
        "power-of-two scales": by_two,
        "keys only": (by_two[0], v),
        "values only": (k, by_two[1]),
        "first tokens in BF16": tuple(
            torch.cat([a[:, :FIRST], b[:, FIRST:]], 1) for a, b in ((k, by_two[0]), (v, by_two[1]))
        ),
        "a scale a channel of keys": (power_of_two_scales(k / amax) * amax, by_two[1]),
        "power-of-two scales, centred": (power_of_two_scales(k - mean), by_two[1]),
        "searched": (as_cached(k), as_cached(v)),
        "searched, centred": cached(keys.mean)(0, k, v),
    }
    for name, wanted in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(decoded[name], wanted, strict=True)), name
    assert decoded.keys() - expected.keys() == {"FP32 scales", "FP32 scales, centred"}
    largest = k.abs().flatten(0, 2).argmax(-1)
    exact = decoded["FP32 scales"][0].flatten(0, 2).gather(-1, largest[:, None])
    torch.testing.assert_close(exact, k.flatten(0, 2).gather(-1, largest[:, None]), rtol=1e-6, atol=0)


def test_a_runner_is_scored_with_each_cache(monkeypatch):
    """Rows are what the runner's logits give by hand, whatever it reads at once."""
    model, text, means = language_model(), windows(3), {layer: torch.ones(HEADS, HEAD_DIM) for layer in range(2)}
    lines = runner_lines(model, text, means)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert [row[0] for row in rows] == ["BF16", "FP8", "FP8, keys less their means"]
    nats = []
    for fmt, given in ((BF16, None), (E4M3, None), (E4M3, means)):
        runner: Any = ModelRunner(cast(Llama, model.model), key_means=given)
        logits = [runner(window[:-1], runner.new_cache(fmt=fmt), every=True) for window in text]
        nats.append(torch.stack([F.cross_entropy(x, w[1:]) for x, w in zip(logits, text, strict=True)]).double())
    for row, own in zip(rows, nats, strict=True):
        assert float(row[1]) == pytest.approx(own.mean().exp().item(), abs=1e-3)
    more = nats[2] - nats[0]
    assert float(rows[2][2].removesuffix(" %")) == pytest.approx(100 * more.mean().expm1().item(), abs=0.02)
    assert float(rows[2][3].split("±")[1]) == pytest.approx(more.std().item() / 3**0.5, abs=2e-4)
    assert rows[2][4] == ("met" if more.mean() <= CACHE_NATS else "missed")
    monkeypatch.setattr(kv_cache, "AT_ONCE", 5)
    again = runner_lines(model, text, means)[4].split("|")[2]
    assert float(again) == pytest.approx(float(rows[0][1]), rel=1e-5)


def test_kv_cache_benchmark_runs_on_a_small_model():
    keys = key_statistics(language_model(), windows())
    rows = [line.split(" | ")[0] for line in design_lines(language_model(), windows(2), keys, [])]
    assert rows[4:] == ["| bf16", *(f"| {name}" for name in designs(keys))]
    assert len(design_lines(language_model(), windows(1), keys, ["searched"])) == 6
