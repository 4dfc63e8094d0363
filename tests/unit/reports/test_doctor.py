"""The doctor's page without a browser: what it says first, what it embeds, that it is whole, escaped and offline."""

import json
import re

import numpy as np
import pytest
import torch
from plotly.offline import get_plotlyjs_version

import octavo
import octavo.doctor
from octavo.doctor import Finding, Sample, Severity, series_of
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_FIELDS
from octavo.reports.doctor import doctor_page
from octavo.reports.findings import headline
from tests.unit.doctor.synthetic_series import looks
from tests.unit.doctor.synthetic_series import steps as steps_of
from tests.unit.reports.synthetic_run import findings, paths, run, steps


@pytest.fixture(scope="module")
def page():
    return doctor_page(run(), findings()[::-1], title="a <small> run & more", reference=series_of(steps(590, seed=1)))


def one_look(path, value=1.0):
    numbers = np.full(len(CAST_FIELDS), value)
    return Sample(step=1, casts={CastKey(path, "input", "output"): numbers}, products={}, parameters={})


def text_of(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def data_of(page):
    (data,) = re.findall(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(data)


def test_the_worst_finding_is_the_headline_and_findings_follow_worst_first(page):
    text = text_of(page)
    assert "<h1>Small gradients become zero in layers.1.mlp.down (grad_output), steps 330 to 590.</h1>" in text
    assert re.findall(r'class="finding (\w+)"', text) == ["fail", "warn", "warn", "note"]
    assert "FP8 layers (delayed): 21, sampled 60 times from step 1 to 590. 1 failure, 2 warnings, 1 note." in text


def test_a_run_that_has_not_cast_yet_is_not_healthy():
    before = Sample(step=1, casts={}, products={}, parameters={})
    text = text_of(doctor_page(series_of([], [before, before]), [], title="t"))
    assert "<h1>Nothing to judge yet: no layer has cast to FP8 in 2 samples.</h1>" in text


@pytest.mark.parametrize(
    ("severity", "said"),
    [(Severity.FAIL, "A scale is made"), (Severity.NOTE, "Healthy, with a note: A scale is made")],
)
def test_a_note_alone_is_healthy(severity, said):
    one = Finding(code="stale-scale", severity=severity, path="proj", first_step=3, last_step=3)
    assert headline([one], 10, 2).startswith(said)
    assert headline([one], 10, 2).endswith(" in proj, step 3.")


@pytest.mark.parametrize(
    ("code", "cause", "said"),
    [
        (
            "learning-rate",
            "the learning rate of up to 3 is too large: updates",
            "The learning rate of up to 3 is too large",
        ),
        ("learning-rate", "updates are 9x as large since step 2", "Updates are 9x as large since step 2"),
        ("loss-scale", "the loss scale of 2 is too small: up to 9%", "The loss scale of 2 is too small"),
    ],
)
def test_a_headline_says_which_of_several_causes_it_is(code, cause, said):
    one = Finding(code=code, severity=Severity.WARN, first_step=1, last_step=9, cause=cause)
    assert headline([one], 10, 2) == f"{said}, steps 1 to 9."


def test_a_stalled_loss_is_not_healthy():
    """Of unknown text: nothing tells such a loss from a converged one, and the page says no more."""
    lines = steps_of([7.6, *[6.4] * 59])
    said = "The loss has not fallen since step 3 and stays at 6.4"
    assert f"<h1>{said}; nothing else was found.</h1>" in text_of(doctor_page(looks(lines=lines), [], title="t"))
    note = Finding(code="stale-scale", severity=Severity.NOTE, path="proj", first_step=3, last_step=3)
    assert f"<h1>{said}, with a note: A scale is made" in text_of(doctor_page(looks(lines=lines), [note], title="t"))
    for known in (
        steps_of([7.6, *[3.4] * 59]),
        steps_of([7.6, *[6.4] * 30]),
    ):  # it fell by more than half; too few steps
        assert "<h1>Healthy: 6 samples of 2 layers" in text_of(doctor_page(looks(lines=known), [], title="t"))


def test_a_finding_shows_its_numbers_and_remedies_with_their_bars(page):
    text = text_of(page)
    assert "<dt>underflow fraction</dt><dd>0.534</dd>" in text
    assert '<i style="width:93.0%"></i></span><span>93 %</span>' in text
    assert '<i style="width:52.0%"></i></span><span>1.04×</span>' in text
    assert '<i style="width:0.0%"></i></span><span>−20 %</span>' in text
    assert text.count('<table class="remedies">') == 2
    assert text.count("error removed</th>") == 1, "a remedy that was not replayed has no bars"
    assert text.count("time, modelled</th>") == 1


def test_text_from_outside_is_escaped(page):
    text = text_of(page)
    assert "a &lt;small&gt; run &amp; more" in text
    assert "head&lt;b&gt;&amp;&#34;x&#34;" in text
    assert "The output head &lt;b&gt;runs&lt;/b&gt; in FP8 &amp; is &#34;sensitive&#34;." in text
    assert "a history of 4 instead of &lt;16&gt;" in text
    assert "head<b>" not in text
    assert paths(21)[-1] in data_of(page)["layers"]


def test_no_path_ends_the_script_that_holds_it():
    evil = "</script><script>alert(1)</script>"
    finding = Finding(code="saturation", severity=Severity.WARN, path=evil, role="input", cause=evil)
    page = doctor_page(series_of([], [one_look(evil)]), [finding], title=evil)
    assert page.count("<script") == page.count("</script") == 4
    assert data_of(page)["layers"] == [evil]


def test_page_asks_nothing_of_the_network(page):
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text_of(page))
    assert re.findall(r'<script src="(.*?)"', page) == [f"plotly-{get_plotlyjs_version()}.min.js"]
    assert "@import" not in text_of(page)


def test_findings_point_at_their_rows_and_those_of_the_run_at_the_loss(page):
    data = data_of(page)
    where = [
        (one["statistic"], one.get("sheet"), data["layers"][one["layer"]] if "layer" in one else "")
        for one in data["findings"]
    ]
    assert where == [
        ("casts.underflow_fraction", 2, "layers.1.mlp.down"),
        ("casts.stale_ratio", 0, "layers.2.mlp.up"),
        (None, None, ""),
        ("casts.underflow_fraction", 1, paths(21)[-1]),
    ]


def test_a_finding_nothing_shows_has_no_link():
    lost = Finding(code="slow-layer", severity=Severity.NOTE, path="elsewhere", cause="it is slow")
    page = doctor_page(run(looks=2), [lost], title="t")
    assert data_of(page)["findings"] == [None]
    assert "Show where" not in text_of(page)


def test_the_page_says_how_many_experts_have_no_rows():
    experts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
    model = torch.nn.ModuleDict({"experts": experts})
    octavo.convert(model, "tensorwise")
    watcher = octavo.doctor.watch(model, interval=1)
    with watcher.step():
        for expert in experts:
            expert(torch.randn(3, 16)).square().sum().backward()
    page = doctor_page(series_of([], watcher.samples), [], title="experts")
    assert len([path for path in data_of(page)["layers"] if path.startswith("experts.")]) == 1
    assert "findings, without the 3 others." in text_of(page)


def test_many_findings_are_folded():
    many = [Finding(code="saturation", severity=Severity.WARN, path=path, role="input") for path in paths(21)]
    assert "<summary>15 more findings</summary>" in text_of(doctor_page(run(looks=2), many, title="t"))


def test_numbers_no_json_has_still_make_a_page():
    numbers = np.array([np.inf, np.nan, -np.inf, *np.zeros(len(CAST_FIELDS) - 3)])
    sample = Sample(step=1, casts={CastKey("", "input", "output"): numbers}, products={}, parameters={})
    finding = Finding(code="nonfinite", severity=Severity.FAIL, evidence={"loss": float("nan"), "amax": float("inf")})
    lines = [{"kind": "step", "step": 1, "loss": float("nan")}, {"kind": "failure", "step": 1, "loss": None}]
    page = doctor_page(series_of(lines, [sample]), [finding], title="t")
    assert data_of(page)["layers"] == [""]
    assert "<dt>amax</dt><dd>inf</dd>" in page


def test_a_healthy_run_and_one_that_was_not_measured_differ():
    healthy = text_of(doctor_page(run(faulty=False, looks=5), [], title="t"))
    assert "<h1>Healthy: 5 samples of 21 layers found nothing.</h1>" in healthy
    empty = text_of(doctor_page(series_of(steps(5)), [], title="t"))
    assert "<h1>Nothing was measured in this run.</h1>" in empty
    assert "lies on many grids, and one in BF16 on none of FP8's." in empty
    assert "no reference run" in empty
    assert "hold no loss" in text_of(doctor_page(series_of([]), [], title="t"))
