"""Lines of metrics.jsonl: which are a run's, and which are refused by number."""

import json

import pytest

from octavo.doctor.lines import read_lines
from octavo.errors import TrainingError


def written(folder, *steps, **values):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"kind": "step", "step": step, **values}) + "\n" for step in steps))
    return path


def test_a_step_may_have_several_lines(tmp_path):
    assert [line["step"] for line in read_lines(written(tmp_path, 0, 1, 1, 2, 2**53))] == [0, 1, 1, 2, 2**53]


def test_steps_that_fall_are_two_runs(tmp_path):
    with pytest.raises(TrainingError, match=r"line 3 of .* has step 1 after step 2: two runs wrote there"):
        read_lines(written(tmp_path, 1, 2, 1))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None, 10**400, float("inf")])
def test_a_step_is_a_whole_number_from_0_on(tmp_path, step):
    with pytest.raises(TrainingError, match=r"line 2 of .* is not a run's; remove the line"):
        read_lines(written(tmp_path, 1, step))


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**4000])
def test_a_number_is_one_that_a_float_holds(tmp_path, value):
    with pytest.raises(TrainingError, match=r"line 1 of .* is not a run's; remove the line"):
        read_lines(written(tmp_path, 1, loss=value))
