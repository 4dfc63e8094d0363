"""Native stochastic rounding: the definition's codes for the same random numbers, at every level."""

import math
from fractions import Fraction

import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels import native_bindings
from octavo.numerics import Nonfinite, cast_stochastic
from octavo.numerics.cast import STOCHASTIC_BITS, round_stochastic_by_torch
from octavo.numerics.random_bits import random_bits_by_torch
from octavo.numerics.reference import encode_stochastic
from tests.oracle.rounding_table import float32_edges
from tests.oracle.test_native_casts import assert_same_codes, numbers

pytestmark = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)
every_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
MOST = (1 << STOCHASTIC_BITS) - 1


def assert_same_rounding(x, random, fmt):
    wanted = round_stochastic_by_torch(x, random, fmt.torch_dtype)
    for level in native_bindings.levels():
        assert_same_codes(native_bindings.round_stochastic(x, random, fmt, level=level), wanted, level)
    return wanted


@every_format
def test_nonfinite_elements_keep_their_sign(fmt):
    x = torch.tensor([math.inf, -math.inf, math.nan, math.copysign(math.nan, -1)])
    random = torch.zeros(4, dtype=torch.int32)
    wanted = {E4M3: [0x7F, 0xFF, 0x7F, 0xFF], E5M2: [0x7C, 0xFC, 0x7F, 0xFF]}[fmt]
    for level in native_bindings.levels():
        assert native_bindings.round_stochastic(x, random, fmt, level=level).view(torch.uint8).tolist() == wanted


@every_format
def test_the_reference_for_the_number_drawn(fmt):
    edges = torch.from_numpy(float32_edges(fmt))
    edges = edges[edges.isfinite() & (edges.abs() <= fmt.max)]
    x = torch.cat([edges, numbers(7, 60).flatten().clamp(-fmt.max, fmt.max), torch.tensor([2.0**-149, -0.0])])
    generator = torch.Generator().manual_seed(1)
    for random in (
        torch.zeros(x.shape, dtype=torch.int32),
        torch.full(x.shape, MOST, dtype=torch.int32),
        torch.full(x.shape, 1 << 19, dtype=torch.int32),
        torch.randint(MOST + 1, x.shape, generator=generator, dtype=torch.int32),
    ):
        pairs = zip(x.tolist(), random.tolist(), strict=True)
        wanted = [encode_stochastic(value, fmt, uniform=Fraction(drawn, MOST + 1)) for value, drawn in pairs]
        assert assert_same_rounding(x, random, fmt).view(torch.uint8).tolist() == wanted


@every_format
def test_every_bfloat16_and_what_lies_between(fmt):
    every = torch.arange(2**16, dtype=torch.int32)
    generator = torch.Generator().manual_seed(2)
    for low in (0, torch.randint(2**16, every.shape, generator=generator, dtype=torch.int32)):
        x = ((every << 16) | low).view(torch.float32)
        x = torch.where(x.isfinite(), x.clamp(-fmt.max, fmt.max), x)
        random = torch.randint(MOST + 1, x.shape, generator=generator, dtype=torch.int32)
        for numbers_drawn in (random, random.clamp(max=0), random.clamp(min=MOST)):
            assert_same_rounding(x, numbers_drawn, fmt)


@every_format
def test_every_length_and_layout(fmt):
    random = torch.randint(MOST + 1, (40, 50), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    x = numbers(40, 50).clamp(-fmt.max, fmt.max)
    for n in range(1, 50):
        assert_same_rounding(x[0, :n], random[0, :n], fmt)
    for view, drawn in ((x.t(), random.t()), (x[:, ::3], random[:, :17]), (x[3, 7], random[1, 1].long())):
        assert_same_rounding(view, drawn, fmt)


@every_format
def test_the_generator_decides_and_threads_do_not(fmt):
    x = numbers(300, 701)
    scale, before = torch.tensor(3.7), torch.get_num_threads()
    x[1, 1], x[2, 2] = torch.inf, torch.nan
    codes = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for policy in Nonfinite:
                generator = torch.Generator().manual_seed(4)
                codes.append(cast_stochastic(x, fmt, scale, generator=generator, nonfinite=policy))
    finally:
        torch.set_num_threads(before)
    for first in (0, 1):  # of either policy
        for other in codes[first + 2 :: 2]:
            assert_same_codes(other, codes[first], first)
    assert not torch.equal(codes[0].view(torch.uint8), cast_stochastic(x, fmt, scale).view(torch.uint8))


def test_compiled_it_is_one_operator():
    x, random = numbers(4, 5), torch.zeros(4, 5, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.octavo.round_stochastic, (x, random, E4M3.torch_dtype), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 100_003])
def test_random_bits_are_those_of_the_formula(count):
    for seed in (0, 1, 2**62 - 1, -1, 2**33 + 5):
        wanted = random_bits_by_torch(torch.tensor(seed), count)
        for level in native_bindings.levels():
            assert torch.equal(native_bindings.random_bits(torch.tensor(seed), count, level=level), wanted)
