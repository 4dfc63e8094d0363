"""Casts on the GPU against octavo.numerics: the same codes, scales, amaxes and counts, to the bit, in either order."""

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import cast_operators, triton_bindings
from octavo.kernels.backend import CastResult
from octavo.kernels.triton import launching, values
from octavo.kernels.triton.blocks import cast_blocks
from octavo.kernels.triton.casts import ceil_div
from octavo.kernels.triton.rows import cast_rows
from octavo.numerics import (
    AmaxRecord,
    CastSpec,
    Granularity,
    Nonfinite,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    ScaleRounding,
    cast_stochastic,
    measure,
)
from octavo.numerics import quantize as quantize_by_torch
from octavo.numerics.cast import round_stochastic_by_torch
from octavo.numerics.granularity import granularity_as_list
from octavo.numerics.quantized import dequantize_by_torch
from octavo.numerics.random_bits import random_bits_by_torch
from octavo.numerics.scaling import AMAX_FLOOR

FORMATS = (E4M3, E5M2)
ALMOST_2_TO_THE_31 = 2**31 - 100  # a whole tile more is beyond int32
RULE: dict[str, Any] = {"scale_rounding": ScaleRounding.FP32, "amax_floor": AMAX_FLOOR, "margin": 0}
POWERS: dict[str, Any] = {"scale_rounding": ScaleRounding.RCEIL, "amax_floor": AMAX_FLOOR, "margin": 0}
GRANULARITIES = (PerTensor(), PerRow(), PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32), PerBlock(4, 2))
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)


def wanted_cast(
    x: Tensor, fmt: Format, granularity: Granularity, rule: dict[str, Any], nonfinite: Nonfinite = Nonfinite.PROPAGATE
) -> QuantizedTensor:
    return quantize_by_torch(
        x.cpu(), fmt, granularity=granularity, nonfinite=nonfinite, **rule,
    )  # fmt: skip


def assert_codes(found: Tensor, wanted: Tensor) -> None:
    """Equal to the bit, but for the signs of NaN."""
    assert found.is_contiguous()
    assert found.shape == wanted.shape
    held, broken = found.cpu().view(torch.uint8), wanted.float().isnan()
    assert torch.equal(found.cpu().float().isnan(), broken)
    assert torch.equal(held[~broken], wanted.view(torch.uint8)[~broken])


def assert_cast(found: CastResult, x: Tensor, wanted: QuantizedTensor) -> None:
    measured = measure(x.cpu(), wanted.granularity)
    assert_codes(found.output.data, wanted.data)
    assert torch.equal(found.output.scale.cpu(), wanted.scale)
    assert found.measurement is not None
    assert torch.equal(found.measurement.amax.cpu(), measured.amax)
    assert count(found) == int(measured.nonfinite or 0)


