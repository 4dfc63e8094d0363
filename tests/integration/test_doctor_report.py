"""The doctor's page in a real browser: it opens without an error and answers to hover, click, menus, keys and links.

Chromium is driven by Playwright; where either is missing the tests skip and say so.
"""

import itertools
import shutil
from io import BytesIO

import numpy as np
import pytest
import torch

from octavo.doctor import diagnose, series_of
from octavo.doctor.histograms import Histogram
from octavo.doctor.statistics import CAST_FIELDS
from octavo.formats import E4M3, E5M2
from octavo.reports.doctor import doctor_page
from octavo.reports.rendering import write_page
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from tests.unit.reports.synthetic_run import findings, long_run, paths, run, samples, steps
from tests.unit.training.tiny_runs import tiny_config, tiny_data

pytestmark = pytest.mark.long

LAYERS, LOOKS = 21, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    histograms = [
        Histogram(path="layers.1.mlp.down", role=role, values=torch.randn(4096), format=form, scale=4 / form.max)
        for role, form in (("input", E4M3), ("grad_output", E5M2))
    ]
    reference = series_of(steps(590, seed=1))
    page = doctor_page(
        run(layers=LAYERS, looks=LOOKS), findings(), title="t", reference=reference, histograms=histograms
    )
    write_page(folder / "faulty.html", page)
    write_page(folder / "empty.html", doctor_page(series_of([]), [], title="t"))
    far = list(samples(layers=7, looks=9))
    for look, one in enumerate(far):
        for numbers in one.casts.values():
            numbers[CAST_FIELDS.index("stale_ratio")] = 2.0 ** (3 * (look - 4))
    histograms = [
        Histogram(path="a", role="input", values=values, format=E4M3, scale=2.0**-128)
        for values in (torch.randn(4096), torch.zeros(4096))
    ]
    write_page(folder / "far.html", doctor_page(series_of([], far), [], title="t", histograms=histograms))
    return folder


@pytest.fixture(scope="module")
def heard():
    """What pages said on their console, and what they asked the network for."""
    return []


@pytest.fixture(autouse=True)
def _nothing_is_heard(heard):
    yield
    assert heard == []


@pytest.fixture(scope="module")
def opened(browser, folder, heard):
    def open_page(name, width=1280, height=900):
        tab = browser.new_page(viewport={"width": width, "height": height})
        tab.on("console", lambda message: heard.append(message.text))
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.on("request", lambda request: is_local(request.url) or heard.append(request.url))
        tab.goto(f"file://{folder}/{name}")
        tab.wait_for_selector("html[data-complete]", timeout=120_000, state="attached")
        return tab

    return open_page


@pytest.fixture(scope="module")
def tab(opened):
    """The page with findings; a test leaves it in any state."""
    return opened("faulty.html")


def is_local(url):
    return url.startswith(("file:", "data:", "blob:"))


def cell(tab, layer, look, *, layers=LAYERS, columns=LOOKS):
    """The middle of a cell, on the screen."""
    tab.locator("#heat").scroll_into_view_if_needed()
    box = tab.locator("#heat .nsewdrag").bounding_box()
    return box["x"] + box["width"] * (look + 0.5) / columns, box["y"] + box["height"] * (layer + 0.5) / layers


def column_of(series, path, role):
    return next(index for index, key in enumerate(series.casts.keys) if (key.path, key.role) == (path, role))


def wait_for_tip(tab, text):
    tab.wait_for_function("text => document.getElementById('tip').innerText.includes(text)", arg=text)


def curves_of(tab):
    return tab.locator("#layer-name").inner_text()


def test_the_page_opens_at_the_worst_finding(tab):
    assert tab.locator("#about b").inner_text() == "Underflow"
    assert curves_of(tab) == "layers.1.mlp.down"


def test_heat_map_cell_shows_its_values_on_hover(tab):
    series = run(layers=LAYERS, looks=LOOKS)
    table = series.casts.of("underflow_fraction")
    for layer, look in ((13, 40), (0, 0), (20, 59)):
        tab.mouse.move(*cell(tab, layer, look))
        wait_for_tip(tab, paths(LAYERS)[layer])
        said = tab.locator("#tip").inner_text()
        key = column_of(series, paths(LAYERS)[layer], "grad_output")
        assert float(said.split(" %")[0]) == pytest.approx(100 * table[look, key], rel=5e-3)
        assert f"step {max(1, look * 10)}\n" in said
        assert "healthy: up to 10 %" in said


