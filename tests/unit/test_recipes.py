import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import octavo
from octavo.errors import ConfigError
from octavo.formats import BF16, E4M3, E4M3_FNUZ, E5M2, E8M0
from octavo.numerics import Accumulate, PerBlock, PerRow, PerTensor, Rounding, ScaleRounding
from octavo.recipes import CastSpec, GemmSpec, History, Recipe, Scaling, Statistic, from_toml, get, names, to_toml


def test_the_presets():
    assert names() == (
        "bf16",
        "tensorwise",
        "delayed",
        "delayed_te",
        "article",
        "rowwise",
        "rowwise_hp_grad_weight",
        "blockwise",
        "mxfp8",
        "static",
        "weight_only",
    )
    for name in names():
        assert get(name).name == name
        assert get(name) == get(name), "a preset is a value"


@pytest.mark.parametrize(
    ("name", "gradient", "granularity", "scaling", "scale_rounding"),
    [
        ("tensorwise", E5M2, PerTensor(), Scaling.DYNAMIC, ScaleRounding.FP32),
        ("delayed", E5M2, PerTensor(), Scaling.DELAYED, ScaleRounding.FP32),
        ("rowwise", E4M3, PerRow(), Scaling.DYNAMIC, ScaleRounding.RCEIL),
    ],
)
def test_a_preset_is_its_row_of_the_table(name, gradient, granularity, scaling, scale_rounding):
    recipe = get(name)
    forward = CastSpec(format=E4M3, granularity=granularity, scaling=scaling, scale_rounding=scale_rounding)
    backward = replace(forward, format=gradient)
    assert recipe.output == GemmSpec(a=forward, b=forward, accumulate=Accumulate.HOPPER_FAST)
    assert recipe.grad_input == GemmSpec(a=backward, b=forward, accumulate=Accumulate.HOPPER_SLOW)
    assert recipe.grad_weight == GemmSpec(a=backward, b=forward, accumulate=Accumulate.HOPPER_SLOW)
    assert recipe.is_delayed == (scaling is Scaling.DELAYED)
    assert not recipe.is_high_precision


@pytest.mark.parametrize(
    ("granularity", "wanted"), [("row", PerRow()), ("tensor", PerTensor()), ("128x128", PerBlock(128, 128))]
)
def test_weight_only_casts_the_weight_for_the_output_and_nothing_else(granularity, wanted):
    recipe = get("weight_only", granularity=granularity)
    weight, plain = CastSpec(format=E4M3, granularity=wanted), GemmSpec(a=None, b=None)
    assert recipe.casts == (weight,)
    assert recipe.output == GemmSpec(a=None, b=weight)
    assert (recipe.grad_input, recipe.grad_weight) == (plain, plain)
    assert not recipe.is_high_precision
    assert not recipe.has_static_input
    assert get("weight_only") == get("weight_only", granularity="row")


def test_weight_only_sums_nothing_in_fp8():
    with pytest.raises(ConfigError, match="cannot emulate tensor cores: it casts no input"):
        replace(get("weight_only"), emulate_tensor_cores=True)
    with pytest.raises(ConfigError, match="granularity must be one of tensor, row, 128x128, not 'channel'"):
        get("weight_only", granularity="channel")


def test_bf16_casts_nothing():
    recipe = get("bf16")
    assert recipe.is_high_precision
    assert not recipe.casts
    assert not recipe.is_delayed


def test_delayed_takes_its_options():
    recipe = get("delayed", history_length=32, statistic="mean", margin=2, update_interval=4)
    assert recipe.history == History(length=32, statistic=Statistic.MEAN, update_interval=4)
    assert {cast.margin for cast in recipe.casts} == {2}
    assert get("delayed").history == History(length=16, statistic=Statistic.MAX, update_interval=1)


@pytest.mark.parametrize(
    ("word", "granularity"), [("tensor", PerTensor()), ("row", PerRow()), ("128x128", PerBlock(128, 128))]
)
def test_static_takes_the_granularity_of_the_weight_alone(word, granularity):
    recipe = get("static", weight_granularity=word, power_of_two=True)
    assert recipe.output.a == CastSpec(format=E4M3, scaling=Scaling.STATIC, scale_rounding=ScaleRounding.RCEIL)
    assert recipe.output.b == CastSpec(format=E4M3, granularity=granularity, scale_rounding=ScaleRounding.RCEIL)
    assert recipe.has_static_input
    assert from_toml(to_toml(recipe)) == recipe
    with pytest.raises(ConfigError, match="weight_granularity must be one of tensor, row, 128x128, not 'channel'"):
        get("static", weight_granularity="channel")
    with pytest.raises(ConfigError, match="power_of_two must be one of False, True, not 2"):
        get("static", power_of_two=2)


