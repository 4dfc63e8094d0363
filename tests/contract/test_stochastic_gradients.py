"""Recipes that round gradients stochastically: codes of the reference, no bias, seeds that repeat and are kept."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.doctor import Thresholds, series_of, watch
from octavo.doctor.rules.weights import stale_weight
from octavo.nn import Linear
from octavo.numerics import PerTensor
from octavo.numerics.cast import STOCHASTIC_BITS
from octavo.numerics.random_bits import random_bits
from octavo.numerics.reference import encode_stochastic
from tests.contract.gemm_oracle import recorded_products

RECIPES = ("tensorwise", "delayed", "delayed_te", "article", "rowwise", "blockwise", "mxfp8")
each_recipe = pytest.mark.parametrize("name", RECIPES)


def _layer(name: str, rounding: str = "stochastic") -> Linear:
    torch.manual_seed(3)
    return Linear(40, 24, recipe=octavo.recipes.get(name, gradient_rounding=rounding))


def _gradients(
    layer: Linear, grad_output: Tensor, *, seed: int | None = 0, run: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Of the input and the weight; ``seed`` is torch's in the backward pass, None leaves its generator as it is."""
    x = torch.randn(len(grad_output), 40, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x) if run is None else run(x)
    if seed is not None:
        torch.manual_seed(seed)
    grads = torch.autograd.grad(y, (x, layer.weight), grad_output)
    return grads[0], grads[1]


def _same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@each_recipe
def test_codes_are_the_reference_s_of_the_seeds_that_torch_draws(name: str) -> None:
    """One seed a cast: one for both GEMMs where a scale a tensor lets the transpose be a view."""
    layer, grad_output = _layer(name), torch.randn(16, 24)
    with recorded_products() as products:
        _gradients(layer, grad_output, seed=7)
    torch.manual_seed(7)
    spec = layer.recipe.grad_input.a
    assert spec is not None
    casts = [(products[1].a, grad_output), (products[2].a, grad_output.t())]
    if isinstance(spec.granularity, PerTensor):
        assert torch.equal(products[2].a.data.view(torch.uint8), products[1].a.data.view(torch.uint8).t())
        del casts[1]
    for operand, x in casts:
        encode = spec.granularity.expand(operand.fp32_scale.reciprocal(), x.shape)
        scaled = (x * encode).clamp(-spec.format.max, spec.format.max)
        bits = random_bits(torch.randint(1 << 62, ()), x.shape, x.device)
        random = (bits >> (32 - STOCHASTIC_BITS)) & ((1 << STOCHASTIC_BITS) - 1)
        wanted = [
            encode_stochastic(value, spec.format, uniform=Fraction(integer, 1 << STOCHASTIC_BITS))
            for value, integer in zip(scaled.flatten().tolist(), random.flatten().tolist(), strict=True)
        ]
        # x times the reciprocal of the stored scale may differ in its last bit from x times the encode scale.
        found = operand.data.contiguous().view(torch.uint8).flatten().tolist()
        assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= 1


@each_recipe
def test_a_seed_repeats_and_the_generator_s_state_resumes(name: str) -> None:
    layer, grad_output = _layer(name), torch.randn(16, 24)
    first = _gradients(layer, grad_output, seed=5)
    state = torch.get_rng_state()
    second = _gradients(layer, grad_output, seed=None)
    assert _same(first, _gradients(layer, grad_output, seed=5))
    assert not _same(first, second)
    assert not _same(first, _gradients(layer, grad_output, seed=6))
    torch.set_rng_state(state)
    assert _same(second, _gradients(layer, grad_output, seed=None))


@each_recipe
def test_the_forward_pass_draws_nothing_and_is_the_same(name: str) -> None:
    x = torch.randn(16, 40)
    stochastic, nearest = _layer(name), _layer(name, "nearest")
    state = torch.get_rng_state()
    assert torch.equal(stochastic(x), nearest(x))
    assert torch.equal(torch.get_rng_state(), state)


@each_recipe
def test_exact_gradients_never_move(name: str) -> None:
    grad_output = torch.tensor([1.0, -0.5, 0.25, 0.0]).repeat(16, 6)
    assert _same(
        _gradients(_layer(name), grad_output, seed=2), _gradients(_layer(name, "nearest"), grad_output, seed=2)
    )


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_stochastic_gradients_keep_the_mean_that_nearest_rounding_flushes(name: str) -> None:
    """1/8 of the smallest code beside an amax: 5 standard deviations of the mean of many."""
    fmt = octavo.recipes.get(name).grad_weight.a.format  # type: ignore[union-attr]
    small = fmt.magnitude(1) / 8
    rows = 4000
    grad_output = torch.full((rows, 24), small)
    grad_output[0] = fmt.max  # encode scale 1, in every row and column of its transpose
    grad_output[:, 0] = fmt.max
    x = torch.ones(rows, 40)
    x[0] = 0
    for rounding, wanted, spread in (
        ("nearest", 0.0, 0.0),
        ("stochastic", small * (rows - 1), fmt.magnitude(1) * math.sqrt(7 / 64 * rows)),
    ):
        layer = _layer(name, rounding)
        torch.manual_seed(1)
        (grad,) = torch.autograd.grad(layer(x), layer.weight, grad_output)
        assert ((grad[1:].double() - wanted).abs() <= 5 * spread).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
@each_recipe
def test_activation_checkpointing_changes_no_bit(name: str, use_reentrant: bool) -> None:
    grad_output = torch.randn(16, 24)
    results = []
    for checkpointed in (False, True):
        layer = _layer(name)
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointed else layer(x)
        torch.manual_seed(8)
        y.backward(grad_output)
        assert x.grad is not None
        assert layer.weight.grad is not None
        results.append((x.grad, layer.weight.grad))
    assert _same(*results)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_compiled_a_seed_repeats(name: str, dynamic: bool) -> None:
    layer, grad_output = _layer(name), torch.randn(16, 24)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    first = _gradients(layer, grad_output, seed=5, run=compiled)
    assert _same(first, _gradients(layer, grad_output, seed=5, run=compiled))
    assert not _same(first, _gradients(layer, grad_output, seed=6, run=compiled))


def test_the_doctor_takes_drawn_codes_for_no_other_tensor_s() -> None:
    model = torch.nn.Sequential(_layer("tensorwise"))
    watcher = watch(model, interval=1)
    for _ in range(3):
        with watcher.step():
            (model(torch.randn(64, 40)) * torch.randn(64, 24)).sum().backward()
    assert not list(stale_weight(series_of([], list(watcher.samples)), Thresholds()))
