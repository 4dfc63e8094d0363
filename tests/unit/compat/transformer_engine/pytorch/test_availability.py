import pytest

from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from octavo.compat.transformer_engine.pytorch import availability

RUNS = ["is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_bf16_available"]


@pytest.mark.parametrize("name", RUNS)
def test_supported_recipes_are_available_without_a_reason(name):
    question = getattr(te, name)
    assert question() is True
    assert question(return_reason=True) == question(True) == (True, "")


def test_fp4_is_not_available_and_the_reason_says_what_to_use():
    assert te.is_nvfp4_available() is False
    answer = te.is_nvfp4_available(return_reason=True)
    assert isinstance(answer, tuple)
    assert answer[0] is False
    assert "MXFP8BlockScaling" in answer[1]


def test_default_recipe_is_that_of_a_block_without_recipe():
    assert te.get_default_recipe() == availability.get_default_fp8_recipe() == DelayedScaling()
