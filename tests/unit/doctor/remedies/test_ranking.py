from dataclasses import replace

import pytest
import torch

from octavo import recipes
from octavo.doctor import Captures, Finding, Sample, series_of
from octavo.doctor.facts import recipe_facts
from octavo.doctor.findings import Remedy
from octavo.doctor.remedies import ranked, remedies_for
from tests.unit.doctor.one_layer import captured, found
from tests.unit.doctor.test_replay import gaussian, log_normal, outlier_row


def run_of(*recipe_at_step, path="0"):
    """A run that was looked at in these steps, and whose layer ran these recipes there."""
    samples = [
        Sample(step=step, casts={}, products={}, parameters={}, layers={path: recipe_facts(recipes.get(recipe))})
        for step, recipe in recipe_at_step
    ]
    return series_of([], samples)


def diagnosed(code, recipe="tensorwise", **fields) -> Finding:
    one = found(code, **fields)
    return replace(one, remedies=remedies_for(one, run_of((1, recipe))))


def proven(finding, captures, run=None):
    """Remedies, ranked in a run whose layer is tensorwise, or in another."""
    return ranked(finding, captures, series=run or run_of((1, "tensorwise")), rounds=1)


def names(remedies):
    return [next(iter(remedy.changes.get("overrides", {"": remedy.text}).values())) for remedy in remedies]


def test_an_outlier_row_is_best_served_by_a_scale_a_row(tmp_path):
    captured(tmp_path, "tensorwise", **outlier_row())
    remedies = proven(diagnosed("saturation"), Captures(tmp_path))
    order = names(remedies)
    assert order.index("rowwise") < order.index("bf16"), "it costs more and removes no more harm"
    best = remedies[order.index("rowwise")]
    assert best.error_removed is not None
    assert best.error_removed > 0.9
    assert best.bytes_ratio is not None
    assert best.time_ratio == 1
    assert best.bytes_ratio == pytest.approx(2, rel=0.1)


def test_the_time_is_that_by_which_remedies_are_ranked(tmp_path):
    """On a CPU a model of the GEMMs, of which one in BF16 takes twice the time: no clock is in it."""
    captured(tmp_path, "tensorwise", **outlier_row())
    remedies = proven(diagnosed("saturation"), Captures(tmp_path))
    ratios = {name: one.time_ratio for name, one in zip(names(remedies), remedies, strict=True)}
    wanted = {"bf16": 2.0, "rowwise_hp_grad_weight": 4 / 3, "rowwise": 1.0, "blockwise": 1.0, "mxfp8": 1.0}
    assert ratios == pytest.approx(wanted)
    assert not any(one.is_time_measured for one in remedies)


def test_a_log_normal_gradient_is_best_served_by_range(tmp_path):
    recipe = recipes.get("tensorwise", gradient_format="E4M3")
    captured(tmp_path, recipe, **log_normal())
    one = diagnosed("gradient-underflow", role="grad_output")
    override = Remedy(text="E5M2", changes={"overrides": {"0": "tensorwise"}})
    remedies = proven(replace(one, remedies=(*one.remedies, override)), Captures(tmp_path), run_of((1, recipe)))
    assert names(remedies)[0] == "tensorwise"
    assert names(remedies).index("blockwise") < names(remedies).index("rowwise")
    assert all(remedy.error_removed is not None for remedy in remedies)


def test_replay_confirms_the_first_remedy_of_an_e5m2_gradient_underflow(tmp_path):
    captured(tmp_path, "tensorwise", **gaussian(gradient=torch.exp(6 * torch.randn(64, 96))))
    one = diagnosed("gradient-underflow", role="grad_output")
    remedies = proven(one, Captures(tmp_path))
    assert remedies[0].changes == one.remedies[0].changes == {"overrides": {"0": "bf16"}}
    removed = dict(zip(names(remedies), (remedy.error_removed for remedy in remedies), strict=True))
    assert removed["bf16"] == pytest.approx(1, abs=0.01)
    assert removed["mxfp8"] is not None
    assert removed["mxfp8"] < 0.5


def test_a_history_with_a_past_outlier_is_cut_or_given_up(tmp_path):
    captured(tmp_path, "delayed", **gaussian(), before=lambda step: 1e6 if step == 2 else 1.0, steps=9)
    one = diagnosed("stale-scale", "delayed", evidence={"stale_ratio": 1e-6})
    remedies = proven(one, Captures(tmp_path), run_of((1, "delayed")))
    assert [dict(remedy.changes) for remedy in remedies[:2]] == [
        {"overrides": {"0": "tensorwise"}},
        {"recipe_options": {"history_length": 4}},
    ]
    assert all(remedy.error_removed is not None and remedy.error_removed > 0.9 for remedy in remedies[:2])


