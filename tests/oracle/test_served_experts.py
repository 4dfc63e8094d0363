"""Mixtures of experts in the CPU engine beside transformers: logits, greedy tokens, every format of export."""

import json
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import octavo
from octavo.checkpoints import load_quantized
from octavo.convert import unfuse_experts
from octavo.errors import CheckpointError
from octavo.export.checkpoint_writer import save_quantized
from octavo.formats import E4M3, FP32
from octavo.inference import Engine, EngineConfig, Event, ModelRunner, SamplingParams, load_served_model
from octavo.inference.llama_layout import as_llama, why_not_llama
from octavo.kernels import native_bindings
from octavo.language_model import load_language_model
from octavo.models.llama_folder import write_tokenizer
from tests.tiny_mixtures import CONTEXT, mixture

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
LEVELS = ("torch", *native_bindings.levels())
FAMILIES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe")
TOKENS = torch.arange(24) * 7 % 300


def spread_out(name, **settings):
    """A mixture whose weights are BF16 numbers of several magnitudes, and whose router decides."""
    made = mixture(name, **settings)
    generator = torch.Generator().manual_seed(5)
    for path, parameter in made.model.named_parameters():
        if path.endswith("norm.weight"):
            parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
        elif parameter.ndim > 1:
            rows = 10 ** (torch.rand((*parameter.shape[:-1], 1), generator=generator) - 0.5)
            parameter.mul_(rows * (10 if path.endswith("mlp.gate.weight") else 1))
        else:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        parameter.copy_(parameter.bfloat16())
    return made


def write(made, folder):
    made.model.save_pretrained(folder)
    write_tokenizer(folder, made.tokenizer, context=CONTEXT)
    return folder


def logits_of(runner):
    """In parts, so that prompts and single tokens are read."""
    cache = runner.new_cache(fmt=FP32)
    return torch.cat([runner(part, cache, every=True) for part in TOKENS.split([17, 1, 6])])


