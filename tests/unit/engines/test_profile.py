"""Profiles as data: every property has a source, every proof is a test that exists, and nothing is claimed twice."""

from dataclasses import replace

import pytest
import torch

from octavo.engines import NOT_RUN, PROFILES, get, names, properties_of, source_of
from octavo.engines.properties import is_proven, unproven
from octavo.errors import ConfigError
from octavo.recipes.engines.profile import INTERPRETED
from tests.policy.source_tree import ROOT

CAST = ("weight", "input")


@pytest.mark.parametrize("name", PROFILES)
def test_every_proof_is_a_test(name):
    for prop in properties_of(PROFILES[name]):
        source = source_of(PROFILES[name], prop)
        assert source.project
        assert source.version
        assert source.file
        if source.test:
            assert (ROOT / source.test).is_file(), f"{prop}: {source.test}"


def test_at_least_seven_engines_are_proven_by_their_own_code():
    proven = {
        name
        for name, profile in PROFILES.items()
        if is_proven(profile, "input.division") and source_of(profile, "input.division").project != "octavo"
    }
    assert len(proven) >= 7, proven


def test_a_test_names_the_engines_that_it_proves():
    for name, profile in PROFILES.items():
        for role in CAST:
            source = source_of(profile, f"{role}.division")
            if source.test and source.project != "octavo":
                assert f'"{name}"' in (ROOT / source.test).read_text(), f"{source.test} does not run {name!r}"


def test_a_property_without_a_source_is_refused():
    profile = get("vllm-block")
    sources = {name: source for name, source in profile.sources.items() if name != "kv_cache"}
    with pytest.raises(ConfigError, match="profile 'vllm-block' has no source for 'kv_cache'"):
        replace(profile, sources=sources)


def test_the_longest_name_counts():
    profile = get("sglang-block")
    assert source_of(profile, "input.amax_of").proof == NOT_RUN
    assert source_of(profile, "input.limit").proof.endswith("test_sglang.py")


@pytest.mark.parametrize("name", ["vllm-block", "vllm-block-ue8m0", "sglang-block", "sglang-block-ue8m0"])
def test_division_and_logarithm_of_triton_kernels_are_not_proven_for_a_gpu(name):
    """NVIDIA's FP32 division is not IEEE's, which Triton's interpreter computes."""
    for prop in ("input.division", "input.application", "input.power_of_two"):
        assert source_of(get(name), prop).proof.endswith(f".py {INTERPRETED}")
        assert not is_proven(get(name), prop)
        assert prop in unproven(get(name))
    assert is_proven(get(name), "input.amax_floor")


def test_names():
    assert names() == tuple(PROFILES)
    assert all(profile.name == name for name, profile in PROFILES.items())
    with pytest.raises(ConfigError, match=r"there is no engine 'vllm' \(did you mean 'vllm-fnuz'\?\); use one of te-"):
        get("vllm")


def test_properties_in_words():
    words = properties_of(get("modelopt-mxfp8"))
    assert words["input.granularity"] == "1×32 block"
    assert words["input.scale_format"] == "E8M0"
    assert words["input.limit"] == "448"
    assert words["activations"] == "bfloat16"
    assert words["head"] == "no"
    assert properties_of(replace(get("octavo-token"), input=None))["input.format"] == "not cast"
    assert get("octavo-token").activations is torch.float32
