"""Grids of tiny runs: cells against single runs, kills, processes that share a folder, runs that diverge."""

import json
import multiprocessing
import random
import time

import pytest

from octavo.errors import ConfigError, DataError
from octavo.experiments.bars import Bars, read_bars, save_bars
from octavo.experiments.cells import Cell, Variant
from octavo.experiments.grid import Grid, finished_cells, locked, run_grid
from octavo.experiments.grid_results import result_row, write_results
from octavo.experiments.presets import PRESETS, preset_named
from octavo.training import loop
from octavo.training.loop import train
from octavo.training.run_folder import load_run
from tests.policy.source_tree import ROOT
from tests.unit.training.tiny_runs import tiny_config

BF16, TENSORWISE = (Variant(name=name, recipe=name) for name in ("bf16", "tensorwise"))
GRID = Grid(variants=(BF16, TENSORWISE), seeds=(0, 1))
NUMBERS = (
    *("nats", "validation_nats", "train_nats", "window_nats"),
    *("gradient_error", "gradient_variance", "noise_scale", "failed_at"),
)


def numbers(results):
    """Everything but times and memory, by cell."""
    return {result.cell.name: [result_row(result)[key] for key in NUMBERS] for result in results}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    return folder, run_grid(GRID, tiny_config(), folder, data=data)


@pytest.mark.long
def test_a_cell_is_the_run_of_its_configuration(uninterrupted, data, tmp_path):
    folder, results = uninterrupted
    cell = results[3].cell
    assert (cell.variant, cell.seed) == (TENSORWISE, 1)
    alone = train(tiny_config(recipe="tensorwise", seed=1), tmp_path / "alone", data=data)
    assert results[3].run.train_curve == alone.train_curve
    stored = load_run(folder / "cells" / cell.name).model.state_dict()
    assert all(tensor.equal(stored[name]) for name, tensor in load_run(tmp_path / "alone").model.state_dict().items())


def test_pairs_read_the_same_batches_from_the_same_weights(uninterrupted):
    _, results = uninterrupted
    first = {result.cell.name: result.run.validation_curve[0][1] for result in results}
    assert first["bf16-lr1-warmup1-seed0"] == pytest.approx(first["tensorwise-lr1-warmup1-seed0"], abs=0.01)
    assert first["bf16-lr1-warmup1-seed0"] != first["bf16-lr1-warmup1-seed1"]


def test_finished_cells_are_read_and_never_run_again(uninterrupted, data, monkeypatch):
    folder, results = uninterrupted
    monkeypatch.setattr(loop.Trainer, "run", None)
    assert run_grid(GRID, tiny_config(), folder, data=data) == results
    assert finished_cells(GRID, tiny_config(), folder, data) == results


@pytest.mark.long
def test_more_seeds_run_only_what_is_missing(uninterrupted, data, tmp_path):
    small = Grid(variants=GRID.variants, seeds=(0,))
    run_grid(small, tiny_config(), tmp_path, data=data)
    names = []
    results = run_grid(GRID, tiny_config(), tmp_path, data=data, on_phase=lambda phase: names.append(phase.name))
    assert numbers(results) == numbers(uninterrupted[1])
    assert not any("seed0" in name for name in names)


def work(folder, data):
    run_grid(GRID, tiny_config(checkpoint_interval=2), folder, data=data)


def logged(folder):
    return sum(len(path.read_text().splitlines()) for path in folder.glob("cells/*/metrics.jsonl"))


@pytest.mark.long
def test_ten_kills_change_no_number(uninterrupted, data, tmp_path):
    """A process is killed as it trains, ten times after a random number of lines of metrics; the last one finishes."""
    context, kills = multiprocessing.get_context("fork"), 0
    for _ in range(10):
        process = context.Process(target=work, args=(tmp_path, data))
        process.start()
        enough = logged(tmp_path) + random.randint(1, 3)
        while process.is_alive() and logged(tmp_path) < enough:
            time.sleep(0.002)
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills >= 8
    results = run_grid(GRID, tiny_config(checkpoint_interval=2), tmp_path, data=data)
    assert numbers(results) == numbers(uninterrupted[1])


