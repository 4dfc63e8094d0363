"""Scales that are not those of their tensors: each rule on both sides of each of its thresholds."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.doctor import Severity, Thresholds
from octavo.doctor.rules.scales import frozen_scale, inexact_amax, rank_mismatch, scale_oscillation, stale_scale
from tests.unit.doctor.synthetic_series import FIRST, SECOND, healthy_sample, looks

LIMITS = Thresholds()
PLACE = (FIRST, "input")


def floored(recipe, floor):
    """A healthy look under a recipe with another amax_floor."""
    sample = healthy_sample(recipe)
    layers = {
        path: {**facts, "casts": {name: {**cast, "amax_floor": floor} for name, cast in facts["casts"].items()}}
        for path, facts in sample.layers.items()
    }
    return replace(sample, layers=layers)


def provided(amaxes, scales):
    """Numbers of a cast whose tensor has these amaxes under these scales of E4M3."""
    amaxes, scales = np.array(amaxes, dtype=float), np.array(scales, dtype=float)
    return {"amax": amaxes, "scale": scales, "stale_ratio": amaxes / (scales * 448)}


class TestStale:
    @pytest.mark.parametrize(("g", "found"), [([1, 1, 2, 2, 2, 1], [Severity.WARN]), ([1, 1, 1.99, 2, 2, 1], [])])
    def test_stale_scale_needs_three_samples_at_twice_the_amax(self, g, found):
        series = looks("delayed", casts={PLACE: {"stale_ratio": g, "saturation_fraction": 0.013}})
        assert [one.severity for one in stale_scale(series, LIMITS)] == found

    @pytest.mark.parametrize(
        ("g", "found"), [([1, 4, 4, 1], [Severity.FAIL]), ([1, 4, 3.99, 1], []), ([1, 9, 1, 9], [])]
    )
    def test_stale_scale_needs_two_samples_at_four_times_the_amax(self, g, found):
        series = looks("delayed", count=4, casts={PLACE: {"stale_ratio": g}})
        assert [one.severity for one in stale_scale(series, LIMITS)] == found

    def test_stale_scale_reports_its_place_steps_and_cause(self):
        g = [1, 2.5, 6.1, 5, 1, 1]
        series = looks("delayed", casts={PLACE: {"stale_ratio": g, "saturation_fraction": [0, 0.05, 0.21, 0.1, 0, 0]}})
        (found,) = stale_scale(series, LIMITS)
        assert (found.path, found.role, found.first_step, found.last_step) == (FIRST, "input", 10, 20)
        assert found.cause == (
            "the history of 16 steps lags: amax grew 6.1x since the scale was computed, 21.00% of the elements saturate"
        )
        assert found.evidence["stale_ratio"] == 6.1

    def test_the_mean_is_named(self):
        series = looks("delayed", statistic="mean", casts={PLACE: {"stale_ratio": 3}})
        (found,) = stale_scale(series, LIMITS)
        assert found.cause.startswith("the mean of the scales of the history of 16 steps lags")

    @pytest.mark.parametrize(("g", "lost", "found"), [(1 / 8, 0.1, 1), (1 / 7, 0.1, 0), (1 / 8, 0.09, 0), (1e-4, 0, 0)])
    def test_oversized_scale_is_stale_only_where_it_underflows(self, g, lost, found):
        series = looks("delayed", casts={PLACE: {"stale_ratio": g, "underflow_fraction": lost}})
        assert len(list(stale_scale(series, LIMITS))) == found

    def test_margin_does_not_change_the_stale_ratio(self):
        """With a margin of 2 a g of 1 reads 0.25, and 2 means an amax eight times the last."""
        quiet = looks("delayed", margin=2, casts={PLACE: {"stale_ratio": 0.25}})
        assert not list(stale_scale(quiet, LIMITS))
        (found,) = stale_scale(looks("delayed", margin=2, casts={PLACE: {"stale_ratio": 2}}), LIMITS)
        assert found.evidence["stale_ratio"] == 8

    def test_growth_of_half_a_binade_a_step_is_healthy(self):
        assert not list(stale_scale(looks("delayed", casts={PLACE: {"stale_ratio": 1.5}}), LIMITS))

    @pytest.mark.parametrize(("floor", "found"), [(0.9, 0), (0.0, 1)])
    def test_a_floor_is_no_past_amax(self, floor, found):
        changes = {**provided(np.full(6, 0.1), np.full(6, 1 / 448)), "underflow_fraction": 0.2}
        assert len(list(stale_scale(looks(floored("delayed", floor), casts={PLACE: changes}), LIMITS))) == found

    def test_dynamic_scales_are_never_stale(self):
        assert not list(stale_scale(looks("tensorwise", casts={PLACE: {"stale_ratio": 8}}), LIMITS))


class TestFrozen:
    @pytest.mark.parametrize(("last", "found"), [(1.25, 1), (1.24, 0)])
    def test_the_tensor_must_move(self, last, found):
        amaxes = np.array([1, 1, 1.2, 1.1, 1.1, last])
        series = looks("delayed", casts={PLACE: provided(amaxes, np.full(6, 1 / 448))})
        assert len(list(frozen_scale(series, LIMITS))) == found

    @pytest.mark.parametrize(("excess", "found"), [(1.5, 1), (1.01, 0)])
    def test_a_maximum_would_have_followed(self, excess, found):
        amaxes = [0.5, excess, 0.5, 0.5]
        series = looks("delayed", count=4, casts={PLACE: provided(amaxes, np.full(4, 1 / 448))})
        assert len(list(frozen_scale(series, LIMITS))) == found

    @pytest.mark.parametrize(("count", "found"), [(12, 1), (10, 0)])
    def test_scale_constant_for_several_history_windows_is_frozen(self, count, found):
        """Looks every 5 steps: 55 steps are more than three windows of 16, 45 are not."""
        amaxes = np.where(np.arange(count) % 2, 0.5, 0.9)
        series = looks("delayed", count=count, casts={PLACE: provided(amaxes, np.full(count, 1 / 448))})
        assert len(list(frozen_scale(series, LIMITS))) == found

    def test_an_amax_that_equals_the_held_one_begins_another_window(self):
        amaxes = np.where(np.arange(12) == 6, 1.0, 0.6)
        series = looks("delayed", count=12, casts={PLACE: provided(amaxes, np.full(12, 1 / 448))})
        assert not list(frozen_scale(series, LIMITS))

    def test_constant_dynamic_scale_is_frozen(self):
        """Where the tensor stays within the binade that a power of two provides for, it is not."""
        still = provided([0.6, 0.9, 0.7, 0.9, 0.8, 0.6], np.full(6, 1 / 448))
        assert len(list(frozen_scale(looks("tensorwise", casts={PLACE: still}), LIMITS))) == 1
        assert not list(frozen_scale(looks("rowwise", casts={(*PLACE, "output"): still}), LIMITS))

    @pytest.mark.parametrize(("floor", "found"), [(1.0, 0), (0.05, 1)])
    @pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
    def test_scale_held_by_an_amax_floor_is_not_frozen(self, recipe, floor, found):
        """Looks at 60 steps, all below a floor of 1; without it the tensor's own amaxes were to be followed."""
        amaxes = np.where(np.arange(12) % 2, 0.6, 0.9)
        changes = provided(amaxes, np.full(12, 1 / 448))
        series = looks(floored(recipe, floor), count=12, casts={PLACE: changes})
        assert len(list(frozen_scale(series, LIMITS))) == found

    def test_frozen_scale_reports_its_severity_and_cause(self):
        series = looks("delayed", casts={PLACE: provided([1, 2, 3, 4, 4.5, 5], np.full(6, 1 / 448))})
        (found,) = frozen_scale(series, LIMITS)
        assert found.severity is Severity.FAIL
        assert found.cause.startswith("the scale stayed 0.00223 in 6 samples while amax changed 5x and is up to 5x")
        assert found.evidence["stale_ratio"] == pytest.approx(5)

    def test_a_long_window_holds_an_early_peak(self):
        amaxes = [8, *np.linspace(1, 3, 59)]
        series = looks("delayed_te", count=60, casts={PLACE: provided(amaxes, np.full(60, 8 / 448))})
        assert not list(frozen_scale(series, LIMITS))


