"""What the heat map is made of: columns that keep the worst, rows of the right layers, 16-bit codes that decode."""

import base64

import numpy as np
import pytest

from octavo.doctor.findings import CAUSES
from octavo.doctor.series import CastKey, Sample, series_of
from octavo.doctor.statistics import CAST_FIELDS
from octavo.doctor.statistics_catalog import STATISTIC_OF_CODE, PageStatistic, StatisticKind, Worst, all_statistics
from octavo.doctor.thresholds import Thresholds
from octavo.reports.packing import MOST_COLUMNS, columns_of, encode, layers_of, other_experts, sheets
from tests.unit.reports.synthetic_run import paths, run


def decode(packed, rows):
    """Cells [R, B] of packed ones, as doctor.js decodes them."""
    codes = np.frombuffer(base64.b64decode(packed["data"]), dtype="<u2").astype(np.int64).reshape(rows, -1)
    low, high = packed["span"]
    numbers = low + codes / 65532 * (high - low)
    if packed["log"]:
        numbers = np.where(codes == 0, 0.0, np.exp(low + (codes - 1) / 65531 * (high - low)))
    special = ((65535, np.nan), (65534, np.inf), (65533, -np.inf))
    for code, value in special if not packed["log"] else special[:2]:
        numbers[codes == code] = value
    return np.asarray(numbers, dtype=np.float64)


def statistic(name):
    return next(one for one in all_statistics(Thresholds(), ["alignment", "rank_scale_ratio"]) if one.name == name)


def cells(series, name, sheet=0):
    found = sheets(series, statistic(name), columns_of(series.casts.steps), layers_of(series))[sheet]
    return decode(found, len(found["rows"])), found


@pytest.mark.parametrize("looks", [1, 2, 399, 400, 401, 1000, 10_001])
def test_every_sample_is_in_exactly_one_column(looks):
    steps = np.cumsum(np.random.default_rng(looks).integers(1, 50, looks)).astype(float)
    columns = columns_of(steps)
    assert len(columns.starts) <= MOST_COLUMNS
    assert (columns.first[0], columns.last[-1]) == (steps[0], steps[-1])
    assert all(low < first <= last < high for low, first, last, high in zip(
        columns.edges, columns.first, columns.last, columns.edges[1:], strict=False))  # fmt: skip
    assert (np.diff(columns.edges) > 0).all()


@pytest.mark.parametrize("worst", list(Worst))
@pytest.mark.parametrize("kind", [StatisticKind.SIGNED, StatisticKind.RATIO])
def test_column_shows_its_worst_sample(worst, kind):
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(size=(1003, 5))) if kind is StatisticKind.RATIO else rng.normal(size=(1003, 5))
    values[rng.random(values.shape) < 0.3] = np.nan
    values[:3, 4] = np.nan
    one = PageStatistic(table="casts", field="amax", title="", kind=kind, meaning="", worst=worst)
    found = columns_of(np.arange(1003.0)).worst(values, one)
    how_bad = {
        Worst.LARGEST: lambda x: x,
        Worst.SMALLEST: lambda x: -x,
        Worst.FARTHEST: lambda x: abs(np.log(x)) if kind is StatisticKind.RATIO else abs(x),
    }[worst]
    for column, start in enumerate(range(0, 1003, 3)):
        for place in range(5):
            known = [x for x in values[start : start + 3, place] if not np.isnan(x)]
            assert np.isnan(found[column, place]) if not known else found[column, place] == max(known, key=how_bad)


def test_one_bad_step_in_ten_thousand_stays_visible():
    values = np.full((10_000, 1), 31.0)
    values[7321] = 4.8
    found = columns_of(np.arange(10_000.0)).worst(values, statistic("casts.sqnr_db"))
    assert found.min() == 4.8


@pytest.mark.parametrize("log", [False, True])
def test_codes_decode_to_what_they_were(log):
    rng = np.random.default_rng(1)
    numbers = np.exp(rng.normal(size=(7, 50)) * 8) if log else rng.normal(size=(7, 50)) * 30
    numbers[0, :4] = 0.0, np.nan, np.inf, np.nan if log else -np.inf
    again = decode(encode(numbers, log), 7)
    finite = np.isfinite(numbers)
    width = np.ptp(np.log(numbers[finite & (numbers > 0)])) if log else np.ptp(numbers[finite])
    allowed = numbers[finite] * width / 65531 if log else width / 65532
    assert (np.abs(again[finite] - numbers[finite]) <= allowed * 0.51).all()
    np.testing.assert_array_equal(again[~finite], numbers[~finite])
    assert not log or again[0, 0] == 0


@pytest.mark.parametrize("value", [0.0, 3.5, np.nan])
def test_cells_that_are_all_alike_decode_too(value):
    for log in (False, True):
        np.testing.assert_allclose(decode(encode(np.full((2, 3), value), log), 2), np.full((2, 3), value))


