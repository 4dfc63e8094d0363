"""An engine against itself: which ways have equal bits, and what makes the others differ."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from octavo.engines import agree_with_itself, get, model_as, names
from octavo.engines.rank_slices import SlicedLinear
from octavo.engines.self_agreement import divisions_of
from octavo.engines.summary import WAY_COLUMNS, self_notes, self_record, way_cells
from octavo.engines.token_scores import text_log_probabilities
from octavo.errors import ConfigError
from octavo.kernels.row_by_row import RowByRow
from octavo.models import Llama
from octavo.numerics import Accumulate
from tests.tiny_llama import tiny_llama_config
from tests.unit.quantization.tiny_models import language_model, model_with_a_window_of_zeros, windows

pytestmark = pytest.mark.long
TOKENS = windows(2, 13)
BY_ROW = ("octavo-token", "octavo-block", "vllm-token", "vllm-token-cuda", "sglang-block", "compressed-tensors")


@pytest.fixture(scope="module")
def model():
    return language_model()


@pytest.fixture(scope="module")
def wide():
    """Of a width whose halves and quarters end with blocks of 128."""
    made = Llama(tiny_llama_config(hidden_size=512, intermediate_size=512, num_layers=1, num_kv_heads=4)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return made


def ways(found):
    return {way.name: way for way in found.ways}


@pytest.mark.parametrize("name", BY_ROW)
def test_engines_with_a_scale_a_row_are_equal_in_company_and_by_token(model, name):
    found = ways(agree_with_itself(model, name, TOKENS, ranks=()))
    assert list(found) == ["in company", "token by token"]
    assert all(way.is_equal for way in found.values())
    assert all(not scores.delta.any() for way in found.values() for scores in way.scores)


@pytest.mark.parametrize("name", [*names(), "vllm-token+fp8-cache"])
def test_every_engine_is_compared_with_itself_and_shown(model, name):
    found = agree_with_itself(model, name, windows(1, 6), ranks=(2,))
    run, refused = [way.name for way in found.ways], [name for name, _ in found.refused]
    divided = [each.name_on(2) for each in divisions_of(found.profile.output)]
    assert sorted([*run, *refused]) == sorted(["in company", "token by token", *divided])
    assert {*run} >= {"in company", "token by token", "2 ranks"}
    assert all("do not end with a block of" in reason for _, reason in found.refused)
    assert name in ("te-current", "torchao-tensorwise") or all(way.is_equal for way in found.ways[:2])
    assert all(len(way_cells(way)) == len(WAY_COLUMNS) for way in found.ways)
    said = " ".join(self_notes(found))
    assert all(each in said for each in refused)
    assert len(json.loads(json.dumps(self_record(found, {})))["ways"]) == len(run)


@pytest.mark.parametrize("name", ["te-current", "torchao-tensorwise"])
def test_one_scale_for_all_rows_depends_on_company(model, name):
    found = agree_with_itself(model, name, TOKENS, ranks=())
    assert not any(way.is_equal for way in found.ways)
    assert all(way.kl.estimate > 0 for way in found.ways)
    assert not found.agrees
    static = agree_with_itself(model, "vllm-tensor", TOKENS, ranks=())
    assert static.agrees


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_bits_are_equal_if_those_of_every_window_are(order):
    """A window of a token whose embedding is zero has logits of zero in one pass or many; the other has not."""
    plain, texts = model_with_a_window_of_zeros()
    way = ways(agree_with_itself(plain, "te-current", texts[list(order)], ranks=()))["token by token"]
    assert [bool(scores.delta.any()) for scores in way.scores] == [index == 0 for index in order]
    assert not way.is_equal


def test_octavos_server_s_profile_is_equal_unless_inputs_are_divided(model):
    found = ways(agree_with_itself(model, "octavo-token", TOKENS[:1]))
    equal = {name for name, way in found.items() if way.is_equal}
    outputs = {f"{ranks} ranks, outputs divided" for ranks in (2, 4)}
    assert equal == {"in company", "token by token"} | outputs
    for ranks in (2, 4):
        assert (
            found[f"{ranks} ranks, scales of slices"].kl.estimate > found[f"{ranks} ranks, order of sums"].kl.estimate
        )


@pytest.mark.parametrize("name", ["vllm-token", "octavo-token"])
def test_a_slices_own_scale_is_found_as_the_cause(model, name):
    found = agree_with_itself(model, name, TOKENS, ranks=(2,))
    assert found.causes[2].name == "2 ranks, scales of slices"
    by_name = ways(found)
    assert by_name["2 ranks"].input_scales == pytest.approx(0.5, abs=0.02)  # the other half has a row's largest number
    assert by_name["2 ranks, order of sums"].input_scales == by_name["2 ranks, order of sums"].weight_scales == 0
    assert by_name["2 ranks, outputs divided"].input_scales is None


def test_blocks_that_end_with_a_slice_leave_sums_alone(wide):
    found = agree_with_itself(wide, "vllm-block", TOKENS, ranks=(2, 4))
    by_name = ways(found)
    assert not found.refused
    for ranks in (2, 4):
        assert by_name[f"{ranks} ranks"].input_scales == by_name[f"{ranks} ranks"].weight_scales == 0
        scales, order = (by_name[f"{ranks} ranks, {cause}"] for cause in ("scales of slices", "order of sums"))
        for one, other in zip(scales.scores, order.scores, strict=True):
            assert torch.equal(one.delta, other.delta)
        assert found.causes[ranks].name == f"{ranks} ranks, rounded products"


def test_scores_are_those_of_two_passes(model):
    profile = get("te-current")
    found = agree_with_itself(model, profile, TOKENS, ranks=())
    engine = model_as(model.model, profile)
    with RowByRow():
        for window, scores in zip(TOKENS, ways(found)["token by token"].scores, strict=True):
            alone, stepwise = engine(window[None, :-1])[0], engine.stepwise(window[None, :-1])[0]
            delta = text_log_probabilities(alone, window[1:]) - text_log_probabilities(stepwise, window[1:])
            torch.testing.assert_close(scores.delta, delta, rtol=0, atol=1e-12)


def test_padding_takes_no_part(model, monkeypatch):
    """One scale a tensor would see it."""
    rows = set()
    quantized = SlicedLinear.forward

    def seen(layer, x):
        rows.add(tuple(x.shape[:-1]))
        return quantized(layer, x)

    monkeypatch.setattr(SlicedLinear, "forward", seen)
    agree_with_itself(model, "te-current", TOKENS, ranks=())
    assert rows == {(1, 12), (12 + 9 + 6 + 3,), (1, 1)}


def test_the_caches_scheme_is_part_of_decoding(model):
    one_scale = replace(get("octavo-token"), kv_cache=get("torchao-tensorwise").input)
    found = ways(agree_with_itself(model, one_scale, TOKENS, ranks=()))
    assert not found["token by token"].is_equal
    by_row = replace(get("octavo-token"), kv_cache=get("octavo-token").input)
    assert agree_with_itself(model, by_row, TOKENS, ranks=()).agrees


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    from tests.tiny_llama import tiny_hugging_face_config

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(tiny_hugging_face_config()).eval()
    found = agree_with_itself(theirs, "vllm-token", TOKENS[:1], ranks=(2,))
    equal = {way.name for way in found.ways if way.is_equal}
    assert equal >= {"in company", "token by token", "2 ranks, outputs divided"}
    assert "2 ranks" not in equal
    by_row = replace(get("vllm-token"), kv_cache=get("octavo-token").input)
    assert agree_with_itself(theirs, by_row, TOKENS[:1], ranks=()).agrees


def test_mixtures_of_experts():
    plain = Llama(tiny_llama_config(num_experts=4, experts_per_token=2)).eval()
    found = agree_with_itself(plain, "vllm-token", TOKENS[:2], ranks=(2,))
    assert [way.is_equal for way in found.ways[:2]] == [True, True]


def test_what_cannot_be_divided_is_said(model):
    found = agree_with_itself(model, "vllm-block", TOKENS[:1], ranks=(2, 5))
    refused = dict(found.refused)
    assert "do not end with a block of 128" in refused["2 ranks, order of sums"]
    assert "5 ranks cannot share 64 channels" in refused["5 ranks"]
    cut = ways(found)["2 ranks, outputs divided"]  # within a block of the weight
    assert cut.weight_scales > 0
    assert found.causes[2] in (cut, ways(found)["2 ranks, scales of slices"])


def test_the_bar_and_other_sums(model):
    loose = agree_with_itself(model, "vllm-token", TOKENS[:1], ranks=(2,), max_kl=10.0, accumulate=Accumulate.FP32)
    assert loose.agrees
    assert loose.profile.accumulate == Accumulate.FP32
    assert not replace(loose, max_kl=None).agrees
    assert not replace(loose, max_kl=1e-12).agrees


def test_bad_input(model):
    with pytest.raises(ConfigError, match=r"tokens are \[windows, T\]"):
        agree_with_itself(model, "vllm-token", TOKENS[0])
    with pytest.raises(ConfigError, match="ranks must be a whole number of at least 2, not 1"):
        agree_with_itself(model, "vllm-token", TOKENS, ranks=(1, 2))
    for wrong in (2.5, True, None):
        with pytest.raises(ConfigError, match=f"ranks must be a whole number of at least 2, not {wrong}"):
            agree_with_itself(model, "vllm-token", TOKENS, ranks=(cast(Any, wrong),))
