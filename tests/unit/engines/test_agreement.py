"""Agreement of two engines: equal engines differ by nothing, and every number is what its passes say."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import octavo
from octavo.engines import Division, agree, agree_with_itself, get, model_as, quantize_as
from octavo.engines.agreement import mean_of, nudge
from octavo.engines.layer_differences import compare_codes, relative_error, total_of
from octavo.errors import ConfigError, DataError
from octavo.numerics import Accumulate, PerBlock, PerRow, QuantizedTensor
from tests.oracle.engines.adversarial import input_cast
from tests.unit.engines.test_model import seen_layers
from tests.unit.quantization.tiny_models import LINEARS, language_model, model_with_a_window_of_zeros, windows

TOKENS = windows(3, 20)
PATH = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model():
    return language_model()


@pytest.fixture(scope="module")
def blocks(model):
    return agree(model, "te-block", "vllm-block", TOKENS, max_kl=1e-9)


def test_equal_nan_scales_are_equal_and_e5m2_s_infinity_is_no_nan():
    codes = torch.tensor([[1.0, torch.inf]]).to(torch.float8_e5m2)
    other = torch.tensor([[1.0, torch.nan]]).to(torch.float8_e5m2)
    scale, granularity = torch.full((1, 1), torch.nan), PerRow()
    ours, theirs = (QuantizedTensor(each, scale, granularity, torch.float32) for each in (codes, other))
    assert compare_codes(ours, ours).is_equal
    assert compare_codes(theirs, theirs).is_equal
    found = compare_codes(ours, theirs)
    assert (found.codes_differ, found.first, found.scales_differ, found.largest_scale) == (1, (0, 1), 0, 0.0)


@pytest.mark.parametrize("name", ["te-block", "vllm-tensor", "te-delayed", "compressed-tensors", "vllm-fnuz"])
def test_an_engine_agrees_with_itself_exactly(model, name):
    result = octavo.agree(model, name, name, TOKENS)
    assert result.agrees
    assert result.kl.estimate == result.kl.high == 0
    for layer in result.layers:
        assert layer.weight is not None
        assert layer.weight.is_equal
        assert layer.input is not None
        assert layer.input.is_equal
        assert layer.errors == layer.end_to_end == (0.0, 0.0, 0.0)
    for scores in result.scores:
        assert not scores.delta.any()


def test_engines_whose_bits_differ_do_not_agree_without_a_bar_or_with_0(model):
    ours = get("octavo-token")
    assert ours.input is not None
    theirs = replace(ours, input=replace(ours.input, division=Division.AMAX_BY_LIMIT))
    for bar in (None, 0.0):
        result = agree(model, ours, theirs, TOKENS, max_kl=bar)
        assert 0 < result.kl.estimate < 1e-3
        assert not result.is_equal
        assert not result.agrees
        assert agree(model, ours, ours, TOKENS, max_kl=bar).agrees
    assert agree(model, ours, theirs, TOKENS, max_kl=1.0).agrees


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_engines_are_equal_if_all_windows_are(order):
    """A window of a token whose embedding is zero has logits of zero in every engine; the other has not."""
    plain, texts = model_with_a_window_of_zeros()
    result = agree(plain, "vllm-token", "vllm-block", texts[list(order)])
    assert [bool(scores.delta.any()) for scores in result.scores] == [index == 0 for index in order]
    assert not result.is_equal


def test_scores_are_those_of_two_passes(model, blocks):
    ours, theirs = (model_as(model.model, get(name)) for name in ("te-block", "vllm-block"))
    for window, scores in zip(TOKENS, blocks.scores, strict=True):
        p, q = (each(window[None, :-1])[0].double().log_softmax(1) for each in (ours, theirs))
        torch.testing.assert_close(scores.reverse_kl, (q.exp() * (q - p)).sum(1), atol=1e-14, rtol=1e-9)
        assert len(scores.delta) == 19
    assert not blocks.agrees
    assert blocks.kl.low < blocks.kl.estimate < blocks.kl.high
    assert replace(blocks, max_kl=1.0).agrees
    by_window = torch.tensor([float(scores.delta.abs().mean()) for scores in blocks.scores])
    assert mean_of(blocks.scores, "abs_delta").estimate == pytest.approx(float(by_window.mean()))


def test_layers_are_compared_on_the_trainers_inputs(model, blocks):
    assert len(blocks.layers) == LINEARS
    layer = next(each for each in blocks.layers if each.path == PATH)
    ours, theirs = model_as(model.model, get("te-block")), model_as(model.model, get("vllm-block"))
    x, y = seen_layers(ours, TOKENS[:1, :-1])[PATH]
    _, own = seen_layers(theirs, TOKENS[:1, :-1])[PATH]
    same = theirs.layers[PATH](x)
    assert layer.errors[0] == relative_error(same, y)
    expected = (same.double() - y.double()).norm() / y.double().norm()
    assert layer.errors[0] == pytest.approx(float(expected))
    assert expected > 0
    assert layer.end_to_end[0] == relative_error(own, y)
    casts = [quantize_as(x[0], input_cast(name)) for name in ("te-block", "vllm-block")]
    first = compare_codes(*casts)
    assert layer.input is not None
    assert layer.input.codes == 3 * first.codes
    assert layer.input.first == first.first
    assert layer.input.codes_differ >= first.codes_differ > 0


def test_the_floor_is_the_trainers_last_bits(model):
    result = agree(model, "octavo-token", "octavo-token", TOKENS)
    floor = mean_of(result.floor, "reverse_kl").estimate
    assert 0 < floor < 1e-2
    engine = model_as(model.model, get("vllm-token"))
    before = engine.model.get_parameter("model.embed_tokens.weight").clone()
    head = engine.model.get_parameter("lm_head.weight")
    nudge(engine, 0)
    after = engine.model.get_parameter("model.embed_tokens.weight")
    steps = after.view(torch.int16).int() - before.view(torch.int16).int()
    assert set(steps.unique().tolist()) == {-1, 1}
    assert torch.equal(head, before)
    again = model_as(model.model, get("vllm-token"))
    nudge(again, 0)
    assert torch.equal(again.model.get_parameter("model.embed_tokens.weight"), after)


@pytest.mark.parametrize("name", ["octavo-token", "vllm-token"])
def test_zeros_stay_where_numbers_move(model, name):
    engine = model_as(model.model, get(name))
    before = engine.model.get_parameter("model.embed_tokens.weight").clone()
    before[3], before[4, ::2] = 0.0, -0.0
    engine.model.get_submodule("model.embed_tokens").weight = torch.nn.Parameter(before, requires_grad=False)
    nudge(engine, 0)
    after = engine.model.get_parameter("model.embed_tokens.weight")
    assert after.isfinite().all()
    assert torch.equal(after == before, before == 0)


def test_layers_of_one_engine_alone_have_no_codes_to_compare(model):
    result = agree(model, "vllm-token", replace(get("vllm-token"), head=True, skipped=("*.o_proj",)), TOKENS)
    by_path = {layer.path: layer for layer in result.layers}
    assert len(by_path) == LINEARS + 1
    for path in ("lm_head", "model.layers.0.self_attn.o_proj"):
        assert by_path[path].weight is by_path[path].input is None
        assert min(by_path[path].errors) > 0


def test_other_sums_are_those_of_both(model):
    result = agree(model, "te-block", "te-current", TOKENS[:1], accumulate=Accumulate.FP32)
    assert result.trainer.accumulate == result.server.accumulate == Accumulate.FP32


def test_what_cannot_be_compared_is_refused(model):
    with pytest.raises(ConfigError, match=r"tokens are \[windows, T\]"):
        agree(model, "te-block", "vllm-block", TOKENS[0])
    with pytest.raises(ConfigError, match=r"tokens must be a torch.Tensor, not list; convert it with torch.as_tensor"):
        agree(model, "te-block", "vllm-block", cast(Any, TOKENS.tolist()))
    for other in (torch.nn.Linear(4, 4), cast(Any, "a folder")):
        with pytest.raises(ConfigError, match=f"a decoder .*, not a {type(other).__name__}"):
            agree(other, "te-block", "vllm-block", TOKENS)
    with pytest.raises(ConfigError, match="there is no engine 'vllm'"):
        agree(model, "te-block", "vllm", TOKENS)
    with pytest.raises(ConfigError, match=r"an engine is a profile or its name, such as 'vllm-token', not a int"):
        agree(model, "te-block", cast(Any, 3), TOKENS)
    with pytest.raises(ConfigError, match="tokens are ids in int64, not float32"):
        agree(model, "te-block", "vllm-block", TOKENS.float())
    for beyond in (300, -1):
        with pytest.raises(ConfigError, match="token ids of this model are 0 to 299"):
            agree(model, "te-block", "vllm-block", torch.tensor([[1, beyond, 2]]))
    for bar in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_kl takes nats a token, 0 or more"):
            agree(model, "te-block", "vllm-block", TOKENS, max_kl=bar)
        with pytest.raises(ConfigError, match="max_kl takes nats a token, 0 or more"):
            agree_with_itself(model, "te-block", TOKENS, max_kl=bar)


def test_nan_in_a_weight_is_said():
    broken = language_model()
    with torch.no_grad():
        broken.model.get_parameter("model.norm.weight")[0] = torch.nan
    with pytest.raises(DataError, match="the trainer's logits have NaN or infinities"):
        agree(broken, "te-block", "vllm-block", TOKENS[:1])


def test_codes_and_scales_are_counted():
    x = torch.tensor([[1.0, 3.0, -2.0, 448.0], [0.5, 0.25, -0.75, 7.0]])
    a = octavo.quantize(x, octavo.E4M3, scale=torch.tensor(1.0))
    changed = x.clone()
    changed[1, 0], changed[0, 2] = -0.5, -2.25
    b = octavo.quantize(changed, octavo.E4M3, scale=torch.tensor(2.0))
    found = compare_codes(a, b)
    values = [[float(q.data[i, j]) for i in range(2) for j in range(4)] for q in (a, b)]
    assert found.codes_differ == sum(x != y for x, y in zip(*values, strict=True))
    assert (found.codes, found.scales, found.scales_differ, found.largest_scale) == (8, 1, 1, 1.0)
    same = compare_codes(a, octavo.quantize(changed, octavo.E4M3, scale=torch.tensor(1.0)))
    assert (same.codes_differ, same.first, same.scales_differ) == (2, (0, 2), 0)
    assert same.largest_step == 2 * (0b0110_000)  # from 0.5 to -0.5: twice the codes between 0 and 0.5
    total = total_of([same, found])
    assert (total.codes, total.codes_differ, total.first) == (16, 2 + found.codes_differ, (0, 2))
    assert total.largest_scale == total_of([found, same]).largest_scale == 1.0


def test_scales_of_other_groups_are_compared_element_by_element():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    a, b = (octavo.quantize(x, octavo.E4M3, granularity=each) for each in (PerRow(), PerBlock(1, 128)))
    found = compare_codes(a, b)
    assert found.scales == x.numel()
    expected = (a.scale.expand(4, 256) != b.scale.repeat_interleave(128, 1)).sum()
    assert found.scales_differ == int(expected) > 0
