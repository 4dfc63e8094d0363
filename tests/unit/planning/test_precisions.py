"""Published names of precisions, in the spellings of several programs."""

import pytest

from octavo.planning.hardware import find_hardware
from octavo.planning.model_names import find_model
from octavo.planning.model_shapes import Part
from octavo.planning.precision import Kernel, find_precision, linear_precision, unsupported_reason


@pytest.mark.parametrize(
    ("name", "recipe", "kernel"),
    [
        ("bf16_with_mxfp8_mixed", "mxfp8", Kernel.MX),
        ("bf16_with_fp8_delayed_scaling_mixed", "delayed_te", Kernel.TENSOR),
        ("bf16_with_fp8_current_scaling_mixed", "tensorwise", Kernel.TENSOR),
        ("bf16-mixed + fp8", "delayed_te", Kernel.TENSOR),
        ("bf16/fp8", "delayed_te", Kernel.TENSOR),
        ("no fp8 (bf16)", "bf16", Kernel.BF16),
        ("bf16, fp8 disabled", "bf16", Kernel.BF16),
        ("bf16 (fp8 all-gather)", "bf16", Kernel.BF16),
        ("bf16 baseline for fp8", "bf16", Kernel.BF16),
        ("bf16 baseline of FP8 delayed scaling", "bf16", Kernel.BF16),
        ("fp8 current scaling (TE, hybrid)", "tensorwise", Kernel.TENSOR),
        ("fp8 block scaling (TE, hybrid)", "blockwise", Kernel.BLOCK),
        ("mxfp8 (TE, hybrid)", "mxfp8", Kernel.MX),
        ("fp8 (TE, hybrid)", "delayed_te", Kernel.TENSOR),
        ("float8 rowwise_with_gw_hp", "rowwise_hp_grad_weight", Kernel.ROW),
        ("rowwise_hp_grad_weight", "rowwise_hp_grad_weight", Kernel.ROW),
        ("fp8 1x128 128x128", "blockwise", Kernel.BLOCK),
        ("DeepGEMM fp8", "blockwise", Kernel.DEEPGEMM),
    ],
)
def test_the_recipe_of_a_name(name, recipe, kernel):
    found = find_precision(name, has_mx=True)
    assert (found.recipe.name, found.kernel) == (recipe, kernel)


def test_operands_quantized_before_are_not_cast():
    assert find_precision("DeepGEMM fp8").casts  # of a model's layers
    assert not find_precision("fp8 current (prequantised)").casts


@pytest.mark.parametrize(
    ("name", "bits", "weight_bits"),
    [
        ("int8 weights / bf16 activations", 16, 8),
        ("nvfp4 weights, bf16 activations", 16, 4),
        ("int4 weight, float8 activation", 8, 4),
        ("MXFP4 W4A8", 8, 4),
        ("mxfp4 weights, fp8 activations", 8, 4),
        ("nvfp4", 4, 0),
        ("nvfp4 + fp8 kv", 4, 0),
    ],
)
def test_bits_of_weights_and_operands(name, bits, weight_bits):
    found = find_precision(name, has_mx=True)
    assert (found.bits, found.weight_bits) == (bits, weight_bits)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("nvfp4 + fp8 kv", 1),
        ("bf16, KV cache in fp8", 1),
        ("fp8, KV fp8", 1),
        ("fp16, int8 KV", 1),
        ("fp8, bf16 kv", 2),
        ("fp8", 2),
    ],
)
def test_bytes_of_keys_and_values(name, kv_bytes):
    assert find_precision(name).kv_bytes == kv_bytes


@pytest.mark.parametrize(
    ("name", "dense", "experts"),
    [
        ("mxfp8 linears only", True, False),
        ("mxfp8 linear layers", True, False),
        ("mxfp8 moe only", False, True),
        ("mxfp8 experts", False, True),
        ("BF16 + MXFP8 experts", False, True),
        ("mxfp8 (dense BF16)", False, True),
        ("mxfp8 both", True, True),
        ("mxfp8 (linears + grouped GEMM)", True, True),
        ("mxfp8", True, True),
    ],
)
def test_what_a_name_covers(name, dense, experts):
    found = find_precision(name, has_mx=True)
    assert (found.covers_dense, found.covers_experts) == (dense, experts)


@pytest.mark.parametrize("name", ["fp8 tensorwise, bf16 attention", "fp8 tensorwise (attention in bf16)"])
def test_attention_in_bf16_leaves_the_other_layers_in_fp8(name):
    found = find_precision(name)
    for model in ("qwen-3-30b-a3b", "llama-3-8b"):
        for linear in find_model(model).linears():
            assert linear_precision(found, linear).is_bf16 == (linear.part in (Part.ATTENTION, Part.HEAD))


@pytest.mark.parametrize("name", ["MI300X", "L40S", "A100", "H100"])
def test_mxfp4_without_units_is_of_weights_alone(name):
    hardware = find_hardware(name)
    found = find_precision("mxfp4", has_mx=hardware.has_mx)
    assert (found.bits, found.weight_bits) == (16, 4)
    assert unsupported_reason(found, hardware) is None


def test_mxfp4_of_cdna4_is_twice_as_fast_as_fp8():
    """AMD's datasheet of the MI355X: 10.1 PFLOP/s in MXFP4, 5 in FP8."""
    hardware = find_hardware("MI355X")
    assert find_precision("mxfp4", has_mx=hardware.has_mx).kernel == Kernel.FP4
    assert hardware.peak(4) == 2 * hardware.peak(8)
    assert unsupported_reason(find_precision("mxfp8"), hardware) is None
