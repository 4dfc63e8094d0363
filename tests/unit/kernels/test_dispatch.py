import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.formats import E4M3_FNUZ
from octavo.kernels import cast, dispatch, explain, native_bindings, scaled_mm, selections
from octavo.kernels.backend import CastProblem, MatmulProblem
from octavo.kernels.backends import torch_cuda
from octavo.kernels.dispatch import BACKENDS, CAST_BACKENDS, cast_selections
from octavo.numerics import (
    Accumulate,
    AmaxRecord,
    CastSpec,
    PerBlock,
    PerRow,
    PerTensor,
    QuantizedTensor,
    Rounding,
    measure,
)

NAMES = [backend.name for backend in BACKENDS]


@pytest.fixture
def _no_choices(monkeypatch):
    monkeypatch.setattr(dispatch, "_gemm_choices", {})
    monkeypatch.setattr(dispatch, "_cast_choices", {})


def _quantized(rows: int, columns: int, **options) -> QuantizedTensor:
    return octavo.quantize(torch.randn(rows, columns), octavo.E4M3, **options)


@pytest.mark.usefixtures("_no_choices")
def test_auto_records_its_choice_with_reasons_once_a_problem():
    a, b = _quantized(4, 8), _quantized(3, 8)
    for _ in range(3):
        scaled_mm(a, b)
    scaled_mm(a, b, out_dtype=torch.bfloat16)
    first, second = selections()
    assert first.backend == next(name for name in NAMES if name not in dict(first.rejected))
    assert first.backend == ("native" if native_bindings.levels() else "torch_cpu")
    assert (first.problem.m, first.problem.n, first.problem.k) == (4, 3, 8)
    assert second.problem.out_dtype is torch.bfloat16
    assert dict(first.rejected)["torch_cuda"] == "it runs on CUDA, and the operands are on cpu"
    assert explain(first.problem) == first


@pytest.mark.usefixtures("_no_choices")
def test_a_preferred_backend_is_recorded_where_it_can_and_another_where_it_cannot():
    a, b = _quantized(4, 8), _quantized(3, 8)
    for preferred in ("torch_cpu", "triton"):
        dispatch.select_product(a, b, None, None, Accumulate.FP32, fast_accumulation=False, preferred=preferred)
    able, unable = selections()
    assert (able.backend, able.rejected) == ("torch_cpu", ())
    assert unable.backend == explain(unable.problem).backend
    assert unable.rejected[0][0] == "triton"


@pytest.mark.usefixtures("_no_choices")
def test_blocks_that_do_not_meet_go_to_the_reference_with_every_reason():
    a, b = (_quantized(4, 8, granularity=PerBlock(1, columns)) for columns in (4, 8))
    scaled_mm(a, b)
    (selection,) = selections()
    assert selection.backend == "reference"
    assert [name for name, _ in selection.rejected] == NAMES[: NAMES.index("reference")]
    assert dict(selection.rejected)["torch_cpu"] == "its blocks of K are as wide in both operands, not 4 and 8"


@pytest.mark.usefixtures("_no_choices")
def test_the_record_is_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_CHOICES", 2)
    for rows in (1, 2, 3, 4):
        scaled_mm(_quantized(rows, 4), _quantized(2, 4))
    assert [selection.problem.m for selection in selections()] == [1, 2]


@pytest.mark.usefixtures("_no_choices")
def test_a_named_backend_runs_or_refuses():
    a = _quantized(4, 8)
    blocks, others = (_quantized(4, 8, granularity=PerBlock(1, columns)) for columns in (4, 8))
    torch.testing.assert_close(scaled_mm(a, a, backend="reference"), scaled_mm(a, a, backend="torch_cpu"))
    with pytest.raises(BackendError, match=r"'torch_cpu' cannot run this product: its blocks .* use backend='auto'"):
        scaled_mm(blocks, others, backend="torch_cpu")
    with pytest.raises(BackendError, match="'torch_cuda' cannot run this product: it runs on CUDA"):
        scaled_mm(a, a, backend="torch_cuda")
    with pytest.raises(BackendError, match=r"there is no backend 'cuda'; use 'auto' or one of .*torch_cpu"):
        scaled_mm(a, a, backend="cuda")
    assert not selections(), "only choices are recorded, not orders"