@pytest.mark.long
def test_processes_share_the_cells_and_run_each_once(uninterrupted, data, tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(tmp_path, data)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert numbers(finished_cells(GRID, tiny_config(), tmp_path, data)) == numbers(uninterrupted[1])
    for cell in GRID.cells:
        lines = (tmp_path / "cells" / cell.name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines if json.loads(line)["kind"] == "step"]
        assert steps == list(range(1, 7))


@pytest.mark.long
def test_a_cell_that_another_process_runs_is_left_to_it(data, tmp_path):
    (tmp_path / "cells").mkdir()
    busy = GRID.cells[0].name
    with locked(tmp_path / "cells" / f"{busy}.lock") as ours:
        assert ours
        results = run_grid(GRID, tiny_config(), tmp_path, data=data, wait=False)
    assert [result.cell.name for result in results] == [cell.name for cell in GRID.cells[1:]]


@pytest.mark.long
def test_a_run_that_breaks_is_a_result(data, tmp_path):
    variants = (BF16, Variant(name="far", recipe="tensorwise", training={"clip_norm": 0.0, "lr": 1e30}))
    results = run_grid(Grid(variants=variants, seeds=(0,)), tiny_config(), tmp_path, data=data)
    broken = results[1]
    assert broken.diverged
    assert broken.failed_at is not None
    assert 1 < broken.failed_at <= 6
    assert result_row(broken)["nats"] is None
    assert finished_cells(Grid(variants=variants, seeds=(0,)), tiny_config(), tmp_path, data) == results


def test_a_damaged_or_foreign_result_is_refused(uninterrupted, data, tmp_path):
    folder, _ = uninterrupted
    cell = GRID.cells[0]
    with pytest.raises(ConfigError, match="another configuration or on other text"):
        finished_cells(GRID, tiny_config(steps=7), folder, data)
    place = tmp_path / "cells" / cell.name
    place.mkdir(parents=True)
    text = (folder / "cells" / cell.name / "measures.json").read_text()
    (place / "measures.json").write_text(text.replace('"steps": 6', '"steps": 5'))
    with pytest.raises(DataError, match="is damaged"):
        finished_cells(GRID, tiny_config(), tmp_path, data)


def test_all_results_are_checked_before_the_first_run(uninterrupted, data, tmp_path):
    """The last cell's is of another configuration."""
    folder, _ = uninterrupted
    name = GRID.cells[-1].name
    (tmp_path / "cells" / name).mkdir(parents=True)
    (tmp_path / "cells" / name / "measures.json").write_bytes((folder / "cells" / name / "measures.json").read_bytes())
    with pytest.raises(ConfigError, match="another configuration or on other text"):
        run_grid(GRID, tiny_config(steps=7), tmp_path, data=data)
    assert [path.name for path in (tmp_path / "cells").iterdir()] == [name]


def test_results_are_the_same_in_both_files(uninterrupted, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    _, results = uninterrupted
    assert write_results(results, tmp_path) == ("results.jsonl", "results.parquet")
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "results.parquet").to_pylist() == lines
    assert lines == [result_row(result) for result in results]


def test_factors_scale_both_ends_of_the_learning_rate_and_the_warmup():
    base = tiny_config(lr=2e-3, min_lr=1e-4, warmup=3)
    config = Cell(variant=BF16, seed=4, lr=0.5, warmup=1.5).config(base)
    training = config.training
    assert (training.lr, training.min_lr, training.warmup, training.seed) == (1e-3, 5e-5, 4, 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": ()}, "a grid needs seeds, each once; got none"),
        ({"seeds": (1, 1)}, "a grid needs seeds, each once; got 1, 1"),
        ({"variants": (BF16, BF16)}, "a grid needs variants, each once; got bf16, bf16"),
        ({"lr_factors": (0.0,)}, r"factors of the learning rate must be above 0 and below 1000, not \[0.0\]"),
        ({"warmup_factors": (float("nan"),)}, "factors of the warm-up must be above 0"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Grid(**({"variants": (BF16,), "seeds": (0,)} | changes))


@pytest.mark.parametrize("name", PRESETS)
def test_claims_of_presets_are_about_cells_of_their_grids(name):
    preset = preset_named(name)
    grid = preset.grid((0, 1, 2))
    groups = {(cell.variant.name, cell.lr, cell.warmup) for cell in grid.cells}
    assert preset.claims
    named = ((claim.better, claim.worse, *(claim.baselines or ())) for claim in preset.claims)
    assert {group for claim in named for group in claim} <= groups
    for cell in grid.cells:
        assert cell.config(tiny_config()).training.recipe == cell.variant.recipe


@pytest.mark.long
@pytest.mark.parametrize("name", ["gradient-jump", "norm-weights", "smooth-swiglu", "widths"])
def test_runs_of_a_preset_train_and_differ(name, data, tmp_path):
    base = tiny_config(steps=4)
    results = run_grid(preset_named(name).grid((0,)), base, tmp_path, data=data)
    assert not any(result.diverged for result in results)
    assert len({result.run.nats for result in results}) >= len(results) - 1  # after four steps two may agree


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no preset 'phase' \(did you mean 'phases'\?\)"):
        preset_named("phase")


def test_bars_are_read_as_they_were_written(tmp_path):
    bars = Bars(gap_nats=0.01, targets=(0.5, 1.0))
    save_bars(bars, tmp_path / "bars.toml")
    assert read_bars(tmp_path / "bars.toml") == bars
    (tmp_path / "bars.toml").write_text("gap_nats = -1.0\n")
    with pytest.raises(ConfigError, match=r"gap_nats must be above 0, not -1\.0"):
        read_bars(tmp_path / "bars.toml")


def test_every_preset_is_on_the_page_of_presets():
    page = (ROOT / "docs" / "reference" / "study-presets.md").read_text()
    assert [name for name in PRESETS if f"| `{name}` |" not in page] == []
    keys = {key for preset in PRESETS.values() for variant in preset.variants for key in variant.training}
    explained = keys - {"precision_schedule", "convert_head", "moments"}  # of runs in general
    assert [key for key in explained if f"`{key} = " not in page] == []
