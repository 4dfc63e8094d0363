"""Any text in any page is text: it adds no tag and no attribute, ends no script, and is there to be read."""

import json
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.results import Chart, Failure, PartRecord, Report, Section, Verdict
from octavo.doctor import Finding, Sample, Severity, series_of
from octavo.doctor.findings import Remedy
from octavo.doctor.histograms import Histogram
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_FIELDS
from octavo.formats import E4M3
from octavo.quantization import Budget
from octavo.quantization.sensitivity.ablation import Increase
from octavo.quantization.sensitivity.ranking import RankAgreement
from octavo.quantization.sensitivity.study import MixResult, Sensitivity
from octavo.quantization.sensitivity.units import CHOICES, Unit
from octavo.reports.benchmark import benchmark_page
from octavo.reports.doctor import doctor_page
from octavo.reports.sensitivity import sensitivity_page
from octavo.reports.study import study_page
from tests.unit.training.synthetic_study import run, study

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
PIECES = (
    *("<script>", "</script>", "<!--", "-->", "]]>", "</style>", "<img src=x onerror=alert(1)>", "</pre>", "</h1>"),
    *('"', "'", '" onload="', "&", "&lt;", "&amp;#60;", "{{ 7*7 }}", "{% raw %}", "\\u003c", "\\", "`${1}`", ".", "x"),
)
TEXTS = st.text(min_size=1, max_size=20) | st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
MARK = "\ue000"  # in no page of its own accord


class Page(HTMLParser):
    """Tags with their attributes' names, all text outside of scripts, and the JSON that the page embeds."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.data, self.figures, self._inside = [], "", [], [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._inside = values.get("type", tag) if tag in {"script", "style"} else ""
        if tag != "wbr":
            self.tags.append((tag, *values))
        self.figures += [json.loads(values["data-figure"])] if "data-figure" in values else []

    def handle_endtag(self, tag):
        self._inside = ""
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        if self._inside == "application/json":
            self.data.append(json.loads(data))
        elif not self._inside:
            self.text += data


def a_doctor_page(text):
    numbers = np.linspace(0.1, 0.9, len(CAST_FIELDS))
    layers = {text: {"recipe": text, "in_features": 8, "out_features": 8}}
    sample = Sample(step=1, casts={CastKey(text, text, "output"): numbers}, products={}, parameters={}, layers=layers)
    remedies = (Remedy(text=text, error_removed=0.5), Remedy(text=text))
    findings = [
        Finding(code=code, severity=severity, path=text, role=text, cause=f"it is {text} indeed", remedies=remedies)
        for code, severity in (("saturation", Severity.FAIL), ("nonfinite", Severity.NOTE))
    ]
    drawn = Histogram(path=text, role=text, values=torch.ones(3), format=E4M3, scale=1.0)
    return doctor_page(series_of([], [sample]), findings, title=text, histograms=[drawn])


def a_study_page(text):
    runs = (run("bf16", 0.0), run(f"r{text}", 0.01))
    one = replace(study(*runs), facts={"model": text, f"f{text}": text}, prompt=text, samples={f"r{text}": text})
    return study_page(one)


def a_sensitivity_page(text):
    path = f"0.u{text}"
    unit = Unit(path=path, paths=(path,), shape=(8, 8), choices=CHOICES, is_table=True)
    increase = Increase(nats=0.1, error=0.01, divergence=0.1, windows=2)
    best = MixResult(
        name="budget",
        chosen={path: "weight_only"},
        bytes=1,
        bytes_share=0.5,
        fp8_products=0.5,
        predicted=0.1,
        verified=increase,
    )
    costs = {(path, choice): 0.1 for choice in CHOICES}
    found = Sensitivity(
        units=(unit,),
        estimates=costs,
        measured={(path, "rowwise"): increase},
        floor=increase,
        costs=costs,
        agreement=RankAgreement(rank_correlation=1.0, pairs=3),
        budget=Budget(perplexity=0.1, bytes_share=0.9),
        best=best,
        front=(best,),
        presets=(replace(best, name="rowwise"),),
        bf16_bytes=2,
        bf16_nats=3.0,
        attempts=(),
    )
    return sensitivity_page(found, {"model": text, f"f{text}": text})


def a_benchmark_page(text):
    section = Section(
        title=text,
        columns=("timed", text),
        rows=((text, text),),
        notes=(text,),
        chart=Chart(unit=text, series={"one": {text: 1.0}, f"s{text}": {text: 2.0}}, line=1.0),
        verdicts=(Verdict(claim=text, found=1.0, bar=0.5, by=text), Verdict(claim=text, bar=0.5, reason=text)),
        failures=(Failure(name=text, reason=text),),
    )
    facts = {"device": text, f"f{text}": text}
    report = Report(facts=facts, command=text, is_rehearsal=False, theme="serving", measured="2026-01-02")
    report.parts.append(PartRecord(name=text, sections=[section], failure=Failure(name=text, reason=text)))
    return benchmark_page(report)


PAGES = {"doctor": a_doctor_page, "study": a_study_page, "sensitivity": a_sensitivity_page}
PAGES["benchmark"] = a_benchmark_page


@cache
def marked_page(name):
    return Page(PAGES[name](MARK))


def with_text(value, text):
    """JSON whose every mark is replaced."""
    if isinstance(value, dict):
        return {with_text(key, text): with_text(one, text) for key, one in value.items()}
    if isinstance(value, list):
        return [with_text(one, text) for one in value]
    return value.replace(MARK, text) if isinstance(value, str) else value


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
@settings(max_examples=40)
@given(text=TEXTS)
def test_arbitrary_text_is_escaped_and_changes_nothing_else_on_the_page(name, text):
    text = text.replace(".", "·") if name == "sensitivity" else text  # a path's words are roles
    page, wanted = Page(PAGES[name](text)), marked_page(name)
    assert page.tags == wanted.tags
    assert page.text == wanted.text.replace(MARK, text)
    assert page.data == with_text(wanted.data, text)
    assert page.figures == with_text(wanted.figures, escape(text, quote=False)), "plotly reads markup of its own"


@pytest.mark.parametrize("name", PAGES)
def test_markup_that_is_not_escaped_would_be_seen(name):
    html = PAGES[name](MARK).replace(MARK, "<b>", 1)
    assert Page(html).tags != marked_page(name).tags