def test_ineffective_remedies_rank_last_after_remedies_without_replay(tmp_path):
    captured(tmp_path, "delayed", **gaussian(), before=lambda _: 1 / 8)
    window = Remedy(text="window", changes={"recipe_options": {"history_length": 1}})
    rate = Remedy(text="rate", changes={"lr": 1e-3})
    dynamic = Remedy(text="dynamic", changes={"overrides": {"0": "tensorwise"}})
    one = found("stale-scale", remedies=(window, rate, dynamic))
    texts = [remedy.text for remedy in proven(one, Captures(tmp_path), run_of((1, "delayed")))]
    assert texts[0] == "dynamic"
    assert texts[-2:] == ["rate", "window"]


def test_healthy_capture_adds_error_numbers_and_keeps_the_remedy_order(tmp_path):
    captured(tmp_path, "tensorwise", **gaussian())
    one = diagnosed("inexact-amax")
    remedies = proven(one, Captures(tmp_path))
    assert [remedy.text for remedy in remedies] == [remedy.text for remedy in one.remedies]
    assert [remedy.error_removed is None for remedy in remedies] == [False, False, True]


def test_the_newest_capture_counts(tmp_path):
    old = captured(tmp_path / "old", "tensorwise", **outlier_row())
    new = replace(old, step=9, input=torch.randn_like(old.input))
    one = diagnosed("saturation")
    both, newest = proven(one, [new, old]), proven(one, [new])
    assert [remedy.error_removed for remedy in both] == [remedy.error_removed for remedy in newest]


def test_captures_under_another_recipe_than_the_findings_prove_no_remedy(tmp_path):
    """Found in steps 10 to 30, from step 40 on under another recipe, and captured before and after."""
    before = replace(captured(tmp_path, "tensorwise", **outlier_row()), step=30)
    after = replace(before, step=60, recipe=recipes.get("rowwise"))
    again = replace(before, step=90, input=torch.randn_like(before.input))
    one = diagnosed("saturation", first_step=10, last_step=30)
    run = run_of((10, "tensorwise"), (40, "rowwise"), (80, "tensorwise"))
    wanted = proven(one, [before], run)
    assert wanted != one.remedies
    errors = [[remedy.error_removed for remedy in proven(one, captures, run)] for captures in ([before, after, again],)]
    assert errors == [[remedy.error_removed for remedy in wanted]], "one of its own steps, though a later one is there"
    assert proven(one, [after], run) == one.remedies
    assert proven(one, [before], run_of((10, "rowwise"))) == one.remedies
    assert proven(one, [before], series_of([])) == one.remedies, "nobody knows what the layer ran"
    later = replace(one, first_step=40, last_step=60)
    assert proven(later, [before], run) == one.remedies


def test_another_history_is_another_recipe(tmp_path):
    capture = captured(tmp_path, "delayed", **gaussian())
    one = diagnosed("stale-scale", "delayed")
    assert proven(one, [capture], run_of((1, "delayed"))) != one.remedies
    other = run_of((1, recipes.get("delayed", history_length=4)))
    assert proven(one, [capture], other) == one.remedies


def test_a_finding_of_a_module_is_replayed_on_the_layer_that_is_meant(tmp_path):
    capture = replace(captured(tmp_path, "tensorwise", **outlier_row()), path="mlp.down")
    remedy = Remedy(text="", changes={"overrides": {"mlp.down": "bf16"}})
    one = found("outlier-growth", path="mlp", remedies=(remedy,))
    assert proven(one, [capture], run_of((1, "tensorwise"), path="mlp.down"))[0].error_removed is not None


def test_remedies_that_no_capture_can_test_stay_unchanged(tmp_path):
    words = diagnosed("rank-mismatch")
    capture = captured(tmp_path, "tensorwise", **outlier_row())
    assert proven(words, [capture]) == words.remedies
    rate = found("learning-rate", remedies=(Remedy(text="", changes={"lr": 1e-3}),))
    assert proven(rate, [capture]) == rate.remedies
    elsewhere = diagnosed("saturation")
    assert proven(elsewhere, []) == elsewhere.remedies
    assert proven(elsewhere, Captures(tmp_path / "nothing")) == elsewhere.remedies


def test_a_head_leaves_fp8_whatever_a_replay_shows(tmp_path):
    captured(tmp_path, "tensorwise", **outlier_row())
    one = diagnosed("sensitive-module")
    (remedy,) = proven(one, Captures(tmp_path))
    assert remedy.changes == {"skip": ["0"]}
    assert remedy.error_removed is not None
