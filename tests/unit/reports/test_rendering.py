"""Pages need the report extra, and say so before any work; templates are part of the installed package."""

import sys
from importlib import resources

import jinja2
import pytest
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from octavo.errors import ConfigError
from octavo.reports.rendering import check_report_extra, render, write_page


@pytest.mark.parametrize(("module", "library"), [("plotly.offline", "plotly"), ("jinja2", "jinja2")])
def test_a_missing_library_is_named_with_the_extra_and_what_to_do_then(module, library, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"^a page needs {library}, .*'octavo\[report\]', then look again$"):
        check_report_extra("a page", then=", then look again")


def test_a_template_that_uses_an_unknown_name_is_refused():
    with pytest.raises(jinja2.UndefinedError, match="headline"):
        render("study")


def test_templates_are_package_data():
    names = {path.name for path in resources.files("octavo.reports").joinpath("templates").iterdir()}
    templates = (
        "base",
        "macros",
        "doctor",
        "finding",
        "study",
        "grid",
        "sensitivity",
        "benchmark",
        "plan",
        "agreement",
    )
    assert names == {f"{name}.html.jinja" for name in templates} | {"style.css", "base.js", "doctor.js"}


def test_pages_of_a_folder_share_one_script_which_is_repaired_but_not_rewritten(tmp_path):
    script = tmp_path / f"plotly-{get_plotlyjs_version()}.min.js"
    write_page(tmp_path / "one.html", "<p>one</p>")
    assert script.read_text(encoding="utf-8") == get_plotlyjs()
    before = script.stat()
    write_page(tmp_path / "two.html", "<p>two</p>")
    assert script.stat() == before
    script.write_text("cut off")
    write_page(tmp_path / "one.html", "<p>again</p>")
    assert script.read_text(encoding="utf-8") == get_plotlyjs()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "one.html", script, tmp_path / "two.html"]
    assert (tmp_path / "one.html").read_text() == "<p>again</p>"