def test_a_cell_is_its_layers_number_at_its_step():
    series = run(layers=14, looks=9)
    values, found = cells(series, "casts.sqnr_db", 2)
    assert (found["role"], [layers_of(series)[row] for row in found["rows"]]) == ("grad_output", paths(14))
    table = series.casts.of("sqnr_db")
    for row, path in enumerate(paths(14)):
        column = series.casts.keys.index(CastKey(path, "grad_output", "grad_input"))
        np.testing.assert_allclose(values[row], table[:, column], atol=1e-3)


def test_parameters_stand_in_their_layers_rows():
    series = run(layers=14, looks=3)
    _, found = cells(series, "parameters.update_ratio")
    assert [layers_of(series)[row] for row in found["rows"]] == paths(14)


def test_casts_that_only_some_layers_make_get_their_own_map():
    numbers = np.ones(len(CAST_FIELDS))
    keys = [
        ("a", "input", "output"),
        ("b", "input", "output"),
        ("b", "input", "grad_weight"),
        ("a", "grad_output", "grad_weight"),
    ]
    sample = Sample(step=1, casts={CastKey(*key): numbers for key in keys}, products={}, parameters={})
    series = series_of([], [sample])
    found = sheets(series, statistic("casts.amax"), columns_of(series.casts.steps), layers_of(series))
    assert [(one["name"], one["rows"]) for one in found] == [
        ("input", [0, 1]), ("input, again for grad_weight", [1]), ("grad_output", [0]),
    ]  # fmt: skip


def test_scales_across_ranks_stand_by_role():
    sample = Sample(
        step=1,
        casts={CastKey("a b", "input", "output"): np.ones(len(CAST_FIELDS))},
        products={},
        parameters={},
        modules={"rank_scale_ratio": {"a b input output": 2.0, "a b weight output": 1.0}},
    )
    series = series_of([], [sample])
    found = sheets(series, statistic("modules.rank_scale_ratio"), columns_of(series.casts.steps), layers_of(series))
    assert [(one["name"], one["rows"]) for one in found] == [("input", [0]), ("weight", [0])]
    assert layers_of(series) == ["a b"]


def experts_series(noisy):
    """A layer beside two mixtures of three experts, whose expert ``noisy`` of the first has the lowest SQNR."""
    place, casts = CAST_FIELDS.index("sqnr_db"), {CastKey("head", "input", "output"): np.ones(len(CAST_FIELDS))}
    for mixture in ("0.experts", "1.experts"):
        for expert in range(3):
            for layer in ("up", "down"):
                numbers = np.full(len(CAST_FIELDS), 30.0 - expert)
                if (mixture, expert, layer) == ("0.experts", noisy, "down"):
                    numbers[place] = -np.inf
                casts[CastKey(f"{mixture}.{expert}.{layer}", "input", "output")] = numbers
    modules = {"worst_expert": {"0.experts": float(noisy), "1.experts": 2.0, "fused.experts": 0.0}}
    return series_of([], [Sample(step=1, casts=casts, products={}, parameters={}, modules=modules)])


def test_of_experts_with_layers_of_their_own_the_worst_and_the_named_have_rows():
    series = experts_series(noisy=0)
    mixtures = ["0.experts", "1.experts", "fused.experts"]
    shown = ["head", "0.experts.0.up", "0.experts.0.down", "1.experts.2.up", "1.experts.2.down", *mixtures]
    assert layers_of(series) == shown
    assert other_experts(series) == {"0.experts.1", "0.experts.2", "1.experts.0", "1.experts.1"}
    named = layers_of(series, ["1.experts.1.up", "head"])
    assert set(named) - set(shown) == {"1.experts.1.up", "1.experts.1.down"}
    found = sheets(series, statistic("casts.sqnr_db"), columns_of(series.casts.steps), shown)[0]
    assert found["rows"] == [0, 1, 2, 3, 4]
    assert decode(found, 5)[2, 0] == -np.inf


def test_statistic_without_values_has_no_map():
    casts = {CastKey("a", "input", "output"): np.full(len(CAST_FIELDS), np.nan)}
    sample = Sample(step=1, casts=casts, products={}, parameters={})
    series = series_of([], [sample])
    assert sheets(series, statistic("casts.amax"), columns_of(series.casts.steps), layers_of(series)) == []


def test_every_field_can_be_shown_and_every_code_has_its_statistic():
    of_modules = [
        "alignment",
        "attention_divergence",
        "attention_gradient_imbalance",
        "attention_logit",
        "batch_norm",
        "batch_norm_rows",
        "rank_scale_ratio",
        "least_expert_share",
        "idle_experts",
    ]
    named = {one.name for one in all_statistics(Thresholds(), of_modules)}
    assert {f"casts.{field}" for field in CAST_FIELDS} <= named
    assert {name for names in STATISTIC_OF_CODE.values() for name in names} <= named
    of_the_run = {"checkpoint", "memory", "nondeterministic"}
    of_the_loss = {"divergence", "loss-gap", "loss-scale", "loss-spike", "stalled-loss"}
    assert CAUSES.keys() - STATISTIC_OF_CODE.keys() == of_the_run | of_the_loss