class TestOscillation:
    def jumping(self, turns, factor):
        scales = np.where(np.arange(turns + 2) % 2, factor, 1.0) / 448
        return looks(
            "delayed", statistic="latest", count=turns + 2, casts={PLACE: provided(np.ones(turns + 2), scales)}
        )

    @pytest.mark.parametrize(
        ("turns", "factor", "found"),
        [(4, 2, [Severity.WARN]), (3, 2, []), (4, 1.9, []), (4, 4, [Severity.FAIL])],
    )
    def test_four_turns_of_a_binade(self, turns, factor, found):
        assert [one.severity for one in scale_oscillation(self.jumping(turns, factor), LIMITS)] == found

    def test_a_scale_that_moves_with_its_tensor_is_healthy(self):
        scales = np.where(np.arange(8) % 2, 4.0, 1.0) / 448
        series = looks("tensorwise", count=8, casts={PLACE: provided(scales * 448, scales)})
        assert not list(scale_oscillation(series, LIMITS))

    def test_a_scale_that_only_grows_does_not_oscillate(self):
        series = looks("delayed", casts={PLACE: provided(np.ones(6), 2.0 ** np.arange(6))})
        assert not list(scale_oscillation(series, LIMITS))


class TestInexact:
    @pytest.mark.parametrize(("g", "found"), [(1.00009, 0), (1.0002, 1), (0.9998, 1), (1.0, 0)])
    def test_inexact_amax_needs_only_one_sample(self, g, found):
        series = looks("tensorwise", casts={PLACE: {"stale_ratio": [1, 1, g, 1, 1, 1]}})
        assert len(list(inexact_amax(series, LIMITS))) == found

    @pytest.mark.parametrize(("g", "found"), [(0.501, 0), (1.0, 0), (1.001, 1), (0.49, 1)])
    def test_powers_of_two_leave_a_binade(self, g, found):
        series = looks("rowwise", casts={(*PLACE, "output"): {"stale_ratio": g}})
        assert len(list(inexact_amax(series, LIMITS))) == found

    @pytest.mark.parametrize(("g", "found"), [(1.14, 0), (0.58, 0), (2.1, 1)])
    def test_scales_rounded_down_provide_for_less(self, g, found):
        series = looks("mxfp8", scale_rounding="floor", casts={(*PLACE, "output"): {"stale_ratio": g}})
        assert len(list(inexact_amax(series, LIMITS))) == found

    @pytest.mark.parametrize(
        ("g", "severity", "words"),
        [
            (1.003, Severity.WARN, "an amax that differs by 0.30% from its tensor's, as after rounding to fewer bits"),
            (1.5, Severity.WARN, "an amax of another tensor: its own tensor's is 1.5x as large"),
            (16, Severity.FAIL, "its own tensor's is 16x as large"),
            (1 / 16, Severity.FAIL, "its own tensor's is 0.0625x as large"),
        ],
    )
    def test_inexact_amax_reports_its_severity_and_cause(self, g, severity, words):
        (found,) = inexact_amax(looks("tensorwise", casts={PLACE: {"stale_ratio": g}}), LIMITS)
        assert found.severity is severity
        assert words in found.cause
        assert "6 of 6 samples" in found.cause

    def test_the_scale_of_some_groups(self):
        """Other groups have the scale that is theirs, so that the largest g is right."""
        place = (*PLACE, "output")
        (found,) = inexact_amax(looks("rowwise", casts={place: {"least_stale_ratio": 1 / 256}}), LIMITS)
        assert (found.severity, found.evidence["stale_ratio"]) == (Severity.FAIL, 1 / 256)
        assert not list(inexact_amax(looks("rowwise", casts={place: {"least_stale_ratio": 0.501}}), LIMITS))
        assert not list(inexact_amax(looks("rowwise", casts={place: {"least_stale_ratio": np.nan}}), LIMITS))
        assert not list(inexact_amax(looks("rowwise", casts={place: {"least_stale_ratio": 0}}), LIMITS))

    @pytest.mark.parametrize(("amax", "found"), [(1.3e-35, 0), (1.4e-35, 1), (5e-13, 1)])
    def test_an_amax_near_the_smallest_that_a_scale_fits_is_not_judged(self, amax, found):
        series = looks("tensorwise", casts={PLACE: {"stale_ratio": 0.5, "amax": amax}})
        assert len(list(inexact_amax(series, LIMITS))) == found

    @pytest.mark.parametrize(("amax", "found"), [(5e-3, 0), (0.009, 0), (0.02, 1)])
    def test_near_a_recipe_s_own_floor_nothing_is_judged(self, amax, found):
        series = looks(floored("tensorwise", 1e-3), casts={PLACE: {"stale_ratio": 0.5, "amax": amax}})
        assert len(list(inexact_amax(series, LIMITS))) == found

    def test_a_margin_beyond_every_exponent_is_a_number(self):
        with np.errstate(all="ignore"):
            assert not list(stale_scale(looks("delayed", margin=2000, casts={PLACE: {"stale_ratio": 0}}), LIMITS))

    def test_delayed_scales_are_not_exact(self):
        assert not list(inexact_amax(looks("delayed", casts={PLACE: {"stale_ratio": 0.7}}), LIMITS))


