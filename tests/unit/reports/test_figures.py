"""Figures hold what was added to them, in their places."""

from octavo.reports import figures


def test_figure_has_its_lines_points_and_levels():
    figure = figures.new_figure("nats")
    figures.add_line(figure, ((1, 3.0), (2, 2.0)), "loss", "#000", width=1)
    figures.add_points(figure, ((2, 2.5),), "validation", "#000")
    figures.add_level(figure, 2.25, "target")
    figures.add_level(figure, 1.5, "change", axis="x")
    assert [(list(one.x), list(one.y), one.mode) for one in figure.data] == [
        ([1, 2], [3.0, 2.0], "lines"),
        ([2], [2.5], "lines+markers"),
    ]
    assert [one.text for one in figure.layout.annotations] == ["target", "change"]
    assert (figure.layout.shapes[0].y0, figure.layout.shapes[1].x0) == (2.25, 1.5)
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("step", "nats")
