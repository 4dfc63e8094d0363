"""``octavo doctor`` on a run whose files were changed after it wrote them."""

import shutil

import pytest

from tests.unit.cli.doctor.test_examine import refusal


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "state"])
def test_numbers_that_were_changed_are_not_diagnosed(octavo, finished_run, tmp_path, damage):
    run = shutil.copytree(finished_run, tmp_path / "run")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    match damage:
        case "changed":
            metrics.write_text("".join(lines).replace('"loss": ', '"loss": 1', 1))
            assert f"line 2 of '{metrics}' was changed" in refusal(octavo, run)
        case "cut":
            metrics.write_text("".join(lines[:-1]))
            assert f"'{metrics}' has {len(lines) - 1} lines, fewer than the {len(lines)}" in refusal(octavo, run)
        case "gone":
            metrics.write_text("")
            assert "has 0 lines, fewer than the" in refusal(octavo, run)
        case "state":
            state = run / "checkpoints" / "step-000004" / "state.json"
            state.write_text(state.read_text().replace('"step": 4', '"step": 3'))
            assert f"'{state}' is damaged: a value in it was changed" in refusal(octavo, run)