def check_logits(made, level):
    """Weights are BF16 numbers, so that the recipe bf16 rounds nothing; routers are FP32."""
    wanted = made.logits(TOKENS[None])[0]
    found = logits_of(ModelRunner(as_llama(made.model, "m"), recipe="bf16", level=level))
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mixtral", {}),
        ("Mixtral", {"num_experts_per_tok": 1, "num_key_value_heads": 1}),
        ("Mixtral", {"tie_word_embeddings": True}),
        ("Qwen3Moe", {"norm_topk_prob": True}),
        ("Qwen3Moe", {"norm_topk_prob": False, "attention_bias": True, "num_key_value_heads": 1}),
        ("Qwen3Moe", {"num_experts": 130, "num_experts_per_tok": 2, "head_dim": 16}),
        ("Qwen3Moe", {"mlp_only_layers": [1], "intermediate_size": 80}),
        ("Qwen2Moe", {}),
        ("Qwen2Moe", {"decoder_sparse_step": 2, "intermediate_size": 24, "norm_topk_prob": True, "qkv_bias": False}),
        ("Olmoe", {}),
        ("Olmoe", {"norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 3}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(level, name, settings):
    check_logits(spread_out(name, **settings), level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_width_that_is_no_multiple_of_a_vector_loses_no_column_of_the_router(level):
    check_logits(spread_out("Mixtral", hidden_size=44), level)


@pytest.mark.parametrize("level", LEVELS)
def test_router_logits_of_hundreds_do_not_overflow(level):
    made = spread_out("Mixtral")
    for layer in range(2):
        made.model.get_parameter(f"model.layers.{layer}.mlp.gate.weight").mul_(300)
    told: Any = made.model
    for logits in told(TOKENS[None], output_router_logits=True).router_logits:
        assert float(logits.max()) > 300
    check_logits(made, level)


@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (64, 1)])  # torch.topk has an algorithm for each
def test_router_logits_of_nan_spoil_only_the_tokens_that_have_or_see_them(level, experts, top_k):
    """Rows without NaN are in the same call. transformers reads only the text before it: it adds 0 · NaN to them."""
    made = spread_out("Qwen3Moe", num_experts=experts, num_experts_per_tok=top_k)
    wanted = made.logits(TOKENS[None, :20])[0]
    made.model.get_parameter("model.embed_tokens.weight")[TOKENS[20]] = torch.nan
    found = logits_of(ModelRunner(as_llama(made.model, "m"), recipe="bf16", level=level))
    torch.testing.assert_close(found[:20], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert found[20:].isnan().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_a_folder_are_those_of_transformers(name, tmp_path):
    made = spread_out(name)
    served = load_served_model(write(made, tmp_path), recipe="bf16")
    told: Any = made.model
    told = told.generate(
        TOKENS[None],
        attention_mask=torch.ones_like(TOKENS)[None],
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    engine = Engine(served.runner, served.tokenizer, config=EngineConfig(cache_format=FP32, cache_positions=64))
    events: list[Event] = []
    engine.submit(TOKENS.tolist(), SamplingParams(max_tokens=24, temperature=0), events.append)
    while engine.step():
        pass
    tokens = told[0, len(TOKENS) :].tolist()
    assert [event.token for event in events] == tokens
    assert len({*tokens}) > 5


def routers_alike(experts, top_k, cut):
    """Experts that differ behind routers whose first ``cut`` rows are the same row.

    That row has one number which is not 0: its product is exact, in whichever order a GEMM adds the zeros."""
    made = spread_out("Qwen3Moe", num_experts=experts, num_experts_per_tok=top_k)
    for path, parameter in made.model.named_parameters():
        if path.endswith("mlp.gate.weight"):
            row = torch.zeros_like(parameter[0])
            row[5] = parameter[0, 5]
            parameter[:cut] = row
    return made


@pytest.mark.long
@pytest.mark.parametrize("level", native_bindings.levels())
@pytest.mark.parametrize(
    ("experts", "top_k", "cut"),
    [(8, 2, 8), (16, 4, 16), (16, 4, 9), (40, 8, 40), (64, 1, 64), (130, 2, 130), (4, 4, 4)],
)
def test_equal_probabilities_choose_the_experts_that_transformers_does(level, experts, top_k, cut):
    made = routers_alike(experts, top_k, cut)
    router = made.model.get_parameter("model.layers.0.mlp.gate.weight")
    logits = torch.nn.functional.linear(torch.randn(len(TOKENS), 64), router)
    assert torch.equal(logits[:, :cut], logits[:, :1].expand(-1, cut))
    check_logits(made, level)


def exported(name, fmt, recipe, folder):
    model = spread_out(name)
    unfuse_experts(model.model)
    if recipe == "static":
        octavo.calibrate(model, [TOKENS[None]]).apply(model)
    else:
        octavo.convert(model.model, recipe)
    save_quantized(model, folder, format=fmt, verify_folder=False, dtype="fp32")
    return folder


def decoded(folder, to):
    """A folder of the numbers that the codes stand for, which transformers reads as any other."""
    numbers, tensors = {}, load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype == E4M3.torch_dtype:
            if (blocks := tensors.get(f"{name}_scale_inv")) is not None:
                scale = blocks.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            else:
                scale = tensors[f"{name}_scale"]
            numbers[name] = tensor.float() * scale
        elif "_scale" not in name:
            numbers[name] = tensor
    to.mkdir()
    save_file(numbers, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = config.pop("quantization_config").get("model_type", config["model_type"])
    (to / "config.json").write_text(json.dumps(config))
    return to


FORMATS = [("compressed-tensors", "rowwise"), ("hf-fp8", "blockwise"), ("octavo", "tensorwise"), ("modelopt", "static")]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize(("fmt", "recipe"), FORMATS)
def test_every_format_is_served_as_transformers_computes_its_numbers(name, fmt, recipe, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = exported(name, fmt, recipe, tmp_path / "m")
    theirs: Any = AutoModelForCausalLM.from_pretrained(decoded(folder, tmp_path / "numbers"), dtype=torch.float32)
    with torch.no_grad():  # the engine's own rounding of the head
        head = theirs.lm_head.weight
        head.copy_(octavo.quantize(head, E4M3, granularity=octavo.PerRow()).dequantize())
        wanted = theirs(TOKENS[None]).logits[0]
    found = logits_of(load_served_model(folder).runner)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("fmt", "recipe"), [FORMATS[0], FORMATS[1], FORMATS[3]])
def test_inputs_are_cast_as_the_format_says(level, fmt, recipe, tmp_path):
    """The folder's own recipe: a scale per token, per token and block, or calibrated; the head in high precision."""
    folder = exported("Mixtral", fmt, recipe, tmp_path / "m")
    model: Any = load_quantized(folder).model
    with torch.no_grad():
        head = model.lm_head.weight
        head.copy_(octavo.quantize(head, E4M3, granularity=octavo.PerRow()).dequantize())
        wanted = model(TOKENS[None]).logits[0]
    runner = ModelRunner(
        as_llama(model, "m"), recipe="fp8-static" if recipe == "static" else "fp8-dynamic", level=level
    )
    plain = ModelRunner(as_llama(load_quantized(folder).model, "m"), level=level)
    quality = [octavo.numerics.sqnr_db(wanted, logits_of(each)) for each in (runner, plain)]
    assert quality[0] > max(30, quality[1] + 6)


def test_static_scales_of_experts_come_from_a_calibration(tmp_path):
    folder = write(spread_out("Mixtral"), tmp_path / "model")
    model = load_language_model(folder)
    unfuse_experts(model.model)
    scales = octavo.calibrate(model, [TOKENS[None]])
    scales.save(tmp_path / "scales")
    served = load_served_model(folder, recipe="fp8-static", calibration=tmp_path / "scales")
    found = logits_of(served.runner)
    scales.apply(model)
    with torch.no_grad():
        wanted = model.logits(TOKENS[None])[0]
    assert octavo.numerics.sqnr_db(wanted, found) > 25  # the head's weight is E4M3 here alone
    assert served.runner.saturation.elements == len(TOKENS) * 2 * (64 + 64 + 2 * (64 + 32))


def test_a_token_reads_its_own_experts():
    made = spread_out("Mixtral")
    expert = 3 * 32 * 64
    routers, others = 2 * 4 * 64, sum(p.numel() for p in made.model.parameters() if p.ndim == 2)
    runner = ModelRunner(as_llama(made.model, "m"), recipe="bf16")
    read = others - routers - 300 * 64  # no embedding
    assert runner.weight_bytes == 2 * (read + 2 * 2 * expert)
    assert runner.resident_bytes > 2 * (read + 2 * 4 * expert + 300 * 64) + 4 * routers


REFUSED = [
    ("DeepseekV3", {"n_group": 4}, r"every token goes to \(n_shared_experts is 1\) and .* groups \(n_group is 4\)"),
    ("GptOss", {}, r"its experts have biases and clamp their activations \(swiglu_limit is 7.0\)"),
    ("GraniteMoeShared", {"shared_intermediate_size": 8}, r"every token goes to \(shared_intermediate_size is 8\)"),
    (
        "Phimoe",
        {},
        "'phimoe', not one of 'llama', 'mistral', 'qwen2', 'qwen3', 'mixtral', 'qwen2_moe', 'qwen3_moe', 'olmoe'",
    ),
    ("Mixtral", {"sliding_window": 16}, r"a sliding window \(sliding_window is 16\)"),
    ("Mixtral", {"hidden_act": "gelu"}, "its MLP has 'gelu', not 'silu'"),
    ("Mixtral", {"num_experts_per_tok": 9}, "experts_per_token must be from 1 to num_experts"),
    ("Olmoe", {"clip_qkv": 8.0}, r"clips queries, keys and values \(clip_qkv is 8.0\)"),
    ("Olmoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "are 'linear', not"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_other_properties_are_named(name, settings, words):
    import transformers

    reason = why_not_llama(getattr(transformers, f"{name}Config")(**settings))
    assert reason is not None
    assert re.search(words, reason)


def test_a_window_wider_than_the_context_is_none():
    from transformers import MixtralConfig

    assert why_not_llama(MixtralConfig(sliding_window=4096, max_position_embeddings=4096)) is None


@pytest.mark.parametrize("is_fp8", [True, False])
def test_a_folder_of_other_experts_is_refused_in_one_sentence(is_fp8, tmp_path):
    made = mixture("GptOss")
    folder = write(made, tmp_path / "m")
    if is_fp8:
        octavo.convert(made.model, "rowwise")
        folder = tmp_path / "fp8"
        save_quantized(made, folder, format="octavo", verify_folder=False)
    with pytest.raises(
        CheckpointError, match=r"cannot be served: its experts have biases .*; octavo serves only models"
    ):
        load_served_model(folder)
