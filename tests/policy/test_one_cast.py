"""One FP8 cast: only numerics/cast.py turns high precision into FP8 codes, and kernels proven equal to it bit for bit.

Seen in two ways. By reading: a ``.to`` or ``.type`` whose argument names an FP8 dtype. By running: a dispatch mode
watches a converted model train and evaluate, and notes where every FP8 tensor with new values comes from, whatever the
code that made it looks like.
"""

import ast
import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import octavo
from octavo.formats import FP8_FORMATS
from octavo.kernels import native_bindings
from tests.policy.source_tree import SOURCE, modules

CASTS = {"octavo.numerics.cast", "octavo.kernels.triton.codes"}  # the second proven equal by tests/triton

# Places that write ``.to(<an FP8 dtype>)`` without rounding anything, each with its reason.
ALLOWED: dict[str, str] = {}

FP8_NAMES = ("float8", "torch_dtype", "fp8_dtype", "fp8")


def fp8_casts(text: str) -> list[int]:
    """Lines of calls like ``x.to(torch.float8_e4m3fn)``, ``x.to(fmt.torch_dtype)`` or ``x.type(fp8_dtype)``."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return sorted(
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in {"to", "type", "astype", "_to_copy", "convert_element_type"}
        and any(
            name in ast.unparse(arg) for arg in [*call.args, *(k.value for k in call.keywords)] for name in FP8_NAMES
        )
    )


def test_only_the_cast_casts():
    outside = {}
    for name, path in modules().items():
        if name not in CASTS | ALLOWED.keys() and (lines := fp8_casts(path.read_text())):
            outside[name] = lines
    assert not outside


def test_the_reading_sees_casts():
    assert fp8_casts(
        "x.to(torch.float8_e4m3fn)\nx.to(dtype=fmt.torch_dtype)\nx.type(self.fp8_dtype)\nx.to(y.dtype)"
    ) == [1, 2, 3]
    assert all(fp8_casts(modules()[name].read_text()) for name in CASTS)


class FP8Makers(TorchDispatchMode):
    """Notes which file of octavo runs an operation that takes other dtypes and returns FP8."""

    dtypes = frozenset(fmt.torch_dtype for fmt in FP8_FORMATS)

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        # copy_ into an FP8 tensor has an FP8 argument too: any high-precision one beside it is a cast.
        made = any(isinstance(x, torch.Tensor) and x.dtype in self.dtypes for x in tree_leaves(out))
        if made and any(dtype.is_floating_point and dtype not in self.dtypes for dtype in given):
            self.seen.add(self._place())
        return out

    @staticmethod
    def _place():
        files = [frame.filename for frame in traceback.extract_stack() if frame.filename.startswith(str(SOURCE))]
        return files[-1].removeprefix(f"{SOURCE}/") if files else "not in octavo"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_training_casts_in_one_place(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    octavo.convert(model, recipe=recipe)
    makers = FP8Makers()
    with makers:
        for _ in range(2):
            model(torch.randn(16, 32)).square().mean().backward()
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 32))
    native = "octavo/kernels/cast_operators.py"  # tests/oracle/test_native_casts.py proves its kernels
    assert makers.seen == {native if native_bindings.levels() else "octavo/numerics/cast.py"}


def test_the_watch_sees_casts():
    makers = FP8Makers()
    with makers:
        torch.ones(3).to(torch.float8_e5m2)
        torch.empty(3, dtype=torch.float8_e4m3fn).copy_(torch.ones(3))
    assert makers.seen == {"not in octavo"}
