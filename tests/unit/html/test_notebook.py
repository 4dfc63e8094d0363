"""Summaries in notebooks: escaped, folded, without scripts and colours of their own; plain text without jinja2."""

import sys

import pytest
import torch

import octavo
from octavo import recipes
from octavo.doctor import Finding, Findings, Remedy, Severity
from octavo.html import environment
from octavo.html.notebook import Table, summary

HOSTILE = "</table><script>alert('x')</script>&\""


def html_of(shown) -> str:
    html = shown._repr_html_()
    assert html is not None
    return html


def finding(**fields):
    return Finding(code="saturation", severity=Severity.FAIL, **fields)


def converted():
    model = torch.nn.ModuleDict({"<b>": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 4)})
    return octavo.convert(model, "delayed", skip=["head"])


SHOWN = {
    "report": converted,
    "tensor": lambda: octavo.quantize(torch.eye(4), octavo.E4M3),
    "recipe": lambda: recipes.get("delayed"),
    "finding": lambda: finding(path=HOSTILE, cause=HOSTILE, remedies=(Remedy(text=HOSTILE),)),
    "findings": lambda: Findings([finding(path=HOSTILE)]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_summary_has_no_script_no_markup_from_text_and_no_background(name):
    html = html_of(SHOWN[name]())
    assert "<script" not in html
    assert "<b>head" not in html
    assert "background: none" in html
    assert html.count("background") == html.count("background: none")
    assert "#" not in html.partition("<style>")[2].partition("</style>")[0], "a fixed colour"


@pytest.mark.parametrize("name", SHOWN)
def test_without_jinja2_ipython_falls_back_to_the_plain_text(name, monkeypatch):
    shown = SHOWN[name]()
    environment.environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert shown._repr_html_() is None


def test_long_tables_are_folded_after_their_first_rows():
    html = summary("t", tables=[Table(columns=("n",), rows=[(f"row {n}",) for n in range(1000)])])
    assert html is not None
    before, folded = html.split("<details>")
    assert "992 more" in folded
    assert (before.count('scope="row"'), folded.count('scope="row"')) == (8, 992)


def test_a_model_of_a_thousand_layers_is_shown_in_few_lines():
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(1000))
    html = html_of(octavo.convert(layers, "tensorwise"))
    assert "[0-999] (1000)" in html
    assert len(html) < 10_000


def test_a_recipe_shows_each_operand_s_cast():
    html = html_of(recipes.get("rowwise_hp_grad_weight"))
    rows = [row.split("<td>") for row in html.partition("<tbody>")[2].split("<tr>")[1:]]
    cells = [[cell.partition("</td>")[0] for cell in row[1:4]] for row in rows]
    assert cells == [
        ["input", "E4M3", "row"],
        ["weight", "E4M3", "row"],
        ["grad_output", "E4M3", "row"],
        ["weight", "E4M3", "tensor"],
        ["grad_output", "high precision", "–"],
        ["input", "high precision", "–"],
    ]


def test_findings_show_severity_place_evidence_and_remedies():
    one = finding(
        path="layers.0.up", role="input", first_step=3, last_step=9, cause="it saturates",
        evidence={"saturation_fraction": 0.25}, remedies=(Remedy(text="first"), Remedy(text="second")),
    )  # fmt: skip
    html = html_of(Findings([one]))
    for text in ("■ fail", "layers.0.up<br>input<br>steps 3 to 9", "It saturates.", "saturation_fraction = 0.25"):
        assert text in html
    assert "1. first<br>2. second" in html


def test_diagnose_gives_findings_that_a_notebook_shows():
    found = octavo.doctor.diagnose(octavo.doctor.series_of([]))
    assert found == []
    assert "0 findings" in html_of(found)