def test_out_dtype_defaults_to_that_of_the_first_operand():
    a = octavo.quantize(torch.randn(4, 8, dtype=torch.float16), octavo.E4M3)
    assert scaled_mm(a, _quantized(3, 8)).dtype is torch.float16


def test_bad_operands_are_refused_in_one_sentence():
    a = _quantized(4, 8)
    with pytest.raises(ConfigError, match=r"equal K: a is \(4, 8\), b is \(3, 9\); pass b as \[N, K\]"):
        scaled_mm(a, _quantized(3, 9))
    with pytest.raises(ConfigError, match=r"multiplies matrices, not shapes \(2, 3, 8\)"):
        scaled_mm(octavo.quantize(torch.randn(2, 3, 8), octavo.E4M3), a)
    with pytest.raises(ConfigError, match="out_dtype must be bfloat16, float16 or float32"):
        scaled_mm(a, a, out_dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"bias must have shape \(4,\), not \(8,\)"):
        scaled_mm(a, a, bias=torch.zeros(8))


def test_backends_are_ordered_and_named_apart():
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES[-1] == "reference"


def test_quantize_is_numerics_own():
    x = torch.randn(4, 4)
    assert torch.equal(
        octavo.quantize(x, octavo.E4M3).data.float(),
        octavo.numerics.quantize(x, octavo.E4M3).data.float(),
    )
    assert octavo.quantize(x, octavo.E4M3).granularity == PerTensor()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("recipe", [name for name in octavo.recipes.names() if name != "bf16"])
def test_on_cuda_training_never_runs_on_a_model(recipe, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch_cuda, "_CUDA", (12, 8))  # with block scales nowhere but in Triton
    specified = octavo.recipes.get(recipe)
    for gemm in (specified.output, specified.grad_input, specified.grad_weight):
        if gemm.a is None or gemm.b is None:
            continue
        problem = MatmulProblem(
            m=256,
            n=256,
            k=256,
            device="cuda",
            a_dtype=gemm.a.format.torch_dtype,
            b_dtype=gemm.b.format.torch_dtype,
            a_granularity=gemm.a.granularity,
            b_granularity=gemm.b.granularity,
            out_dtype=torch.bfloat16,
            bias=False,
            accumulate=Accumulate.FP32,
            fast_accumulation=gemm.accumulate is Accumulate.HOPPER_FAST,
        )
        blocks = isinstance(gemm.a.granularity, PerBlock)
        fastest = "triton" if blocks and capability >= (9, 0) else "torch_cuda"
        assert explain(problem).backend == ("reference" if capability < ((9, 0) if blocks else (8, 9)) else fastest)


def test_operands_on_other_devices_are_refused():
    """Their addresses would end the process."""
    a, b = _quantized(4, 8), octavo.quantize(torch.randn(3, 8, device="meta"), octavo.E4M3)
    with pytest.raises(ConfigError, match="b is on meta and a on cpu; move it there first"):
        scaled_mm(a, b)
    with pytest.raises(ConfigError, match="bias is on meta and a on cpu"):
        scaled_mm(a, _quantized(3, 8), bias=torch.zeros(3, device="meta"))
    with pytest.raises(ConfigError, match="the scale is on meta and the codes on cpu"):
        QuantizedTensor(a.data, a.scale.to("meta"), a.granularity, a.hp_dtype)
    elsewhere = torch.tensor(7.0, device="meta")
    for given in ("amax", "scale"):
        options: Any = {given: elsewhere}
        with pytest.raises(ConfigError, match=f"the {given} is on meta and the tensor on cpu; move it there first"):
            octavo.quantize(torch.ones(4), octavo.E4M3, **options)


@pytest.mark.skipif(not native_bindings.levels(), reason="no native kernels were built")
@pytest.mark.usefixtures("_no_choices")
@pytest.mark.parametrize("learned", ["bias", "scale"])
def test_backend_without_gradients_is_rejected_where_one_is_needed(learned):
    a, b, bias = _quantized(4, 8), _quantized(3, 8), torch.zeros(3)
    (bias if learned == "bias" else a.scale).requires_grad_()
    scaled_mm(a, b, bias=bias)
    with torch.no_grad():
        scaled_mm(a, b, bias=bias)
        scaled_mm(a, b, bias=bias, backend="native")
    recorded, without = selections()
    assert (recorded.backend, without.backend) == ("torch_cpu", "native")
    reason = "its kernels have no gradient, and a scale or the bias requires one"
    assert dict(recorded.rejected)["native"] == reason
    with pytest.raises(BackendError, match=f"'native' cannot run this product: {reason}"):
        scaled_mm(a, b, bias=bias, backend="native")