def test_article_is_the_delayed_scaling_of_the_source_article():
    recipe = get("article")
    assert recipe.history == History(length=32, statistic=Statistic.MEAN, update_interval=4, backoff=0.99)
    assert replace(recipe, history=get("delayed").history, name="delayed") == get("delayed")
    assert get("article", update_interval=8).history == replace(recipe.history, update_interval=8)
    assert from_toml(to_toml(recipe)) == recipe


GRADIENT_PRESETS = ("tensorwise", "delayed", "delayed_te", "article", "rowwise", "blockwise", "mxfp8")


@pytest.mark.parametrize("name", GRADIENT_PRESETS)
def test_gradients_and_nothing_else_may_be_rounded_stochastically(name):
    plain, recipe = get(name), get(name, gradient_rounding="stochastic")
    assert plain.grad_input.a is not None
    fmt = plain.grad_input.a.format
    assert recipe.name == f"{name}, {fmt} stochastic gradients"
    assert [str(cast.rounding) for cast in recipe.casts] == ["nearest", "nearest", *["stochastic", "nearest"] * 2]
    assert replace(recipe.with_gradients_in(fmt, Rounding.NEAREST), name=name) == plain
    assert from_toml(to_toml(recipe)) == recipe
    other = recipe.with_gradients_in(E4M3 if fmt is E5M2 else E5M2)
    assert other.grad_weight.a is not None
    assert other.grad_weight.a.rounding == "stochastic"
    with pytest.raises(ConfigError, match="gradient_rounding must be one of nearest, stochastic, not 'up'"):
        get(name, gradient_rounding="up")
    with pytest.raises(ConfigError, match=r"only gradients, .* can be rounded stochastically"):
        replace(plain, output=replace(plain.output, b=recipe.grad_input.a))
    with pytest.raises(ConfigError, match="rounding must be one of nearest, stochastic, not 'up'"):
        from_toml(to_toml(recipe).replace('"stochastic"', '"up"'))


@pytest.mark.parametrize("name", GRADIENT_PRESETS)
def test_the_gradient_takes_either_format_and_nothing_else_changes(name):
    plain = get(name)
    assert plain.grad_input.a is not None
    own, other = (E5M2, E4M3) if plain.grad_input.a.format is E5M2 else (E4M3, E5M2)
    assert get(name, gradient_format=own.name) == plain
    changed = get(name, gradient_format=other.name)
    assert changed.name == f"{name}, {other} gradients"
    assert [cast.format for cast in changed.casts] == [E4M3, E4M3, other, E4M3, other, E4M3]
    assert changed.with_gradients_in(own) == replace(plain, name=f"{name}, {own} gradients")
    assert get("bf16").with_gradients_in(other) == get("bf16")
    with pytest.raises(ConfigError, match="gradient_format must be one of E4M3, E5M2, not 'FP8'"):
        get(name, gradient_format="FP8")


def test_a_finished_recipe_passes_through():
    recipe = get("rowwise")
    assert get(recipe) is recipe


def test_recipes_are_frozen():
    with pytest.raises(FrozenInstanceError):
        get("tensorwise").name = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        get("delayed").output.a.margin = 3  # type: ignore[misc, union-attr]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "tensorwize",
            {},
            r"there is no recipe 'tensorwize'; use one of bf16, tensorwise, delayed, ",
        ),
        ("", {}, r"there is no recipe ''"),
        ("tensorwise", {"margin": 1}, r"recipe 'tensorwise' has no option 'margin'; it takes emulate_tensor_cores"),
        ("delayed", {"window": 4}, r"no option 'window'; it takes history_length, statistic, margin, update_interval"),
        ("delayed", {"history_length": 0}, r"length must be a whole number of at least 1, not 0"),
        ("delayed", {"history_length": 2.5}, r"length must be a whole number of at least 1, not 2.5"),
        ("delayed", {"history_length": True}, r"length must be a whole number of at least 1, not True"),
        ("delayed", {"update_interval": 0}, r"update_interval must be a whole number of at least 1, not 0"),
        ("delayed", {"margin": -1}, r"margin must be a whole number of at least 0, not -1"),
        ("delayed", {"statistic": "median"}, r"statistic must be one of max, latest, mean, not 'median'"),
    ],
)
def test_bad_choices_are_refused_in_one_sentence(name, options, message):
    with pytest.raises(ConfigError, match=message):
        get(name, **options)


