"""The how-to page's code in a Jupyter kernel: its values are shown as HTML and plotly figures."""

import os

import pytest

from tests.policy.source_tree import ROOT
from tests.policy.test_documents import fences

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install nbformat")
pytest.importorskip("ipykernel", reason="needs a kernel: pip install ipykernel")

LAST = ("octavo.plot.history(model)", 'octavo.recipes.get("mxfp8")', "octavo.quantize(weight, octavo.E4M3)")
PLOTLY = "application/vnd.plotly.v1+json"


def test_a_notebook_shows_tables_and_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split()]))
    blocks = [block for _, block in fences((ROOT / "docs/how-to/use-in-a-notebook.md").read_text(), "python")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (*blocks, *LAST)])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1].data if cell.outputs else {} for cell in notebook.cells]
    report, findings, _, figure, recipe, tensor = shown
    assert "ConversionReport: recipe delayed" in report["text/html"]
    assert "0 findings" in findings["text/html"]
    assert len(figure[PLOTLY]["data"]) == 12  # 2 layers, 3 roles: amaxes, and the range of the scale
    assert "1×32 block" in recipe["text/html"]
    assert "<svg" in tensor["text/html"]
    assert (tmp_path / "codes.html").exists()
