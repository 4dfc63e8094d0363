"""One cast over the looks at it."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import series_of
from octavo.doctor.rules.tracks import longest, tracks
from tests.unit.doctor.synthetic_series import FIRST, SECOND, healthy_sample, looks


def test_casts_come_in_the_order_in_which_they_ran():
    order = [(track.key.path, track.key.role) for track in tracks(looks())]
    assert order == [
        (FIRST, "input"),
        (FIRST, "weight"),
        (SECOND, "input"),
        (SECOND, "weight"),
        (SECOND, "grad_output"),
        (FIRST, "grad_output"),
    ]


def test_samples_without_a_cast_are_left_out_of_its_track():
    once, both = healthy_sample("tensorwise"), healthy_sample("tensorwise")
    without = replace(once, casts={key: numbers for key, numbers in once.casts.items() if key.path != SECOND})
    series = series_of([], [replace(both, step=1), replace(without, step=2), replace(both, step=3)])
    steps = {track.key[:2]: track.steps.tolist() for track in tracks(series)}
    assert steps[FIRST, "input"] == [1, 2, 3]
    assert steps[SECOND, "input"] == [1, 3]


def test_a_step_that_was_made_again_under_another_recipe_belongs_to_both():
    before, after = healthy_sample("delayed"), healthy_sample("tensorwise")
    series = series_of([], [replace(before, step=1), replace(after, step=1), replace(after, step=2)])
    found = [track for track in tracks(series) if track.key[:2] == (FIRST, "input")]
    assert [(one.steps.tolist(), one.spec("scaling")) for one in found] == [([1], "delayed"), ([1, 2], "dynamic")]


def test_a_layer_that_changes_its_recipe_has_two_tracks():
    before, after = healthy_sample("delayed"), healthy_sample("tensorwise")
    series = series_of([], [replace(before, step=1), replace(before, step=2), replace(after, step=3)])
    found = [track for track in tracks(series) if track.key[:2] == (FIRST, "input")]
    assert [(one.steps.tolist(), one.spec("scaling"), one.memory) for one in found] == [
        ([1, 2], "delayed", 16),
        ([3], "dynamic", 1),
    ]


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({}, 16),
        ({"update_interval": 4}, 19),
        ({"statistic": "latest"}, 1),
        ({"statistic": "mean", "history_length": 8}, 1),
    ],
)
def test_how_long_a_scale_may_stay(options, memory):
    assert next(tracks(looks("delayed", **options))).memory == memory


def test_facts_of_both_casts_of_one_tensor():
    """The weight of rowwise_hp_grad_weight has one scale a row in one GEMM and one a tensor in the other."""
    specs = {track.key[1:]: track.spec("scale_rounding") for track in tracks(looks("rowwise_hp_grad_weight"))}
    assert specs["weight", "output"] == specs["weight", "grad_input"] == "rceil"


def test_without_facts_nothing_is_known():
    sample = replace(healthy_sample("tensorwise"), layers={})
    track = next(tracks(looks(sample)))
    assert track.spec("scaling") is None
    assert np.array_equal(track.growth, track.of("stale_ratio"))


@pytest.mark.parametrize(
    ("mask", "run"),
    [([], (0, 0)), ([0, 0], (0, 0)), ([1, 1], (0, 2)), ([1, 0, 1, 1, 0], (2, 4)), ([1, 0, 1], (0, 1))],
)
def test_longest(mask, run):
    assert longest(np.array(mask, dtype=bool)) == slice(*run)
