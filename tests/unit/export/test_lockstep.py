import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.export.emulation import add_cache_casts
from octavo.export.lockstep import compare, load_probe, make_probe, relative_error, save_probe
from octavo.export.verification import TOLERANCE
from octavo.models import Llama
from octavo.nn import Linear
from tests.tiny_llama import tiny_llama_config
from tests.unit.checkpoints.folders import ROW, dynamic, layer_of, static
from tests.unit.quantization.tiny_models import windows

PROMPT = 8


def converted_paths(model):
    return [path for path, layer in model.model.named_modules() if isinstance(layer, Linear)]


@pytest.fixture(scope="module")
def probe():
    model = dynamic(ROW)
    return make_probe(model.logits, model.model, converted_paths(model), windows(2), prompt=PROMPT)


def agreement_of(model, probe):
    with torch.no_grad():
        return compare(model.logits, model.model, probe)


def test_the_reference_agrees_with_itself(probe):
    found = agreement_of(dynamic(ROW), probe)
    assert found.free_error == 0
    assert found.logits_error < 1e-6
    assert found.greedy_equal == found.greedy_tokens == windows(2).shape[1] - PROMPT
    assert found.within(TOLERANCE)


def test_the_prompt_is_kept_and_continued_greedily(probe):
    model, tokens = dynamic(ROW), windows(2)[:1, :PROMPT]
    assert torch.equal(probe.tokens[:1, :PROMPT], tokens)
    assert torch.equal(probe.tokens[1], windows(2)[1])
    with torch.no_grad():
        assert probe.tokens[0, PROMPT] == model.logits(tokens)[0, -1].argmax()


def test_what_a_layer_is_given_has_the_codes_of_what_reached_it(probe):
    for path, x in probe.inputs.items():
        before, after = (
            octavo.quantize(each, octavo.E4M3, granularity=octavo.PerRow()) for each in (x, probe.given[path])
        )
        assert torch.equal(before.data.view(torch.uint8), after.data.view(torch.uint8)), path
        assert not torch.equal(x, probe.given[path])


def test_in_lockstep_another_order_of_sums_makes_no_difference(probe):
    """The plain formula, in torch's own products, is the same model; running free it need not look like it."""
    model = dynamic(ROW)
    for path in converted_paths(model):
        layer = layer_of(model.model, path)
        weight = octavo.quantize(layer.weight.detach(), octavo.E4M3, granularity=octavo.PerRow()).dequantize()

        def forward(x, weight=weight):
            cast = octavo.fake_quantize(x, octavo.E4M3, granularity=octavo.PerRow())
            return (cast.double() @ weight.double().T).float()

        layer.forward = forward  # type: ignore[method-assign]
    found = agreement_of(model, probe)
    assert found.logits_error < 1e-5
    assert found.worst_error < 1e-5


def spoil_scale(model):
    layer = model.model.get_submodule("model.layers.1.mlp.up_proj")
    layer.weight.data[5] *= 1.5


def spoil_norm(model):
    model.model.model.layers[1].input_layernorm.weight.data *= 1.01


def spoil_rotary(model):
    model.model.model.cos.copy_(model.model.model.cos.roll(1, 0))


def spoil_inputs(model):
    for path in converted_paths(model):
        model.model.get_submodule(path).set_recipe(recipes.get("weight_only"))


def spoil_granularity(model):
    octavo.convert(model.model, "tensorwise")


MISTAKES = {
    spoil_scale: "model.layers.1.mlp.down_proj",
    spoil_norm: "model.layers.1.self_attn.",
    spoil_rotary: "self_attn.o_proj",
    spoil_inputs: "",
    spoil_granularity: "",
}


