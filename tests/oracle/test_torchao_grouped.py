"""torchao's GEMMs of experts against octavo's: codes and scales of all six operands, bit for bit.

Of MXFP8, torchao emulates forward and backward on any device. Of one scale a row, its grouped GEMM needs a GPU, and the
PyTorch functions that its kernels are tested against are called here; they refuse an expert without rows.
"""

from typing import NamedTuple

import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.moe_training.kernels.mxfp8 import torch_pad_token_groups
from torchao.prototype.moe_training.utils import (
    torch_to_3d_rowwise_float8_transpose_rhs,
    torch_to_float8_per_group_colwise,
    torch_to_float8_per_group_rowwise,
)
from torchao.quantization.quantize_.common import KernelPreference

from octavo import recipes
from octavo.functional import fp8_grouped_linear, grouped_linear
from octavo.kernels import scaled_mm_each
from octavo.numerics import QuantizedTensor

K, N, BLOCK = 64, 96, 32
GROUPS = {
    "ragged": (5, 33, 64, 17),
    "without rows": (0, 40, 0, 0, 7, 0),
    "one token": (0, 1, 0),
    "one expert": (0, 70, 0),
    "whole blocks": (32, 64, 32),
}
E4M3 = torch.float8_e4m3fn
each_group = pytest.mark.parametrize("counts", GROUPS.values(), ids=GROUPS)


class Codes(NamedTuple):
    """An expert's operand [rows, columns], and its scales [rows, groups of columns]."""

    data: torch.Tensor
    scale: torch.Tensor


class Pass(NamedTuple):
    """Tensors of one forward and backward pass."""

    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor
    counts: tuple[int, ...]

    @property
    def ends(self) -> torch.Tensor:
        """Where each expert's rows end."""
        return torch.tensor(self.counts).cumsum(0).int()

    @property
    def experts(self) -> list[int]:
        """Those that have rows."""
        return [expert for expert, count in enumerate(self.counts) if count]


