import itertools
from fnmatch import fnmatchcase

import pytest
import torch

import octavo
from octavo.doctor.findings import CAUSES, Remedy
from octavo.doctor.remedies import applied, merging, remedies_for
from octavo.doctor.remedies.context import FINENESS
from octavo.training.config import config_from_dict
from tests.unit.doctor.one_layer import found
from tests.unit.doctor.remedies.test_selection import run_of


def merged(training, *changes):
    config = {"model": {"hidden_size": 64}, "training": training}
    return applied(config, [Remedy(text="", changes=one) for one in changes])["training"]


def recipe_of(training, path):
    """What a layer runs, by the rules of ``octavo.convert``."""
    if any(fnmatchcase(path, pattern) for pattern in training.get("skip", ())):
        return "bf16"
    for pattern, name in training.get("overrides", {}).items():
        if fnmatchcase(path, pattern):
            return name
    return training["recipe"]


def test_the_given_configuration_is_not_changed():
    config = {"training": {"overrides": {"a": "rowwise"}, "skip": ["b"], "recipe_options": {}}}
    before = repr(config)
    remedy = Remedy(text="", changes={"overrides": {"a": "bf16"}, "skip": ["c"]})
    assert applied(config, [remedy]) == {
        "training": {"overrides": {"a": "bf16"}, "skip": ["b", "c"], "recipe_options": {}}
    }
    assert repr(config) == before
    assert remedy.changes == {"overrides": {"a": "bf16"}, "skip": ["c"]}


def test_merging_no_changes_returns_the_configuration():
    assert merged({"lr": 1.0}) == {"lr": 1.0}
    assert merged({"lr": 1.0}, {}) == {"lr": 1.0}


PATTERNS = ("a.0", "a.*", "*")


@pytest.mark.parametrize("patterns", [*itertools.product(PATTERNS, repeat=2)], ids="+".join)
def test_merging_in_any_order_makes_no_layer_coarser_than_a_single_remedy(patterns):
    """Against the layer's recipe under each remedy alone."""
    for names in itertools.product(("tensorwise", "rowwise", "bf16"), repeat=2):
        changes = [{"overrides": {pattern: name}} for pattern, name in zip(patterns, names, strict=True)]
        together = merged({"recipe": "delayed"}, *changes)
        for path in ("a.0", "a.1", "b"):
            alone = [recipe_of(merged({"recipe": "delayed"}, change), path) for change in changes]
            assert recipe_of(together, path) == max(alone, key=FINENESS.index), (names, path)


def test_overrides_of_the_user_keep_their_order_and_are_not_undone():
    before = {"recipe": "delayed", "overrides": {"a.0": "tensorwise", "a.*": "rowwise", "b": "bf16"}}
    after = merged(before, {"overrides": {"a.0": "blockwise"}}, {"overrides": {"b": "rowwise"}})
    assert [recipe_of(after, path) for path in ("a.0", "a.1", "b", "c")] == ["blockwise", "rowwise", "bf16", "delayed"]
    shadowed = {"recipe": "delayed", "overrides": {"*": "tensorwise", "a.0": "rowwise"}}
    assert recipe_of(merged(shadowed, {"overrides": {"a.0": "blockwise"}}), "a.0") == "blockwise"


USERS = (
    {"a.*": "tensorwise", "b.*": "bf16"},  # the remedy's layer behind a wider, coarser override
    {"*.x": "tensorwise", "a.*": "bf16", "*": "rowwise"},
    {"a.x": "tensorwise", "a.*": "mxfp8", "*.y": "delayed"},
    {"*": "tensorwise", "b.?": "rowwise"},
    {"a.[xy]": "tensorwise", "*.x": "blockwise"},
)
PATHS = ("a.x", "a.y", "a.z", "b.x", "b.y")


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "bf16"])
@pytest.mark.parametrize("pattern", ["a.x", "b.y", "a.*", "b.*", "*"])
@pytest.mark.parametrize("overrides", USERS, ids=str)
def test_behind_whatever_override_a_remedy_reaches_its_layers_and_no_other(overrides, pattern, name):
    """The remedy's layer runs the finer of its own recipe and the remedy's, any other its own; never a coarser."""
    before = {"recipe": "delayed", "overrides": overrides}
    after = merged(before, {"overrides": {pattern: name}})
    for path in PATHS:
        recipes = [recipe_of(before, path), *([name] if fnmatchcase(path, pattern) else [])]
        wanted = max(recipes, key=FINENESS.index)
        assert FINENESS.index(recipe_of(after, path)) >= FINENESS.index(wanted), path
        assert "*" in pattern or recipe_of(after, path) == wanted, path