def count(found: CastResult) -> int:
    """Of NaN and ±Inf."""
    assert found.measurement is not None
    assert found.measurement.nonfinite is not None
    return int(found.measurement.nonfinite)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Ragged, narrow, padded and turned matrices, and what is no matrix; amaxes differ from line to line."""
    spread = torch.logspace(-8, 4, 150, base=2)
    matrix = (torch.randn(70, 150) * spread).to(dtype)
    return [matrix, matrix.t(), matrix[:, 3:139], torch.randn(1, 1).to(dtype), torch.randn(5, 1).to(dtype)]


@pytest.mark.long
@every_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_and_scales_of_both_orders_are_those_of_the_definition(granularity, dtype, device):
    for x in tensors(dtype):
        for both_ways in (False, True):
            found = triton_bindings.cast(
                x.to(device), CastSpec(format=E4M3, granularity=granularity, **POWERS), transpose=both_ways
            )
            assert_cast(found, x, wanted_cast(x, E4M3, granularity, POWERS))
            assert (found.transposed is not None) == both_ways
            if found.transposed is not None:
                wanted = wanted_cast(x.t(), E4M3, granularity, POWERS)
                assert_codes(found.transposed.data, wanted.data)
                assert torch.equal(found.transposed.scale.cpu(), wanted.scale)


@every_granularity
def test_more_and_fewer_dimensions_than_two(granularity, device):
    for shape in ((3, 128, 40), (2, 2, 128, 3)) + (((7,),) if not isinstance(granularity, PerBlock) else ()):
        x = torch.randn(shape)
        assert_cast(
            triton_bindings.cast(x.to(device), CastSpec(format=E4M3, granularity=granularity, **RULE)),
            x,
            wanted_cast(x, E4M3, granularity, RULE),
        )


@every_granularity
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("nonfinite", list(Nonfinite))
def test_nonfinite_elements_are_counted_and_do_not_affect_the_scale(granularity, fmt, nonfinite, device):
    x = torch.randn(9, 140)
    x[2, 3], x[2, 4], x[8, 139], x[5] = float("inf"), float("nan"), float("-inf"), float("nan")
    for rule in (RULE, POWERS):
        found = triton_bindings.cast(
            x.to(device), CastSpec(format=fmt, granularity=granularity, **rule, nonfinite=nonfinite), transpose=True
        )
        assert_cast(found, x, wanted_cast(x, fmt, granularity, rule, nonfinite))
        assert count(found) == 143
        assert found.transposed is not None
        assert_codes(found.transposed.data, wanted_cast(x.t(), fmt, granularity, rule, nonfinite).data)


@pytest.mark.long
@pytest.mark.parametrize("rounding", list(ScaleRounding))
def test_every_rule_of_a_scale(rounding, device):
    ordinary = torch.randn(4, 40).bfloat16()
    tiny = torch.randn(4, 40) * 1e-37 * torch.tensor([1.0, 1e3, 1e-6, 1e7])[:, None]
    normal = torch.where(tiny.abs() < torch.finfo(torch.float32).tiny, 0, tiny)
    rules = (
        {"scale_rounding": rounding, "amax_floor": AMAX_FLOOR, "margin": 0},
        {"scale_rounding": rounding, "amax_floor": AMAX_FLOOR, "margin": 9},
        {"scale_rounding": rounding, "amax_floor": 8.0, "margin": 3},
        {"scale_rounding": rounding, "amax_floor": 1e-12, "margin": 300},
    )
    granularities: tuple[Granularity, ...] = (PerTensor(), PerRow(), PerBlock(1, 32))
    for rule, granularity in itertools.product(rules, granularities):
        # Without subnormal BF16 numbers, which Triton's interpreter widens wrongly.
        for x in (ordinary, tiny, normal.bfloat16(), torch.zeros_like(ordinary)):
            found = triton_bindings.cast(x.to(device), CastSpec(format=E5M2, granularity=granularity, **rule))
            assert_cast(found, x, wanted_cast(x, E5M2, granularity, rule))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, where products saturate
@pytest.mark.parametrize("both_ways", [False, True])
def test_a_known_amax_or_a_given_scale_is_used_while_the_tensor_is_measured(both_ways, device):
    x = torch.randn(70, 150)
    x[3, 4] = float("inf")
    for past, held in ((0.5, None), (0.0, None), (None, 0.25), (None, 2.0**-127)):
        amax, scale = (None if value is None else torch.tensor(value) for value in (past, held))
        found = triton_bindings.cast(
            x.to(device), CastSpec(format=E4M3), measure_if_zero=True, transpose=both_ways,
            amax=None if amax is None else amax.to(device), scale=None if scale is None else scale.to(device),
        )  # fmt: skip
        assert_cast(found, x, quantize_by_torch(x, E4M3, amax=amax if past else None, scale=scale))
    found = triton_bindings.cast(x.to(device), CastSpec(format=E4M3, **RULE), amax=torch.zeros((), device=device))
    assert_cast(found, x, quantize_by_torch(x, E4M3, amax=torch.tensor(0.0)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("largest", [0, 22_000, -1])
@pytest.mark.parametrize("broken", [(), (1, 10_000, 21_999, -2)], ids=str)
def test_a_program_that_measures_several_tiles_finds_the_largest(gaps, largest, broken, device, monkeypatch):
    """Two programs take turns, three each or more, and measure again where something is not finite."""
    monkeypatch.setattr("octavo.kernels.triton.casts._PROGRAMS", 2)
    numbers = torch.randn(301 * 150)
    numbers[largest] = 9.0
    numbers[list(broken)] = torch.tensor([float("nan"), float("inf"), -float("inf"), float("nan")])[: len(broken)]
    x = torch.zeros(301, 160)[:, :150].copy_(numbers.view(301, 150)) if gaps else numbers.view(301, 150)
    found = triton_bindings.cast(x.to(device), CastSpec(format=E4M3, **RULE))
    assert_cast(found, x, wanted_cast(x, E4M3, PerTensor(), RULE))
    assert count(found) == len(broken)


def filled_record(device: torch.device) -> AmaxRecord:
    return AmaxRecord(torch.tensor(-1.0).to(device), torch.tensor(False).to(device), torch.tensor(5).to(device))


def as_numbers(record: AmaxRecord) -> list[float]:
    return [t.item() for t in (record.amax, record.overflowed, record.nonfinite) if t is not None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, where products saturate
@every_granularity
@pytest.mark.parametrize("both_ways", [False, True])
def test_kernels_record_what_a_measurement_would(granularity, both_ways, device):
    """Several tensors after each other, the largest amax neither first nor last, and every part by itself."""
    given: list[dict[str, Tensor]] = [{}]
    if isinstance(granularity, PerTensor):
        given += [{"amax": torch.tensor(0.5)}, {"amax": torch.tensor(0.0)}, {"scale": torch.tensor(0.25)}]
    finite, broken = torch.randn(70, 150), torch.randn(150, 70).t() * 3
    broken[3, 4], broken[69, 149] = float("inf"), float("nan")
    for options in given:
        on_device: dict[str, Any] = {name: value.to(device) for name, value in options.items()}
        found, wanted = filled_record(device), filled_record(torch.device("cpu"))
        for x in (finite * 0, finite, broken, broken.contiguous(), finite):
            result = triton_bindings.cast(
                x.to(device), CastSpec(format=E4M3, granularity=granularity), measure_if_zero=True,
                transpose=both_ways, record=found, **on_device,
            )  # fmt: skip
            assert result.measurement is None
            wanted.add(measure(x, granularity))
            assert as_numbers(found) == as_numbers(wanted)
        assert as_numbers(wanted)[1:] == [True, 9]
        for part in ("amax", "overflowed", "nonfinite"):
            alone = filled_record(device)
            only = AmaxRecord(**{part: getattr(alone, part)})
            spec = CastSpec(format=E4M3, granularity=granularity)
            triton_bindings.cast(broken.to(device), spec, transpose=both_ways, record=only, **on_device)
            assert [i for i, (a, b) in enumerate(zip(as_numbers(alone), (-1.0, False, 5), strict=True)) if a != b] == [
                ("amax", "overflowed", "nonfinite").index(part)
            ]


def test_saturated_and_underflowed_elements_are_counted_on_request(device):
    x = torch.tensor([[1.0, 500.0, -460.0, 448.0, 1e-5, 0.0, float("inf"), float("nan")]])
    found = triton_bindings.cast(
        x.to(device), CastSpec(format=E4M3, **RULE), scale=torch.ones((), device=device), counting=True
    )
    assert found.saturated is not None
    assert found.underflowed is not None
    assert (int(found.saturated), int(found.underflowed), count(found)) == (2, 1, 2)


@pytest.mark.long
def test_a_row_that_does_not_fit_into_registers(device):
    x = torch.randn(2, 16400)
    assert_cast(
        triton_bindings.cast(x.to(device), CastSpec(format=E4M3, granularity=PerRow(), **POWERS)),
        x,
        wanted_cast(x, E4M3, PerRow(), POWERS),
    )
    assert not triton_bindings.fakes(x, PerRow())


@pytest.mark.long
@every_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_in_place_and_elsewhere_are_those_of_the_codes(granularity, dtype, device):
    for x in tensors(dtype):
        if not triton_bindings.fakes(x, granularity):
            continue
        # The interpreter cuts bfloat16 off instead of rounding it; with powers of two there is nothing to round.
        rule = POWERS if device.type == "cpu" else RULE
        wanted = wanted_cast(x, E5M2, granularity, rule).dequantize()
        given = x.to(device)
        made = triton_bindings.fake_quantize(given, CastSpec(format=E5M2, granularity=granularity, **rule))
        assert torch.equal(made.cpu(), wanted)
        other = torch.empty_like(given)
        assert (
            triton_bindings.fake_quantize(given, CastSpec(format=E5M2, granularity=granularity, **rule), out=other)
            is other
        )
        assert torch.equal(other.cpu(), wanted)
        given = x.clone().to(device)
        assert (
            triton_bindings.fake_quantize(given, CastSpec(format=E5M2, granularity=granularity, **rule), out=given)
            is given
        )
        assert torch.equal(given.cpu(), wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, where float16 becomes infinite
@every_granularity
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_code_decodes_as_defined(granularity, fmt, device):
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.torch_dtype)
    for codes in (every.view(2, 128).repeat(40, 2)[:, :200], every.view(64, 4).t()):
        scale = (torch.rand(granularity.scale_shape(codes.shape)) + 0.5).to(torch.float32)
        if isinstance(granularity, PerTensor):
            assert (
                triton_bindings.dequantize(
                    every.view(2, 2, 64).to(device), scale.to(device), granularity, torch.float32
                ).ndim
                == 3
            )
        for dtype in (torch.float32, torch.float16):
            wanted = dequantize_by_torch(codes, scale, granularity_as_list(granularity), dtype)
            found = triton_bindings.dequantize(codes.to(device), scale.to(device), granularity, dtype)
            torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_stochastic_rounding_takes_the_same_random_bits_to_the_same_codes(fmt, device):
    held = torch.tensor([fmt.magnitude(code) for code in range(fmt.max_code + 1)])
    between = held[:-1] + held.diff() * torch.rand(len(held) - 1)
    tiny = torch.tensor([2.0**-149, 2.0**-130, 2.0**-30, 0.0, float("inf"), float("nan")])
    numbers = torch.cat([held, between, held[1:] * (1 - 2.0**-24), tiny])
    x = torch.cat([numbers, -numbers]).repeat(9)
    for random in (torch.randint(1 << 20, x.shape), torch.zeros(x.shape), torch.full(x.shape, (1 << 20) - 1)):
        drawn = random.to(torch.int32)
        found = triton_bindings.round_stochastic(x.to(device), drawn.to(device), fmt)
        assert_codes(found, round_stochastic_by_torch(x, drawn, fmt.torch_dtype))


def test_random_bits_are_those_of_the_definition(device):
    for seed, count in ((0, 7), (0x1234_5678_9ABC_DEF0, 9001)):
        given = torch.tensor(seed)
        assert torch.equal(values.random_bits(given.to(device), count).cpu(), random_bits_by_torch(given, count))


@pytest.mark.gpu
def test_a_seed_gives_the_same_codes_on_every_device():
    x = torch.randn(300, 70)
    made = [cast_stochastic(x.to(where), E4M3, generator=torch.Generator().manual_seed(3)) for where in ("cpu", "cuda")]
    assert_codes(made[1], made[0])


@triton.jit
def _divide(size, out, BLOCK: tl.constexpr):
    tl.store(out, ceil_div(size, BLOCK))


def test_sizes_up_to_the_largest_int32_are_divided_into_blocks(device):
    out = torch.empty((), dtype=torch.int64, device=device)
    for block in (1, 32, 128, 8192):
        for size in (1, 31, 32, 33, 8192, 8193, ALMOST_2_TO_THE_31, 2**31 - 1):
            _divide[(1,)](size, out, BLOCK=block)
            assert int(out) == launching.ceil_div(size, block)


def casts_of_a_line(x: Tensor) -> list[Tensor]:
    """Codes in both orders, scales and amaxes of 128 numbers, by blocks and, if they are a row, by lines; and back."""
    made = [
        cast_blocks(x, CastSpec(format=E4M3, granularity=block, **POWERS), transposed=True)
        for block in (PerBlock(128, 128), PerBlock(1, 128))
    ]
    if len(x) == 1:
        made.append(cast_rows(x, CastSpec(format=E4M3, granularity=PerRow(), **POWERS), transposed=True))
    lines = [each for one in made for each in one if each is not None]
    back = values.dequantize(lines[0].codes, lines[0].scale, (128, 128), E4M3, torch.float32)
    found = [tensor for each in lines for tensor in (each.codes.view(torch.uint8), each.scale, each.amax)]
    return [back, *(tensor for tensor in found if tensor is not None)]


@pytest.mark.parametrize("shape", [(1, 128), (128, 1)], ids=str)
def test_the_beginning_of_the_longest_line_is_cast_as_if_nothing_followed(shape, device, monkeypatch):
    """The kernels are told that a line of 128 numbers is as long as an int32 can say; memory is asked for these."""
    x, launch = torch.randn(shape, device=device), launching.launch
    wanted = casts_of_a_line(x)

    def longer(kernel, grid, *arguments, **constants):
        told = (ALMOST_2_TO_THE_31 if type(each) is int and each == 128 else each for each in arguments)
        launch(kernel, grid, *told, **constants)

    monkeypatch.setattr(launching, "launch", longer)
    assert all(map(torch.equal, casts_of_a_line(x), wanted))


def test_unsupported_casts_fall_back_to_torch():
    x = torch.empty(4, 6)
    assert not triton_bindings.supports(x, E4M3, PerTensor())
    if not torch.cuda.is_available():
        assert triton_bindings.why_absent() == "there is no CUDA device"


@every_granularity
@pytest.mark.parametrize("measured", [True, False])
def test_the_operators_are_what_their_shape_functions_say(granularity, measured, device):
    rest = ("fp32", 1e-12, 0, True, None, None, False, measured, "")
    for x in (torch.randn(5, 130, device=device), torch.randn(130, 33, device=device).t()):
        arguments = (torch.float8_e4m3fn, granularity_as_list(granularity), *rest)
        made = cast_operators._cast_both_ways_on_gpu(x, *arguments)
        shapes = cast_operators._cast_both_ways_shapes(x, *arguments)
        for one, other in zip(made, shapes, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == len(made)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (*made, *cast_operators._cast_on_gpu(x, *arguments)))


@pytest.mark.gpu
@every_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_tensors_and_every_number(granularity, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    edges = patterns.view(torch.bfloat16 if dtype is not torch.float16 else torch.float16).to(dtype)
    large = torch.randn(1031, 8208)  # more than the programs that measure take at once, and no multiple of that
    large[-1, -1] = 9.0
    for x in (large.to(dtype), edges.view(256, 256), torch.randn(513, 1111).to(dtype)):
        for rule in (RULE, POWERS | {"margin": 1}):
            found = triton_bindings.cast(
                x.cuda(), CastSpec(format=E4M3, granularity=granularity, **rule), transpose=True
            )
            assert_cast(found, x, wanted_cast(x, E4M3, granularity, rule))


@pytest.mark.gpu
def test_a_cast_can_be_captured_in_a_graph():
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    triton_bindings.cast(x, CastSpec(format=E4M3, **RULE), transpose=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_bindings.cast(x, CastSpec(format=E4M3, **RULE), transpose=True)
    x.copy_(torch.randn_like(x) * 3)
    graph.replay()
    assert_cast(found, x, wanted_cast(x, E4M3, PerTensor(), RULE))
