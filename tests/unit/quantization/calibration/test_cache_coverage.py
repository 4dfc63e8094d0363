"""Coverage of keys and values: their scales against the text's own."""

from dataclasses import replace

import pytest
import torch

from octavo.quantization import calibrate, coverage
from tests.unit.quantization.calibration.test_observers import llama, token_batches


def test_coverage_includes_keys_and_values_by_their_scales():
    """Scales that are a third of their amax are exceeded threefold, by the elements beyond them."""
    model = llama()
    found = calibrate(model, token_batches(), kv_cache=True)
    names = [f"{what} of layer {layer}" for layer in (0, 1) for what in ("keys", "values")]
    within = {each.path: each for each in coverage(model, found, token_batches())}
    assert set(names) <= within.keys()
    assert all(within[name].ratio == pytest.approx(1.0) and not within[name].goes_beyond for name in names)
    smaller = {layer: (key / 3, value) for layer, (key, value) in found.kv_scales.items()}
    beyond = {each.path: each for each in coverage(model, replace(found, kv_scales=smaller), token_batches())}
    assert {path for path, each in beyond.items() if each.goes_beyond} == {"keys of layer 0", "keys of layer 1"}
    assert beyond["keys of layer 0"].ratio == pytest.approx(3.0, rel=1e-5)
    kept = []

    def keep(layer, keys, values):
        kept.extend([keys] if layer == 0 else [])
        return keys, values

    with torch.no_grad():
        for batch in token_batches():
            model.logits(batch, keep)
    limit = 464 * float(smaller[0][0])
    saturated = torch.cat([keys.flatten() for keys in kept]).abs().gt(limit).double().mean().item()
    assert beyond["keys of layer 0"].saturation_fraction == pytest.approx(saturated, rel=0.1)
