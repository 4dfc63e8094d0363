"""Figures of octavo.plot hold the numbers of the objects that they draw, and errors say what to do."""

import json
import sys

import pytest
import torch

import octavo
from octavo import recipes
from octavo.errors import ConfigError
from octavo.training.metrics import METRICS
from tests.unit.reports.synthetic_run import run, steps


@pytest.fixture(scope="module")
def delayed():
    """Two layers after three steps whose inputs have the amaxes 1, 4 and 2."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    octavo.convert(model, "delayed", scale_updates="manual")
    for amax in (1.0, 4.0, 2.0):
        model(torch.full((2, 4), amax)).sum().backward()
        octavo.update_scales(model)
    return model


def test_history_draws_amaxes_and_the_largest_magnitude_of_the_next_scale(delayed):
    figure = octavo.plot.history(delayed, layers=["0"])
    amaxes, limit = figure.data[:2]
    assert (amaxes.x, amaxes.y) == ((1, 2, 3), (1.0, 4.0, 2.0))
    x = torch.linspace(-8, 8, 64).reshape(16, 4)
    scale = octavo.quantize(x, octavo.E4M3, amax=octavo.scaling_state(delayed)["0.input.amax"]).scale
    assert (limit.x, limit.y) == ((4,), (float(scale) * 448,))
    assert [title.text for title in figure.layout.annotations] == ["input", "weight", "grad_output"]
    assert {trace.name for trace in octavo.plot.history(delayed).data} == {"0", "1"}


def test_history_of_many_layers_draws_only_those_nearest_to_the_range(monkeypatch, delayed):
    monkeypatch.setattr("octavo.plot.amax_history.MOST_LAYERS", 1)
    figure = octavo.plot.history(delayed)
    assert len({trace.name for trace in figure.data}) == 1
    assert figure.layout.title.text.startswith("1 of 2 layers")


def test_history_does_not_count_as_saving_the_scaling_state(delayed):
    updates = delayed[0].scale_updates
    updates.state_read = False
    octavo.plot.history(delayed)
    assert not updates.state_read


def fresh(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    octavo.convert(model, recipe)
    return model


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: octavo.plot.history(fresh("tensorwise")), "keeps an amax history.*delayed recipe"),
        (lambda: octavo.plot.history(fresh("delayed")), "has finished a step yet; train a step"),
        (lambda: octavo.plot.codes(torch.ones(2)), "takes a QuantizedTensor, or values and a CastSpec"),
        (lambda: octavo.plot.codes(octavo.quantize(torch.empty(0), octavo.E4M3)), "no codes to count"),
        (octavo.plot.losses, "at least one run"),
        (lambda: octavo.plot.losses(run(looks=2), octavo.doctor.series_of([])), "run 2 has no loss; .*notes.loss"),
        (lambda: octavo.plot.heat_map(run(looks=2), "amax"), "saturation_fraction.*not 'amax'"),
        (lambda: octavo.plot.heat_map(octavo.doctor.series_of([])), "no layer was sampled: watch"),
        (lambda: octavo.plot.losses("/nowhere/run"), "'/nowhere/run' holds no run"),
    ],
)  # fmt: skip
def test_plot_without_data_raises_one_sentence(draw, said):
    with pytest.raises(ConfigError, match=said):
        draw()


def test_an_unknown_layer_is_named_with_those_that_have_a_history(delayed):
    with pytest.raises(ConfigError, match="'2' is not a layer with an amax history; use one of 0, 1"):
        octavo.plot.history(delayed, layers=["2"])


def test_a_missing_plotly_is_named_with_the_extra(monkeypatch, delayed):
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(ConfigError, match=r"^octavo.plot needs plotly, .*'octavo\[report\]'"):
        octavo.plot.history(delayed)


def test_codes_of_values_are_those_of_the_cast_by_the_spec():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    spec = recipes.get("rowwise").output.a
    assert spec is not None
    cast = octavo.quantize(x, spec.format, granularity=spec.granularity, scale_rounding=spec.scale_rounding)
    drawn, expected = octavo.plot.codes(x, spec).data[0], octavo.plot.codes(cast).data[0]
    assert drawn.y == expected.y
    decoded = cast.data.float().flatten()
    assert sum(share for place, share in zip(drawn.x, drawn.y, strict=True) if place < 0) == pytest.approx(
        (decoded < 0).double().mean().item()
    )


def test_losses_read_a_run_s_folder_and_name_it(tmp_path):
    lines = list(steps(40))
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curve, smooth, validation = octavo.plot.losses(tmp_path).data
    assert curve.y == tuple(line["loss"] for line in lines if line["kind"] == "step")
    assert validation.x == tuple(line["step"] for line in lines if line["kind"] == "evaluation")
    assert smooth.name == f"{tmp_path}, smoothed"
    assert [one.showlegend for one in (curve, smooth, validation)] == [False, True, False]


def test_the_heat_map_has_the_worst_of_each_column_s_samples():
    series = run(looks=300)
    figure = octavo.plot.heat_map(series, "underflow_fraction")
    (panel,) = (one for one in figure.data if "grad_output" in one.hovertemplate)
    values = series.casts.of("underflow_fraction")
    columns = [index for index, key in enumerate(series.casts.keys) if key.role == "grad_output"]
    assert panel.customdata.shape == (len(columns), 100)
    assert "var(--" not in figure.to_json(), "a notebook knows no colours of the pages' style sheet"
    assert panel.customdata.max() == pytest.approx(values[:, columns].max(), rel=1e-6)
    assert panel.y[-1] == 'head&lt;b&gt;&amp;"x"'