@pytest.mark.parametrize("one", ["a.*", "*.x", "a.?", "a.[xy]", "*", "a.x", "?.x", "a?x"])
@pytest.mark.parametrize("other", ["a.*", "*.y", "b.?", "a.[!x]", "*", "b.*", "a", "*.x.*"])
def test_two_patterns_overlap_where_some_path_matches_both(one, other):
    letters = "abxy."
    paths = ["".join(path) for length in range(1, 5) for path in itertools.product(letters, repeat=length)]
    both = any(fnmatchcase(path, one) and fnmatchcase(path, other) for path in paths)
    assert merging._may_overlap(one, other) >= both, "never missed"
    assert both or "[" in one + other or not merging._may_overlap(one, other), "exact without sets of characters"


def test_a_layer_that_is_kept_out_needs_no_recipe():
    after = merged({"recipe": "delayed"}, {"overrides": {"a": "rowwise", "b": "rowwise"}}, {"skip": ["a"]})
    assert after == {"recipe": "delayed", "skip": ["a"], "overrides": {"b": "rowwise"}}
    after = merged({"recipe": "delayed", "overrides": {"a.0": "rowwise"}}, {"skip": ["a.*"]})
    assert after["overrides"] == {}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    octavo.convert(
        model,
        "delayed",
        skip=["0"],
        overrides=merged({}, {"overrides": {"0": "bf16"}}, {"skip": ["0"]}).get("overrides"),
    )


def test_another_recipe_leaves_options_it_does_not_take():
    before = {"recipe": "delayed", "recipe_options": {"history_length": 4, "gradient_format": "E4M3"}}
    assert merged(before, {"recipe": "rowwise", "recipe_options": {}}) == {"recipe": "rowwise", "recipe_options": {}}
    assert merged(before, {"recipe_options": {"margin": 1}})["recipe_options"] == {
        "history_length": 4,
        "gradient_format": "E4M3",
        "margin": 1,
    }
    both = merged(before, {"recipe_options": {"margin": 1, "gradient_format": "E5M2"}}, {"recipe": "rowwise"})
    assert both == {"recipe": "rowwise", "recipe_options": {"gradient_format": "E5M2"}}


def test_no_recipe_becomes_coarser():
    assert merged({"recipe": "blockwise"}, {"recipe": "rowwise", "recipe_options": {}})["recipe"] == "blockwise"
    both = merged({"recipe": "delayed"}, {"recipe": "rowwise"}, {"overrides": {"a": "tensorwise", "b": "bf16"}})
    assert both["overrides"] == {"b": "bf16"}, "tensorwise is coarser than what all layers run now"


@pytest.mark.parametrize(
    ("key", "given", "wanted"),
    [
        ("lr", (0.1, 0.01), 0.01),
        ("warmup", (10, 200), 200),
        ("loss_scale", (2.0**10, 2.0**4), 2.0**4),
        ("loss_scale", (2.0**10, "dynamic"), "dynamic"),
        ("precision_schedule", ([["fp8", 0.0], ["bf16", 0.8]], [["bf16", 0.0]]), [["fp8", 0.0], ["bf16", 0.8]]),
        ("recipe_options", ({"margin": 1}, {"margin": 2}), {"margin": 1}),
    ],
)
def test_of_two_values_the_gentler_or_the_first_wins(key, given, wanted):
    assert merged({"recipe": "delayed"}, *({key: value} for value in given))[key] == wanted


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ([], [["fp8", 0.0], ["bf16", 0.8]]),
        ([["bf16", 0.0], ["fp8", 0.2]], [["bf16", 0.0], ["fp8", 0.2], ["bf16", 0.8]]),
        ([["fp8", 0.0], ["rowwise", 0.9]], [["fp8", 0.0], ["bf16", 0.8]]),
        ([["fp8", 0.0], ["bf16", 0.8]], [["fp8", 0.0], ["bf16", 0.8]]),
        ([["fp8", 0.0], ["bf16", 0.5]], [["fp8", 0.0], ["bf16", 0.5]]),
    ],
)
def test_a_last_phase_comes_after_the_user_s_own(own, wanted):
    before = {"recipe": "delayed", "precision_schedule": own}
    after = merged(before, {"precision_schedule": [["fp8", 0.0], ["bf16", 0.8]]})
    assert after["precision_schedule"] == wanted
    config_from_dict({"training": after})


def test_merging_keeps_the_smaller_rate_and_the_longer_warmup():
    assert merged({"lr": 0.001, "warmup": 500}, {"lr": 0.1, "warmup": 10}) == {"lr": 0.001, "warmup": 500}
    assert merged({"lr": 0.1, "min_lr": 0.01}, {"lr": 0.001}) == {"lr": 0.001, "min_lr": 0.001}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "mxfp8"])
def test_all_remedies_of_all_findings_together_are_a_configuration(recipe):
    series = run_of(recipe=recipe, layers=("mlp.0", "mlp.1"), history_length=16, statistic="mean")
    findings = [found(code, path=path, evidence={"layers": 1.0}) for code in CAUSES for path in ("mlp.0", "mlp.1")]
    remedies = [remedy for one in findings for remedy in remedies_for(one, series)]
    after = applied({"training": {"recipe": recipe}}, remedies)
    config_from_dict(after)  # which refuses unknown keys
