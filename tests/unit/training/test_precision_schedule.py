"""Which step runs which recipe, and what is no schedule."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.training.config import RunConfig, TrainingConfig, load_config, save_config
from octavo.training.precision_schedule import check_schedule, parse_schedule, recipe_name_at

PHASES = (("bf16", 0.0), ("fp8", 0.8))


def names(schedule, steps, own="rowwise"):
    return [recipe_name_at(schedule, step, steps=steps, own=own) for step in range(1, steps + 1)]


def test_the_first_step_at_or_after_the_fraction():
    assert names(PHASES, 10) == ["bf16"] * 8 + ["rowwise"] * 2
    assert names((("fp8", 0.0), ("bf16", 0.5)), 4) == ["rowwise"] * 2 + ["bf16"] * 2
    assert names((), 2) == ["rowwise"] * 2


def test_a_phase_without_a_step_is_passed_over():
    assert names((("bf16", 0.0), ("delayed", 0.6), ("fp8", 0.7)), 4) == ["bf16"] * 3 + ["rowwise"]
    assert names((("bf16", 0.0), ("fp8", 0.99)), 4) == ["bf16"] * 4


@given(st.integers(1, 300), st.lists(st.integers(1, 255), unique=True, max_size=4).map(sorted))
def test_every_step_belongs_to_the_last_phase_that_has_begun(steps, eighths):
    """Against the definition, in exact fractions; 1/256 and its multiples are floats too."""
    schedule = tuple((name, start / 256) for name, start in zip(["a", "b", "c", "d", "e"], [0, *eighths], strict=False))
    for step, name in enumerate(names(schedule, steps), 1):
        begun = [one for one, start in schedule if Fraction(start) <= Fraction(step - 1, steps)]
        assert name == begun[-1]


def test_config_round_trips_through_toml(tmp_path):
    (tmp_path / "by_hand.toml").write_text('[training]\nprecision_schedule = [["bf16", 0], ["fp8", 0.8]]\n')
    config = load_config(tmp_path / "by_hand.toml")
    assert config.training.precision_schedule == PHASES
    save_config(config, tmp_path / "run.toml")
    assert load_config(tmp_path / "run.toml") == config
    assert config.config_hash() != RunConfig().config_hash()


def test_run_in_high_precision_drops_the_phases():
    config = RunConfig(training=TrainingConfig(recipe="delayed", precision_schedule=PHASES))
    assert config.with_recipe("bf16").training.precision_schedule == ()
    assert config.with_recipe("rowwise").training.precision_schedule == PHASES


MISTAKES = {
    "[['fp9', 0.0]]": "must be one of fp8, bf16, .*, not 'fp9'",
    "[['fp32', 0.0]]": "must be one of fp8, bf16, .*, not 'fp32'",
    "[['static', 0.0]]": "not 'static'",
    "[['bf16', 0.1]]": r"must begin with 0.0 and increase, each below 1, not 0.1",
    "[['bf16', 0.0], ['fp8', 0.0]]": "must begin with 0.0 and increase, each below 1, not 0.0, 0.0",
    "[['bf16', 0.0], ['fp8', 1.0]]": "not 0.0, 1.0",
    "[['bf16', 0.0], ['fp8', nan]]": "not 0.0, nan",
    "[['bf16', 0.0], ['fp8', 0.5], ['bf16', 0.4]]": "not 0.0, 0.5, 0.4",
    "[['bf16']]": r"training.precision_schedule\[0\] must hold lists of a string and a number, not",
    "[[0.0, 'bf16']]": r"training.precision_schedule\[0\] must be a string, not 0.0",
    "['bf16']": r"training.precision_schedule\[0\] must be a list, not 'bf16'",
    "'bf16:0.0'": "training.precision_schedule must be a list",
}


@pytest.mark.parametrize("value", MISTAKES)
def test_mistakes_are_named(tmp_path, value):
    (tmp_path / "run.toml").write_text(f"[training]\nprecision_schedule = {value}\n")
    with pytest.raises(ConfigError, match=MISTAKES[value]):
        load_config(tmp_path / "run.toml")


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_precision_phases_need_an_fp8_recipe(recipe):
    with pytest.raises(ConfigError, match=f"needs an FP8 recipe as training.recipe, not '{recipe}'"):
        check_schedule(PHASES, recipe)


@pytest.mark.parametrize("text", ["", "bf16", "bf16:", "bf16:0.0,", "bf16=0.0", "bf16:x"])
def test_invalid_schedule_on_the_command_line_is_refused(text):
    with pytest.raises(ConfigError, match=r"such as 'bf16:0.0,fp8:0.8', but '.*' is not a recipe with a fraction"):
        parse_schedule(text)