def test_compiled_product_passes_gradients_to_a_bias():
    a, b, bias = _quantized(4, 8), _quantized(3, 8), torch.zeros(3, requires_grad=True)
    compiled = torch.compile(lambda bias: scaled_mm(a, b, bias=bias), backend="aot_eager", fullgraph=True)
    compiled(bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((3,), 4.0))


def test_sums_of_scaled_blocks_as_hopper_makes_them_pass_gradients_to_a_scale():
    a = _quantized(4, 256, granularity=PerBlock(1, 128))
    learned = replace(a, scale=a.scale.clone().requires_grad_())
    y = scaled_mm(learned, a, accumulate=Accumulate.HOPPER_SLOW)
    assert torch.equal(y, scaled_mm(a, a, accumulate=Accumulate.HOPPER_SLOW))
    y.sum().backward()
    assert learned.scale.grad is not None
    torch.testing.assert_close((learned.scale.grad * a.scale).sum(), y.detach().sum())  # y is linear in the scales


def test_a_learned_bias_and_scale_have_gradients():
    a, b, bias = _quantized(4, 8), _quantized(3, 8), torch.zeros(3, requires_grad=True)
    scale = a.scale.clone().requires_grad_()
    y = scaled_mm(QuantizedTensor(a.data, scale, a.granularity, a.hp_dtype), b, bias=bias)
    assert torch.equal(y, scaled_mm(a, b, backend="torch_cpu"))
    y.sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((3,), 4.0))
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, y.detach().sum() / a.scale)


def test_tensors_whose_numbers_are_not_in_memory():
    """torch.func's have none of their own, and a negative may be a bit."""
    a, b = (octavo.quantize(torch.randn(3, 4, 16), octavo.E4M3, granularity=octavo.PerRow()) for _ in range(2))

    def multiply(codes, scale):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it loops over the operator
            left = octavo.QuantizedTensor(codes, scale, octavo.PerRow(), torch.float32)
            return octavo.scaled_mm(left, octavo.QuantizedTensor(b.data[0], b.scale[0], octavo.PerRow(), torch.float32))

    one_by_one = torch.stack([multiply(codes, scale) for codes, scale in zip(a.data, a.scale, strict=True)])
    torch.testing.assert_close(torch.func.vmap(multiply)(a.data, a.scale), one_by_one)

    x, one = torch._neg_view(torch.randn(4, 16)), octavo.quantize(torch.eye(16), octavo.E4M3)
    negative = torch._neg_view(torch.ones(16))
    for granularity in (octavo.PerTensor(), octavo.PerRow(), octavo.PerBlock(1, 4)):
        kept, plain = (octavo.quantize(given, octavo.E4M3, granularity=granularity) for given in (x, x.clone()))
        assert torch.equal(kept.dequantize(), plain.dequantize())
        assert torch.equal(octavo.fake_quantize(x, octavo.E4M3, granularity=granularity), plain.dequantize())
    product, biased = octavo.scaled_mm(one, one), octavo.scaled_mm(one, one, bias=negative)
    assert torch.equal(biased, product - 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"accumulate": "fp64"},
        {"accumulate": []},
        {"out_dtype": torch.float64},
        {"out_dtype": {}},
        {"bias": torch.zeros(3)},
        {"bias": torch.zeros(2, dtype=torch.int32)},
        {"bias": [0.0, 0.0]},
    ],
    ids=str,
)
def test_earlier_success_does_not_skip_later_checks(wrong):
    a = octavo.quantize(torch.ones(2, 4), octavo.E4M3)
    for _ in range(2):
        scaled_mm(a, a, bias=torch.zeros(2), accumulate=Accumulate.FP32)
    with pytest.raises(ConfigError):
        scaled_mm(a, a, **wrong)
    with pytest.raises(ConfigError):
        scaled_mm(a, octavo.quantize(torch.ones(2, 5), octavo.E4M3))
    matrix: Any = torch.ones(2, 4)
    with pytest.raises(ConfigError):
        scaled_mm(a, matrix)


