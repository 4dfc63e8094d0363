import pytest

from octavo import recipes
from octavo.doctor.recipe_changes import changed_recipe, same_casts, with_options
from octavo.errors import ConfigError

OPTIONS = {
    "history_length": 3,
    "statistic": "mean",
    "margin": 2,
    "update_interval": 4,
    "backoff": 0.5,
    "gradient_format": "E4M3",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_recipe_option_matches_the_preset_with_that_option(name):
    one = {name: OPTIONS[name]}
    assert with_options(recipes.get("delayed"), one) == recipes.get("delayed", **one)


def test_other_options_stay():
    recipe = recipes.get("delayed", history_length=8, margin=1)
    changed = with_options(recipe, {"statistic": "latest"})
    assert changed == recipes.get("delayed", history_length=8, margin=1, statistic="latest")
    assert with_options(recipe, OPTIONS) == recipes.get("delayed", **OPTIONS)


def test_options_of_other_recipes_change_nothing():
    history = {name: value for name, value in OPTIONS.items() if name != "gradient_format"}
    for name in ("tensorwise", "rowwise", "bf16"):
        assert with_options(recipes.get(name), history) == recipes.get(name)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "delayed"),
        ({"lr": 1.0, "warmup": 5}, "delayed"),
        ({"recipe": "rowwise"}, "rowwise"),
        ({"recipe": "rowwise", "overrides": {"b.*": "mxfp8"}}, "rowwise"),
        ({"recipe": "rowwise", "overrides": {"a.*": "mxfp8", "*": "bf16"}}, "mxfp8"),
        ({"overrides": {"*": "bf16", "a.0": "mxfp8"}}, "bf16"),
        ({"overrides": {"a.0": "mxfp8"}, "skip": ["a.*"]}, "bf16"),
        ({"overrides": {"a.0": "mxfp8"}, "skip": ["b.*"]}, "mxfp8"),
    ],
)
def test_layer_override_takes_precedence_over_global_changes(changes, wanted):
    assert changed_recipe(recipes.get("delayed"), "a.0", changes) == recipes.get(wanted)


def test_a_recipe_takes_its_options_along():
    changes = {"recipe": "delayed", "recipe_options": {"margin": 1}}
    assert changed_recipe(recipes.get("tensorwise"), "a", changes) == recipes.get("delayed", margin=1)
    with pytest.raises(ConfigError, match="has no option 'margin'"):
        changed_recipe(recipes.get("delayed"), "a", {"recipe": "bf16", "recipe_options": {"margin": 1}})
    with pytest.raises(ConfigError, match="there is no recipe 'finer'"):
        changed_recipe(recipes.get("delayed"), "a", {"overrides": {"a": "finer"}})


def test_names_are_not_casts():
    there = recipes.get("rowwise", gradient_format="E5M2").with_gradients_in(recipes.get("rowwise").casts[0].format)
    assert there != recipes.get("rowwise")
    assert same_casts(there, recipes.get("rowwise"))
    assert not same_casts(recipes.get("rowwise"), recipes.get("blockwise"))


def test_only_scales_of_a_byte_are_rounded_otherwise():
    rounded_down = recipes.get("mxfp8", scale_rounding="floor")
    assert with_options(rounded_down, {"scale_rounding": "rceil"}) == recipes.get("mxfp8")
    assert with_options(recipes.get("tensorwise"), {"scale_rounding": "floor"}) == recipes.get("tensorwise")