class TestRanks:
    def ratios(self, role, values, recipe="delayed"):
        gemm = "grad_input" if role == "grad_output" else "output"
        return looks(recipe, modules={"rank_scale_ratio": {f"{SECOND} {role} {gemm}": values}})

    @pytest.mark.parametrize(("ratio", "found"), [(1.0, 0), (1.0002, 1)])
    def test_weights_are_cast_alike(self, ratio, found):
        series = self.ratios("weight", [1, 1, 1, 1, 1, ratio])
        assert len(list(rank_mismatch(series, LIMITS))) == found

    @pytest.mark.parametrize(
        ("role", "ratios", "found"),
        [
            ("input", [2] * 6, 1),
            ("input", [1.7] * 6, 0),
            ("input", [2, 2, 1, 2, 2, 1], 0),
            ("grad_output", [5] * 6, 1),
            ("grad_output", [3] * 6, 0),
        ],
    )
    def test_data_may_differ_a_little_and_now_and_then(self, role, ratios, found):
        assert len(list(rank_mismatch(self.ratios(role, ratios), LIMITS))) == found

    @pytest.mark.parametrize(("role", "found"), [("input", 0), ("grad_output", 0), ("weight", 1)])
    def test_dynamic_scales_of_data_are_the_rank_s_own(self, role, found):
        """A run of two ranks at 1e-3 had gradients that differed by 169x, in three samples by more than 4x."""
        assert len(list(rank_mismatch(self.ratios(role, [169] * 6, "tensorwise"), LIMITS))) == found

    def test_rank_mismatch_reports_its_place_and_ratio(self):
        (found,) = rank_mismatch(self.ratios("weight", 2), LIMITS)
        assert (found.path, found.role, found.severity) == (SECOND, "weight", Severity.FAIL)
        assert "a scale 2x another's" in found.cause
