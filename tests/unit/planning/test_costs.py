"""Ideal seconds and bytes: counted by hand, by torch, or known to grow and shrink with one setting."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.errors import ConfigError
from octavo.planning.constants import fitted_constants
from octavo.planning.gemm_costs import add_gemm, gemm_parts, wave_efficiency
from octavo.planning.hardware import find_hardware, hardware_names
from octavo.planning.jobs import Framework, GemmJob, GemmPass, Layout, Recompute, ServingJob, Sharding, TrainingJob
from octavo.planning.model_names import find_model
from octavo.planning.model_shapes import ModelShape
from octavo.planning.precision import BF16, Kernel, bytes_cast, find_precision, precision_of_recipe
from octavo.planning.search import best_layout, layouts
from octavo.planning.serving_costs import kv_bytes, requests_in_flight, weight_bytes
from octavo.planning.training_costs import training_parts
from octavo.planning.training_memory import activation_bytes, recomputed_share, training_memory

H100 = find_hardware("h100")


def job(**changes):
    settings: dict[str, Any] = {
        "model": find_model("llama-3-8b"),
        "hardware": H100,
        "layout": Layout(gpus=64),
        "seq": 8192,
        "global_batch": 64,
        "micro_batch": 1,
        "precision": BF16,
    }
    return TrainingJob(**(settings | changes))


def test_a_large_product_takes_its_flops_at_the_peak():
    parts = gemm_parts(GemmJob(shapes=((16384, 16384, 16384),), hardware=H100, precision=BF16, passes=GemmPass.ALL))
    ideal = 3 * 2 * 16384**3 / 989.4e12
    assert ideal < parts["gemm_bf16_hopper"] < 1.1 * ideal


def test_a_product_of_one_row_takes_the_time_to_read_its_weight():
    parts = gemm_parts(GemmJob(shapes=((1, 8192, 8192),), hardware=H100, precision=BF16, passes=GemmPass.FORWARD))
    assert parts["reading"] == pytest.approx(2 * 8192**2 / 3350e9, rel=0.05)


@pytest.mark.parametrize("rows", [1, 4])
def test_integer_units_of_b300_keep_up_with_a_decoding_step(rows):
    """150 TOP/s multiply 8 rows, the fewest of an MMA, in 0.8 of the time in which 7.7 TB/s read a byte a weight."""
    b300, int8 = find_hardware("b300"), find_precision("int8 W8A8")
    fp8 = precision_of_recipe("tensorwise")
    seconds = []
    for precision in (fp8, int8):
        parts = gemm_parts(
            GemmJob(shapes=((rows, 8192, 8192),), hardware=b300, precision=precision, passes=GemmPass.FORWARD)
        )
        seconds.append(sum(value for name, value in parts.items() if name.startswith("gemm") or name == "reading"))
    read, multiply = 8192**2 / 7.7e12, 2 * 8 * 8192**2 / 150e12
    assert seconds[0] == pytest.approx(read, rel=0.15)
    assert seconds[1] == pytest.approx((read**4 + multiply**4) ** 0.25, rel=0.02)
    large = GemmJob(shapes=((8192,) * 3,), hardware=b300, precision=int8, passes=GemmPass.FORWARD)
    assert gemm_parts(large)["gemm_tensor_blackwell"] == pytest.approx(2 * 8192**3 / 150e12, rel=0.01)


def test_waves_that_are_partly_empty_cost_efficiency():
    full = wave_efficiency((128 * 132, 256, 8192), 132)
    assert wave_efficiency((128 * 133, 256, 8192), 132) < full <= 1


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
def test_bytes_of_casts_follow_the_recipe(name):
    """At least one reading and two writings of codes; a scale from the whole tensor needs a second reading."""
    moved = bytes_cast(precision_of_recipe(name))
    assert min(moved.input, moved.weight, moved.grad_output) >= 2 + 1 + 1
    if name == "tensorwise":
        assert moved.input == bytes_cast(precision_of_recipe("delayed")).input + 2
    assert bytes_cast(replace(precision_of_recipe(name), casts=False)).input == 0


def test_a_high_precision_grad_weight_is_multiplied_in_bf16():
    precision = precision_of_recipe("rowwise_hp_grad_weight")
    parts = gemm_parts(GemmJob(shapes=((4096, 4096, 4096),), hardware=H100, precision=precision))
    assert parts["gemm_bf16_hopper"] > 0 < parts["gemm_row_hopper"]
    assert recipes.get("rowwise_hp_grad_weight").grad_weight.b is None


def test_published_names_of_precisions():
    assert find_precision("fp8 delayed scaling (TE, hybrid)").recipe.is_delayed
    assert find_precision("fp8-block/mx (parenthesised)", has_mx=True).kernel == Kernel.MX
    assert find_precision("fp8-block/mx (parenthesised)").kernel == Kernel.BLOCK
    assert find_precision("nvfp4").bits == 4
    assert find_precision("bf16").is_bf16
    assert find_precision("mxfp8 grouped").covers_dense is False
    assert find_precision("mxfp8 linears").covers_experts is False


@pytest.mark.parametrize("name", ["fp32", "TF32", "fp8 E5M2", "mxfp6", "te", "MS-AMP O2", "int2", "W4A6"])
def test_a_precision_that_is_not_modelled_is_refused(name):
    with pytest.raises(ConfigError, match="is not modelled"):
        find_precision(name)


def test_spellings_of_precisions():
    assert all(find_precision(name).is_bf16 for name in ("bfloat16", "fp16 mixed", "", "not stated"))
    assert find_precision("fp8_mx").kernel == Kernel.MX
    assert find_precision("per-tensor").recipe == precision_of_recipe("tensorwise").recipe
    assert find_precision("fp8 per-tensor delayed scaling").recipe.is_delayed
    assert find_precision("hybrid").recipe.is_delayed
    assert find_precision("bf16, fp8 KV cache").kv_bytes == 1


@pytest.mark.parametrize(
    ("name", "bits"),
    [("W4A16", 4), ("W8A16", 8), ("INT4 AWQ", 4), ("GPTQ", 4), ("MXFP4", 4), ("fp8 weight-only", 8), ("nf4", 4)],
)
def test_weights_alone_in_fewer_bits(name, bits):
    """Weights are read and stored in fewer bits, and multiplied in 16: on Blackwell too, which has FP4 units."""
    precision = find_precision(name, has_mx=name != "MXFP4")
    assert (precision.bits, precision.weight_bits, precision.kernel) == (16, bits, Kernel.BF16)
    fast = replace(H100, bf16=1e9)  # so that a GEMM takes the time to read its weight
    parts = gemm_parts(GemmJob(shapes=((1, 8192, 8192),), hardware=fast, precision=precision, passes=GemmPass.FORWARD))
    assert parts["reading"] == pytest.approx(bits / 8 * 8192**2 / 3350e9, rel=0.05)
    service = ServingJob(
        model=find_model("gpt-oss-120b"), hardware=H100, gpus=1, tp=1, prompt=128, answer=128, precision=precision
    )
    model = service.model
    experts = 36 * 128 * 3 * 2880 * 2880
    others = model.parameters - experts - 2 * model.vocab * model.hidden
    dense = 16 if name == "MXFP4" else bits  # published models have experts alone in MXFP4
    ends = 4 * model.vocab * model.hidden
    assert weight_bytes(service) == pytest.approx((experts * bits + others * dense) / 8 + ends)


def test_gemms_of_a_step_have_the_flops_of_the_model():
    model = find_model("llama-3-8b")
    parts = training_parts(job(recompute=Recompute.NONE))
    ideal = 6 * model.active_parameters * 8192 / H100.peak(16)
    assert ideal < parts["gemm_bf16_hopper"] < 1.15 * ideal
    again = training_parts(job(recompute=Recompute.FULL))
    blocks = 2 * (model.active_parameters - model.vocab * model.hidden) * 8192 / H100.peak(16)
    assert again["gemm_bf16_hopper"] - parts["gemm_bf16_hopper"] == pytest.approx(blocks, rel=0.15)


def test_frozen_weights_take_no_gradient():
    parts, frozen = training_parts(job(recompute=Recompute.NONE)), training_parts(job(frozen=True))
    assert frozen["gemm_bf16_hopper"] == pytest.approx(parts["gemm_bf16_hopper"] * 2 / 3, rel=0.05)
    assert frozen["optimizer"] == 0


def test_a_pipeline_is_idle_while_it_fills():
    layout = Layout(gpus=64, pp=4, sharding=Sharding.ZERO1)
    parts = training_parts(job(layout=layout, global_batch=16 * 16))
    assert parts["micro_batches"] == 16
    assert parts["bubble"] == 3 / 16
    assert training_parts(job(layout=replace(layout, vp=2), global_batch=16 * 16))["bubble"] == 3 / 32


def test_fsdp_moves_every_weight_thrice_a_micro_batch():
    parts = training_parts(job(layout=Layout(gpus=8), global_batch=8))
    sent = (2 + 2 + 4) * find_model("llama-3-8b").parameters * 7 / 8
    assert parts["fsdp"] == pytest.approx(sent / 450e9)


def test_gradients_that_are_divided_are_reduced_every_micro_batch_and_whole_ones_once_a_step():
    """Weights are gathered once a step by both; what is reduced once is what memory holds whole."""
    parameters = find_model("llama-3-8b").parameters
    steps = [job(layout=Layout(gpus=8, sharding=kind), global_batch=64) for kind in (Sharding.ZERO2, Sharding.ZERO1)]
    of_zero2, of_zero1 = map(training_parts, steps)
    assert of_zero2["micro_batches"] == of_zero1["micro_batches"] == 8
    assert of_zero2["fsdp"] == pytest.approx((2 + 8 * 4) * parameters * 7 / 8 / 450e9)
    assert of_zero1["dp"] == pytest.approx((2 + 2) * parameters * 7 / 8 / 450e9)
    kept = [training_memory(step, Recompute.NONE).gradients for step in steps]
    assert kept == pytest.approx([4 * parameters / 8, 2 * parameters])


@pytest.mark.parametrize("vp", [1, 2])
def test_a_pipeline_sends_activations_forward_and_their_gradients_back(vp):
    """Between every two stages: two bytes an element of each, divided by tensor-parallel ranks."""
    layout = Layout(gpus=64, tp=2, pp=4, vp=vp, sharding=Sharding.ZERO1)
    parts = training_parts(job(layout=layout, global_batch=64))
    sent = 2 * 2 * 8192 * 4096 / 2
    assert parts["pp"] == pytest.approx(vp * sent / (H100.network * 1e9))


def test_context_parallel_ranks_exchange_the_heads_of_keys_alone():
    """Keys and values of 8 of 32 heads, of 1,024 tokens: forward, backward and their gradients, to 7 other ranks."""
    parts = training_parts(job(layout=Layout(gpus=8, cp=8), global_batch=8))
    of_layer = 1024 * 8 * (128 + 128) * 2
    assert parts["cp"] == pytest.approx(3 * 32 * of_layer * 7 / 450e9)


def test_stages_inside_a_domain_leave_fewer_neighbours_to_share_the_network():
    """Of 8 linked GPUs four are of one copy's stages, so that two networks feed a rank, and not eight."""
    parameters = find_model("llama-3-8b").parameters
    parts = training_parts(job(layout=Layout(gpus=64, pp=4, sharding=Sharding.ZERO1), global_batch=64))
    assert parts["dp"] == pytest.approx((2 + 2) * parameters / 4 * 15 / 16 / (2 * H100.network * 1e9))


