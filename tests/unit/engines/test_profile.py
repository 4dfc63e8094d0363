"""Profiles as data: every property has a source, every proof is a test that exists, and nothing is claimed twice."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from octavo.engines import NOT_RUN, PROFILES, get, names, properties_of, source_of
from octavo.engines.properties import is_proven, unproven
from octavo.errors import ConfigError
from octavo.recipes.engines.profile import COMPILED, INTERPRETED
from tests.policy.source_tree import ROOT

CAST = ("weight", "input")


def test_profiles_are_keys():
    again = replace(get("te-block"))
    assert {get("te-block"): 1, get("vllm-block"): 2}[again] == 1
    assert len({get("te-block"), again, replace(again, head=True)}) == 2


@pytest.mark.parametrize("name", PROFILES)
def test_every_proof_is_a_test(name):
    for prop in properties_of(PROFILES[name]):
        source = source_of(PROFILES[name], prop)
        assert source.project
        assert source.version
        assert source.file
        if source.test:
            assert (ROOT / source.test).is_file(), f"{prop}: {source.test}"


def test_how_many_engines_own_code_gives_an_input_s_scale():
    """On twelve profiles their code runs here; on six of them it computes so on the engine's own hardware too."""
    run = {
        name
        for name, profile in PROFILES.items()
        if source_of(profile, "input.division").test and source_of(profile, "input.division").project != "octavo"
    }
    proven = {name for name in run if is_proven(get(name), "input.division")}
    assert proven == {
        "te-current", "torchao-tensorwise", "torchao-rowwise", "compressed-tensors", "modelopt", "modelopt-mxfp8",
    }  # fmt: skip
    assert run - proven == {
        "vllm-token", "vllm-fnuz", "vllm-block", "vllm-block-ue8m0", "sglang-block", "sglang-block-ue8m0",
    }  # fmt: skip


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


COMPILED_CASTS = {
    "input": ("vllm-tensor", "vllm-token", "vllm-fnuz"),
    "weight": ("vllm-block", "vllm-block-cuda", "vllm-block-ue8m0"),
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in COMPILED_CASTS.items() for name in names])
def test_what_a_compiler_computes_otherwise_for_a_gpu_is_not_proven(role, name):
    """Inductor's division is not IEEE's in Triton's kernels, and it may drop the rounding between a norm and a cast."""
    profile = get(name)
    limits = {source_of(profile, f"{role}.{each}").proof for each in ("application", "division")}
    assert limits <= {f"tests/oracle/engines/test_vllm.py {COMPILED}", NOT_RUN}
    for prop in (f"{role}.division", f"{role}.application", *(["fused_cast"] if role == "input" else [])):
        assert not is_proven(profile, prop)
        assert prop in unproven(profile)
    if role == "weight":
        assert not is_proven(profile, "weight.power_of_two")
    else:
        assert source_of(profile, "fused_cast").project == "PyTorch"
    assert is_proven(profile, f"{role}.saturation")


def test_names():
    assert names() == tuple(PROFILES)
    assert all(profile.name == name for name, profile in PROFILES.items())
    with pytest.raises(ConfigError, match=r"there is no engine 'vllm' \(did you mean 'vllm-fnuz'\?\); use one of te-"):
        get("vllm")
    with pytest.raises(ConfigError, match=r"an engine's name is text, such as 'vllm-token', not None"):
        get(cast(Any, None))


def test_properties_in_words():
    words = properties_of(get("modelopt-mxfp8"))
    assert words["input.granularity"] == "1×32 block"
    assert words["input.scale_format"] == "E8M0"
    assert words["input.limit"] == "448"
    assert words["activations"] == "bfloat16"
    assert words["head"] == "no"
    assert properties_of(replace(get("octavo-token"), input=None))["input.format"] == "not cast"
    assert get("octavo-token").activations is torch.float32
