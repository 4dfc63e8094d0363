"""Static scales out of a short training with delayed scaling."""

import pytest
import torch
from typer.testing import CliRunner

import octavo
from octavo.cli.app import app
from octavo.errors import CheckpointError, ConfigError
from octavo.formats import E4M3
from octavo.quantization import calibration_from_run, load_calibration
from octavo.training.run_folder import load_run
from tests.unit.cli.conftest import TINY


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of delayed scaling, and one of tensorwise."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own.txt").write_text("".join(f"{n} times {n % 7} makes {n * (n % 7)}.\n" for n in range(2000)))
    (folder / "run.toml").write_text(TINY)
    for recipe in ("delayed", "tensorwise"):
        setting = ["--config", folder / "run.toml", "--data", folder / "own.txt", "--recipe", recipe]
        result = CliRunner().invoke(app, [str(arg) for arg in ["train", *setting, "--out", folder / recipe]])
        assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_those_of_the_windows_largest_amax(runs, power_of_two):
    found = calibration_from_run(runs / "delayed", granularity="row", power_of_two=power_of_two)
    run = load_run(runs / "delayed")
    state = octavo.scaling_state(run.model)
    windows = {key.removesuffix(".input.amax_history"): x for key, x in state.items() if "input.amax_history" in key}
    assert found.input_scales.keys() == windows.keys()
    assert len(windows) == 7
    for path, window in windows.items():
        assert (window >= 0).sum() == 4, "the run's steps"
        rounding = octavo.recipes.get("static", power_of_two=power_of_two).output.a.scale_rounding  # type: ignore[union-attr]
        expected = octavo.quantize(window[window >= 0], E4M3, scale_rounding=rounding).scale
        assert torch.equal(found.input_scales[path], expected)
    assert [each.amax for each in found.health] == [float(windows[each.path].max()) for each in found.health]
    assert {each.sqnr_db for each in found.health} == {None}
    assert found.left_out == {"lm_head": "the run kept no amaxes of it"}
    assert found.seen.samples is None
    assert found.warnings() == []


def test_scales_of_a_run_are_saved_and_applied(runs, tmp_path):
    found = calibration_from_run(runs / "delayed")
    found.save(tmp_path)
    model = load_run(runs / "delayed").model
    octavo.restore(model)
    report = load_calibration(tmp_path).apply(model)
    assert len(report.converted) == 7
    with torch.no_grad():
        assert model(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()


def test_a_run_without_histories_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"\(tensorwise\) has kept no amaxes; train with the recipe delayed"):
        calibration_from_run(runs / "tensorwise")
    with pytest.raises(CheckpointError, match="holds no run"):
        calibration_from_run(tmp_path)
    with pytest.raises(ConfigError, match="weight_method must be one of"):
        calibration_from_run(runs / "delayed", weight_method="median")
