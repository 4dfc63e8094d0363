"""Lines that a watched run writes, read back: the same numbers, and clear words for lines that nobody wrote."""

import copy
import json
import math

import numpy as np
import pytest

from octavo.doctor import diagnose
from octavo.doctor.series import PARAMETER_FIELDS, CastKey, ProductKey, Sample, series_of
from octavo.doctor.statistics import CAST_FIELDS, PRODUCT_FIELDS
from octavo.errors import TrainingError

KEYS = [CastKey("a", "input", "output"), CastKey("a", "weight", "output"), CastKey("b.c", "grad_output", "grad_input")]
SHAPE = {"in_features": 64, "out_features": 32, "casts": {"input output": {"format": "E4M3"}}}
FACTS = {"a": {"recipe": "tensorwise", **SHAPE}, "b.c": {"recipe": "delayed", **SHAPE}}


def numbers(rng, count):
    """Of many sizes, a tenth of them missing."""
    values = rng.normal(size=count) * 10.0 ** rng.integers(-20, 20, count)
    values[rng.random(count) < 0.1] = np.nan
    return values


def sample(step, *, keys=KEYS, seed=0, layers=FACTS):
    rng = np.random.default_rng(seed + step)
    return Sample(
        step=step,
        casts={key: numbers(rng, len(CAST_FIELDS)) for key in keys},
        products={ProductKey("a", "output"): numbers(rng, len(PRODUCT_FIELDS))},
        parameters={"a.weight": numbers(rng, len(PARAMETER_FIELDS))},
        modules={"alignment": {"mlp": 0.25, "other": math.inf}, "batch_norm": {}},
        scalars={"gradient_to_noise": 12.5},
        layers=layers,
    )


def lines_of(*samples, names=True):
    """As metrics.jsonl holds them, by way of its text."""
    lines = []
    for one in samples:
        if names:
            lines.append({"kind": "watched", "step": one.step, **one.names()})
        lines.append({"kind": "statistics", "step": one.step, **one.values()})
    return [json.loads(json.dumps(line, allow_nan=False)) for line in lines]


def assert_same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=5e-5)  # five digits


def test_numbers_come_back_and_what_does_not_exist_is_null():
    one, two = sample(10), sample(20)
    lines = lines_of(one, two)
    assert any(value is None for column in lines[1]["casts"].values() for value in column)
    written, kept = series_of(lines), series_of([], [one, two])
    for name in ("casts", "products", "parameters"):
        found, wanted = getattr(written, name), getattr(kept, name)
        assert (found.keys, found.fields) == (wanted.keys, wanted.fields)
        assert found.steps.tolist() == [10, 20]
        assert_same(found.values, wanted.values)
    assert written.casts.values.shape == (2, len(KEYS), len(CAST_FIELDS))
    assert written.casts.of("rms")[1, 2] == pytest.approx(two.casts[KEYS[2]][1], rel=5e-5, nan_ok=True)
    assert written.layers == FACTS
    assert written.modules["alignment"].keys == ("mlp", "other")
    assert np.isnan(written.modules["alignment"].values[0, 1, 0]), "an infinite number is none"
    assert [points.tolist() for points in written.curve("gradient_to_noise")] == [[10, 20], [12.5, 12.5]]


def test_names_hold_until_others_follow():
    first, same, other = sample(10), sample(20), sample(30, keys=KEYS[1:])
    lines = [*lines_of(first), *lines_of(same, names=False), *lines_of(other)]
    series = series_of(lines)
    assert series.casts.keys == tuple(KEYS)
    assert np.isnan(series.casts.values[2, 0]).all()
    assert_same(series.casts.values[1, 0], same.casts[KEYS[0]])
    assert_same(series.casts.values[2, 1], other.casts[KEYS[1]])


def test_a_layer_that_changes_has_periods():
    bf16 = {"recipe": "bf16", **SHAPE}
    later = {**FACTS, "a": bf16}
    series = series_of([], [sample(10), sample(20), sample(30, layers=later)])
    assert series.layers["a"] == bf16
    assert series.periods["a"] == [(10.0, 0, FACTS["a"]), (30.0, 2, bf16)]
    assert series.periods["b.c"] == [(10.0, 0, FACTS["b.c"])]


