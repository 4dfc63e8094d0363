"""What Python decides before a native kernel runs: what it takes, how it reads a layout, and what it refuses."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from octavo.errors import BackendError
from octavo.formats import E4M3, E4M3_FNUZ, E5M2
from octavo.kernels import native_bindings as native
from octavo.kernels.threads import count_threads
from octavo.kernels.tracing import is_traced
from octavo.numerics import CastSpec, PerBlock, PerRow, PerTensor

TENSOR, ROWS = CastSpec(format=E4M3), CastSpec(format=E4M3, granularity=PerRow())
built = pytest.mark.skipif(native.why_absent() is not None, reason=f"no native kernels: {native.why_absent()}")


@built
def test_nonempty_cpu_tensors_of_known_formats_are_cast():
    x = torch.randn(3, 4)
    assert native.supports(x, E4M3, PerTensor())
    assert native.supports(x, E5M2)
    assert not native.supports(x, E4M3_FNUZ)
    assert not native.supports(x[:0], E4M3)
    assert not native.supports(x.to("meta"), E4M3)
    assert not native.supports(torch.randn(2, 3, 4), E4M3, PerBlock(2, 2)), "a block would hold rows of two matrices"


@built
def test_torch_func_has_tensors_without_memory():
    seen = []

    def look(x):
        seen.append(native.supports(x, E4M3))
        return x

    torch.func.vmap(look)(torch.randn(2, 3))
    assert seen == [False]


def test_without_the_extension_nothing_is_supported(monkeypatch):
    monkeypatch.setattr(native, "_absence", "not built")
    assert (native.levels(), count_threads(), native.why_absent()) == ((), 0, "not built")
    assert not native.supports(torch.ones(1), E4M3)
    assert not native.decodes(torch.ones(1).to(E4M3.torch_dtype), torch.float32, PerTensor())


NOT_BUILT = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "octavo.kernels._native" else found(name, package)
"""
NOT_LOADED = """
import importlib.machinery, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "octavo.kernels._native" else None
    def create_module(self, spec):
        raise ImportError("undefined symbol: PyNothing")
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "words"),
    [
        (NOT_BUILT, "octavo's CPU kernels were not built here; with a C++ compiler, `pip install .` in a checkout"),
        (NOT_LOADED, "octavo's CPU kernels are here and cannot be loaded: undefined symbol: PyNothing"),
    ],
)
def test_missing_extension_gives_reason_and_remedy(before, words):
    code = f"{before}\nfrom octavo.kernels import native_bindings\nprint(native_bindings.why_absent())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert said.stdout.startswith(words)


@built
def test_levels_are_named_and_the_last_is_the_default():
    assert native.levels()[0] == "baseline"
    assert [native.level_number(name) for name in native.levels()] == list(range(len(native.levels())))
    assert native.level_number(None) == -1
    with pytest.raises(BackendError, match="there is no level 'sse2' here; use one of baseline"):
        native.level_number("sse2")


@built
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 2)], ids=str)
def test_codes_lie_as_the_matrix_does(granularity):
    x = torch.randn(4, 6)
    for given, strides in ((x, (6, 1)), (x.t(), (1, 6)), (x[:, ::2], (3, 1))):
        codes = native.cast(given, CastSpec(format=E4M3, granularity=granularity)).output.data
        assert codes.stride() == strides == tuple(native.codes_strides(given))


@built
def test_only_an_instance_of_tensor_itself_has_an_address():
    class Watched(torch.Tensor):
        pass

    assert not is_traced(torch.ones(1))
    assert not is_traced(torch.nn.Parameter(torch.ones(1)))
    assert is_traced(torch.ones(1).as_subclass(Watched))
    assert not is_traced(torch.ones(1), None)
    assert is_traced(torch.ones(1), None, torch.ones(1).as_subclass(Watched))


@built
def test_cast_reads_negated_and_zero_tensors():
    """A negative may be a bit that torch keeps, and zeros may have no memory."""
    plain = torch.randn(8, 4)
    x, one = torch._neg_view(plain), torch.ones(())
    assert x.is_neg()
    assert x.is_contiguous()
    known: list[dict[str, Any]] = [{"scale": one}, {"amax": one}, {}]
    for given in known:
        read, wanted = (native.cast(values, TENSOR, **given) for values in (x, -1 * plain))
        assert torch.equal(read.output.data.float(), wanted.output.data.float())
    assert torch.equal(
        native.fake_quantize(x, ROWS),
        native.fake_quantize(-1 * plain, ROWS),
    )
    kept, codes = torch._neg_view(-one), plain.to(E4M3.torch_dtype)
    for name in ("scale", "amax"):
        options: list[dict[str, Any]] = [{name: kept}, {name: one}]
        read, wanted = (native.cast(plain, TENSOR, **given) for given in options)
        assert torch.equal(read.output.data.float(), wanted.output.data.float())
        assert torch.equal(read.output.scale, wanted.output.scale)
    assert torch.equal(native.dequantize(codes, kept, PerTensor(), torch.float32), codes.float())
    assert not native.cast(torch._efficientzerotensor(4), TENSOR).output.data.float().any()
    with pytest.raises(BackendError, match=r"plain tensors on a CPU, not Tensor torch\.sparse_coo"):
        native.cast(torch.eye(3).to_sparse(), TENSOR)
    with pytest.raises(BackendError, match=r"not Tensor torch\.strided on cpu inside torch\.func"):
        torch.func.vmap(native.in_memory)(plain)


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
    codes = native.cast(_read_only(tmp_path / "numbers", numbers), TENSOR).output.data
    assert torch.equal(codes.float(), native.cast(numbers, TENSOR).output.data.float())
    held = _read_only(tmp_path / "codes", codes)
    assert torch.equal(native.dequantize(held, torch.ones(()), PerTensor(), torch.float32), codes.float())


@built
@pytest.mark.parametrize("side", [2**31, 2**62, 2**63 - 1])
def test_a_block_may_be_larger_than_any_tensor(side):
    x = torch.randn(4, 600)
    for block, same in (
        (PerBlock(1, side), PerRow()), (PerBlock(side, side), PerTensor()), (PerBlock(side, 7), PerBlock(4, 7)),
    ):  # fmt: skip
        for turned in (False, True):
            given = x.t().contiguous().t() if turned else x
            found, wanted = (
                native.cast(given, CastSpec(format=E4M3, granularity=granularity)) for granularity in (block, same)
            )
            assert torch.equal(found.output.data.float(), wanted.output.data.float())
            assert torch.equal(found.output.scale.flatten(), wanted.output.scale.flatten())
            values = native.dequantize(found.output.data, found.output.scale, block, torch.float32)
            assert torch.equal(values, native.dequantize(wanted.output.data, wanted.output.scale, same, torch.float32))
            assert torch.equal(native.fake_quantize(given, CastSpec(format=E4M3, granularity=block)), values)


def _at(address, count):
    """Memory that torch does not know to be another tensor's."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


