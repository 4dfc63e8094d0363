"""What Python decides before a native kernel runs: what it takes, how it reads a layout, and what it refuses."""

import mmap
import warnings

import pytest
import torch

from octavo.errors import BackendError
from octavo.formats import E4M3, E4M3_FNUZ, E5M2
from octavo.kernels import cpu
from octavo.numerics import PerBlock, PerRow, PerTensor, ScaleRounding
from octavo.numerics.scaling import AMAX_FLOOR

RULE = cpu.ScaleRule(ScaleRounding.FP32, AMAX_FLOOR, 0)
built = pytest.mark.skipif(cpu.why_absent() is not None, reason=f"no native kernels: {cpu.why_absent()}")


@built
def test_it_casts_on_a_cpu_what_has_elements_and_a_known_format():
    x = torch.randn(3, 4)
    assert cpu.supports(x, E4M3, PerTensor())
    assert cpu.supports(x, E5M2)
    assert not cpu.supports(x, E4M3_FNUZ)
    assert not cpu.supports(x[:0], E4M3)
    assert not cpu.supports(x.to("meta"), E4M3)
    assert not cpu.supports(torch.randn(2, 3, 4), E4M3, PerBlock(2, 2)), "a block would hold rows of two matrices"


@built
def test_torch_func_has_tensors_without_memory():
    seen = []

    def look(x):
        seen.append(cpu.supports(x, E4M3))
        return x

    torch.func.vmap(look)(torch.randn(2, 3))
    assert seen == [False]


def test_without_the_extension_nothing_is_supported(monkeypatch):
    monkeypatch.setattr(cpu, "_absence", "not built")
    assert (cpu.levels(), cpu.threads(), cpu.why_absent()) == ((), 0, "not built")
    assert not cpu.supports(torch.ones(1), E4M3)
    assert not cpu.decodes(torch.ones(1).to(E4M3.torch_dtype), torch.float32, PerTensor())


@built
def test_levels_are_named_and_the_last_is_the_default():
    assert cpu.levels()[0] == "baseline"
    assert [cpu.level_number(name) for name in cpu.levels()] == list(range(len(cpu.levels())))
    assert cpu.level_number(None) == -1
    with pytest.raises(BackendError, match="there is no level 'sse2' here; use one of baseline"):
        cpu.level_number("sse2")


@built
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 2)], ids=str)
def test_codes_lie_as_the_matrix_does(granularity):
    x = torch.randn(4, 6)
    for given, strides in ((x, (6, 1)), (x.t(), (1, 6)), (x[:, ::2], (3, 1))):
        codes = cpu.quantize(given, E4M3, granularity, RULE).codes
        assert codes.stride() == strides == tuple(cpu.codes_strides(given))


@built
def test_only_an_instance_of_tensor_itself_has_an_address():
    class Watched(torch.Tensor):
        pass

    assert not cpu.is_traced(torch.ones(1))
    assert not cpu.is_traced(torch.nn.Parameter(torch.ones(1)))
    assert cpu.is_traced(torch.ones(1).as_subclass(Watched))


@built
def test_numbers_are_read_as_they_are():
    """A negative may be a bit that torch keeps, and zeros may have no memory."""
    x = torch.view_as_complex(torch.randn(8, 4, 2)).conj().imag
    assert x.is_neg()
    for granularity in (PerTensor(), PerRow()):
        read, resolved = (cpu.quantize(given, E4M3, granularity, RULE) for given in (x, x.resolve_neg().clone()))
        assert torch.equal(read.codes.float(), resolved.codes.float())
    assert torch.equal(cpu.fake_quantize(x, E4M3, PerRow(), RULE), -cpu.fake_quantize(-x, E4M3, PerRow(), RULE))
    scale = torch._neg_view(-torch.ones(()))
    assert cpu.quantize(x, E4M3, PerTensor(), RULE, scale=scale).codes.float().abs().sum() > 0
    assert not cpu.quantize(torch._efficientzerotensor(4), E4M3, PerTensor(), RULE).codes.float().any()
    with pytest.raises(BackendError, match=r"plain tensors on a CPU, not Tensor torch\.sparse_coo"):
        cpu.quantize(torch.eye(3).to_sparse(), E4M3, PerTensor(), RULE)


def _read_only(path, tensor):
    """``tensor``'s bytes in memory that ends the process when it is written to."""
    path.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it cannot protect such memory
        return torch.frombuffer(mapped, dtype=torch.uint8).view(tensor.dtype)


@built
def test_inputs_may_be_read_only(tmp_path):
    numbers = torch.randn(64)
    codes = cpu.quantize(_read_only(tmp_path / "numbers", numbers), E4M3, PerTensor(), RULE).codes
    assert torch.equal(codes.float(), cpu.quantize(numbers, E4M3, PerTensor(), RULE).codes.float())
    held = _read_only(tmp_path / "codes", codes)
    assert torch.equal(cpu.dequantize(held, torch.ones(()), PerTensor(), torch.float32), codes.float())


@built
@pytest.mark.parametrize("call", [
    lambda x: cpu.quantize(x.int(), E4M3, PerTensor(), RULE),
    lambda x: cpu.quantize(x[:0], E4M3, PerTensor(), RULE),
    lambda x: cpu.quantize(x, E4M3_FNUZ, PerTensor(), RULE),
    lambda x: cpu.quantize(x, E4M3, PerTensor(), RULE, out=torch.empty(4, 8)),
    lambda x: cpu.quantize(x, E4M3, PerTensor(), RULE, out=torch.empty(8, 4).to(torch.float8_e4m3fn).t()),
    lambda x: cpu.quantize(x, E4M3, PerRow(), RULE, scale=torch.ones(3, 1)),
    lambda x: cpu.quantize(x, E4M3, PerRow(), RULE, amax=torch.ones(())),
    lambda x: cpu.fake_quantize(x.double(), E4M3, PerTensor(), RULE),
    lambda x: cpu.fake_quantize(x, E4M3, PerTensor(), RULE, out=torch.empty(2)),
    lambda x: cpu.round_stochastic(x.half(), torch.zeros(4, 8), E4M3),
    lambda x: cpu.round_stochastic(x, torch.zeros(2), E4M3),
    lambda x: cpu.dequantize(x, torch.ones(()), PerTensor(), torch.float32),
    lambda x: cpu.dequantize(x.to(torch.float8_e4m3fn), torch.ones(()), PerTensor(), torch.float64),
    lambda x: cpu.dequantize(x.to(torch.float8_e4m3fn), torch.ones(3, 1), PerRow(), torch.float32),
    lambda x: cpu.dequantize(x.to(torch.float8_e4m3fn), torch.ones(()), PerTensor(), torch.float32, out=torch.empty(2)),
    lambda x: torch.ops.octavo.cast(x.int(), torch.float8_e4m3fn, [], "fp32", 0.0, 0, True, None, None, False),
    lambda x: torch.ops.octavo.cast(x[:0], torch.float8_e4m3fn, [], "fp32", 0.0, 0, True, None, None, False),
])  # fmt: skip
def test_what_the_kernels_do_not_read_or_write_is_refused(call):
    with pytest.raises(BackendError, match="not"):
        call(torch.randn(4, 8))