def test_a_click_shows_the_curves_of_that_layer(tab):
    tab.mouse.click(*cell(tab, 4, 30))
    tab.wait_for_function("document.getElementById('layer-name').textContent === 'layers.0.mlp.gate'")
    titles = ["Amax", "Scale", "Stale ratio", "SQNR", "Underflow", "Saturation"]
    assert tab.locator("#panels h3").all_inner_texts() == titles
    assert tab.locator("#layer").evaluate("menu => menu.selectedOptions[0].text") == "layers.0.mlp.gate"
    assert "step 300" in tab.locator("#readout").inner_text()
    drawn = tab.locator("#panels .panel div.js-plotly-plot").nth(4).evaluate("figure => Array.from(figure.data[2].y)")
    series = run(layers=LAYERS, looks=LOOKS)
    wanted = series.casts.of("underflow_fraction")[:, column_of(series, "layers.0.mlp.gate", "grad_output")]
    np.testing.assert_allclose(drawn, wanted, rtol=1e-3)


def test_the_marks_of_a_ratio_that_moves_far_do_not_touch(opened):
    page = opened("far.html")
    panel = page.locator("#panels .panel").nth(2)
    assert panel.locator("h3").inner_text() == "Stale ratio"
    texts = panel.locator(".ytick text")
    boxes = sorted((texts.nth(index).bounding_box() for index in range(texts.count())), key=lambda box: box["y"])
    assert len(boxes) >= 4
    assert "1×" in texts.all_text_contents()
    assert all(above["y"] + above["height"] <= below["y"] for above, below in itertools.pairwise(boxes))
    page.close()


def test_the_menus_change_the_map_and_the_keyboard_moves_in_it(tab):
    before = tab.locator("#heat").screenshot()
    statistics = tab.locator("#statistic option").all_inner_texts()
    assert {"SQNR", "Amax", "Stale ratio", "GEMM SQNR", "Update / weight", "Gate/up alignment"} <= set(statistics)
    tab.locator("#statistic").focus()
    tab.keyboard.press("ArrowDown")
    assert statistics[statistics.index("Underflow") + 1] in tab.locator("#about").inner_text()
    tab.select_option("#statistic", label="Kurtosis")
    assert "Kurtosis" in tab.locator("#about").inner_text()
    assert tab.locator("#panels h3").first.inner_text() == "Kurtosis"
    assert tab.locator("#heat").screenshot() != before
    tab.select_option("#sheet", label="weight")
    tab.select_option("#layer", label="layers.0.attention.k_proj")
    assert curves_of(tab) == "layers.0.attention.k_proj"
    tab.locator("#heat").focus()
    tab.keyboard.press("ArrowDown")
    assert curves_of(tab) == "layers.0.attention.v_proj"
    for name in statistics:
        tab.select_option("#statistic", label=name)
        assert name in tab.locator("#about").inner_text()


def test_a_finding_leads_to_its_cells(tab):
    tab.locator("#finding-1 .show").click()
    assert tab.locator("#about b").inner_text() == "Stale ratio"
    assert curves_of(tab) == "layers.2.mlp.up"
    shapes = tab.locator("#heat").evaluate("figure => figure.layout.shapes.map(one => [one.x0, one.x1, one.y0])")
    assert [17.5, 41.5, 18.5] in shapes  # looks 18 to 41 are steps 180 to 410
    shaded = tab.locator("#loss").evaluate("figure => figure.layout.shapes.map(one => [one.x0, one.x1])")
    assert shaded == [[175, 415]]
    assert tab.locator(".finding.chosen").get_attribute("id") == "finding-1"
    tab.locator("#finding-2 .show").click()
    assert tab.locator("#loss").evaluate("figure => figure.layout.shapes.length") == 1
    assert tab.locator(".finding.chosen").get_attribute("id") == "finding-2"


def test_markup_in_a_layer_path_is_shown_as_text(tab):
    tab.locator("#finding-3 .show").click()
    assert curves_of(tab) == paths(LAYERS)[-1]
    assert tab.locator("#heat .ytick text").last.text_content() == paths(LAYERS)[-1]
    tab.mouse.move(*cell(tab, LAYERS - 1, 30))
    wait_for_tip(tab, paths(LAYERS)[-1])


def test_values_stand_on_the_grid_of_their_format(tab):
    assert "E4M3" in tab.locator("#histogram-about").inner_text()
    tab.select_option("#histogram", index=1)
    assert "E5M2" in tab.locator("#histogram-about").inner_text()
    assert tab.locator("#grid").evaluate("figure => figure.data[1].x.length") == E5M2.max_code


