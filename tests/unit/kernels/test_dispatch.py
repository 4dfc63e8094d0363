import warnings
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError, ConfigError
from octavo.kernels import dispatch, explain, native_bindings, scaled_mm, selections
from octavo.kernels.backend import MatmulProblem
from octavo.kernels.backends import torch_cuda
from octavo.kernels.dispatch import BACKENDS
from octavo.numerics import Accumulate, PerBlock, PerTensor, QuantizedTensor

NAMES = [backend.name for backend in BACKENDS]


@pytest.fixture
def _fresh_record(monkeypatch):
    monkeypatch.setattr(dispatch, "_record", {})


def _quantized(rows: int, columns: int, **options) -> QuantizedTensor:
    return octavo.quantize(torch.randn(rows, columns), octavo.E4M3, **options)


@pytest.mark.usefixtures("_fresh_record")
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


@pytest.mark.usefixtures("_fresh_record")
def test_blocks_that_do_not_meet_go_to_the_reference_with_every_reason():
    a, b = (_quantized(4, 8, granularity=PerBlock(1, columns)) for columns in (4, 8))
    scaled_mm(a, b)
    (selection,) = selections()
    assert selection.backend == "reference"
    assert [name for name, _ in selection.rejected] == NAMES[: NAMES.index("reference")]
    assert dict(selection.rejected)["torch_cpu"] == "its blocks of K are as wide in both operands, not 4 and 8"


@pytest.mark.usefixtures("_fresh_record")
def test_the_record_is_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_RECORD_SIZE", 2)
    for rows in (1, 2, 3, 4):
        scaled_mm(_quantized(rows, 4), _quantized(2, 4))
    assert [selection.problem.m for selection in selections()] == [1, 2]


@pytest.mark.usefixtures("_fresh_record")
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
def test_what_went_well_before_vouches_for_no_other_call(wrong):
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