@built
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 7)], ids=str)
def test_values_are_written_elsewhere_where_they_would_be_read_again(granularity):
    x = torch.randn(100, 50)
    wanted = native.fake_quantize(x, CastSpec(format=E4M3, granularity=granularity))
    for shift in (0, 1, 7, 4999, 5000):
        memory = torch.cat([x.flatten(), torch.zeros(shift)])
        given, out = (_at(memory.data_ptr() + 4 * places, 5000).view(100, 50) for places in (0, shift))
        assert native.fake_quantize(given, CastSpec(format=E4M3, granularity=granularity), out=out) is out
        assert torch.equal(memory[shift:], wanted.flatten())
        assert torch.equal(memory[:shift], x.flatten()[:shift])


@built
def test_values_go_where_the_tensor_says():
    x = torch.randn(8, 4)
    wanted = native.fake_quantize(x, ROWS)
    for out in (torch._neg_view(torch.zeros(8, 4)), torch.zeros(8, 4, 2).unbind(-1)[1], torch.zeros(4, 8).t()):
        assert native.fake_quantize(x, ROWS, out=out) is out
        assert torch.equal(out, wanted)
    negative = torch._neg_view(x.clone())
    native.fake_quantize(negative, ROWS, out=negative)
    assert torch.equal(negative, native.fake_quantize(-1 * x, ROWS))
    with pytest.raises(RuntimeError, match="sparse"):
        native.fake_quantize(x, ROWS, out=x.to_sparse())


