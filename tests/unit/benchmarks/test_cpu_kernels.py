"""The bars of the CPU kernels' benchmark, judged on made-up times; and that all it names is there and runs."""

import sys

import pytest
import torch

from benchmarks import cpu_kernels
from benchmarks.cpu_kernels import Bound, Contestant
from octavo.kernels import native_bindings

ENTERED = {
    "read": Contestant(list, 8.0),
    "copy": Contestant(list, 12.0),
    "cast": Contestant(list, 12.0, bounds=(Bound(("copy",), 0.85), Bound(("read", "copy"), 0.8))),
    "finer": Contestant(list, 12.0, bounds=(Bound(("copy",)),)),
    "sums": Contestant(list, 5000.0, "million MAC/s", least=2000.0),
}
SECONDS = {
    "read": [1.0, 2.0, 1.0],
    "copy": [2.0, 4.0, 2.0],
    "cast": [4.0, 8.0, 4.0],
    "finer": [2.5] * 3,
    "sums": [2.5] * 3,
}
needs_extension = pytest.mark.skipif(
    bool(native_bindings.why_absent()), reason=f"no native kernels: {native_bindings.why_absent()}"
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "SHAPE", (128, 256))
    monkeypatch.setattr(cpu_kernels, "GEMMS", ((4, 64, 32),))
    monkeypatch.setattr(cpu_kernels, "ROW_WIDTH", 64)
    monkeypatch.setattr(cpu_kernels, "HOPPER_SIDE", 32)


def test_every_comparison_has_a_row_and_every_bar_a_verdict():
    rows = list(cpu_kernels.result_rows(ENTERED, SECONDS))
    assert rows == [
        ["read", "8.0 GB/s", "", "", "", ""],
        ["copy", "6.0 GB/s", "", "", "", ""],
        ["cast", "3.0 GB/s", "copy", "0.50 (0.50–0.50)", "0.85", "missed"],
        ["cast", "3.0 GB/s", "read, then copy", "0.75 (0.75–0.75)", "0.8", "missed"],
        ["finer", "4.8 GB/s", "copy", "0.80 (0.80–1.60)", "", ""],
        ["sums", "2,000.0 million MAC/s", "", "", "2,000 million MAC/s", "met"],
    ]


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "met"), (1.01, "missed")])
def test_a_bar_is_met_by_what_reaches_it(seconds, verdict):
    cast = Contestant(list, 1.0, bounds=(Bound(("copy",), 1.0),))
    *_, row = cpu_kernels.result_rows({"cast": cast}, {"copy": [1.0] * 2, "cast": [seconds] * 2})
    assert row[-1] == verdict


@needs_extension
@pytest.mark.parametrize("rounds", [2, 7])
def test_the_result_names_the_command_and_counts_the_bars(monkeypatch, rounds, written):
    monkeypatch.setattr(sys, "argv", ["cpu_kernels", "--rounds", str(rounds)])
    monkeypatch.setattr(cpu_kernels, "contestants", lambda: ENTERED)
    monkeypatch.setattr(cpu_kernels, "interleaved", lambda _, rounds: SECONDS)
    cpu_kernels.main()
    lines = written()
    assert lines[2].startswith(f"`python -m benchmarks.cpu_kernels --rounds {rounds}`, ")
    assert lines[4].endswith(f"kernels for {native_bindings.levels()[-1]}")
    assert f"Median of {rounds} interleaved rounds" in lines[-1]
    assert "1 of 3 bars met." in lines


def test_without_native_kernels_it_refuses(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cpu_kernels"])
    monkeypatch.setattr(native_bindings, "_absence", "not built")
    with pytest.raises(SystemExit):
        cpu_kernels.main()
    assert "no native kernels to time: not built" in capsys.readouterr().err


@needs_extension
@pytest.mark.usefixtures("small")
def test_every_call_of_a_bar_is_timed_and_runs():
    entered = cpu_kernels.contestants()
    rows = list(cpu_kernels.result_rows(entered, {name: [1.0, 1.0] for name in entered}))
    assert sum(bool(row[-1]) for row in rows) == 9 * len(cpu_kernels.DTYPES) + len(cpu_kernels.GEMMS) + 2 + 2
    for name, entry in entered.items():
        if "torch.compile" not in name:
            entry.run()


@needs_extension
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES, ids=str)
def test_copy_moves_as_many_bytes_as_a_cast(dtype):
    work = {name: entry.work for name, entry in cpu_kernels.contestants().items()}
    short = str(dtype).removeprefix("torch.")
    for kind in ("given", "fresh"):
        copied = work[cpu_kernels.COPY.format(short, kind)]
        assert copied == work[f"quantize {short}, amax known, {kind}"] == work[f"dequantize {short}, {kind}"]
        assert copied == 128 * 256 * (1 + torch.empty(0, dtype=dtype).element_size()) / 1e9
