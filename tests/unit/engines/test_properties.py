"""Properties in which profiles differ: swapped one by one they lead from one profile to the other."""

from dataclasses import replace
from functools import reduce
from itertools import permutations

import pytest

from octavo.engines import NOT_RUN, PROFILES, PowerOfTwo, differences, get, neighbours, quantize_as, with_property
from octavo.engines.properties import proof_of, unproven, value_in_words
from octavo.errors import ConfigError
from octavo.numerics import Scaling
from tests.oracle.engines.adversarial import finite_tensors, input_cast, same_codes

PAIRS = [("te-block", "vllm-block"), ("octavo-token", "compressed-tensors"), ("te-mxfp8", "sglang-block-ue8m0")]


@pytest.mark.parametrize(("first", "second"), list(permutations(PROFILES, 2))[::7])
def test_all_swaps_together_are_the_other_profile(first, second):
    ours, theirs = get(first), get(second)
    names = differences(ours, theirs)
    swapped = reduce(lambda profile, name: with_property(profile, name, theirs), names, ours)
    assert differences(swapped, theirs) == ()
    for role in ("weight", "input"):
        for x in finite_tensors(theirs.activations).values():
            casts = (replace(getattr(each, role), scaling=Scaling.DYNAMIC) for each in (swapped, theirs))
            a, b = (quantize_as(x, cast) for cast in casts)
            assert same_codes(a.data, b.data)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_one_swap_changes_one_property(first, second):
    ours, theirs = get(first), get(second)
    for name in differences(ours, theirs):
        changed = with_property(ours, name, theirs)
        assert name in differences(ours, changed)
        others = {*differences(ours, changed)} - {name}
        assert not others or (name.endswith("division") and others == {name.replace("division", "power_of_two")})


def test_a_power_of_two_survives_another_division():
    ours = with_property(get("te-block"), "input.division", get("vllm-block"))
    assert ours.input is not None
    assert ours.input.power_of_two == PowerOfTwo.SCALE_UP
    theirs = with_property(get("vllm-block"), "input.power_of_two", get("te-block"))
    assert theirs.input is not None
    assert theirs.input.power_of_two == PowerOfTwo.SCALE_UP
    with pytest.raises(ConfigError, match="rounds an encode scale"):
        replace(input_cast("vllm-block"), power_of_two=PowerOfTwo.ENCODE_DOWN)


def test_neighbours_have_values_of_the_catalogue():
    claimed = get("vllm-block")
    found = list(neighbours(claimed, PROFILES.values()))
    assert len(found) == len({(name, value) for name, value, _ in found})
    values = {value for name, value, _ in found if name == "input.amax_floor"}
    assert values == {"0", "1e-12"}
    for name, _, profile in found:
        assert name in differences(claimed, profile)


def test_values_and_proofs_in_words():
    assert value_in_words(get("te-mxfp8"), "weight.power_of_two") == "scale up, by bits; E8M0"
    assert value_in_words(get("te-block"), "accumulate") == "hopper-slow"
    assert value_in_words(get("te-block"), "input") == "cast"
    assert value_in_words(replace(get("te-block"), input=None), "input") == "not cast"
    assert proof_of(get("sglang-block"), "input.saturation") == NOT_RUN
    assert proof_of(get("octavo-token"), "kv_cache") == "tests/unit/engines/test_own.py"
    assert "accumulate" in unproven(get("te-block"))
    assert "input.amax_floor" not in unproven(get("te-block"))


@pytest.mark.parametrize("name", ["input.nonsense", "nonsense", "nonsense.division", "name", "kv_cache.format", ""])
def test_properties_that_do_not_exist(name):
    with pytest.raises(ConfigError, match=f"there is no property {name!r}.*; use one of weight, input, requantizes"):
        with_property(get("te-block"), name, get("vllm-block"))


def test_a_property_of_a_cast_that_an_engine_does_not_make():
    plain, block = replace(get("vllm-block"), name="plain", input=None), get("vllm-block")
    for ours, theirs in ((plain, block), (block, plain)):
        with pytest.raises(ConfigError, match=r"plain casts no input, so input.division has no value; use 'input'"):
            with_property(ours, "input.division", theirs)
        assert with_property(ours, "input", theirs).input == theirs.input
