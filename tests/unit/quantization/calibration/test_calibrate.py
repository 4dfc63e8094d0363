"""``octavo.calibrate`` from end to end: scales, what a converted model computes with them, coverage."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.formats import E4M3
from octavo.nn import Linear
from octavo.numerics import Granularity, ScaleRounding
from octavo.quantization import calibrate, coverage
from octavo.quantization.calibration.result import NEVER_REACHED
from octavo.quantization.calibration.weight_scales import WeightMethod
from tests.contract.gemm_oracle import recorded_products
from tests.unit.quantization.calibration.test_observers import llama, recorded, token_batches

GRANULARITIES: dict[str, Granularity] = {
    "tensor": octavo.PerTensor(),
    "row": octavo.PerRow(),
    "128x128": octavo.PerBlock(128, 128),
}


def mlp(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 150, bias=bias), nn.GELU(), nn.Linear(150, 70, bias=bias)).eval()


def mlp_batches(count=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 200, generator=generator) for _ in range(count)]


def test_max_scales_are_those_of_all_inputs_together_bitwise():
    model = llama()
    found = calibrate(model, token_batches())
    kept = recorded(
        model.model, {p: model.model.get_submodule(p) for p in found.input_scales}, token_batches(), model.logits
    )
    assert len(found.input_scales) == 14
    for path, tensors in kept.items():
        everything = torch.cat([x.flatten() for x in tensors])
        assert torch.equal(found.input_scales[path], octavo.quantize(everything, E4M3).scale)
    own = {path: octavo.quantize(model.model.get_submodule(path).weight, E4M3).scale for path in kept}
    assert all(torch.equal(found.weight_scales[path], scale) for path, scale in own.items())


def test_calibration_does_not_change_the_model():
    model = mlp().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calibrate(model, mlp_batches())
    assert type(model[0]) is nn.Linear
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "batches", [lambda: mlp_batches(), lambda: [torch.cat(mlp_batches())], lambda: iter(mlp_batches()[::-1])]
)
def test_scales_do_not_depend_on_how_the_samples_come(batches):
    for method in ("max", "percentile", "mse", "entropy"):
        expected, found = (calibrate(mlp(), given, method=method) for given in (mlp_batches(), batches()))
        for path, scale in expected.input_scales.items():
            # The GEMM of another batch may differ in the last bit; the first layer's input is the data itself.
            if path == "0":
                assert torch.equal(found.input_scales[path], scale)
            torch.testing.assert_close(found.input_scales[path], scale, rtol=0.05, atol=0)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("weight_method", ["max", "mse"])
@pytest.mark.parametrize("hold", [None, True])
@pytest.mark.parametrize("granularity", list(GRANULARITIES))
def test_a_converted_layer_multiplies_just_these_codes(granularity, hold, weight_method, power_of_two):
    model = mlp()
    weights = {path: model.get_submodule(path).weight.detach().clone() for path in ("0", "2")}
    found = calibrate(
        model, mlp_batches(), granularity=granularity, weight_method=weight_method, power_of_two=power_of_two
    )
    report = found.apply(model, hold_weights=hold)
    assert report.converted == ("0", "2")
    assert (report.stored == ("0", "2")) == (hold is True or weight_method == "mse")
    x = mlp_batches(1)[0]
    with recorded_products() as products, torch.no_grad():
        y = model(x)
    for product, (path, weight) in zip(products, weights.items(), strict=True):
        scale, weight_scale = found.input_scales[path], found.weight_scales[path]
        assert torch.equal(product.a.scale, scale)
        expected = octavo.quantize(weight, E4M3, granularity=GRANULARITIES[granularity], scale=weight_scale)
        assert torch.equal(product.b.scale, weight_scale)
        assert torch.equal(product.b.data.view(torch.uint8), expected.data.view(torch.uint8))
        if power_of_two:
            assert all(math.log2(each).is_integer() for each in [scale.item(), *weight_scale.flatten().tolist()])
    hidden = x
    for index, (path, weight) in enumerate(weights.items()):
        a = octavo.quantize(hidden, E4M3, scale=found.input_scales[path])
        b = octavo.quantize(weight, E4M3, granularity=GRANULARITIES[granularity], scale=found.weight_scales[path])
        bias = model.get_submodule(path).bias.detach()
        hidden = octavo.scaled_mm(a, b, out_dtype=torch.float32, bias=bias)
        hidden = nn.functional.gelu(hidden) if index == 0 else hidden
    assert torch.equal(y, hidden)


def test_searched_weight_scales_must_be_held():
    model = mlp()
    found = calibrate(model, mlp_batches(), weight_method="mse")
    with pytest.raises(ConfigError, match=r"searched weight scales \(mse\) need hold_weights=True"):
        found.apply(model, hold_weights=False)
    assert type(model[0]) is nn.Linear


class Bert(nn.Module):
    """An encoder with biases, whose evaluation torch would take past its layers."""

    embed: nn.Module
    encoder: nn.Module
    pooler: nn.Module
    unused: nn.Module

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler, self.unused = nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, ids):
        return torch.tanh(self.pooler(self.encoder(self.embed(ids))[:, 0]))


def test_a_bert_like_module_with_biases():
    torch.manual_seed(0)
    model = Bert().eval()
    batches = [torch.randint(50, (4, 12)) for _ in range(8)]
    found = calibrate(model, batches)
    layers = [f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert list(found.input_scales) == [*layers, "pooler"]
    assert found.left_out["unused"] == NEVER_REACHED
    assert "NonDynamicallyQuantizableLinear" in found.left_out["encoder.layers.0.self_attn.out_proj"]
    assert any("no batch reached 'unused'" in sentence for sentence in found.warnings())
    with torch.no_grad():
        expected = model(batches[0])
    report = found.apply(model)
    assert report.skipped["unused"] == NEVER_REACHED
    assert type(model.unused) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(model.train().eval()(batches[0]), expected, rtol=0.1, atol=0.1)
    pooled = model.pooler
    assert isinstance(pooled, Linear)
    assert pooled.bias is not None


def test_layers_that_share_an_input_share_its_scale_and_are_listed():
    found = calibrate(llama(), token_batches())
    assert found.groups[0] == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert found.groups[1] == ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    for group in found.groups:
        assert len({float(found.input_scales[path]) for path in group}) == 1


def test_the_head_and_skipped_layers_stay():
    found = calibrate(llama(), token_batches(), skip=["*.down_proj"])
    assert found.left_out["lm_head"] == "head: by its name"
    assert "model.layers.0.mlp.down_proj" in found.left_out
    with_head = calibrate(llama(), token_batches(), convert_head=True)
    assert "lm_head" in with_head.input_scales
    model = llama()
    assert "lm_head" in with_head.apply(model).converted
    with pytest.raises(ConfigError, match="pattern 'nothing' matches no layer"):
        calibrate(llama(), token_batches(), skip=["nothing"])


def test_zero_inputs_get_scale_1_and_compute():
    model = nn.Sequential(nn.Linear(8, 8))
    found = calibrate(model, [torch.zeros(3, 8)] * 4)
    assert found.input_scales["0"].item() == 1.0
    found.apply(model)
    with torch.no_grad():
        assert torch.equal(model(torch.zeros(2, 8)), model.get_parameter("0.bias").expand(2, 8))


def test_keys_and_values_have_scales_by_their_amax():
    model = llama()
    for options in ({}, {"power_of_two": True}, {"method": "percentile", "percentile": 50.0}):
        found = calibrate(model, token_batches(), kv_cache=True, **options)
        largest = [[0.0, 0.0], [0.0, 0.0]]

        def measure(layer, keys, values, largest=largest):
            for i, x in enumerate((keys, values)):
                largest[layer][i] = max(largest[layer][i], float(x.abs().max()))
            return keys, values

        with torch.no_grad():
            for batch in token_batches():
                model.logits(batch, measure)
        rounding = ScaleRounding.RCEIL if "power_of_two" in options else ScaleRounding.FP32
        for layer, pair in found.kv_scales.items():
            for amax, scale in zip(largest[layer], pair, strict=True):
                one = torch.tensor([amax])
                assert torch.equal(scale, octavo.quantize(one, E4M3, scale_rounding=rounding).scale)


def test_keys_have_the_mean_of_all_positions():
    model = llama()
    kept: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def keep(layer, keys, values):
        kept[layer].append(keys)
        return keys, values

    with torch.no_grad():
        for batch in token_batches():
            model.logits(batch, keep)
    found = calibrate(model, token_batches(), kv_cache=True).means_of_keys(model)
    assert found.keys() == kept.keys()
    for layer, keys in kept.items():
        torch.testing.assert_close(found[layer], torch.cat(keys).double().mean((0, 1)).float(), rtol=1e-6, atol=0)


def test_means_are_refused_where_there_are_none_or_of_another_model():
    model = llama()
    with pytest.raises(ConfigError, match="no means of keys; octavo calibrate --kv-cache computes them"):
        calibrate(model, token_batches()).means_of_keys(model)
    with pytest.raises(CheckpointError, match="another model"):
        calibrate(model, token_batches(), kv_cache=True).means_of_keys(mlp())


def without_hash(calibration):
    """As an octavo that knew no hash of weights wrote it: their searched scales have to tell."""
    return replace(calibration, weights_hash="")


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_searched_scales_are_of_the_weights_they_were_searched_for(granularity):
    """One row that training has made three times as large would be cut off in silence."""
    model = mlp()
    found = without_hash(calibrate(model, mlp_batches(), weight_method="mse", granularity=granularity))
    trained, rounded = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        trained[0].weight[1] *= 3
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    before = copy.deepcopy(trained.state_dict())
    with pytest.raises(CheckpointError, match=r"the weight of '0' is not the one its scales were searched for \(mse\)"):
        found.apply(trained)
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())
    assert len(found.apply(rounded).stored) == len(found.apply(model).stored) > 0


def test_a_row_that_is_cut_off_is_enough():
    """Of a thousand rows one that is small counts nothing in the matrix's SQNR; its own output is wrong."""
    model = nn.Sequential(nn.Linear(16, 1024, bias=False))
    row = model.get_parameter("0.weight").data[7]
    row *= 1e-4
    found = without_hash(calibrate(model, [torch.randn(4, 16)], weight_method="mse", granularity="row"))
    row *= 3
    with pytest.raises(CheckpointError, match="is not the one its scales were searched for"):
        found.apply(model)
    row /= 3
    found.apply(model)