@pytest.mark.parametrize("spoil", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes_are_found_at_the_next_layer(probe, spoil):
    model = dynamic(ROW)
    spoil(model)
    found = agreement_of(model, probe)
    assert not found.within(TOLERANCE)
    assert found.worst_error > 3 * TOLERANCE
    assert MISTAKES[spoil] in found.worst_layer


def test_an_embedding_that_differs_is_found(probe):
    model = dynamic(ROW)
    model.model.get_parameter("model.embed_tokens.weight").data[:, 0] *= 1.1
    assert not agreement_of(model, probe).within(TOLERANCE)


def test_a_head_that_differs_is_found(probe):
    """All of its layers are right, and their input too: the logits alone tell."""
    model = dynamic(ROW)
    weight = model.model.get_parameter("lm_head.weight")
    model.model.get_submodule("lm_head").forward = lambda x: 1.01 * nn.functional.linear(x, weight)
    found = agreement_of(model, probe)
    assert found.worst_error < 1e-5
    assert found.logits_error > 3 * TOLERANCE
    assert not found.within(TOLERANCE)


def test_one_other_choice_is_another_model(probe):
    found = agreement_of(dynamic(ROW), probe)
    assert found.within(TOLERANCE)
    assert not replace(found, greedy_equal=found.greedy_tokens - 1).within(TOLERANCE)


def test_a_norm_that_is_nan_is_found(probe):
    model = dynamic(ROW)
    model.model.get_parameter("model.layers.1.input_layernorm.weight").data[0] = float("nan")
    assert not agreement_of(model, probe).within(TOLERANCE)


@pytest.mark.parametrize("name", ["logits_error", "worst_error", "free_error"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_no_error_may_be_other_than_finite(probe, name, wrong):
    found = agreement_of(dynamic(ROW), probe)
    assert found.within(TOLERANCE)
    assert not replace(found, **{name: wrong}).within(TOLERANCE)


def test_a_layer_that_never_runs_is_found(probe):
    model = dynamic(ROW)
    mlp = model.model.get_submodule("model.layers.0.mlp")
    mlp.forward = torch.zeros_like
    found = agreement_of(model, probe)
    assert found.worst_error == float("inf")
    assert not found.within(TOLERANCE)


def test_nan_is_never_the_same(probe):
    model = dynamic(ROW)
    model.model.get_parameter("model.norm.weight").data.fill_(float("nan"))
    assert not agreement_of(model, probe).within(TOLERANCE)


def test_a_probe_on_disk(probe, tmp_path):
    save_probe(probe, tmp_path / "probe")
    read = load_probe(tmp_path / "probe")
    assert read.prompt == PROMPT
    assert torch.equal(read.tokens, probe.tokens)
    for kind in ("inputs", "given"):
        ours, theirs = getattr(probe, kind), getattr(read, kind)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[path], theirs[path]) for path in ours)
    given_alike = [path for path in read.inputs if path.startswith("model.layers.0") and path[-6] in "qkv"]
    assert len({read.inputs[path].data_ptr() for path in given_alike}) == 1


def test_static_inputs_that_saturate_keep_their_codes():
    model, _ = static()
    for path in converted_paths(model):
        layer_of(model.model, path).input_scale.mul_(0.25)
    probe = make_probe(model.logits, model.model, converted_paths(model), windows(1), prompt=PROMPT)
    assert agreement_of(model, probe).logits_error < 1e-6


@pytest.fixture(scope="module")
def cached():
    """A model whose keys and values are cast, the scales, and its probe."""
    model, scales = static(kv_cache=True)
    return model, scales, _probe_with_cache(model, scales)


def _with_cache(model, scales):
    return partial(model.logits, kv_transform=add_cache_casts(model.model, scales))


def _probe_with_cache(model, scales):
    return make_probe(_with_cache(model, scales), model.model, converted_paths(model), windows(2), prompt=PROMPT)


def test_keys_and_values_beside_a_rounding_boundary_keep_their_codes(cached):
    """Each is moved to a tie, 1e-6 below it in the reference and above it in the other program."""
    model, scales, _ = cached

    def program(sign):
        cast = add_cache_casts(model.model, scales)

        def beside_ties(layer, *both):
            steps = [17 / 16 * scale * (1 + sign * 1e-6) for scale in scales[layer]]
            return cast(layer, *(torch.full_like(x, float(step)) for x, step in zip(both, steps, strict=True)))

        return partial(model.logits, kv_transform=beside_ties)

    probe = make_probe(program(-1), model.model, converted_paths(model), windows(2), prompt=PROMPT)
    with torch.no_grad():
        found = compare(program(1), model.model, probe)
    assert found.free_error > 1e-3
    assert found.worst_error < 1e-5
    assert found.within(TOLERANCE)


@pytest.mark.parametrize("factor", [1.1, 1.5, 3])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_wrong_cache_scale_of_one_layer_is_found(cached, part, factor):
    model, scales, probe = cached
    keys, values = scales[1]
    wrong = {**scales, 1: (keys * factor, values) if part == "keys" else (keys, values * factor)}
    with torch.no_grad():
        found = compare(_with_cache(model, wrong), model.model, probe)
    assert found.worst_error > 3 * TOLERANCE
    assert "layers.1.self_attn" in found.worst_layer


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    for other in (torch.ones(3), torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")])):
        assert relative_error(other, torch.ones(2)) == float("inf")
        assert relative_error(torch.ones(2), other) == float("inf")


def error_of_one_digit(model, tokens):
    """Of the logits, when each element of the embedding moves by FP32's last digit, up or down."""
    moved = copy.deepcopy(model)
    table = moved.model.embed_tokens
    signs = torch.randint(0, 2, table.weight.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    table.weight = torch.nn.Parameter(table.weight * (1 + signs * torch.finfo(torch.float32).eps))
    return relative_error(moved(tokens), model(tokens))


@pytest.mark.long
@torch.no_grad()
def test_free_running_a_model_in_fp8_leaves_itself_after_one_digit():
    """Why two programs are compared in lockstep, or with the same codes. Not every model has a value beside a tie."""
    shape = tiny_llama_config(hidden_size=128, intermediate_size=256, num_layers=8, num_kv_heads=1)
    tokens = torch.randint(300, (8, 64), generator=torch.Generator().manual_seed(0))
    in_fp8 = []
    for seed in range(3):
        model = Llama(shape, seed=seed).eval()
        assert error_of_one_digit(model, tokens) < 1e-6
        octavo.convert(model, "tensorwise")
        in_fp8.append(error_of_one_digit(model, tokens))
    assert 1e-3 < max(in_fp8) < 0.1


class WritesIntoItsInput(nn.Module):
    """As fused kernels do: what a layer has read is overwritten later."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 16)
        self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.one(x) + self.two(x)
        x.mul_(3)
        return (self.three(x) + y).repeat(1, 1, 20)[..., :300]


def test_what_is_recorded_does_not_change_with_the_tensor():
    model = WritesIntoItsInput()
    octavo.convert(model, ROW)
    paths, tokens = ["one", "two", "three"], windows(2)
    probe = make_probe(model, model, paths, tokens, prompt=PROMPT)
    with torch.no_grad():
        x = model.embedding(probe.tokens)
    assert torch.equal(probe.inputs["one"], x)
    assert torch.equal(probe.inputs["three"], 3 * x)
    assert probe.inputs["one"].data_ptr() == probe.inputs["two"].data_ptr() != probe.inputs["three"].data_ptr()
    assert compare(model, model, probe).within(TOLERANCE)
