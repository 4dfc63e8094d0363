"""A launch without Triton's binding: the kernel that Triton would have compiled, and its arguments in order."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.flop_counter import FlopCounterMode
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton import launching

_bytes = torch.empty(4096, dtype=torch.uint8)
ARGUMENTS = {
    **{f"int {n}": n for n in (0, 1, -1, 2, 15, 16, -16, 17, 48, 2**31 - 1, 2**31, 2**31 + 15, -(2**31), 2**40 + 1)},
    "none": None,
    **{f"float {x}": x for x in (0.0, 1.0, 1e-5, float("nan"))},
    **{f"at {first}": _bytes[first : first + 64] for first in (0, 4, 8, 16, 32)},
    **{str(dtype): torch.empty(8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool)},
    "fp8": torch.empty(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "wide tiles": TensorDescriptor.from_tensor(torch.empty(64, 64, dtype=torch.uint8), [16, 64]),
    "high tiles": TensorDescriptor.from_tensor(torch.empty(64, 64, dtype=torch.uint8), [64, 16]),
    "tiles of halves": TensorDescriptor.from_tensor(torch.empty(64, 64, dtype=torch.float16), [16, 64]),
}  # fmt: skip


def test_arguments_that_triton_specializes_on_have_distinct_keys() -> None:
    for one, other in itertools.combinations(ARGUMENTS, 2):
        theirs = [native_specialize_impl(CUDABackend, ARGUMENTS[name], False, True, True) for name in (one, other)]
        ours = [launching._traits((ARGUMENTS[name],)) for name in (one, other)]
        if theirs[0] != theirs[1]:
            assert ours[0] != ours[1], f"{one} and {other}"


class Kernel:
    """What Triton makes of a function (x, n, SIZE), as far as a launch sees it."""

    arg_names = ("x", "n", "SIZE")

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.seen_by_hooks: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def bind(*arguments: object, **constants: object) -> object:
            self.bound.append((grid, *arguments, constants))
            return self.compiled

        return bind

    @property
    def compiled(self) -> Any:
        kernel = self

        class Compiled(SimpleNamespace):
            function, packed_metadata = "function", "metadata"

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *arguments: kernel.seen_by_hooks.append((grid, *arguments))

            def run(self, *given: Any) -> None:
                assert given[3:9] == (STREAM, "function", "metadata", None, None, None)
                kernel.launched.append((given[:3], *given[9:]))

        return Compiled()


STREAM = 7


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {-1: STREAM}.get, raising=False)  # -1: a CPU
    return Kernel()


def test_the_first_launch_is_tritons_and_the_next_give_all_arguments_in_order(kernel: Kernel) -> None:
    x = torch.empty(8)
    for n in (32, 48):
        launching.launch(kernel, (n,), x, n, SIZE=4, num_warps=8)
    assert [(grid, n, constants) for grid, _, n, constants in kernel.bound] == [
        ((32,), 32, {"SIZE": 4, "num_warps": 8})
    ]
    ((grid, given, n, size),) = kernel.launched
    assert (grid, n, size) == ((48, 1, 1), 48, 4)
    assert given is x


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_a_profiler_see_the_launch(kernel: Kernel, hook: str) -> None:
    """By Triton's own way, which describes the launch to them."""
    x, chain = torch.empty(8), getattr(triton.knobs.runtime, hook)
    chain.add(print)
    try:
        for n in (32, 48):
            launching.launch(kernel, (n,), x, n, SIZE=4)
    finally:
        chain.remove(print)
    assert [(grid[:3], n) for grid, _, n, _ in kernel.seen_by_hooks] == [((48, 1, 1), 48)]
    assert not kernel.launched


@pytest.mark.parametrize("change", ["x", "n", "SIZE", "num_warps", "kernel"])
def test_different_kind_of_call_is_bound_again(kernel: Kernel, change: str) -> None:
    other = Kernel() if change == "kernel" else kernel
    x = torch.empty(9)
    launching.launch(kernel, (1,), x[:8], 32, SIZE=4, num_warps=8)
    launching.launch(
        *(other, (1,), x[1:] if change == "x" else x[:8], 33 if change == "n" else 32),
        SIZE=8 if change == "SIZE" else 4,
        num_warps=4 if change == "num_warps" else 8,
    )
    assert len(kernel.bound) + len(other.bound) * (other is not kernel) == 2
    assert not kernel.launched


def test_interpreted_kernel_is_bound_on_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "compiled", None)  # as in Triton's interpreter
    for _ in range(2):
        launching.launch(kernel, (1,), torch.empty(8), 16, SIZE=4)
    assert len(kernel.bound) == 2


def test_a_graph_takes_no_option_that_inductor_would_drop(kernel: Kernel) -> None:
    with FakeTensorMode(), pytest.raises(AssertionError, match=r"drops .*enable_fp_fusion.* without a word"):
        launching.launch(kernel, (1,), torch.empty(8), 16, SIZE=4, num_warps=8, enable_fp_fusion=False)


def test_graph_records_the_launch_with_its_grid_and_constants(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "wrap_triton", lambda given: given)
    with FakeTensorMode():
        x = torch.empty(8)
        for n in (32, 48):
            launching.launch(kernel, (n, 2), x, n, SIZE=4, num_warps=8)
    assert [(grid, n, constants) for grid, _, n, constants in kernel.bound] == [
        ((n, 2), n, {"SIZE": 4, "num_warps": 8}) for n in (32, 48)
    ]
    assert all(given is x for _, given, *_ in kernel.bound)
    assert not kernel.launched


def test_a_mode_that_watches_real_tensors_launches(kernel: Kernel) -> None:
    with FlopCounterMode(display=False):
        for _ in range(2):
            launching.launch(kernel, (1,), torch.empty(8), 16, SIZE=4)
    assert (len(kernel.bound), len(kernel.launched)) == (1, 1)


def test_a_size_that_is_a_symbol_has_its_power_of_two() -> None:
    shapes = ShapeEnv()
    for size in (1, 3, 33, 4096, 4097):
        symbol = shapes.create_unspecified_symint_and_symbol(size, ConstantSource(f"size {size}"), DimDynamic.DYNAMIC)
        power = launching.next_power_of_2(symbol)
        assert (type(power), power) == (int, launching.next_power_of_2(size))
        assert launching.tile_side(symbol, 64) == 64


def test_numbers_of_programs() -> None:
    for a, b in itertools.product(range(20), range(1, 20)):
        assert launching.ceil_div(a, b) == sum(1 for _ in range(0, a, b))
    assert [launching.next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1023, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]
    assert [launching.tile_side(n, 8) for n in (1, 2, 3, 8, 9, 1025)] == [1, 2, 4, 8, 8, 8]
