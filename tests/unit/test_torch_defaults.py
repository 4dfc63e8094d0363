"""Torch's default dtype and device are the caller's affair: what octavo makes for itself has its own."""

from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import pytest
import torch

import octavo
from octavo.compat import DynamicScaler
from octavo.compat.transformer_engine import pytorch as te
from octavo.formats import E4M3, E4M3_FNUZ, E5M2, E8M0, FP32
from octavo.inference import ModelRunner, PagedKVCache, generate
from octavo.kernels import fake_quantize, native_bindings
from octavo.kernels.hopper_model import _sums_by_torch
from octavo.models import Llama
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, ScaleRounding, hopper_sums
from octavo.training.loss_scaling import LossScaler
from tests.recorded_state import recorded_state
from tests.tiny_llama import tiny_llama_config


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}
every_default = pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS.keys())


def assert_unmoved(default, call):
    wanted = call()
    with default():
        found = call()
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def parts(q):
    return [q.data, q.scale, q.dequantize()]


@every_default
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 32)], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3_FNUZ], ids=str)
def test_casts(default, granularity, fmt):
    """4096 rows: their scales in 2 bytes each would be half of the memory that a kernel writes."""
    x = torch.randn(4096, 64)
    broken = x.clone()
    broken[7, 3] = torch.inf
    assert_unmoved(default, lambda: parts(octavo.quantize(x, fmt, granularity=granularity)))
    assert_unmoved(default, lambda: parts(octavo.quantize(broken, fmt, granularity=granularity)))
    assert_unmoved(default, lambda: [fake_quantize(x, fmt, granularity=granularity)])
    assert_unmoved(default, lambda: [fake_quantize(x, fmt, granularity=granularity, out=torch.zeros_like(x))])
    powers = partial(octavo.quantize, scale_rounding=ScaleRounding.EVEN, scale_format=E8M0)
    assert_unmoved(default, lambda: parts(powers(x, fmt, granularity=granularity)))
    given = octavo.quantize(x, fmt, granularity=granularity).scale
    assert_unmoved(default, lambda: parts(octavo.quantize(x, fmt, granularity=granularity, scale=given)))


@every_default
@pytest.mark.skipif(bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}")
def test_operators(default):
    x = torch.randn(40, 64)
    x[3, 3] = torch.nan
    arguments = (E4M3.torch_dtype, [1], "fp32", 0.0, 0, True, None, None, False, True, "")
    assert_unmoved(default, lambda: torch.ops.octavo.cast(x, *arguments))
    seed = torch.tensor(5)
    assert_unmoved(default, lambda: [torch.ops.octavo.random_bits(seed, 77)])
    generator = torch.Generator()
    finite = torch.randn(40, 64)
    assert_unmoved(default, lambda: [octavo.numerics.cast_stochastic(finite, E4M3, generator=generator.manual_seed(0))])


@every_default
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(1, 128)], ids=str)
def test_products(default, granularity):
    a, b = (octavo.quantize(torch.randn(rows, 300), E4M3, granularity=granularity) for rows in (40, 50))
    bias = torch.randn(50)
    for accumulate in Accumulate:
        assert_unmoved(default, lambda how=accumulate: [octavo.scaled_mm(a, b, accumulate=how)])
        assert_unmoved(default, lambda how=accumulate: [octavo.scaled_mm(a, b, bias=bias, accumulate=how)])
    assert_unmoved(default, lambda: [octavo.scaled_mm(a, b, bias=bias, backend="torch_cpu")])


@every_default
def test_sums_of_tensor_cores(default):
    a, b = (octavo.quantize(torch.randn(rows, 300), E4M3) for rows in (4, 5))
    for how in (Accumulate.HOPPER_FAST, Accumulate.HOPPER_SLOW):
        assert_unmoved(default, lambda how=how: [hopper_sums(a.data, b.data, accumulate=how)])
    scales = torch.rand(4, 3), torch.rand(5, 3)
    assert_unmoved(default, lambda: [_sums_by_torch(a.data, b.data, Accumulate.HOPPER_SLOW, *scales)])


def small():
    config = tiny_llama_config(vocab_size=60, hidden_size=64, intermediate_size=96, max_positions=100)
    return Llama(config, seed=3)


@every_default
@pytest.mark.parametrize("level", ["torch", *native_bindings.levels()])
def test_generation(default, level):
    runner = ModelRunner(small(), level=level)
    prompt, token, pair = torch.arange(9), torch.tensor([5]), torch.tensor([5, 6])

    def logits():
        cache, batch = runner.new_cache(), runner.new_batch(2)
        return [
            runner(prompt, cache, every=True), runner(token, cache),
            runner(prompt, batch.sequences[1]), runner.step(pair, batch),
        ]  # fmt: skip

    assert_unmoved(default, logits)
    assert_unmoved(default, lambda: [octets(list(generate(runner, [1, 2, 3], max_new_tokens=5, temperature=0)))])


def octets(tokens):
    return torch.tensor(tokens, dtype=torch.uint8, device="cpu")


@every_default
@pytest.mark.parametrize("fmt", [E4M3, FP32], ids=str)
def test_a_cache_is_on_the_cpu(default, fmt):
    def tensors():
        t = PagedKVCache(2, 3, 16, max_positions=70, fmt=fmt).tensors
        return [x for x in (t.keys, t.values, t.key_scale, t.value_scale, t.table) if x is not None]

    assert_unmoved(default, tensors)


@every_default
@pytest.mark.parametrize("recipe", octavo.recipes.names())
def test_training(default, recipe):
    made, tokens = small(), torch.arange(20).view(2, 10)

    def trained():
        model = deepcopy(made)
        octavo.convert(model, recipe=recipe)
        for layer in model.modules():
            if isinstance(layer, octavo.nn.Linear) and layer.recipe.has_static_input:
                layer.input_scale.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        layers = [layer for layer in model.modules() if isinstance(layer, octavo.nn.Linear)]
        octavo.update_scales(model)
        kept = [tensor for layer in layers for tensor in recorded_state(layer).values()]
        return [*model.parameters(), *octavo.scaling_state(model).values(), *kept]

    assert_unmoved(default, trained)


@every_default
def test_loss_scales(default):
    x = torch.randn(200)

    def scaled():
        codes, scale = DynamicScaler().scale_tensor(x)
        weight = torch.nn.Parameter(x.clone())
        optimizer, scaler = torch.optim.SGD([weight]), LossScaler(initial=2.0**7, device="cpu")
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        return [codes, torch.tensor([scale, scaler.value], dtype=torch.float64, device="cpu"), weight.detach()]

    assert_unmoved(default, scaled)


@every_default
def test_scales_of_a_transformer_engine_checkpoint(default):
    layer = te.Linear(8, 12)
    histories = {f"amax_history_{way}": torch.rand(4, columns) for way, columns in (("fwd", 3), ("bwd", 2))}
    scales = {f"scale_{way}": torch.rand(columns) * 200 for way, columns in (("fwd", 3), ("bwd", 2))}
    for extra in (histories | scales, scales, histories):
        state = layer.state_dict() | {"_extra_state": extra}

        def loaded(state=state):
            model = deepcopy(layer)
            model.load_state_dict(state)
            return list(octavo.scaling_state(model).values())

        assert_unmoved(default, loaded)
