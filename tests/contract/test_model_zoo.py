"""Ten architectures of transformers, small and without weights: converted, stepped, restored; how much runs in FP8."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", reason="transformers is not installed: no models to convert")

from benchmarks.model_zoo import build, row

NAMES = ("mixtral", "gpt-oss", "olmoe", "phimoe", "granite-moe", "qwen3-moe", "qwen2-moe", "llama4", "jetmoe", "gpt2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_nearly_all_of_it_runs_in_fp8_trains_and_comes_back(name):
    result = row(name, lambda: build(name))
    assert result.problem == ""
    assert result.before < 0.5
    assert result.after > (0.95 if name == "gpt2" else 0.9)
