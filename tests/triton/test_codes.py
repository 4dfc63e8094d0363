"""Single numbers in a kernel against octavo.numerics: every code, every 16-bit number, every rule of a scale."""

import math

import pytest
import torch
import triton
import triton.language as tl

from octavo.formats import E4M3, E5M2, FP32, Format
from octavo.kernels.triton import codes as kernels
from octavo.numerics import Nonfinite, ScaleRounding
from octavo.numerics.cast import cast_nearest
from octavo.numerics.scaling import AMAX_FLOOR, encode_scale_from_amax

FORMATS = (E4M3, E5M2)
SIZE = 4096


@triton.jit
def _encode(
    x, out, count, MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    PROPAGATE: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    number = tl.load(x + at, mask=at < count, other=0.0)
    infinite = (number == float("inf")) | (number == -float("inf"))
    made = kernels.code_from_number(number, MAX, MANTISSA, BIAS, PROPAGATE, HARDWARE, infinite)
    tl.store(out + at, made, mask=at < count)


@triton.jit
def _decode(x, out, count, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    number = kernels.number_from_code(tl.load(x + at, mask=at < count, other=0), MANTISSA, HARDWARE)
    tl.store(out + at, number, mask=at < count)


@triton.jit
def _scales(
    x, out, count, MAX: tl.constexpr, MANTISSA: tl.constexpr, ROUNDING: tl.constexpr,
    FLOOR: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    amax = tl.load(x + at, mask=at < count, other=1.0)
    made = kernels.encode_scale_from_amax(amax, MAX, MANTISSA, ROUNDING, FLOOR, MARGIN)
    tl.store(out + at, made, mask=at < count)
    tl.store(out + count + at, kernels.reciprocal(made), mask=at < count)


def _grid(x: torch.Tensor) -> tuple[int]:
    return (-(-x.numel() // SIZE),)


def _codes(x: torch.Tensor, fmt: Format, *, propagate: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    constants = kernels.format_constants(fmt)
    hardware = kernels.has_hardware_casts(x.device)
    _encode[_grid(x)](x, out, x.numel(), **constants, PROPAGATE=propagate, HARDWARE=hardware, SIZE=SIZE)
    return out.cpu()


def _every_16_bit_number() -> torch.Tensor:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return torch.cat([patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float()])


def _around_every_tie(fmt: Format) -> torch.Tensor:
    """The midpoints between neighbouring codes, the codes, and the FP32 numbers next to both."""
    held = torch.tensor([fmt.magnitude(code) for code in range(fmt.max_code + 1)])
    beyond = torch.tensor([fmt.max * 1.03, fmt.max * 1.07, fmt.max * 1.2, 2.0**-149, 1e-40])
    points = torch.cat([held, (held[1:] + held[:-1]) / 2, beyond])
    points = torch.cat([points, torch.nextafter(points, torch.tensor(math.inf)), torch.nextafter(points, -points)])
    return torch.cat([points, -points])


@pytest.mark.parametrize("nonfinite", list(Nonfinite))
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_number_gets_the_code_that_the_cast_gives_it(fmt: Format, nonfinite: Nonfinite, device: torch.device) -> None:
    x = torch.cat([_every_16_bit_number(), _around_every_tie(fmt), torch.randn(5000) * 10])
    wanted = cast_nearest(x, fmt, nonfinite=nonfinite)
    made = _codes(x.to(device), fmt, propagate=nonfinite == Nonfinite.PROPAGATE).view(fmt.torch_dtype)
    assert torch.equal(made.float().isnan(), wanted.float().isnan())
    known = ~wanted.float().isnan()
    assert torch.equal(made.view(torch.uint8)[known], wanted.view(torch.uint8)[known])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_code_is_the_number_that_torch_says(fmt: Format, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256, device=device)
    hardware = kernels.has_hardware_casts(device)
    _decode[_grid(codes)](codes.to(device), out, 256, MANTISSA=fmt.mantissa_bits, HARDWARE=hardware, SIZE=SIZE)
    torch.testing.assert_close(out.cpu(), codes.view(fmt.torch_dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounding", list(ScaleRounding))
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_an_amax_gets_the_scale_of_the_definition(fmt: Format, rounding: ScaleRounding, device: torch.device) -> None:
    bits = torch.randint(0, 0x7F80_0000, (20000,), dtype=torch.int32)
    edges = torch.tensor([0.0, 2.0**-149, 1e-38, 1e-12, 0.25, 0.3, 0.5, 1.0, 447.9, 448.0, 1e30, FP32.max])
    floors = [torch.nextafter(edges, torch.tensor(beyond)) for beyond in (0.0, FP32.max)]
    amaxes = torch.cat(
        [bits.view(torch.float32), edges, *floors, torch.logspace(-149, 127, 277, base=2, dtype=torch.float64).float()]
    )
    for floor, margin in ((AMAX_FLOOR, 0), (1e-12, 0), (0.25, 3), (0.3, 1), (AMAX_FLOOR, 9), (AMAX_FLOOR, 140)):
        wanted = encode_scale_from_amax(amaxes, fmt, rounding=rounding, amax_floor=floor, margin=margin)
        out = torch.empty(2, len(amaxes), device=device)
        constants = {"MAX": fmt.max, "MANTISSA": fmt.mantissa_bits, "ROUNDING": str(rounding), "FLOOR": floor}
        _scales[_grid(amaxes)](amaxes.to(device), out, len(amaxes), **constants, MARGIN=margin, SIZE=SIZE)
        assert torch.equal(out[0].cpu(), wanted)
        assert torch.equal(out[1].cpu(), wanted.reciprocal())


@triton.jit
def _round(x, out, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    number = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(out + at, kernels.round_to(number, out.dtype.element_ty), mask=at < count)


def test_sixteen_bits_are_rounded_as_torch_rounds(device):
    """Every bfloat16 number, what lies between it and the next, the midpoint among it, and NaN of every payload."""
    high = torch.arange(1 << 16).repeat(5)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001]).repeat_interleave(1 << 16)
    numbers = ((high << 16) | low).to(torch.uint32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(numbers.shape, dtype=dtype, device=device)
        _round[_grid(numbers)](numbers.to(device), out, numbers.numel(), SIZE=SIZE)
        torch.testing.assert_close(out.cpu(), numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _read_scale(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, kernels.number_from_scale(tl.load(x + at)))


def test_every_scale_of_a_byte(device):
    every = torch.arange(256, dtype=torch.uint8)
    for held in (every, every.view(torch.float8_e8m0fnu).float()):
        out = torch.empty(256, device=device)
        _read_scale[(1,)](held.to(device), out, SIZE=256)
        torch.testing.assert_close(out.cpu(), every.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)