def test_a_loss_is_enough():
    """Weights within twice their range, but cut off by the thousand."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    found = without_hash(calibrate(model, [torch.randn(4, 64)], weight_method="mse"))
    model.get_parameter("0.weight").data *= 1.9
    with pytest.raises(CheckpointError, match="is not the one its scales were searched for"):
        found.apply(model)


def test_a_batch_of_one_dimension_is_one_sample():
    assert calibrate(nn.Sequential(nn.Linear(8, 8)), [torch.randn(8)] * 3).seen.samples == 3


def test_convergence_is_what_the_last_quarter_moved():
    batches = [torch.full((2, 8), 1.0)] * 6 + [torch.full((2, 8), 1.5)] * 2
    model = nn.Sequential(nn.Linear(8, 8))
    assert calibrate(model, batches).health[0].moved == pytest.approx(0.5)
    assert calibrate(model, batches[::-1]).health[0].moved == 0
    assert calibrate(model, iter(batches)).health[0].moved is None
    assert any("still moved the scale of '0' (50.0%)" in sentence for sentence in calibrate(model, batches).warnings())


class OneOfTwo(nn.Module):
    """Its second layer takes part where the input says so: an expert that few batches ask for."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.rare(x) if float(x[0, 0]) > 1 else self.usual(x)


