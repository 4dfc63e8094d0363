"""The table's cells and the verdict, from a study with known answers."""

import pytest

from octavo.training import comparison, study_table
from tests.unit.training.synthetic_study import run, study


def cells(name, of=None, device="cpu"):
    rows = {row.name.split(",")[0]: row for row in study_table.rows(of or study(), device)}
    return next(row for key, row in rows.items() if key.startswith(name))


def test_every_row_has_a_cell_per_run():
    assert all(len(row.cells) == 3 for row in study_table.rows(study(), "cpu"))
    assert len(study_table.columns(study())) == 1 + 3 + 2


@pytest.mark.parametrize(
    ("row", "difference"),
    [
        ("Final perplexity", "+0.20 %"),
        ("Final loss", "+0.0020 ± 0.0000"),
        ("Gradient variance", "+4.9 %"),
        ("Tokens/s", "-50.0 %"),
    ],
)
def test_differences_are_fp8_against_bf16(row, difference):
    assert cells(row).difference == difference


@pytest.mark.parametrize(("device", "difference"), [("cpu", "–"), ("cuda", "+14.3 %")])
def test_peak_memory_has_a_difference_where_it_does_not_depend_on_the_order_of_the_runs(device, difference):
    later = run("tensorwise", 0.0, peak_memory_bytes=800 << 20)
    row = cells("Peak memory", study(run("fp32", 0.0), run("bf16", 0.0), later), device)
    assert row.cells == ("700", "700", "800")
    assert row.difference == difference


def test_the_target_note_names_the_step_that_the_target_is_read_at(monkeypatch):
    for module in (comparison, study_table):
        monkeypatch.setattr(module, "TARGET_FRACTION", 0.5)
    assert "after 200 of its 400 steps" in study_table.target_note(study())


def test_run_that_misses_the_target_is_marked_not_reached():
    slow = study(run("fp32", 0.0), run("bf16", 0.0), run("tensorwise", 1.0))
    row = cells("Steps", slow)
    assert row.cells[2] == "not reached"
    assert row.difference == "–"


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (0.0049, "0.0049 ± 0.0000 nats above BF16"),
        (0.0049, "within the bar"),
        (0.0051, "outside the bar"),
        (-0.01, "0.0100 ± 0.0000 nats below BF16"),
        (-0.01, "below BF16 on held-out text (-1.00 % perplexity), so it stays under the bar of 0.0050 nats, with one"),
    ],
)
def test_verdict_states_size_side_and_bar(offset, words):
    assert words in study_table.verdict(study(run("fp32", 0.0), run("bf16", 0.0), run("tensorwise", offset)))


def test_a_study_without_fp8_has_no_verdict_on_it():
    alone = study(run("fp32", 0.0))
    assert "no FP8 run" in study_table.verdict(alone)
    assert all(row.difference == "–" for row in study_table.rows(alone, "cuda"))


def test_study_table_notes_that_fp8_is_emulated_on_a_cpu():
    assert "emulated" in study_table.emulation_note("cpu")
    assert "emulated" not in study_table.emulation_note("cuda")


def test_a_cpu_says_why_peak_memory_has_no_difference():
    assert "includes memory left by earlier runs" in study_table.emulation_note("cpu")


@pytest.mark.parametrize(
    ("threads", "found"),
    [
        (((2,), (1,), (2,)), "FP32 2, BF16 1, FP8 tensorwise 2"),
        (((1, 2), (1, 2), (1, 2)), "FP32 1 and 2, BF16 1 and 2, FP8 tensorwise 1 and 2"),
        (((), (), ()), "FP32 unknown, BF16 unknown, FP8 tensorwise unknown"),
    ],
)
def test_speeds_on_unlike_threads_are_not_compared(threads, found):
    unlike = study(
        *(run(name, 0.0, threads=own) for name, own in zip(("fp32", "bf16", "tensorwise"), threads, strict=True))
    )
    row = cells("Tokens/s", unlike)
    assert row.cells == ("5,000 (–)",) * 3
    assert row.difference == "–"
    assert study_table.threads_note(unlike, "cpu") == (
        f"Tokens/s are not compared, because the numbers of CPU threads differ ({found})."
    )


def test_speeds_on_the_same_threads_or_on_a_gpu_are_compared():
    assert study_table.threads_note(study(), "cpu") is None
    assert cells("Tokens/s").cells[2] == "2,000 (0.40×)"
    unlike = study(run("fp32", 0.0), run("bf16", 0.0, threads=(1,)))
    assert study_table.threads_note(unlike, "cuda") is None
    assert cells("Tokens/s", unlike, "cuda").cells[1] == "5,000 (1.00×)"
