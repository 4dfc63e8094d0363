"""Casts of several matrices: as few launches as can be, with the codes, scales and records of a cast of each."""

from functools import partial
from typing import Any

import pytest
import torch

from octavo.errors import BackendError
from octavo.formats import E4M3, E5M2, E8M0
from octavo.kernels import EachRecord, cast_each, each, triton_bindings
from octavo.kernels.triton import casts_each
from octavo.numerics import CastSpec, PerBlock, PerRow, ScaleRounding
from tests.triton.test_gemm_each import counted

MX = CastSpec(format=E4M3, granularity=PerBlock(1, 32), scale_rounding=ScaleRounding.RCEIL, scale_format=E8M0)
ROWS, BLOCKS, SQUARES = (CastSpec(format=E4M3, granularity=g) for g in (PerRow(), PerBlock(1, 64), PerBlock(64, 64)))
K = 70


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what the Triton backend casts."""
    shapes: list[tuple[int, ...]] = []

    def cast(x, spec, *, record, **source):
        shapes.append(tuple(x.shape))
        return triton_bindings.cast(x, spec, record=record, **source)

    monkeypatch.setattr(each, "backend_of_cast", lambda *_: "triton")
    monkeypatch.setattr(each, "cast", cast)
    return shapes


def matrices(rows: list[int], device: torch.device) -> list[torch.Tensor]:
    x = torch.randn(sum(rows), K, device=device)
    x[1, 2], x[-1, 3] = float("nan"), float("inf")
    return list(x.split(rows))


@pytest.mark.parametrize(
    ("spec", "rows", "transposed", "expected"),
    [
        (ROWS, [1, 40, 3], False, [(44, K)]),
        (BLOCKS, [1, 40, 3], False, [(44, K)]),
        (MX, [1, 40, 3], False, [(44, K)]),
        (SQUARES, [64, 128, 3], False, [(195, K)]),
        (SQUARES, [64, 3, 64], False, [(67, K), (64, K)]),
        (MX, [32, 64, 5], True, [(K, 101)]),
        (MX, [5, 32, 64], True, [(K, 5), (K, 96)]),
        (ROWS, [3, 40], True, [(K, 3), (K, 40)]),
    ],
    ids=[
        "rows",
        "1x64",
        "mxfp8",
        "64x64",
        "64x64 ragged",
        "mxfp8 of columns",
        "mxfp8 of columns ragged",
        "columns",
    ],
)
def test_rows_of_one_tensor_are_cast_together_where_groups_allow(spec, rows, transposed, expected, casts, device):
    parts = matrices(rows, device)
    counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    places = tuple(range(len(rows)))
    together, _ = cast_each(parts, spec, transposed=transposed, record=EachRecord(places, nonfinite=counts[0]))
    assert casts == expected
    alone = partial(cast_each, spec=spec, transposed=transposed)
    for number, (part, operand) in enumerate(zip(parts, together, strict=True)):
        ([wanted], _) = alone([part], record=EachRecord((number,), nonfinite=counts[1]))
        assert torch.equal(operand.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(operand.scale, wanted.scale)
    assert counts[0] == counts[1] == 2


def test_matrices_apart_are_cast_apart(casts, device):
    stack = torch.randn(5, 8, K, device=device)
    chosen = [stack[number] for number in (0, 1, 3, 4)]
    cast_each([*chosen, stack[0].clone()], ROWS)
    assert casts == [(16, K), (16, K), (8, K)]


def test_amaxes_of_each_are_recorded_by_a_cast_of_each(casts, device):
    largest = torch.full((2,), -1.0, device=device)
    parts = list(torch.tensor([[2.0, -3.0], [1.0, 0.5]], device=device).split([1, 1]))
    cast_each(parts, ROWS, record=EachRecord((0, 1), amax=largest))
    assert casts == [(1, 2), (1, 2)]
    assert largest.tolist() == [3.0, 1.0]


SPECS = {
    "FP32": CastSpec(format=E4M3),
    "power of two": CastSpec(format=E5M2, scale_rounding=ScaleRounding.RCEIL, margin=1),
}
SOURCES = {
    "measured": {},
    "amax": {"amax": [3.0, 0.25, 0.5]},
    "known": {"amax": [3.0, 0.0, 0.5], "measure_if_zero": True},
    "scale": {"scale": [0.5, 2.0**-20, 1.0]},
}


def records(device: torch.device) -> EachRecord:
    amax, overflowed = torch.full((5,), -1.0, device=device), torch.zeros(5, dtype=torch.bool, device=device)
    amax[4] = 2.5
    return EachRecord((4, 0, 3), amax, overflowed, torch.zeros((), dtype=torch.int64, device=device))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_scale_for_each_is_that_of_single_casts(spec, source, transposed, casts, device):
    given: dict[str, Any] = {
        key: torch.tensor(value, device=device) if key != "measure_if_zero" else value for key, value in source.items()
    }
    parts = matrices([1, 40, 3], device)
    record, expected = records(device), records(device)
    with counted() as launches:
        together, _ = cast_each(parts, spec, transposed=transposed, record=record, **given)
    assert launches == {"measure_each_kernel": 1, "cast_each_kernel": 1}
    assert not casts
    for number, (part, operand) in enumerate(zip(parts, together, strict=True)):
        own: dict[str, Any] = {
            key: value[number] if key != "measure_if_zero" else value for key, value in given.items()
        }
        x = part.t() if transposed else part
        wanted = triton_bindings.cast(x, spec, record=expected.of(number), **own).output
        assert torch.equal(operand.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(operand.scale, wanted.scale)
    for ours, theirs in ((record.amax, expected.amax), (record.overflowed, expected.overflowed)):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
    assert record.nonfinite == expected.nonfinite == 2


def test_given_amaxes_are_not_measured_again(casts, device):
    parts = matrices([2, 40], device)
    _, amaxes = cast_each(parts, SPECS["FP32"])
    with counted() as launches:
        _, unmeasured = cast_each(parts, SPECS["FP32"], amax=amaxes)
    assert launches == {"cast_each_kernel": 1}
    assert unmeasured is None


def test_matrices_of_other_widths_are_refused(device):
    with pytest.raises(BackendError, match="width"):
        casts_each.cast_matrices([torch.ones(2, 3, device=device), torch.ones(2, 4, device=device)], SPECS["FP32"])
