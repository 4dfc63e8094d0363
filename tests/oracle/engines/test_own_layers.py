"""All linear layers of decoders trained as served, by the engines' own quantizers and GEMMs (``own_layers.py``).

Sums differ by nature: a CPU adds in FP32, and octavo models a Hopper GPU's tensor cores. So each engine's layers are
compared with its profile as it is, within the bound that vLLM and SGLang test their own GEMMs by; and with the sums of
the other side, FP32 in octavo or tensor cores in Triton's interpreter: then outputs are equal but for BF16 roundings
that FP32's last bits tip over (octavo multiplies a chain by both scales at once, Triton's kernels one by one). With
powers of two no bit differs.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from octavo.engines import get
from octavo.engines.properties import with_property
from octavo.export.checkpoint_writer import save_quantized
from octavo.export.engine_format import format_of_engine
from octavo.export.sources import ConversionOptions, load_source
from octavo.language_model import LanguageModel, load_language_model
from octavo.numerics import Accumulate
from octavo.training.config import ModelConfig
from octavo.training.loop import train
from tests.oracle.engines.own_layers import own_run
from tests.unit.training.tiny_runs import some_text, tiny_config, tiny_data

FP32, TENSOR_CORES = Accumulate.FP32, Accumulate.HOPPER_SLOW
MODEL = ModelConfig(hidden_size=256, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1)
LAYERS, TOKENS = 14, 32
BOUND = 0.001  # of mean |out - ref| / mean |ref|: tests/kernels/quantization/test_block_fp8.py of vLLM, and SGLang's
SAME = 0.001  # share of outputs in which FP32's last bits may decide
EXACT = "vllm-block-ue8m0", TENSOR_CORES  # scales are powers of two
NEAR, APART = 0.001, 0.01  # mean |Δ log p| in nats; measured 0 with equal sums, 0.0021 without
RUNS = [
    pytest.param("te-current", FP32),
    pytest.param("te-block", FP32, marks=pytest.mark.long),
    *(
        pytest.param(engine, sums, marks=pytest.mark.long)
        for engine in ("vllm-block", "vllm-block-ue8m0", "sglang-block")
        for sums in (FP32, TENSOR_CORES)
    ),
]
every_run = pytest.mark.parametrize(("engine", "sums"), RUNS)
CHANGES = {  # one property of another engine
    "te-current": {"input.power_of_two": "te-block", "input.granularity": "te-block", "weight.application": "modelopt"},
    "te-block": {"input.power_of_two": "te-current", "weight.power_of_two": "te-current"},
    "vllm-block": {
        "input.division": "sglang-block",
        "weight.granularity": "vllm-token",
        "input.applied_in": "compressed-tensors",
    },
    "vllm-block-ue8m0": {"input.power_of_two": "vllm-block", "weight.power_of_two": "vllm-block"},
    "sglang-block": {
        "input.division": "vllm-block",
        "input.application": "vllm-block",
        "products": "compressed-tensors",
    },
}


def trained(engine: str, place: Path) -> tuple[Path, LanguageModel]:
    """A run of a few steps as the engine serves, its model, and the folder for a server in ``exported``."""
    run = place / "run"
    config = tiny_config(recipe="blockwise", as_served_by=engine, context=64, lr=3e-3)
    train(replace(config, model=MODEL), run, data=tiny_data(place))
    if not engine.startswith("te-"):
        file_format = format_of_engine(get(engine))
        source = load_source(str(run), file_format, ConversionOptions(engine=get(engine)))
        save_quantized(source.language_model, place / "exported", format=file_format, verify_folder=False)
    return run, load_language_model(run)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    @cache
    def run_of(engine):
        place = tmp_path_factory.mktemp(engine)
        return place, *trained(engine, place)

    @cache
    def of(engine, sums):
        place, run, plain = run_of(engine)
        tokens = torch.tensor([plain.tokenizer.encode(some_text()[4000:5000]).ids[: TOKENS + 1]])
        found = own_run(engine, run, place / "exported", tokens, accumulate=sums, place=place)
        assert len(found.layers) == LAYERS
        return found

    return of


@every_run
def test_layers_are_within_the_servers_own_bound(own, engine, sums):
    *_, error = own(engine, sums).unequal(get(engine))
    assert error < BOUND


@every_run
def test_layers_with_the_same_sums_have_the_same_outputs(own, engine, sums):
    unequal, outputs, error = own(engine, sums).unequal(replace(get(engine), accumulate=sums))
    assert unequal < SAME * outputs
    assert error < BOUND / 100
    if (engine, sums) == EXACT:
        assert not unequal


@every_run
def test_log_probabilities_of_a_decoder(own, engine, sums):
    found = own(engine, sums)
    same = found.deltas(replace(get(engine), accumulate=sums))
    assert float(same.mean()) < NEAR
    assert float(found.deltas(get(engine)).mean()) < APART
    if (engine, sums) == EXACT:
        assert not same.any()


@every_run
def test_another_engine_s_property_is_noticed(own, engine, sums):
    found, profile = own(engine, sums), replace(get(engine), accumulate=sums)
    other_sums = TENSOR_CORES if sums == FP32 else FP32
    changed = [with_property(profile, name, get(other)) for name, other in CHANGES[engine].items()]
    for other in (*changed, replace(profile, accumulate=other_sums)):
        unequal, outputs, _ = found.unequal(other)
        assert unequal > 10 * SAME * outputs, other
