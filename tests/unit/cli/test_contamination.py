"""Text that training, a calibration or a tuning has read is told where a model is measured on it."""

import json

import pytest

from octavo.cli.contamination import default_split, readers_of, shares_read, warnings_of
from octavo.text.overlap import shared_share

FEW = ["--windows", 3, "--context", 16]


@pytest.fixture
def copied(text, tmp_path):
    """The text of ``finished_run`` under another name."""
    copy = tmp_path / "copy.txt"
    copy.write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    return copy


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--compare", "bf16", *FEW]], ids=["alone", "compared"])
def test_overlap_with_a_runs_training_text(octavo, finished_run, text, copied, more):
    """The text is compared, not its name."""
    record = json.loads(octavo("eval", finished_run, "--data", copied, *more, "--json").stdout)
    share = shared_share((str(text), "train"), (str(copied), "all"))
    assert record["read_before"] == {"the run's training": share}
    assert share > 0.5
    assert "is text of the run's training" in octavo("eval", finished_run, "--data", copied, *more).stdout
    record = json.loads(octavo("eval", finished_run, *more, "--json").stdout)
    assert (record["split"], record["read_before"]) == ("test", {"the run's training": 0})
    assert "warning" not in octavo("eval", finished_run, *more).stdout


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--compare", "bf16", *FEW]], ids=["alone", "compared"])
def test_missing_training_text_gives_a_warning(octavo, setting, copied, tmp_path, more):
    assert octavo("train", *setting, "--data", copied, "--out", tmp_path / "run").exit_code == 0
    other = tmp_path / "other.txt"
    other.write_text("Other text, of which this run knows nothing.\n" * 200)
    copied.unlink()
    found = octavo("eval", tmp_path / "run", "--data", other, *more)
    assert found.exit_code == 0, found.output
    assert "the text of the run's training no longer exists" in " ".join(found.stdout.split())
    record = json.loads(octavo("eval", tmp_path / "run", "--data", other, *more, "--json").stdout)
    assert record["read_before"] == {"the run's training": None}


@pytest.mark.long
def test_overlap_with_tuning_and_calibration_text(octavo, finished_run, text, copied, tmp_path):
    """Each of them: on the test split of their text if that is named, and with a warning if it is a copy."""
    options = ["--steps", 2, "--batch-size", 1, "--context", 16, "--eval-windows", 2, "--data", copied]
    assert octavo("qat", finished_run, "--out", tmp_path / "tuned", *options).exit_code == 0
    options = ["--samples", 8, "--context", 16, "--data", copied]
    assert octavo("calibrate", finished_run, "--out", tmp_path / "scales", *options).exit_code == 0
    given = ["--compare", "fp8-static,fp8-qat", "--qat", tmp_path / "tuned", "--calibration", tmp_path / "scales"]
    asked = ["eval", finished_run, *given, *FEW, "--data"]
    record = json.loads(octavo(*asked, copied, "--json").stdout)
    assert record["split"] == "test"
    assert record["read_before"]["the calibration"] == record["read_before"]["the tuning for FP8"] == 0
    alone = json.loads(octavo("eval", tmp_path / "tuned", *FEW, "--data", copied, "--json").stdout)
    assert (alone["split"], alone["read_before"]) == ("test", {"the tuning for FP8": 0})
    again = tmp_path / "again.txt"
    again.write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    said = octavo(*asked, again).stdout
    for name in ("the run's training", "the calibration", "the tuning for FP8"):
        assert f"is text of {name}" in said
    assert "is text of the tuning for FP8" in octavo("eval", tmp_path / "tuned", *FEW, "--data", again).stdout


@pytest.mark.long
def test_other_models_have_no_known_training_text(tmp_path):
    assert readers_of("model.gguf") == {}
    made_now = readers_of("model.gguf", calibrates=True)
    assert made_now == {"the calibration": ("library-sources", "train")}
    for readers in (made_now, {}):  # one text, whether something is calibrated or not
        assert default_split("model.gguf", readers, "language-topics") == "all"
        assert default_split("model.gguf", readers, "builtin") == "test"
        assert default_split("model.gguf", readers, "library-sources") == "test"
    shares = shares_read(made_now, "language-topics", "all")
    assert shares["the calibration"] == pytest.approx(0, abs=0.02)
    assert list(warnings_of(shares, "language-topics", "all")) == []
