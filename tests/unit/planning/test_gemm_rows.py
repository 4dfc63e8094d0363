"""Rows of products: sizes, groups and passes in their spellings."""

from typing import Any

import pytest

from octavo.planning import fitted_constants, predict_row
from octavo.planning.gemm_rows import gemm_job
from octavo.planning.jobs import GemmPass
from octavo.planning.rows import Row

CONSTANTS = fitted_constants()


def row(model, **cells):
    base = {"id": "row", "kind": "gemm", "hardware": "H100", "gpus": "1", "precision": "float8 tensorwise"}
    return Row(base | {"model": model, "metric": "time_us"} | cells)


def predicted(model, **cells) -> Any:
    return predict_row(row(model, **cells), CONSTANTS)


@pytest.mark.parametrize(
    "model",
    [
        "M=16384 N=8192 K=5120",
        "M=16,384 N=8,192 K=5,120",
        "M=16k N=8k K=5k",
        "M: 16384, N: 8192, K: 5120",
        "M 16384 N 8192 K 5120",
        "M=2^14 N=2^13 K=5120",
        "M, K, N = 16384, 5120, 8192",
        "MxKxN 16384x5120x8192",
        "(M, K, N) = (16384, 5120, 8192)",
        "16384 x 8192 x 5120",
        "M=1.6384e4 N=8192 K=5120",
        "m16384 n8192 k5120",
    ],
)
def test_sizes(model):
    assert gemm_job(row(model)).shapes == ((16384, 8192, 5120),)


@pytest.mark.parametrize(
    ("precision", "notes", "casts"),
    [
        ("float8 tensorwise", "", True),
        ("float8 tensorwise", "autocast includes quantisation", True),
        ("float8 tensorwise", "kernel only", False),
        ("float8 tensorwise", "inputs already quantized; CUDA graph", False),
        ("mxfp8", "time of the kernel alone", False),
        ("mxfp8", "excludes quantisation", False),
        ("fp8 current (prequantised)", "", False),
        ("fp8 e4m3 1x128 x 128x128, fp32 promotion", "", False),
        ("fp8 DeepGEMM 1x128 x 128x128", "", False),
    ],
)
def test_casts_count_unless_the_kernel_was_measured_alone(precision, notes, casts):
    assert gemm_job(row("M=128 N=7168 K=2048", precision=precision, notes=notes)).precision.casts == casts


@pytest.mark.parametrize("name", ["G=8", "E=8", "experts=8", "groups: 8"])
def test_groups(name):
    job = gemm_job(row(f"grouped GEMM M=128,000 N=8192 K=5120 {name}"))
    assert (job.groups, job.shapes) == (8, ((16000, 8192, 5120),))
    of_group = gemm_job(row("grouped G=4 M/group=8,192 N=4096 K=7168"))
    assert (of_group.groups, of_group.shapes) == (4, ((8192, 4096, 7168),))


@pytest.mark.parametrize(
    "name",
    [
        "batched GEMM B=16 M=1024 N=4096 K=4096",
        "bmm, batch 16, M 1024 N 4096 K 4096",
        "strided batched b16 1024x4096x4096",
    ],
)
def test_a_batch_of_products_is_as_many_of_them(name):
    """Sixteen products take as long as one of sixteen times the rows, while both are limited by FLOPs."""
    job = gemm_job(row(name, precision="bf16"))
    assert (job.groups, job.shapes, job.is_grouped) == (16, ((1024, 4096, 4096),), False)
    long = predicted("M=16384 N=4096 K=4096", precision="bf16").value
    assert predicted(name, precision="bf16").value == pytest.approx(long, rel=0.05)
    grouped = predicted("grouped GEMM G=16 M=16384 N=4096 K=4096", precision="bf16").value
    assert grouped > 1.3 * long


def test_a_size_beyond_floats_is_refused_in_a_sentence():
    reason = predicted(f"M={'9' * 400} N=4096 K=4096").reason
    assert reason == "the prediction is not a finite number above 0; check the row's sizes"


def test_sizes_of_a_layer():
    plain, short = (
        f"TransformerLayer h=4096 ffn={ffn} heads=32 seq={seq} batch=8"
        for ffn, seq in (("16384", "2048"), ("16,384", "2k"))
    )
    assert gemm_job(row(plain)) == gemm_job(row(short))


@pytest.mark.parametrize(
    ("cells", "passes"),
    [
        ({"metric": each}, GemmPass.BACKWARD)
        for each in ("bwd_ms", "backward_ms", "time_us (bwd)", "dgrad_wgrad_us", "grad_ms")
    ]
    + [({"notes": "backward pass only"}, GemmPass.BACKWARD), ({"notes": "backward not timed"}, GemmPass.FORWARD)]
    + [({"notes": each}, GemmPass.ALL) for each in ("fwd and bwd", "forward-backward", "fprop+dgrad+wgrad")]
    + [({"metric": "fwd_bwd_ms"}, GemmPass.ALL), ({"metric": "fwd_ms"}, GemmPass.FORWARD), ({}, GemmPass.FORWARD)]
    + [({"metric": "dgrad_us"}, GemmPass.GRAD_INPUT), ({"notes": "wgrad"}, GemmPass.GRAD_WEIGHT)],
)
def test_passes(cells, passes):
    assert gemm_job(row("M=8192 N=8192 K=8192", **cells)).passes == passes
    assert predicted("M=8192 N=8192 K=8192", **cells).reason is None


def test_a_backward_pass_is_two_products():
    """Of the same size each: as long as two forward ones in BF16, and as many FLOP/s."""
    times = [predicted("M=8192 N=8192 K=8192", metric=each, precision="bf16").value for each in ("fwd_ms", "bwd_ms")]
    assert times[1] == pytest.approx(2 * times[0], rel=0.02)
    rates = [
        predicted("M=8192 N=8192 K=8192", metric=each, precision="bf16").value
        for each in ("tflops (fwd)", "tflops (bwd)")
    ]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)
    assert "not measured together" in predicted("M=8192 N=8192 K=8192", notes="fprop+dgrad").reason


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("4 linears of one layer", ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))),
        ("MLP", ((16384, 4096), (4096, 16384))),
        ("te.LayerNormMLP", ((16384, 4096), (4096, 16384))),
        ("feed-forward block", ((16384, 4096), (4096, 16384))),
        ("MLP (SwiGLU)", ((32768, 4096), (4096, 16384))),  # gate and up are one product
        ("gated MLP", ((32768, 4096), (4096, 16384))),
    ],
)
def test_an_mlp_has_no_linear_layers_of_attention(name, widths):
    shapes = gemm_job(row(f"{name} h=4096 ffn=16384 M=8192")).shapes
    assert shapes == tuple((8192, n, k) for n, k in widths)


@pytest.mark.parametrize("precision", ["float8 tensorwise", "bf16"])
def test_more_ranks_than_output_features_are_refused(precision):
    """A rank without a column multiplies nothing, in no time."""
    reason = predicted("M=8192 N=64 K=4096", tp="128", precision=precision).reason
    assert reason == "128 tensor-parallel ranks are more than the 64 output features"
    fits = predicted("M=8192 N=64 K=4096", tp="64", precision=precision)
    assert fits.value > 0 < fits.bf16_value
