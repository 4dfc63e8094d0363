"""A run whose recipe changes on the way: each phase is the run that it would be alone, and nothing begins anew."""

import math

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo.training.config import Precision
from octavo.training.events import Event, Notice
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import load_run
from tests.unit.training.tiny_runs import comparable, tiny_config

BF16_FIRST, FP8_FIRST = (("bf16", 0.0), ("fp8", 0.5)), (("fp8", 0.0), ("bf16", 0.5))


def trained(folder, data, **training):
    """The lines of a run but for what the doctor saw, and its weights."""
    result = train(tiny_config(**{"lr": 1e-2, "steps": 8, "eval_interval": 4, **training}), folder, data=data)
    assert result.checkpoint is not None
    lines = [line for line in comparable(read_metrics(folder)) if line["kind"] not in ("watched", "statistics")]
    return lines, load_file(result.checkpoint / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
def test_single_phase_matches_a_run_without_phases(tmp_path, data, precision):
    plain = trained(tmp_path / "plain", data, recipe=str(precision))
    phases = (("bf16", 0.0),)
    phased = trained(tmp_path / "phased", data, recipe="delayed", precision=precision, precision_schedule=phases)
    assert phased[0] == plain[0]
    assert same(phased[1], plain[1])
    alone = trained(tmp_path / "alone", data, recipe="rowwise")
    phased = trained(tmp_path / "fp8", data, recipe="rowwise", precision_schedule=(("fp8", 0.0),))
    assert phased[0] == alone[0]
    assert same(phased[1], alone[1])


@pytest.mark.parametrize(
    ("schedule", "first"), [(BF16_FIRST, "bf16"), (FP8_FIRST, "delayed"), ((("rowwise", 0), ("bf16", 0.5)), "rowwise")]
)
def test_run_matches_the_other_recipe_before_the_switch(tmp_path, data, schedule, first):
    alone, _ = trained(tmp_path / "alone", data, recipe=first)
    phased, _ = trained(tmp_path / "phased", data, recipe="delayed", precision_schedule=schedule)
    switch = phased.index({"kind": "precision", "step": 5, "recipe": "delayed" if schedule == BF16_FIRST else "bf16"})
    assert phased[:switch] == alone[:switch]
    assert alone[switch]["kind"] == phased[switch + 1]["kind"] == "step"
    assert alone[switch]["loss"] != phased[switch + 1]["loss"]
    assert alone[switch]["loss"] == pytest.approx(phased[switch + 1]["loss"], abs=0.01), "nothing began anew"
    assert alone[switch]["lr"] == phased[switch + 1]["lr"]
    assert len([line for line in phased if line["kind"] == "precision"]) == 1


def test_a_delayed_phase_measures_its_own_tensors_first(tmp_path, data):
    """Twice delayed with a phase between: the second history holds the steps of the second phase alone."""
    phases = (("fp8", 0.0), ("bf16", 0.25), ("fp8", 0.5))
    config = tiny_config(recipe="delayed", precision_schedule=phases, steps=8, statistics_interval=5)
    result = train(config, tmp_path / "run", data=data)
    assert result.checkpoint is not None
    state = load_file(result.checkpoint / "scaling.safetensors")
    assert {int(tensor) for name, tensor in state.items() if name.endswith(".steps")} == {4}
    *_, entry = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "statistics" and line["step"] == 5]
    assert set(entry["casts"]["stale_ratio"]) == {1.0}, "the first step of the phase casts by its own amaxes"


def test_history_is_kept_across_a_switch_with_the_same_recipe(tmp_path, data):
    overrides = {"*.down_proj": "delayed"}
    phases = (("rowwise", 0.0), ("fp8", 0.5))
    config = tiny_config(recipe="tensorwise", precision_schedule=phases, overrides=overrides, steps=8)
    result = train(config, tmp_path / "run", data=data)
    assert result.checkpoint is not None
    state = load_file(result.checkpoint / "scaling.safetensors")
    assert [int(tensor) for name, tensor in state.items() if name.endswith(".steps")] == [8] * 3


def test_skip_and_overrides_apply_in_the_fp8_phase(tmp_path, data):
    config = tiny_config(
        recipe="tensorwise", precision_schedule=BF16_FIRST, overrides={"*.q_proj": "rowwise"}, skip=("*.up_proj",),
        steps=4, statistics_interval=1,
    )  # fmt: skip
    events: list[Event] = []
    train(config, tmp_path / "run", data=data, on_event=events.append)
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "watched"]
    watched = [{path: facts["recipe"] for path, facts in line["layers"].items()} for line in lines]
    assert [line["step"] for line in lines] == [1, 3], "a line where the layers' facts change"
    assert set(watched[0].values()) == {"bf16"}
    assert (lines[0]["casts"], lines[0]["products"]) == ([], [])
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert watched[1][attention + "q_proj"] == "rowwise"
    assert watched[1][attention + "k_proj"] == watched[1][mlp + "down_proj"] == "tensorwise"
    assert watched[1][mlp + "up_proj"] == watched[1]["lm_head"] == "bf16"
    said = [event.text for event in events if isinstance(event, Notice)]
    assert "step 3: the layers run tensorwise from now on" in said


def test_an_override_that_matches_nothing_is_refused_before_the_first_phase(tmp_path, data):
    config = tiny_config(recipe="tensorwise", precision_schedule=BF16_FIRST, overrides={"layers.9": "rowwise"})
    with pytest.raises(Exception, match=r"pattern 'layers.9' matches no layer"):
        train(config, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("schedule", [BF16_FIRST, FP8_FIRST])
def test_finished_run_is_loaded_in_its_last_phase(tmp_path, data, schedule):
    trained(tmp_path / "run", data, recipe="delayed", precision_schedule=schedule)
    model = load_run(tmp_path / "run").model
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, octavo.nn.Linear)
    assert layer.recipe.name == ("delayed" if schedule == BF16_FIRST else "bf16")
    assert math.isfinite(model(torch.zeros(1, 4, dtype=torch.int64)).sum().item())
