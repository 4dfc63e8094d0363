"""What ``octavo doctor RUN`` prints of a run, how it ends, and which folders it refuses."""

import dataclasses
import json
import shutil

import pytest

from octavo.doctor import Severity


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy to break."""
    return shutil.copytree(finished_run, tmp_path / "run")


def refusal(octavo, *arguments) -> str:
    result = octavo("doctor", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def test_a_healthy_run_says_what_was_looked_at_and_ends_with_0(octavo, finished_run, finding_what):
    finding_what()
    result = octavo("doctor", finished_run)
    assert result.exit_code == 0
    assert result.stdout.strip() == "healthy: nothing found in 7 layers, looked at once up to step 4"


def test_findings_are_printed_worst_first_with_their_evidence(octavo, finished_run, finding_what, saturation):
    note = dataclasses.replace(saturation, code="zero-tensor", severity=Severity.NOTE, path="model.layers.0.mlp")
    finding_what(note, saturation)
    result = octavo("doctor", finished_run)
    assert result.exit_code == 1
    printed = " ".join(result.stdout.split())
    assert printed.index("fail saturation") < printed.index("note zero-tensor")
    assert "saturation fraction 0.21" in printed
    assert "1-4" in printed
    assert "1 fail, 1 note, in 7 layers, looked at once" in printed


@pytest.mark.parametrize("severity", Severity)
def test_only_a_failing_finding_ends_with_1(octavo, finished_run, finding_what, saturation, severity):
    finding_what(dataclasses.replace(saturation, severity=severity))
    assert octavo("doctor", finished_run).exit_code == (1 if severity == "fail" else 0)


def test_json_holds_the_same(octavo, finished_run, finding_what, saturation):
    finding_what(saturation)
    result = octavo("doctor", finished_run, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {key: found[key] for key in ("step", "steps", "looks", "layers")} == {
        "step": 4, "steps": 4, "looks": 1, "layers": 7,
    }  # fmt: skip
    (finding,) = found["findings"]
    assert finding["severity"] == "fail"
    assert finding["evidence"] == {"saturation_fraction": 0.21}


def test_a_real_short_run_fails_nothing(octavo, finished_run):
    assert octavo("doctor", finished_run).exit_code == 0


def test_a_running_run_is_read_up_to_its_last_whole_line(octavo, run, finding_what):
    finding_what()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    third = next(index for index, line in enumerate(lines) if '"step": 3' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: third + 1]) + lines[third + 1][:7])
    assert "up to step 3 of 4" in octavo("doctor", run).stdout


def test_a_folder_without_a_run_is_refused(octavo, tmp_path):
    assert "holds no run" in refusal(octavo, tmp_path)


def test_a_study_is_refused_with_the_names_of_its_runs(octavo, run):
    assert "holds a study" in refusal(octavo, run.parent)


def test_a_run_without_a_step_is_refused(octavo, run):
    (run / "metrics.jsonl").write_text('{"kind": "evaluation", "step": 0, "nats": 5.7, "perplexity": 300}\n')
    assert "has finished no step yet" in refusal(octavo, run)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('recipe = "tensorwise"', 'recipe = "bf16"', "casts nothing to FP8"),
        ("statistics_interval = 10", "statistics_interval = 0", "its statistics_interval is 0; set it to 10"),
        ("", "", "it was not looked at"),
    ],
)
def test_a_run_without_statistics_is_refused_with_how_to_get_them(octavo, run, before, after, words):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] in ("step", "evaluation")]
    (run / "metrics.jsonl").write_text("".join(kept))
    config = (run / "config.toml").read_text()
    assert before in config
    (run / "config.toml").write_text(config.replace(before, after))
    assert words in refusal(octavo, run)


def test_half_a_line_in_the_middle_is_refused_by_number(octavo, run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], lines[1][:9] + "\n", *lines[2:]]))
    assert "line 2 of" in refusal(octavo, run)


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"\0\0\0\n", b'{"step": 3}\n'])
def test_bytes_that_are_no_lines_are_refused_by_number(octavo, run, garbage):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(garbage)
    assert "is not a run's; remove the line" in refusal(octavo, run)


def test_statistics_of_another_model_are_refused(octavo, run):
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("intermediate_size = 64", "intermediate_size = 96"))
    words = refusal(octavo, run)
    assert "are another model's" in words
    assert "'model.layers.0.mlp.gate_proj' from 32 to 64 features" in words


def test_statistics_that_do_not_fit_their_names_are_refused(octavo, run):
    text = (run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if line["kind"] == "watched":
            line["casts"] = line["casts"][:-1]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "do not fit the names before them" in refusal(octavo, run)


def test_a_folder_that_another_loop_wrote_needs_no_configuration(octavo, run, finding_what):
    finding_what()
    (run / "config.toml").unlink()
    result = octavo("doctor", run)
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("up to step 4")