def test_steps_are_curves_and_all_other_lines_events():
    lines = [
        {"kind": "evaluation", "step": 0, "nats": 7.5},
        {"kind": "step", "step": 1, "loss": 7.0, "lr": 0.1, "tensor": "a word is no number", "note": "nor this"},
        {"kind": "overflow", "step": 2, "loss_scale": 65536.0},
        {"kind": "step", "step": 2, "loss": 6.0},
        {"kind": "failure", "step": 3, "loss": None},
    ]
    series = series_of(lines)
    assert [points.tolist() for points in series.curve("loss")] == [[1, 2], [7, 6]]
    assert [points.tolist() for points in series.curve("nats")] == [[0], [7.5]]
    assert [points.tolist() for points in series.curve("tensor")] == [[], []]
    assert [event["kind"] for event in series.events] == ["overflow", "failure"]
    assert series_of([]).casts.values.shape == (0, 0, len(CAST_FIELDS))


def test_every_finite_number_has_a_name_for_tensorboard():
    one = sample(10)
    found = dict(one.scalars_by_name())
    tables = (one.casts, one.products, one.parameters)
    assert len(found) == sum(np.isfinite(row).sum() for table in tables for row in table.values()) + 2
    place = next(name for name, value in zip(CAST_FIELDS, one.casts[KEYS[0]], strict=True) if np.isfinite(value))
    assert found[f"casts/{place}/a/input/output"] == one.casts[KEYS[0]][CAST_FIELDS.index(place)]
    assert found["modules/alignment/mlp"] == 0.25
    assert found["step/gradient_to_noise"] == 12.5


def cast_of(watched):
    return watched["layers"]["a"]["casts"]["input output"]


def edited(change):
    lines = copy.deepcopy(lines_of(sample(10)))
    change(*lines)
    return lines


EDITS = {
    "no names before": lambda watched, statistics: watched.update(kind="notice"),
    "a column is gone": lambda watched, statistics: statistics["casts"].pop("rms"),
    "a column is short": lambda watched, statistics: statistics["casts"]["rms"].pop(),
    "every column is short": lambda watched, statistics: [column.pop() for column in statistics["casts"].values()],
    "a name is gone": lambda watched, statistics: watched["casts"].pop(),
    "a name is half": lambda watched, statistics: watched["casts"][0].pop(),
    "names are a number": lambda watched, statistics: watched.update(casts=3),
    "a word for a number": lambda watched, statistics: statistics["casts"]["rms"].__setitem__(0, "much"),
    "a list for a number": lambda watched, statistics: statistics["casts"]["rms"].__setitem__(0, [1.0]),
    "a number for a table": lambda watched, statistics: statistics.update(casts=1.0),
    "no modules": lambda watched, statistics: statistics.pop("modules"),
    "modules are a list": lambda watched, statistics: statistics.update(modules=[1]),
    "a module's table is a number": lambda watched, statistics: statistics["modules"].update(alignment=1),
    "a scalar is a word": lambda watched, statistics: statistics.update(gradient_to_noise="large"),
    "no layers": lambda watched, statistics: watched.pop("layers"),
    "layers are a list": lambda watched, statistics: watched.update(layers=["a"]),
    "a layer's facts are a word": lambda watched, statistics: watched.update(layers={"a": "tensorwise"}),
    "no recipe": lambda watched, statistics: watched["layers"]["a"].pop("recipe"),
    "no shape": lambda watched, statistics: watched["layers"]["a"].pop("in_features"),
    "a shape is a word": lambda watched, statistics: watched["layers"]["a"].update(out_features="many"),
    "casts are a number": lambda watched, statistics: watched["layers"]["a"].update(casts=5),
    "a cast is a number": lambda watched, statistics: watched["layers"]["a"].update(casts={"input output": 5}),
    "a margin is a word": lambda watched, statistics: cast_of(watched).update(margin="a"),
    "a margin is half": lambda watched, statistics: cast_of(watched).update(margin=0.5),
    "a margin is negative": lambda watched, statistics: cast_of(watched).update(margin=-1),
    "a margin is true": lambda watched, statistics: cast_of(watched).update(margin=True),
    "a floor is unknown": lambda watched, statistics: cast_of(watched).update(amax_floor=None),
    "a floor is endless": lambda watched, statistics: cast_of(watched).update(amax_floor=math.inf),
    "a scaling is a number": lambda watched, statistics: cast_of(watched).update(scaling=3),
    "no update interval": lambda watched, statistics: watched["layers"]["a"].update(update_interval=None),
    "an empty history": lambda watched, statistics: watched["layers"]["a"].update(history_length=0),
    "a statistic is a list": lambda watched, statistics: watched["layers"]["a"].update(statistic=["max"]),
    "no step": lambda watched, statistics: statistics.pop("step"),
    "a step is a word": lambda watched, statistics: statistics.update(step="ten"),
    "no kind": lambda watched, statistics: statistics.pop("kind"),
}