def tensors(counts: tuple[int, ...], dtype: torch.dtype) -> Pass:
    """Normal values times powers of two from 2^-20 to 2^19, another one for each row and each column."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        powers = [torch.randint(-10, 10, size, generator=generator) for size in ((*shape[:-1], 1), shape[-1:])]
        return torch.ldexp(torch.randn(shape, generator=generator), powers[0] + powers[1]).to(dtype)

    return Pass(
        draw(sum(counts), K).requires_grad_(), draw(len(counts), N, K).requires_grad_(), draw(sum(counts), N), counts
    )


def octavos(given: Pass, recipe: str, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[list[Codes]]]:
    """The output, and the operands of the output's, grad_input's and grad_weight's GEMM for each expert with rows."""
    operands: list[list[Codes]] = []

    def recorded(a: list[QuantizedTensor], b: list[QuantizedTensor], *rest: object, **options: object) -> None:
        operands.extend([Codes(each.data, each.scale) for each in side] for side in (a, b))
        scaled_mm_each(a, b, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(grouped_linear, "scaled_mm_each", recorded)
    offsets = torch.nn.functional.pad(given.ends, (1, 0))
    y = fp8_grouped_linear(given.x, given.weight, None, offsets, recipes.get(recipe))
    y.backward(given.grad)
    return y, operands


def torchaos_emulation(given: Pass, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[Codes]]:
    """The output in MXFP8, and the operands in the same order, padded to whole blocks for each expert."""
    casts: list[Codes] = []
    to_mx = torchao_mxfp8.to_mx

    def recorded(*arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        scale, data = to_mx(*arguments, **options)
        casts.append(Codes(data, scale.view(torch.uint8)))
        return scale, data

    monkeypatch.setattr(torchao_mxfp8, "to_mx", recorded)
    y = torchao_mxfp8._to_mxfp8_then_scaled_grouped_mm(
        given.x,
        given.weight.transpose(1, 2),
        given.ends,
        kernel_preference=KernelPreference.EMULATED,
        pad_token_groups_for_grouped_mm=True,
    )
    y.backward(given.grad)
    return y, casts


def assert_same(found: list[list[Codes]], expected: list[list[Codes]]) -> None:
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_group
def test_operands_with_a_scale_for_each_row_are_torchaos(counts, dtype, monkeypatch):
    given = tensors(counts, dtype)
    found = octavos(given, "rowwise", monkeypatch)[1]
    x, weight, grad = given.x.detach(), given.weight.detach(), given.grad
    ends = given.ends[given.experts]  # torchao's functions refuse an expert without rows
    present = [count for count in counts if count]

    def rows(values: torch.Tensor) -> Codes:
        scale = tensor_to_scale(
            values,
            E4M3,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )
        return Codes(to_fp8_saturated(values.float() * scale, E4M3), scale.reciprocal())

    def each(codes: Codes) -> list[Codes]:
        return [Codes(*parts) for parts in zip(codes.data.split(present), codes.scale.split(present), strict=True)]

    def each_group_of_columns(data: torch.Tensor, scale: torch.Tensor) -> list[Codes]:
        scales = scale.reciprocal().view(len(present), -1, 1)
        return [Codes(*parts) for parts in zip(data.split(present, dim=1), scales, strict=True)]

    along_rows, scales_of_columns = torch_to_3d_rowwise_float8_transpose_rhs(
        weight.transpose(1, 2), E4M3, round_scales_to_power_of_2=True
    )
    inputs, input_scales = torch_to_float8_per_group_colwise(x, ends, E4M3, round_scales_to_power_of_2=True)
    grads = torch_to_float8_per_group_rowwise(grad.t(), ends, E4M3, round_scales_to_power_of_2=True)
    expected = [
        each(rows(x)),
        [rows(weight[expert]) for expert in given.experts],
        each(rows(grad)),
        [Codes(along_rows[expert].t(), scales_of_columns[expert].t().reciprocal()) for expert in given.experts],
        each_group_of_columns(*grads),
        each_group_of_columns(inputs.t(), input_scales),
    ]
    assert_same(found, expected)


@each_group
def test_operands_and_results_in_mxfp8_are_those_of_torchaos_emulation(counts, monkeypatch):
    given = tensors(counts, torch.bfloat16)  # what torchao multiplies in
    y, found = octavos(given, "mxfp8", monkeypatch)
    gradients = [given.x.grad, given.weight.grad]
    given.x.grad = given.weight.grad = None
    theirs, casts = torchaos_emulation(given, monkeypatch)
    starts = torch_pad_token_groups(given.x.detach(), given.ends, BLOCK)[1].tolist()
    where = [(starts[expert], counts[expert]) for expert in given.experts]

    def each(codes: Codes) -> list[Codes]:
        return [Codes(codes.data[start : start + count], codes.scale[start : start + count]) for start, count in where]

    def each_group_of_columns(codes: Codes) -> list[Codes]:
        blocks = [(start // BLOCK, -(-(start + count) // BLOCK)) for start, count in where]
        return [
            Codes(codes.data[:, start : start + count], codes.scale[:, first:last])
            for (start, count), (first, last) in zip(where, blocks, strict=True)
        ]

    x, weight, grad, along_rows, grad_columns, input_columns = casts
    expected = [
        each(x),
        [Codes(weight.data[expert], weight.scale[expert]) for expert in given.experts],
        each(grad),
        [Codes(along_rows.data[expert], along_rows.scale[expert]) for expert in given.experts],
        each_group_of_columns(grad_columns),
        each_group_of_columns(input_columns),
    ]
    assert_same(found, expected)
    for ours, others in zip([y, *gradients], [theirs, given.x.grad, given.weight.grad], strict=True):
        assert ours is not None
        assert others is not None
        assert (ours.double() - others.double()).norm() <= 2**-7 * others.double().norm()