def test_options_do_not_go_with_a_finished_recipe():
    with pytest.raises(ConfigError, match=r"options \(margin\) go with a preset's name"):
        get(get("delayed"), margin=1)


def test_specifications_that_contradict_themselves_are_refused():
    dynamic, delayed = CastSpec(format=E4M3), CastSpec(format=E4M3, scaling=Scaling.DELAYED)
    plain, fp8 = GemmSpec(a=None, b=None), GemmSpec(a=dynamic, b=dynamic)
    with pytest.raises(ConfigError, match="casts both operands, neither, or b alone"):
        GemmSpec(a=dynamic, b=None)
    with pytest.raises(ConfigError, match=r"cannot cast to BF16; use one of octavo\.formats\.E4M3"):
        CastSpec(format=BF16)
    with pytest.raises(ConfigError, match=r"delayed scaling keeps one number a tensor; PerRow\(\) needs"):
        CastSpec(format=E4M3, granularity=PerRow(), scaling=Scaling.DELAYED)
    with pytest.raises(ConfigError, match="amax_floor must be 0 or more and finite, not -1"):
        CastSpec(format=E4M3, amax_floor=-1)
    with pytest.raises(ConfigError, match="amax_floor must be 0 or more and finite, not nan"):
        CastSpec(format=E4M3, amax_floor=float("nan"))
    for gemm, history in ((GemmSpec(a=delayed, b=delayed), None), (fp8, History())):
        with pytest.raises(ConfigError, match="must have a history if, and only if, one of its casts is delayed"):
            Recipe(name="mixed", output=gemm, grad_input=plain, grad_weight=plain, history=history)


def test_different_recipes_differ_in_print():
    """One that prints like another would be mistaken for it in a report or as a key."""
    variants = [get("delayed"), get("delayed", margin=1), get("delayed", history_length=4), get("tensorwise")]
    assert len({repr(recipe) for recipe in variants}) == len(variants)
    assert len(set(variants)) == len(variants)


def test_the_public_package_is_this_one():
    assert octavo.recipes.get is get


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": "yearly"}, "scaling must be one of dynamic, delayed, static, not 'yearly'"),
        ({"nonfinite": "bogus"}, "nonfinite must be one of propagate, saturate"),
        ({"granularity": "rowwise"}, "granularity must be"),
        ({"scale_rounding": "no"}, "scale_rounding must be one of fp32, rceil, floor, even"),
        ({"scale_format": E4M3}, "scale_format must be one of FP32, E8M0"),
        ({"scale_format": E8M0}, "E8M0 holds powers of two; a cast with it needs scale_rounding"),
        ({"amax_floor": float("inf")}, "amax_floor must be 0 or more and finite"),
        ({"format": "E4M3"}, "cannot cast to 'E4M3'"),
    ],
)
def test_a_cast_refuses_words_that_it_would_not_follow(changes, words):
    with pytest.raises(ConfigError, match=words):
        CastSpec(**{"format": E4M3, **changes})


def test_a_word_that_is_allowed_means_its_enum():
    assert CastSpec(format=E4M3, scaling="dynamic") == CastSpec(format=E4M3)  # type: ignore[arg-type]
    delayed = CastSpec(format=E4M3, scaling="delayed")  # type: ignore[arg-type]
    both = GemmSpec(a=delayed, b=delayed)
    with pytest.raises(ConfigError, match="if, and only if, one of its casts is delayed"):
        Recipe(name="no history", output=both, grad_input=both, grad_weight=both)


VARIANTS = [
    *(get(name) for name in names()),
    get("mxfp8", scale_rounding="floor"),
    get("blockwise", power_of_two=False),
    get("rowwise", power_of_two=False),
    get("delayed", history_length=3, statistic="mean", margin=2, update_interval=4, backoff=0.99),
    get("tensorwise", emulate_tensor_cores=True),
    get("rowwise", gradient_format="E5M2"),
    get("weight_only", granularity="128x128"),
]


@pytest.mark.parametrize("recipe", VARIANTS, ids=lambda recipe: recipe.name)
def test_toml_and_back_is_the_same_recipe(recipe):
    text = to_toml(recipe)
    assert from_toml(text) == recipe
    assert to_toml(from_toml(text)) == text


