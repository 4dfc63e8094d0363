"""A language model on a GPU: windows, calibration, comparison, sensitivity and times where its weights are."""

import copy
from dataclasses import replace

import pytest
import torch

from octavo.bench.latency import pass_times
from octavo.language_model import LanguageModel
from octavo.quantization import Budget, calibrate, coverage, measure_sensitivity, text_windows
from octavo.quantization.comparison.comparison import compare
from octavo.quantization.comparison.kv_cache_round_trip import key_means
from octavo.quantization.comparison.variants import line_up
from octavo.training.memory import extra_memory_bytes
from tests.gpu import devices
from tests.unit.quantization.tiny_models import language_model
from tests.unit.quantization.tiny_models import windows as random_windows

pytestmark = pytest.mark.gpu

FORMATS = ["fp32", "bf16", "fp8-dynamic", "fp8-rowwise", "fp8-blockwise", "fp8-static", "fp8-kv", "fp8-kv-centred"]


@pytest.fixture
def there() -> LanguageModel:
    here = language_model()
    return replace(here, model=copy.deepcopy(here.model).to(devices.DEVICE))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "own.txt").write_text("some text, some more text\n" * 3000)
    return tmp_path / "own.txt"


def test_windows_are_where_the_model_is(there, text):
    windows = text_windows(there, text, "all", count=3, length=24)
    assert windows.device.type == "cuda"
    assert torch.equal(windows.cpu(), text_windows(language_model(), text, "all", count=3, length=24))


@pytest.mark.parametrize("weight_method", ["max", "mse"])
def test_scales_are_the_cpus(there, text, tmp_path, weight_method):
    """Amaxes of a product differ by the order of its sums; weights' scales do not."""
    batches = text_windows(there, text, "all", count=4, length=24).split(1)
    found = calibrate(there, batches, weight_method=weight_method, granularity="row", kv_cache=True)
    model, on_cpu = language_model(), [batch.cpu() for batch in batches]
    here = calibrate(model, on_cpu, weight_method=weight_method, granularity="row", kv_cache=True)
    for path, scale in here.input_scales.items():
        torch.testing.assert_close(found.input_scales[path].cpu(), scale, rtol=1e-2, atol=0)
        assert torch.equal(found.weight_scales[path].cpu(), here.weight_scales[path])
    seen, expected = coverage(there, found, batches), coverage(model, here, on_cpu)
    assert {each.path for each in seen} == {each.path for each in expected}
    found.save(tmp_path / "scales")
    found.apply(there)
    assert there.logits(batches[0]).isfinite().all()


def test_formats_are_compared_and_timed_on_the_gpu(there, text):
    windows = text_windows(there, text, "all", count=3, length=24)
    calibration = calibrate(there, windows.split(1))
    contestants = line_up(there, FORMATS, calibration=calibration, means=key_means(there, windows))
    found = compare(contestants, windows)
    assert all(entry.scores.nats < 100 for entry in found.entries)
    times = pass_times({each.name: each for each in contestants}, windows[0], batches=(1,))
    assert all(time.latency_ms > 0 for time in times)
    extra = extra_memory_bytes(windows.device, lambda: contestants[0].logits(windows[:1]))
    assert extra is not None
    assert extra >= 4 * 24 * 300  # its logits, in FP32


def test_layers_are_ranked_on_the_gpu(there):
    windows = random_windows(4).to(devices.DEVICE)
    found = measure_sensitivity(there.model, windows[:2], windows[2:], budget=Budget(perplexity=0.5), true_pairs=2)
    assert len(found.units) > 0