@built
def test_no_element_is_read_after_it_was_written():
    """Rows that overlap: an element becomes what one of its rows makes of it, of what stood there before."""
    memory = torch.randn(40)
    x = memory.unfold(0, 8, 1)
    wanted = native.fake_quantize(x, ROWS)
    native.fake_quantize(x, ROWS, out=x)
    for place, found in enumerate(memory):
        assert found in [wanted[row, place - row] for row in range(33) if 0 <= place - row < 8]


CODES, ONE = torch.zeros(4, 8).to(E4M3.torch_dtype), torch.ones(())
CAST: tuple[Any, ...] = (E4M3.torch_dtype, [], "fp32", 0.0, 0, True, None, None, False, True, "")


def _decoded_into(out):
    return native.dequantize(CODES, ONE, PerTensor(), torch.float32, out=out)


@built
@pytest.mark.parametrize(("call", "words"), [
    (lambda x: native.cast(x.int(), TENSOR), "not int32 (4, 8) PerTensor() to E4M3"),
    (lambda x: native.cast(x[:0], TENSOR), "no empty tensor, to E4M3 or E5M2, not float32 (0, 8)"),
    (lambda x: native.cast(x, CastSpec(format=E4M3_FNUZ)), "PerTensor() to E4M3_FNUZ"),
    (lambda x: native.cast(x, TENSOR, out=torch.empty(4, 8)), "not into float32 (4, 8), [8, 1]"),
    (lambda x: native.cast(x, TENSOR, out=CODES.t().contiguous().t()), "(4, 8), [1, 4] on cpu"),
    (lambda x: native.cast(x, TENSOR, out=CODES.to("meta")), "(4, 8), [8, 1] on meta"),
    (lambda x: native.cast(x, TENSOR, out=torch._neg_view(CODES)), "on cpu with a negative bit"),
    (lambda x: native.cast(x, ROWS, scale=torch.ones(3, 1)), "each of (4, 1) groups, not (3, 1)"),
    (lambda x: native.cast(x, ROWS, amax=torch.ones(())), "each of (4, 1) groups, not ()"),
    (lambda x: native.fake_quantize(x.double(), TENSOR), "cast float32, bfloat16, float16, no empty"),
    (lambda x: native.fake_quantize(x, TENSOR, out=torch.empty(2)), "like it, not into float32 (2,)"),
    (lambda x: native.round_stochastic(x.half(), torch.zeros(4, 8), E4M3), "the kernels cast float32, no empty tensor"),
    (lambda x: native.round_stochastic(x, torch.zeros(2), E4M3), "float32 (4, 8) and random (2,) do not go together"),
    (lambda x: native.dequantize(x, ONE, PerTensor(), torch.float32), "the kernels decode E4M3 and E5M2, no empty"),
    (lambda _: native.dequantize(CODES, ONE, PerTensor(), torch.float64), "(4, 8) PerTensor() to torch.float64"),
    (lambda _: native.dequantize(CODES, torch.ones(3, 1), PerRow(), torch.float32), "(4, 1) groups, not (3, 1)"),
    (lambda _: _decoded_into(torch.empty(2)), "like it, not into float32 (2,), [1] on cpu"),
    (lambda x: _decoded_into(x.t().contiguous().t()), "not into float32 (4, 8), [1, 4] on cpu"),
    (lambda x: _decoded_into(x.to("meta")), "not into float32 (4, 8), [8, 1] on meta"),
    (lambda x: _decoded_into(x.to_sparse()), "not into float32 (4, 8), torch.sparse_coo on cpu"),
    (lambda x: _decoded_into(torch._neg_view(x)), "not into float32 (4, 8), [8, 1] on cpu with a negative bit"),
    (lambda x: torch.ops.octavo.cast(x.int(), *CAST), "not int32 (4, 8) PerTensor() to E4M3"),
    (lambda x: torch.ops.octavo.cast(x[:0], *CAST), "not float32 (0, 8) PerTensor() to E4M3"),
])  # fmt: skip
def test_dtypes_the_kernels_do_not_support_are_refused(call, words):
    with pytest.raises(BackendError, match=re.escape(words)):
        call(torch.randn(4, 8))
