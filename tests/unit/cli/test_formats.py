"""The format table against numpy's and ml_dtypes' own tables: nothing octavo computed is compared with itself."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

PEERS: dict[str, Any] = {
    "FP32": np.finfo(np.float32),
    "FP16": np.finfo(np.float16),
    "BF16": ml_dtypes.finfo(ml_dtypes.bfloat16),
    "E4M3": ml_dtypes.finfo(ml_dtypes.float8_e4m3fn),
    "E5M2": ml_dtypes.finfo(ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize("name", PEERS)
def test_json_rows_equal_numpy_and_ml_dtypes(octavo, name):
    records = {record["name"]: record for record in json.loads(octavo("formats", "--json").stdout)["formats"]}
    row, peer = records[name], PEERS[name]
    assert row["bits"] == peer.bits
    assert row["max"] == float(peer.max)
    assert row["min_normal"] == float(peer.smallest_normal)
    assert row["min_subnormal"] == float(peer.smallest_subnormal)
    assert row["epsilon"] == float(peer.eps)


@pytest.mark.parametrize(
    ("name", "dtype"), [("E4M3", ml_dtypes.float8_e4m3fn), ("E5M2", ml_dtypes.float8_e5m2), ("FP16", np.float16)]
)
def test_distinct_values_equal_a_count_over_all_codes(octavo, name, dtype):
    records = {record["name"]: record for record in json.loads(octavo("formats", "--json").stdout)["formats"]}
    bits = np.dtype(dtype).itemsize * 8
    values = np.arange(1 << bits, dtype=f"uint{bits}").view(dtype).astype(np.float64)
    assert records[name]["distinct_values"] == len(np.unique(values[np.isfinite(values)]))


def test_table_names_every_everyday_format(octavo):
    printed = octavo("formats").stdout
    assert all(name in printed for name in ("FP32", "BF16", "FP16", "E4M3", "E5M2"))
    assert "FNUZ" not in printed
    assert "57,344" in printed


def test_all_adds_fnuz_variants_and_e8m0(octavo):
    printed = octavo("formats", "--all").stdout
    assert all(name in printed for name in ("E4M3_FNUZ", "E5M2_FNUZ", "E8M0"))


@pytest.mark.parametrize(
    "figure", ["65,504", "±448", "57,344", "0.00195", "1.53e-05", "240", "69 skipped", "7 in its top band", "3.9 times"]
)
def test_errata_state_the_true_figures(octavo, figure):
    records = json.loads(octavo("formats", "--errata", "--json").stdout)["errata"]
    assert any(figure in record["true"] for record in records)


def test_errata_table_sets_both_sides_next_to_each_other(octavo):
    line = next(line for line in octavo("formats", "--errata").stdout.splitlines() if "131K" in line)
    assert "57,344" in line


def test_an_unknown_option_is_a_usage_error(octavo):
    result = octavo("formats", "--nonsense")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
