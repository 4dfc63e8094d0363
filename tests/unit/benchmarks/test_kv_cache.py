"""The cache benchmark: its designs are what their names say, and a small model goes through all of them."""

import pytest
import torch

from benchmarks import kv_cache
from benchmarks.kv_cache import FIRST, design_lines, designs, key_statistics
from octavo.quantization.comparison.cache_formats import cached, key_means, power_of_two_scales, searched_scales
from tests.unit.quantization.tiny_models import CONTEXT, language_model, windows


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

    with torch.no_grad(), model.keys_and_values_through(note) as logits:
        logits(text)
    keys = key_statistics(model, text)
    torch.testing.assert_close(keys.amax[1], seen[0].abs().amax((0, 1)))
    torch.testing.assert_close(keys.mean[1], key_means(model, text)[1])


def test_designs_change_what_they_say(found):
    k, v, keys, decoded = found
    today = (power_of_two_scales(k), power_of_two_scales(v))
    mean, amax = keys.mean[0], keys.amax[0]
    expected = {
        "today": today,
        "keys only": (today[0], v),
        "values only": (k, today[1]),
        "first tokens in BF16": tuple(
            torch.cat([a[:, :FIRST], b[:, FIRST:]], 1) for a, b in ((k, today[0]), (v, today[1]))
        ),
        "a scale a channel of keys": (power_of_two_scales(k / amax) * amax, today[1]),
        "centred": (power_of_two_scales(k - mean), today[1]),
        "searched": (searched_scales(k), searched_scales(v)),
        "centred and searched": cached("centred", keys.mean)(0, k, v),
    }
    for name, wanted in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(decoded[name], wanted, strict=True)), name
    assert decoded.keys() - expected.keys() == {"FP32 scales", "centred, FP32 scales"}
    largest = k.abs().flatten(0, 2).argmax(-1)
    exact = decoded["FP32 scales"][0].flatten(0, 2).gather(-1, largest[:, None])
    torch.testing.assert_close(exact, k.flatten(0, 2).gather(-1, largest[:, None]), rtol=1e-6, atol=0)


def test_a_small_model_goes_through(monkeypatch):
    monkeypatch.setattr(kv_cache, "CACHE_WINDOW", CONTEXT)
    monkeypatch.setattr(kv_cache, "text_windows", lambda *_, count, length: windows(count, length))
    rows = [line.split(" | ")[0] for line in design_lines(language_model(), 2, [])]
    assert rows[4:] == ["| bf16", *(f"| {name}" for name in designs(key_statistics(language_model(), windows())))]
    assert len(design_lines(language_model(), 1, ["today"])) == 6
