"""Pages: what every report's HTML and figures are made of."""

import sys

import pytest

from octavo import pages
from octavo.errors import ConfigError


def test_missing_plotly_is_named_with_the_extra_and_what_to_do_then(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"a page needs plotly, .*'octavo\[report\]', then look again$"):
        pages.plotly_script("a page", after=", then look again")


def test_a_figure_holds_what_was_drawn_in_its_place():
    figure = pages.step_figure("nats")
    pages.line(figure, ((1, 3.0), (2, 2.0)), "loss", "#000", width=1)
    pages.points(figure, ((2, 2.5),), "validation", "#000")
    pages.level(figure, 2.25, "target")
    assert [(list(one.x), list(one.y), one.mode) for one in figure.data] == [
        ([1, 2], [3.0, 2.0], "lines"),
        ([2], [2.5], "lines+markers"),
    ]
    assert (figure.layout.shapes[0].y0, figure.layout.annotations[0].text) == (2.25, "target")
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("step", "nats")