def test_a_layer_that_only_the_last_quarter_reaches_has_not_converged():
    usual, rare = torch.full((2, 8), 0.5), torch.full((2, 8), 2.0)
    late = calibrate(OneOfTwo(), [usual] * 7 + [rare])
    assert {each.path: each.moved for each in late.health} == {"usual": 0.0, "rare": 1.0}
    assert any("still moved the scale of 'rare' (100.0%)" in sentence for sentence in late.warnings())
    early = calibrate(OneOfTwo(), [rare] + [usual] * 7)
    assert {each.path: each.moved for each in early.health} == {"usual": 0.0, "rare": 0.0}
    unknown = calibrate(OneOfTwo(), iter([usual] * 7 + [rare]))
    assert {each.path: each.moved for each in unknown.health} == {"usual": None, "rare": None}


def test_coverage_finds_where_other_data_go_beyond():
    model = mlp()
    found = calibrate(model, mlp_batches())
    within, beyond = (coverage(model, found, [x * factor for x in mlp_batches()]) for factor in (1, 3))
    assert [each.goes_beyond for each in within] == [False, False]
    assert max(each.ratio for each in within) == pytest.approx(1.0)
    first = next(each for each in beyond if each.path == "0")
    x = torch.cat(mlp_batches()) * 3
    assert first.goes_beyond
    assert first.amax == x.abs().max()
    assert first.ratio == pytest.approx(3.0, rel=1e-5)
    expected = octavo.quantize(x, E4M3, scale=found.input_scales["0"])
    saturated = (x.abs() > float(expected.scale) * 464).double().mean().item()
    assert first.saturation_fraction == pytest.approx(saturated, rel=0.1)
    assert beyond[0].saturation_fraction == max(each.saturation_fraction for each in beyond)