@pytest.mark.usefixtures("_no_choices")
def test_a_cast_records_its_selection_with_reasons_once_a_problem():
    x, spec = torch.randn(4, 8), CastSpec(format=octavo.E4M3)
    for _ in range(3):
        cast(x, spec)
    cast(x, replace(spec, margin=1))  # no backend asks about it
    cast(x, replace(spec, format=octavo.E5M2, rounding=Rounding.STOCHASTIC))
    nearest, stochastic = cast_selections()
    assert nearest.backend == ("native" if native_bindings.levels() else "reference")
    assert nearest.problem == CastProblem.of(x, octavo.E4M3, PerTensor())
    assert dict(nearest.rejected)["triton"] == "it runs on CUDA, and the tensor is on cpu"
    assert stochastic.backend == "reference"
    assert [name for name, _ in stochastic.rejected] == ["triton", "native"]
    assert explain(stochastic.problem) == stochastic


@pytest.mark.usefixtures("_no_choices")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_fake_quantize_and_dequantize_record_their_selections(dtype):
    x = torch.randn(4, 8, dtype=dtype)
    values = octavo.fake_quantize(x, octavo.E4M3)
    codes = octavo.quantize(x, octavo.E4M3)
    assert torch.equal(values, codes.dequantize())
    encoded, decoded = cast_selections()
    native, other = ("native" if native_bindings.levels() else "reference"), "reference"
    assert (encoded.problem, encoded.backend) == (CastProblem.of(x, octavo.E4M3, PerTensor()), native)
    assert decoded.problem == encoded.problem._replace(decodes=True)
    assert decoded.backend == (native if dtype is torch.bfloat16 else other)
    assert explain(decoded.problem) == decoded


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"shape": torch.Size([0, 4])}, "the tensor is empty"),
        ({"format": E4M3_FNUZ}, "its codes are E4M3 and E5M2, not E4M3_FNUZ"),
        ({"decodes": True, "dtype": torch.float64}, "it decodes to float32, bfloat16 and float16, not torch.float64"),
        ({"device": "meta"}, "it runs on a CPU, and the tensor is on meta"),
        ({"rounding": Rounding.STOCHASTIC}, "it rounds to nearest"),
        ({"transformed": True}, "it reads memory, which torch.func's tensors do not have"),
        (
            {"shape": torch.Size([2, 3, 4]), "granularity": PerBlock(2, 2)},
            "a block of PerBlock(rows=2, columns=2) would hold rows of two matrices",
        ),
    ],
    ids=str,
)
@pytest.mark.skipif(not native_bindings.levels(), reason="no native kernels were built")
def test_the_native_cast_says_why_it_cannot_run(problem, reason):
    described = CastProblem.of(torch.ones(2, 4), octavo.E4M3, PerTensor())._replace(**problem)
    selection = explain(described)
    assert (selection.backend, dict(selection.rejected)["native"]) == ("reference", reason)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(2, 2)], ids=str)
def test_every_cast_backend_returns_and_records_the_same(granularity, monkeypatch):
    x, spec = torch.randn(6, 4), CastSpec(format=octavo.E4M3, granularity=granularity)
    x[2, 3] = float("inf")
    for backend in CAST_BACKENDS:
        if backend.unsupported_reason(CastProblem.of(x, spec.format, granularity)) is not None:
            continue
        monkeypatch.setattr(dispatch, "CAST_BACKENDS", (backend,))
        monkeypatch.setattr(dispatch, "_cast_choices", {})
        result = cast(x, spec, transpose=True)
        for found, source in ((result.output, x), (result.transposed, x.t())):
            assert found is not None
            wanted = octavo.quantize(source, octavo.E4M3, granularity=granularity)
            assert torch.equal(found.data.float().nan_to_num(1000.0), wanted.data.float().nan_to_num(1000.0))
            assert torch.equal(found.scale, wanted.scale)
        assert result.measurement is not None
        assert torch.equal(result.measurement.amax, measure(x, granularity).amax)
        assert result.measurement.nonfinite == 1


def test_a_cast_records_into_what_it_is_given():
    x = torch.tensor([[1.0, -3.0], [float("nan"), 2.0]])
    record = AmaxRecord(torch.tensor(-1.0), torch.tensor(False), torch.tensor(4))
    cast(x, CastSpec(format=octavo.E4M3), transpose=True, record=record)
    assert record.amax == 3.0
    assert record.overflowed
    assert record.nonfinite == 5
    cast(x[:0], CastSpec(format=octavo.E4M3), record=record)
    assert record.nonfinite == 5