def test_a_number_that_older_files_lack_is_unknown():
    lines = edited(lambda _, statistics: statistics["casts"].pop("least_stale_ratio"))
    assert np.isnan(series_of(lines).casts.of("least_stale_ratio")).all()


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_an_edited_line_is_refused_in_words(change):
    with pytest.raises(TrainingError, match="put the file back"):
        series_of(edited(change))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"kind": "overflow", "step": 3}, "the overflow line of step 3 has no loss_scale"),
        ({"kind": "overflow", "step": 3, "loss_scale": "big"}, "has loss_scale = 'big', which no run writes"),
        ({"kind": "overflow", "loss_scale": 2.0}, "the overflow line of step None has no step"),
        ({"kind": "failure", "step": 3, "loss_scale": [2.0]}, r"has loss_scale = \[2.0\]"),
        ({"kind": "failure", "step": 3, "loss": "nan"}, "the failure line of step 3 has loss = 'nan'"),
        ({"kind": "failure", "step": 3, "tensor": 7}, "has tensor = 7"),
        ({"kind": "precision", "step": "late"}, "has step = 'late'"),
    ],
)
def test_an_event_without_what_the_rules_read_is_refused(line, words):
    with pytest.raises(TrainingError, match=words):
        series_of([line])


def test_null_values_in_event_lines_are_accepted():
    lines = [
        {"kind": "overflow", "step": 2, "loss_scale": None},
        {"kind": "failure", "step": 3, "loss": None, "grad_norm": None, "tensor": None},
    ]
    assert not diagnose(series_of(lines[:1]))
    assert [one.code for one in diagnose(series_of(lines))] == ["nonfinite"]


@pytest.mark.parametrize(
    ("steps", "words"), [([10, 10], "step 10 come after those of step 10"), ([20, 10], "of step 20")]
)
def test_samples_with_nonincreasing_steps_are_refused(steps, words):
    lines = [line for step in steps for line in lines_of(sample(step))]
    with pytest.raises(TrainingError, match=words):
        series_of(lines)


def test_failed_step_may_be_sampled_again():
    """Its replay, and the step once more under what the autopilot changed."""
    lines = [line for step in (5, 10, 10) for line in lines_of(sample(step))]
    lines += [{"kind": "failure", "step": 10, "loss": None, "tensor": None}, *lines_of(sample(10))]
    assert series_of(lines).casts.steps.tolist() == [5, 10, 10, 10]


def test_a_step_whose_loss_is_null_had_one_that_was_not_finite():
    lines = [{"kind": "step", "step": step, "loss": 2.0 if step < 4 else None, "lr": None} for step in range(1, 8)]
    series = series_of(lines)
    steps, losses = series.curve("loss")
    assert steps.tolist() == list(range(1, 8))
    assert np.isfinite(losses).tolist() == [True] * 3 + [False] * 4
    assert not series.curve("lr")[0].size, "a rate that nobody knows"
    (found,) = diagnose(series)
    assert (found.code, found.first_step, found.last_step) == ("nonfinite", 4, 7)


def test_the_refusal_names_what_does_not_fit():
    with pytest.raises(TrainingError, match="a's input output's margin is 'a'"):
        series_of(edited(EDITS["a margin is a word"]))


def test_the_refusal_names_the_step():
    with pytest.raises(TrainingError, match="statistics of step 10 do not match the names before them"):
        series_of(edited(EDITS["a column is short"]))