def test_one_huge_element_is_beyond_however_small_its_share():
    """Its row's output is lost: the error is compared with the product that nobody has cast."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 64)), torch.randn(512, 512)
    found = calibrate(model, [x])
    other = x.clone()
    other[7, 3] = 200 * float(x.abs().max())
    (one,) = coverage(model, found, [other])
    assert one.saturation_fraction < 1e-5
    assert one.sqnr_db is not None
    assert one.calibrated_sqnr_db is not None
    assert one.sqnr_db < 2
    assert one.calibrated_sqnr_db > 24
    assert one.goes_beyond
    wanted = model(other)
    found.apply(model)
    assert (model(other)[7] - wanted[7]).norm() > 0.9 * wanted[7].norm()


def test_saturation_that_the_percentile_intends_does_not_go_beyond_the_calibration():
    model = mlp()
    found = calibrate(model, mlp_batches(), method="percentile", percentile=99.0)
    assert all(each.saturation_fraction > 1e-3 for each in coverage(model, found, mlp_batches()) if each.path == "0")
    assert not any(each.goes_beyond for each in coverage(model, found, mlp_batches()))


@pytest.mark.parametrize(("given", "words"), [
    ({"method": "median"}, "method must be one of max, percentile, mse, entropy, not 'median'"),
    ({"weight_method": "entropy"}, "weight_method must be one of max, mse, not 'entropy'"),
    ({"granularity": "channel"}, "weight_granularity must be one of tensor, row, 128x128, not 'channel'"),
])  # fmt: skip
def test_bad_words_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        calibrate(mlp(), mlp_batches(), **given)


def test_models_that_cannot_be_calibrated_are_refused():
    with pytest.raises(ConfigError, match="no linear layer to calibrate"):
        calibrate(nn.Sequential(nn.ReLU()), mlp_batches())
    with pytest.raises(DataError, match="there is no batch"):
        calibrate(mlp(), [])
    broken = mlp()
    with torch.no_grad():
        broken[2].weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match="layer '2' cannot be calibrated: the weight contains NaN or infinity"):
        calibrate(broken, mlp_batches())
    held = mlp()
    held.requires_grad_(False)
    octavo.convert(held, frozen="fp8")
    with pytest.raises(ConfigError, match="layer '0' already stores its weight as FP8 codes"):
        calibrate(held, mlp_batches())


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "other parameter"])
def test_another_model_is_refused_by_name_and_left_alone(change):
    found = calibrate(mlp(), mlp_batches())
    other, words = mlp(), {
        "missing": r"1 of its layers are missing here \['2'\]",
        "extra": r"1 layers are new \['3'\]",
        "shape": r"the weight of '2' is \[71, 150\] here and was \[70, 150\]",
        "other parameter": "names or shapes of other parameters differ",
    }[change]  # fmt: skip
    match change:
        case "missing":
            other[2] = nn.Identity()
        case "extra":
            other.append(nn.Linear(70, 2))
        case "shape":
            other[2] = nn.Linear(150, 71)
        case "other parameter":
            other.append(nn.LayerNorm(70))
    for refuses in (found.apply, lambda model: coverage(model, found, mlp_batches())):
        with pytest.raises(CheckpointError, match=words):
            refuses(other)
    assert type(other[0]) is nn.Linear


def test_a_tied_head_keeps_its_weight_in_high_precision():
    model = llama()
    model.model.lm_head.weight = model.model.model.embed_tokens.weight
    report = calibrate(model, token_batches(), convert_head=True).apply(model, hold_weights=True)
    assert report.not_stored == {"lm_head": "other modules use it too"}
    assert len(report.stored) == 14
    with torch.no_grad():
        assert model.logits(token_batches(1)[0]).isfinite().all()


def test_a_quiet_calibration_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = calibrate(mlp(), mlp_batches(32))
    assert found.seen.samples == 192
    assert found.warnings() == []


@pytest.mark.parametrize("batch", [1, None, "words"])
def test_a_batch_of_another_kind_is_refused(batch):
    with pytest.raises(TypeError, match="a batch is a tensor, a tuple of arguments or a dictionary of keywords, not"):
        calibrate(mlp(), [batch])


def test_a_layer_that_was_given_nothing_was_not_reached():
    """An empty tensor holds no zeros, so that its scale is not theirs."""
    found = calibrate(mlp(), [torch.empty(0, 200)])
    assert found.input_scales == {}
    assert found.left_out == {"0": NEVER_REACHED, "2": NEVER_REACHED}
    several = calibrate(mlp(), [*mlp_batches(), torch.empty(0, 200)])
    assert several.input_scales == calibrate(mlp(), mlp_batches()).input_scales


def test_a_number_beyond_fp32_is_refused_by_name():
    with pytest.raises(DataError, match="in batch 1 layer '0' received NaN or infinity in FP32"):
        calibrate(mlp().double(), [torch.full((2, 200), 1e300, dtype=torch.float64)])


def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def read_by_torch():
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()


@pytest.mark.parametrize(
    ("make", "words"), [(tied, "'0'.*other modules use it too"), (read_by_torch, r"'0\.linear1'.*fast path")]
)
def test_searched_scales_of_a_weight_that_cannot_become_codes_are_refused(make, words):
    """Its layer would cast it with another scale than the one that was found."""
    batches = [torch.randn(2, 4, 8)]
    with pytest.raises(ConfigError, match=words):
        calibrate(make(), batches, weight_method="mse")
    searched = replace(without_hash(calibrate(make(), batches)), weight_method=WeightMethod.MSE)  # of an older version
    model = make()
    with pytest.raises(ConfigError, match=words):
        searched.apply(model)
    assert not any(isinstance(layer, Linear) for layer in model.modules())


def test_a_tied_head_is_left_alone_unless_it_is_asked_for():
    model = llama()
    assert calibrate(model, token_batches(), weight_method="mse").weight_scales


def test_skip_is_a_list():
    with pytest.raises(ConfigError, match=r"write skip=\['0'\]"):
        calibrate(mlp(), mlp_batches(), skip="0")