def test_replicas_gather_over_links_and_reduce_their_shard_over_the_network():
    parts = training_parts(job(layout=Layout(gpus=64, shard=8)))
    parameters = find_model("llama-3-8b").parameters
    assert parts["fsdp"] == pytest.approx((2 + 2 + 4) * parameters * 7 / 8 / 450e9)
    assert parts["dp"] == pytest.approx(2 * 4 * parameters / 8 / (H100.network * 1e9))
    assert str(Layout(gpus=64, shard=8)) == "hsdp 8 × 8"


@pytest.mark.parametrize(
    ("recipe", "tp", "count"),
    [
        ("delayed", 1, 1),
        ("delayed", 8, 1),
        ("tensorwise", 1, 1),  # of the weights, which are gathered as codes
        ("tensorwise", 8, 1 + 32 * 4),  # and of each layer's divided operand
        ("rowwise", 8, 0),
        ("blockwise", 8, 0),
    ],
)
def test_all_reduces_of_amaxes(recipe, tp, count):
    layout = Layout(gpus=64, tp=tp)
    step = job(layout=layout, global_batch=64 // tp, precision=precision_of_recipe(recipe))
    assert training_parts(step)["collectives"] - training_parts(step.at(BF16))["collectives"] == count


def test_the_search_shards_weights_in_every_way():
    found = list(layouts(find_model("llama-3-8b"), H100, 64, seq=8192))
    assert {layout.sharding for layout in found} == {Sharding.FSDP, Sharding.ZERO1, Sharding.ZERO2}
    assert {layout.shard for layout in found if layout.tp == 2} == {0, 4}, "a domain of 8 GPUs holds four such shards"


@pytest.mark.parametrize("policy", Recompute)
def test_activations_by_layer_are_all_activations(policy):
    step = job(layout=Layout(gpus=64, tp=2, pp=4, vp=2, sharding=Sharding.ZERO1))
    kept = activation_bytes(step, policy)
    assert sum(kept.values()) == pytest.approx(training_memory(step, policy).activations)


def test_memory_of_a_toy_layer_is_what_torch_saves():
    """Activations of one SwiGLU block against the tensors that autograd keeps of the same block in BF16."""
    hidden, ffn, tokens = 64, 192, 32
    gate_up, down = nn.Linear(hidden, 2 * ffn, bias=False).bfloat16(), nn.Linear(ffn, hidden, bias=False).bfloat16()
    saved: dict[int, int] = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gate, up = gate_up(x).chunk(2, -1)
        out = down(nn.functional.silu(gate) * up)
    weights = {gate_up.weight.untyped_storage().data_ptr(), down.weight.untyped_storage().data_ptr()}
    measured = sum(size for place, size in saved.items() if place not in weights)
    model = ModelShape(name="toy", layers=1, hidden=hidden, heads=1, vocab=1, ffn=ffn, attention_layers=0, mlp_layers=1)
    step = job(model=model, layout=Layout(gpus=1), seq=tokens, global_batch=1, framework=Framework.EAGER)
    norm = tokens * hidden * (2 + 4)  # of the norm before the MLP, which the toy does not have
    assert training_memory(step, Recompute.NONE).activations - norm == pytest.approx(measured, rel=0.01)
    assert out.shape == (tokens, hidden)


def test_memory_of_a_toy_layer_without_a_gate_is_what_torch_saves():
    hidden, ffn, tokens = 64, 256, 32
    up, down = nn.Linear(hidden, ffn, bias=False).bfloat16(), nn.Linear(ffn, hidden, bias=False).bfloat16()
    saved: dict[int, int] = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = down(nn.functional.gelu(up(x)))
    weights = {up.weight.untyped_storage().data_ptr(), down.weight.untyped_storage().data_ptr()}
    measured = sum(size for place, size in saved.items() if place not in weights)
    model = ModelShape(name="toy", layers=1, hidden=hidden, heads=1, vocab=1, ffn=ffn, gated=False, attention_layers=0)
    step = job(model=model, layout=Layout(gpus=1), seq=tokens, global_batch=1, framework=Framework.EAGER)
    kept = activation_bytes(step, Recompute.NONE)
    assert kept["up"] + kept["down"] == measured
    assert out.shape == (tokens, hidden)


def test_memory_of_attention_is_what_torch_saves_in_bf16_and_fp8():
    """Queries, keys, values and the output; in FP8 the next layer keeps codes, and attention still its output."""
    heads, width, tokens = 4, 64, 128
    hidden = heads * width
    for recipe in ("bf16", "tensorwise"):
        torch.manual_seed(0)
        qkv, out = (nn.Linear(hidden, n, bias=False).bfloat16() for n in (3 * hidden, hidden))
        block = nn.ModuleList([qkv, out])
        if recipe != "bf16":
            octavo.convert(block, recipe)
        saved: dict[int, int] = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        weights = {each.untyped_storage().data_ptr() for each in block.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            queries, keys, values = block[0](x).view(1, tokens, 3 * heads, width).transpose(1, 2).chunk(3, 1)
            attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            result = block[1](attended.transpose(1, 2).reshape(1, tokens, hidden))
        measured = sum(size for place, size in saved.items() if place not in weights)
        model = ModelShape(name="toy", layers=1, hidden=hidden, heads=heads, vocab=1, mlp_layers=0)
        step = job(
            model=model, layout=Layout(gpus=1), seq=tokens, global_batch=1, precision=precision_of_recipe(recipe)
        )
        kept = activation_bytes(step, Recompute.NONE)
        assert kept["qkv"] + kept["out"] == pytest.approx(measured, rel=0.03), (
            recipe
        )  # scales, and sums of exponentials
        assert result.shape == x.shape


def test_states_of_a_step_take_sixteen_bytes_a_parameter():
    memory = training_memory(job(layout=Layout(gpus=8), global_batch=8), Recompute.FULL)
    parameters = find_model("llama-3-8b").parameters
    assert memory.weights + memory.gradients + memory.moments == pytest.approx(16 * parameters / 8)


def test_recomputation_is_the_least_that_fits():
    small = job(model=find_model("llama-3-1b"), seq=2048)
    assert recomputed_share(small) == (Recompute.NONE, 0.0)
    policy, share = recomputed_share(job(model=find_model("llama-3-70b")))
    assert policy == Recompute.SELECTIVE
    assert 0 < share <= 1
    assert recomputed_share(job(recompute=Recompute.FULL)) == (Recompute.FULL, 1.0)


def test_fp8_halves_weights_and_leaves_room_for_more_requests():
    service = ServingJob(
        model=find_model("llama-3-8b"), hardware=H100, gpus=1, tp=1, prompt=1024, answer=1024, precision=BF16
    )
    fp8 = replace(service, precision=precision_of_recipe("tensorwise"))
    model = service.model
    embeddings = 2 * model.vocab * model.hidden
    assert weight_bytes(service) == 2 * model.parameters
    assert weight_bytes(fp8) == model.parameters - embeddings + 2 * embeddings
    assert kv_bytes(service, 1) == 2 * 32 * 8 * 128 * 2
    assert requests_in_flight(fp8) > requests_in_flight(service)


def test_every_gpu_of_a_replica_keeps_a_reserve():
    """1.5 GB of each, and keys and values fill what weights leave of 0.9 of its 80 GB."""
    model = find_model("llama-3-70b")
    service = ServingJob(model=model, hardware=H100, gpus=4, tp=4, prompt=1024, answer=0, precision=BF16)
    free = 4 * (0.9 * 80e9 - 1.5e9) - 2 * model.parameters
    assert requests_in_flight(service) == int(free / (80 * 2 * 8 * 128 * 2 * 1024))


def test_every_accelerator_has_positive_figures():
    for name in hardware_names():
        hardware = find_hardware(name)
        assert hardware.name == name
        figures = (hardware.bf16, hardware.memory, hardware.bandwidth, hardware.link, hardware.network, hardware.watts)
        assert min(figures) > 0
        assert hardware.source


def test_a_power_limit_slows_the_clock():
    limited = find_hardware("H100 SXM 96GB HBM2e (2.4TB/s, 500W cap)")
    assert limited.bf16 == pytest.approx(989.4 * (500 / 700) ** (1 / 3))
    assert limited.bandwidth == 2400


def test_products_of_nothing_cost_nothing():
    parts = gemm_parts(GemmJob(shapes=((128, 128, 128),), hardware=H100, precision=BF16))
    before = dict(parts)
    add_gemm(parts, (0, 128, 128), BF16, H100)
    assert parts == before
    assert all(math.isfinite(value) for value in parts.values())


def test_long_sequences_are_divided_among_context_parallel_ranks():
    model = find_model("llama-3-8b")
    short, long = (list(layouts(model, H100, 64, seq=seq)) for seq in (8192, 65536))
    assert {layout.cp for layout in short} == {1}
    assert {layout.cp for layout in long} == {1, 2, 4, 8, 16}
    best = best_layout(job(seq=262144, layout=Layout(gpus=64), global_batch=64), fitted_constants())
    assert best[0].job.layout.cp > 1, "262,144 tokens do not fit into one GPU"


def test_a_search_tries_micro_batches():
    found = best_layout(job(seq=2048, global_batch=1024), fitted_constants(), [Layout(gpus=64)])
    assert {candidate.job.micro_batch for candidate in found} == {1, 2, 4, 8, 16}
    short = best_layout(job(seq=256, global_batch=64 * 512), fitted_constants(), [Layout(gpus=64)])
    assert max(candidate.job.micro_batch for candidate in short) > 16, "4,096 tokens do not fill a GPU"