def test_fields_missing_from_toml_take_their_defaults():
    text = 'name = "own"\n[output.a]\nformat = "E4M3"\n[output.b]\nformat = "E4M3"\n[grad_input]\n[grad_weight]\n'
    cast = CastSpec(format=E4M3)
    plain = GemmSpec(a=None, b=None)
    assert from_toml(text) == Recipe(name="own", output=GemmSpec(a=cast, b=cast), grad_input=plain, grad_weight=plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[output", "[outptu"), "a recipe has no 'outptu'; it has emulate_tensor_cores, grad_input"),
        (('name = "blockwise"', ""), "a recipe needs name; octavo.recipes.to_toml writes a complete one"),
        (('format = "E4M3"', 'format = "E4M4"'), "there is no format 'E4M4'; use one of FP32, BF16"),
        (('granularity = "1x128"', 'granularity = "128"'), "a granularity is 'tensor', 'row' or a block such as"),
        (('accumulate = "', 'accumulate = "x'), "accumulate must be one of fp32, hopper-fast, hopper-slow, not 'x"),
        (
            ('scaling = "dynamic"', 'scalling = "dynamic"'),
            "a cast has no 'scalling'; it has amax_floor, engine, format",
        ),
        (('scale_rounding = "rceil"', "scale_rounding = 3"), "scale_rounding must be one of fp32, rceil"),
        (("[output.a]", "[output.a"), "this recipe is not TOML"),
        (('name = "blockwise"', 'name = "blockwise"\nhistory = 3'), "a history is a table, not 3"),
    ],
    ids=lambda value: value[1][:20] if isinstance(value, tuple) else "",
)
def test_bad_toml_is_refused_in_one_sentence(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_toml(to_toml(get("blockwise")).replace(*change))


@pytest.mark.parametrize("text", [None, b"name = 1", 3, Path("recipe.toml")], ids=str)
def test_toml_is_read_from_text(text):
    with pytest.raises(ConfigError, match=re.escape(f"a recipe is read from a TOML text, not from {text!r}; read")):
        from_toml(text)


@pytest.mark.parametrize("recipe", ["rowwise", None], ids=str)
def test_only_recipes_are_written(recipe):
    with pytest.raises(ConfigError, match=f"to_toml writes a Recipe, not {recipe!r}; octavo.recipes.get makes one"):
        to_toml(recipe)


def test_recipe_that_no_tensor_core_supports_cannot_emulate_one():
    message = r"recipe 'mxfp8' cannot emulate tensor cores: Hopper's sums can be scaled every 128 of K, not every 32; "
    with pytest.raises(ConfigError, match=message):
        replace(get("mxfp8"), emulate_tensor_cores=True)
    with pytest.raises(ConfigError, match=message):
        from_toml(to_toml(get("mxfp8")).replace("emulate_tensor_cores = false", "emulate_tensor_cores = true"))
    fnuz = CastSpec(format=E4M3_FNUZ)
    with pytest.raises(
        ConfigError, match=r"'tensorwise' cannot emulate .*: Hopper multiplies E4M3 and E5M2, not E4M3_"
    ):
        replace(get("tensorwise"), grad_weight=GemmSpec(a=fnuz, b=fnuz), emulate_tensor_cores=True)
    for name in ("tensorwise", "rowwise", "blockwise"):
        assert replace(get(name), emulate_tensor_cores=True) == get(name, emulate_tensor_cores=True)


def test_recipes_refuse_what_they_would_misread():
    plain, cast = GemmSpec(a=None, b=None), CastSpec(format=E4M3)
    static = CastSpec(format=E4M3, scaling=Scaling.STATIC)
    for changes, message in (
        ({"name": 5}, "a recipe's name is a word, not 5"),
        ({"emulate_tensor_cores": "false"}, "emulate_tensor_cores must be True or False, not 'false'"),
        ({"output": GemmSpec(a=cast, b=static)}, "only the input of the output GEMM can be static"),
    ):
        fields = {"name": "own", "output": plain, "grad_input": plain, "grad_weight": plain} | changes
        with pytest.raises(ConfigError, match=message):
            Recipe(**fields)  # type: ignore[arg-type]
    for options in ({"amax_floor": "x"}, {"amax_floor": True}):
        with pytest.raises(ConfigError, match="amax_floor must be 0 or more and finite"):
            CastSpec(format=E4M3, **options)
    with pytest.raises(ConfigError, match="backoff must be above 0 and at most 1, not no"):
        History(backoff="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="power_of_two must be one of False, True, not 'no'"):
        get("blockwise", power_of_two="no")
