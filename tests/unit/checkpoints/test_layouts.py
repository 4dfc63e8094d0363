"""Which layers a configuration means: what outranks what, whole parts of a path, wildcards."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoints import FORMATS
from octavo.checkpoints.modelopt import configuration_from_file
from octavo.checkpoints.schemes import Inputs, scheme_of

ATTENTION, MLP = "model.layers.1.self_attn.{}_proj", "model.layers.1.mlp.{}_proj"
LINEARS = [*map(ATTENTION.format, "qkvo"), *(MLP.format(each) for each in ("gate", "up", "down")), "lm_head"]
E4M3: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
WEIGHTS = E4M3 | {"strategy": "channel", "dynamic": False}
INPUTS: dict[Inputs, dict[str, Any] | None] = {
    Inputs.TOKEN: E4M3 | {"strategy": "token", "dynamic": True},
    Inputs.STATIC: E4M3 | {"strategy": "tensor", "dynamic": False},
    Inputs.HIGH_PRECISION: None,
}


def layout(fmt: str, given: dict[str, Any], linears=LINEARS):
    return FORMATS[fmt].layout(given, linears, Path())


def by_groups(*groups: tuple[list[str], Inputs]) -> dict[str, Inputs]:
    """How compressed-tensors casts the inputs of each layer, by groups in this order."""
    given = {
        "format": "float-quantized",
        "config_groups": {
            f"group_{i}": {"targets": targets, "weights": WEIGHTS, "input_activations": INPUTS[inputs]}
            for i, (targets, inputs) in enumerate(groups)
        },
        "ignore": ["lm_head"],
    }
    found = layout("compressed-tensors", given)
    return {path: scheme_of(recipe).inputs for path, recipe in found.recipes.items()}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_path_outranks_an_expression_and_that_a_class(order):
    """Whichever stands first."""
    groups = (
        (["Linear"], Inputs.TOKEN),
        ([r"re:.*self_attn\..*"], Inputs.STATIC),
        ([ATTENTION.format("k")], Inputs.HIGH_PRECISION),
    )
    found = by_groups(*(groups[i] for i in order))
    assert found == {
        **{ATTENTION.format(each): Inputs.STATIC for each in "qvo"},
        ATTENTION.format("k"): Inputs.HIGH_PRECISION,
        **{MLP.format(each): Inputs.TOKEN for each in ("gate", "up", "down")},
    }


def test_of_two_targets_of_one_rank_the_first_group_s_counts():
    one, other = (["re:.*_proj"], Inputs.STATIC), ([r"re:.*mlp\..*"], Inputs.TOKEN)
    assert by_groups(one, other)[MLP.format("up")] is Inputs.STATIC
    assert by_groups(other, one)[MLP.format("up")] is Inputs.TOKEN


def hf_fp8(*left_out: str) -> set[str]:
    """Layers in FP8 by hf-fp8."""
    paths = [*LINEARS, "model.layers.11.mlp.up_proj", "model.layers.1.mlp.gate"]
    config = {"weight_block_size": [128, 128], "modules_to_not_convert": list(left_out)}
    return set(paths) - set(layout("hf-fp8", config, paths).recipes)


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("lm_head", {"lm_head"}),
        ("head", set()),
        ("model.layers.1", {path for path in LINEARS if path != "lm_head"} | {"model.layers.1.mlp.gate"}),
        ("layers.11", {"model.layers.11.mlp.up_proj"}),
        ("gate", {"model.layers.1.mlp.gate"}),
        ("mlp.gate", {"model.layers.1.mlp.gate"}),
        ("up_proj", {MLP.format("up"), "model.layers.11.mlp.up_proj"}),
        ("modelXlayers", set()),
    ],
)
def test_a_name_that_is_left_out_is_whole_parts_of_a_path(name, out):
    assert hf_fp8(name) == out


@pytest.mark.parametrize(
    ("patterns", "out"),
    [
        (["lm_head"], {"lm_head"}),
        (["head"], set()),
        (["*head"], {"lm_head"}),
        (["*.self_attn.*"], set(map(ATTENTION.format, "qkvo"))),
        (["model.layers.?.mlp.*", "lm_*"], {MLP.format(each) for each in ("gate", "up", "down")} | {"lm_head"}),
        (["*.[qk]_proj"], set(map(ATTENTION.format, "qk"))),
        (["LM_HEAD", "*.Self_Attn.*"], set()),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_modelopt_s_modules_are_patterns_with_their_case(patterns, out):
    of_a_file = configuration_from_file({"quantization": {"quant_algo": "FP8", "exclude_modules": patterns}})
    for given in (of_a_file, *({"quant_algo": "FP8", key: patterns} for key in ("ignore", "exclude_modules"))):
        assert set(LINEARS) - set(layout("modelopt", given).recipes) == out