def test_the_axis_of_a_tensor_of_zeros_shows_the_format_and_little_else(opened):
    page = opened("far.html")
    grid = page.locator("#grid")
    page.select_option("#histogram", index=1)
    left, right = grid.evaluate("figure => figure.layout.xaxis.range")
    strokes = grid.evaluate("figure => [Math.min(...figure.data[1].x), Math.max(...figure.data[1].x)]")
    assert left > strokes[0] - 20
    assert right < strokes[1] + 20
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_names_of_the_ranges_do_not_touch(opened, width):
    """Of values far above the format, whose ranges are narrow on the axis."""
    page = opened("far.html", width)
    names = page.locator("#zones span, #grid .annotation")
    assert names.all_inner_texts() == ["flushed to zero", "subnormal", "normal", "saturated"]
    for box, other in itertools.combinations([name.bounding_box() for name in names.all()], 2):
        is_beside = box["x"] + box["width"] <= other["x"] or other["x"] + other["width"] <= box["x"]
        assert is_beside or box["y"] + box["height"] <= other["y"]
    page.close()


@pytest.mark.parametrize("width", [1280, 800])
def test_a_screenshot_is_not_blank_and_nothing_overflows(tab, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.wait_for_function("width => document.getElementById('heat').clientWidth < width", arg=width)
    tab.wait_for_timeout(500)  # plotly follows the window's width a moment later
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed to read a screenshot")
    for selector in ("#loss", "#heat", "#panels", "#grid"):
        seen = image.open(BytesIO(tab.locator(selector).screenshot())).convert("RGB")
        assert len(seen.getcolors(seen.width * seen.height)) > 50
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["faulty.html", "empty.html"])
def test_the_page_fits_and_is_legible_and_small(folder, page_faults, name):
    assert page_faults(folder / name) == []


def test_the_map_and_the_curves_follow_the_scheme(tab):
    colours = """[by("heat").data[0].colorscale[0][1], by("heat").layout.plot_bgcolor,
      by("panels").querySelector(".js-plotly-plot").data[0].line.color, by("loss").layout.font.color]"""
    light = tab.evaluate(colours)
    assert all(colour.startswith("#") for colour in light)
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_function(f"light => {colours}.every((colour, index) => colour !== light[index])", arg=light)
    tab.emulate_media(color_scheme="light")
    tab.wait_for_function(f"light => {colours}.every((colour, index) => colour === light[index])", arg=light)


def test_without_plotly_s_script_the_findings_stay(browser, folder, tmp_path):
    shutil.copy(folder / "faulty.html", tmp_path)
    tab, errors = browser.new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto((tmp_path / "faulty.html").as_uri())
    assert tab.locator(".finding:visible").count() == 4
    assert tab.locator(":is(.plot, .legend, select, .show, #map):visible").count() == 0
    (script,) = folder.glob("plotly-*.min.js")
    assert script.name in tab.locator("#without").inner_text()
    assert errors == []
    shutil.copy(script, tmp_path)
    tab.reload()
    assert tab.locator("#heat .main-svg").count() > 0
    assert not tab.locator("#without").is_visible()
    tab.close()


def test_a_page_without_statistics_opens(opened):
    tab = opened("empty.html")
    assert tab.locator("select:visible").count() == 0
    assert "Nothing was measured" in tab.locator("h1").inner_text()


def test_a_real_run_opens(opened, folder, tmp_path):
    config = tiny_config(recipe="delayed", statistics_interval=2)
    train(config, tmp_path / "run", data=tiny_data(tmp_path))
    series = series_of(read_metrics(tmp_path / "run"))
    page = doctor_page(series, diagnose(series), title="tiny")
    write_page(folder / "real.html", page)
    tab = opened("real.html")
    layers = [key.path for key in series.casts.keys]
    assert curves_of(tab) in layers
    tab.select_option("#statistic", label="Amax")
    assert tab.locator("#heat").evaluate("figure => figure.data[0].z.length") == len(set(layers))
    assert tab.locator("#loss").evaluate("figure => figure.data[0].y.length") == config.training.steps


def test_two_hundred_layers_and_ten_thousand_steps_open(opened, folder, capsys):
    big = long_run(layers=200, looks=1000)
    write_page(folder / "big.html", doctor_page(big, findings(), title="big"))
    tab = opened("big.html")
    ready, complete = (int(tab.locator("html").get_attribute(f"data-{name}")) for name in ("ready", "complete"))
    with capsys.disabled():
        megabytes = (folder / "big.html").stat().st_size / 1e6
        print(f"\n200 layers x 10,000 steps, {megabytes:.1f} MB: map after {ready} ms, everything after {complete} ms")
    shape = tab.locator("#heat").evaluate("figure => [figure.data[0].z.length, figure.data[0].z[0].length]")
    assert shape == [200, 334]
    tab.mouse.click(*cell(tab, 100, 200, layers=200, columns=334))
    tab.wait_for_function("name => document.getElementById('layer-name').textContent === name", arg=paths(200)[100])
