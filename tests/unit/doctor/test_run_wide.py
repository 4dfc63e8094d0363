"""Findings of most layers become one; findings of a few stay what they are."""

import pytest
import torch
from torch import nn

import octavo
from octavo.doctor import Captures, Severity, diagnose, series_of, watch
from octavo.doctor.remedies import ranked
from octavo.doctor.run_wide import run_wide
from octavo.reports.doctor import doctor_page
from tests.unit.doctor.one_layer import finding, found

PATHS = [f"layers.{index}" for index in range(8)]
WARN, FAIL = Severity.WARN, Severity.FAIL


def alike(paths, code="saturation", **fields):
    return [found(code, path=path, **fields) for path in paths]


def said(findings):
    return [(one.code, one.path, one.severity, len(one.places)) for one in findings]


@pytest.mark.parametrize(
    ("layers", "with_it", "merged"), [(8, 5, True), (8, 4, False), (5, 4, True), (4, 4, True), (3, 3, False)]
)
def test_more_than_half_of_the_layers_and_four_at_least(layers, with_it, merged):
    result = run_wide(alike(PATHS[:with_it]), PATHS[:layers])
    assert len(result) == (1 if merged else with_it)
    assert [one.places for one in result] == ([tuple(PATHS[:with_it])] if merged else [()] * with_it)


def test_merged_finding_has_the_union_of_steps_the_worst_cause_and_all_places():
    findings = [
        found(
            path=path, role=role, first_step=10 - i, last_step=20 + i, weight=i, evidence={"share": i}, cause="it is so"
        )
        for i, (path, role) in enumerate((path, role) for path in PATHS[:6] for role in ("input", "weight"))
    ]
    (one,) = run_wide(findings, PATHS)
    assert (one.path, one.role, one.first_step, one.last_step) == ("", "", -1, 31)
    assert one.evidence == {"share": 11, "layers": 6, "of": 8}
    assert one.cause == "6 of 8 FP8 layers; the worst is layers.5, weight: it is so"
    assert one.places == tuple(reversed(PATHS[:6]))
    assert one.is_at("")
    assert one.is_at("layers.3")
    assert not one.is_at("layers.7")


def test_a_few_worse_ones_are_named():
    findings = alike(PATHS[:3], severity=FAIL) + alike(PATHS)
    assert said(run_wide(findings, PATHS)) == [("saturation", path, FAIL, 0) for path in PATHS[:3]] + [
        ("saturation", "", WARN, 8)
    ]
    many = alike(PATHS[:4], severity=FAIL) + alike(PATHS)
    assert said(run_wide(many, PATHS)) == [("saturation", "", FAIL, 8)]


def test_codes_modules_and_the_run_stay_apart():
    others = [found("loss-gap", path=""), *alike([f"{path}.mlp" for path in PATHS], "outlier-growth")]
    findings = [*alike(PATHS[:4], "stale-scale"), *alike(PATHS[4:], "saturation"), *others]
    assert run_wide(findings, PATHS) == findings


def stack(recipe, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    octavo.convert(model, octavo.recipes.get(recipe, **options), convert_head=True)
    return model


def watched(model, folder=None, *, steps=4):
    watcher = watch(model, interval=1, captures=folder)
    for _ in range(steps):
        with watcher.step():
            (model(torch.randn(128, 64, requires_grad=True)) * torch.randn(128, 64)).sum().backward()
    return watcher


def test_a_recipe_that_rounds_scales_down_is_one_finding_and_its_remedy_is_the_recipes(tmp_path):
    watcher = watched(stack("mxfp8", scale_rounding="floor"), tmp_path)
    (one,) = watcher.findings()
    assert (one.code, one.path, one.evidence["layers"]) == ("saturation", "", 5)
    assert [remedy.changes for remedy in one.remedies] == [
        {"recipe_options": {"scale_rounding": "rceil"}},
        {"overrides": {"*": "bf16"}},
    ]
    captures = Captures(tmp_path)
    assert captures.of(one.places[0]) is not None
    series = series_of([], list(watcher.samples))
    proven = ranked(one, captures, series=series, rounds=1)
    assert all(remedy.error_removed is not None for remedy in proven)
    page = doctor_page(series, [one], title="t")
    assert "Show where" in page
    assert not watched(stack("mxfp8")).findings()


def test_other_recipes_are_tried_on_all_layers(tmp_path):
    """Remedies that a replay adds apply to as many layers as the finding."""
    model = stack("tensorwise")
    with finding(*alike([str(index) for index in range(5)])):
        watcher = watched(model, tmp_path)
        (one,) = watcher.findings()
    series = series_of([], list(watcher.samples))
    proven = ranked(one, Captures(tmp_path), series=series, rounds=1)
    places = {pattern for remedy in proven for pattern in remedy.changes["overrides"]}
    assert places == {"*"}
    assert all("all layers" in remedy.text for remedy in one.remedies)


def test_empty_run_has_no_findings():
    assert diagnose(series_of([])) == []
    assert run_wide([], []) == []
