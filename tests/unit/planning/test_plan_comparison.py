"""Two plans side by side, by hand-made records."""

import json
import re
from typing import Any

import pytest

from octavo.errors import DataError
from octavo.planning.plan_comparison import compare_plans, read_plan


def option(recipe: str, rate: float) -> dict[str, Any]:
    return {"recipe": recipe, "step_time_s": 1.0, "days": 2.0, "memory_gb": 3.0, "tokens_per_s_per_gpu": rate}


def test_plans_of_other_numbers_of_gpus_are_compared_by_the_tokens_of_all():
    """Four times the GPUs at half the rate each are twice as fast."""
    few = {"gpus": 16, "options": [option("bf16", 1000.0)]}
    many = {"gpus": 64, "options": [option("bf16", 500.0)]}
    assert [each.times_as_fast for each in compare_plans(few, many)] == [2.0]
    assert [each.times_as_fast for each in compare_plans(many, few)] == [0.5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": []}, "it has no list of options"),
        ({"options": [option("bf16", 1.0), option("bf16", 2.0)]}, "it has bf16 twice"),
        ({"gpus": 10.5}, "it has no whole number of gpus above 0"),
        ({"gpus": 0}, "it has no whole number of gpus above 0"),
    ],
)
def test_a_file_that_no_plan_is_is_refused(tmp_path, changes, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"gpus": 8, "options": [option("bf16", 1.0)]} | changes))
    with pytest.raises(
        DataError, match=re.escape(f"is not a plan: {words}; give a file that octavo plan --json wrote")
    ):
        read_plan(path)
