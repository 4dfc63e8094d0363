"""What ``octavo doctor RUN`` prints of a run, how it ends, and which folders it refuses."""

import dataclasses
import importlib
import json
import shutil

import pytest
import torch

from octavo import recipes
from octavo.doctor import Capture, Captures, Severity
from octavo.training.config import load_config
from octavo.training.run_folder import CAPTURES


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


def with_loss(run, target, factor):
    """A BF16 run of the same configuration whose losses are ``factor`` of the run's."""
    shutil.copytree(run, target)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        line | ({"loss": line["loss"] * factor} if "loss" in line else {})
        for line in lines
        if line["kind"] in ("step", "evaluation")
    ]
    (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    config = (target / "config.toml").read_text()
    (target / "config.toml").write_text(config.replace('recipe = "tensorwise"', 'recipe = "bf16"'))
    return target


def test_the_loss_is_compared_with_a_reference(octavo, run, tmp_path, monkeypatch):
    module = importlib.import_module("octavo.doctor.diagnose")
    compared = []

    def gap(series, reference, _limits):
        compared.append(float((series.curve("loss")[1] / reference.curve("loss")[1]).max()))
        return iter(())

    monkeypatch.setattr(module, "loss_gap", gap)
    reference = with_loss(run, tmp_path / "bf16", 0.5)
    result = octavo("doctor", run, "--against", reference, "--json")
    assert json.loads(result.stdout)["against"] == str(reference)
    assert compared == [pytest.approx(2.0)]


OTHERWISE = {
    "it has training.seed = 1, not 0": ("seed = 0", "seed = 1"),
    "it has model.hidden_size = 64, not 32": ("hidden_size = 32", "hidden_size = 64"),
}


@pytest.mark.parametrize("words", OTHERWISE)
def test_a_reference_that_trained_otherwise_is_refused(octavo, run, tmp_path, words):
    reference = with_loss(run, tmp_path / "bf16", 1.0)
    config = (reference / "config.toml").read_text()
    (reference / "config.toml").write_text(config.replace(*OTHERWISE[words]))
    refused = refusal(octavo, run, "--against", reference)
    assert words in refused
    assert "--recipe bf16" in refused


def test_remedies_are_written_into_a_configuration_that_can_be_trained(octavo, run, tmp_path, finding_what, saturation):
    finding_what(dataclasses.replace(saturation, code="sensitive-module", role=""))
    fixed = tmp_path / "fixed.toml"
    result = octavo("doctor", run, "--apply", fixed)
    assert result.exit_code == 1
    before, after = load_config(run / "config.toml"), load_config(fixed)
    assert saturation.path in after.training.skip
    assert dataclasses.replace(after.training, skip=before.training.skip) == before.training
    assert "First remedies" in result.stdout
    assert str(fixed) in result.stderr


def test_a_note_changes_no_configuration(octavo, run, tmp_path, finding_what, saturation):
    finding_what(dataclasses.replace(saturation, severity=Severity.NOTE))
    result = octavo("doctor", run, "--apply", tmp_path / "fixed.toml")
    assert "is not written" in result.stderr
    assert not (tmp_path / "fixed.toml").exists()


def test_a_run_s_own_configuration_is_not_overwritten(octavo, run):
    assert "name another file" in refusal(octavo, run, "--apply", run / "config.toml")


def test_remedies_need_a_configuration(octavo, run, tmp_path):
    (run / "config.toml").unlink()
    assert "has none" in refusal(octavo, run, "--apply", tmp_path / "fixed.toml")


def test_a_captured_layer_s_remedies_are_replayed(octavo, run, finding_what, saturation):
    config = load_config(run / "config.toml")
    weight, x = torch.randn(64, 32), torch.randn(16, 32) * torch.logspace(-4, 4, 16)[:, None]
    capture = Capture(
        path=saturation.path,
        step=4,
        recipe=recipes.get(config.training.recipe),
        input=x,
        weight=weight,
        grad_output=torch.randn(16, 64),
    )
    Captures(run / CAPTURES).add(capture)
    finding_what(saturation)
    (finding,) = json.loads(octavo("doctor", run, "--json").stdout)["findings"]
    assert finding["remedies"][0]["error_removed"] > 0
    printed = octavo("doctor", run).stdout
    assert "%" in printed
    assert "(modelled)" in printed, "a CPU's seconds are no GPU's"
    page = run / "page.html"
    assert octavo("doctor", run, "--html", page).exit_code == 1
    assert "model.layers.0.mlp.up_proj · grad_output, step 4" in json_in(page.read_text())


@pytest.mark.parametrize("spoilt", [b"torn", None])
def test_a_capture_that_cannot_be_replayed_hides_nothing(octavo, run, finding_what, saturation, spoilt):
    """One that is torn, and one in which every token is NaN."""
    capture = Capture(
        path=saturation.path,
        step=4,
        recipe=recipes.get("tensorwise"),
        input=torch.full((4, 32), torch.nan),
        weight=torch.randn(64, 32),
        grad_output=torch.randn(4, 64),
    )
    file = Captures(run / CAPTURES).add(capture)
    assert file is not None
    if spoilt:
        file.write_bytes(spoilt)
    elsewhere = dataclasses.replace(saturation, path="model.layers.0.mlp.gate_proj")
    finding_what(saturation, elsewhere)
    result = octavo("doctor", run, "--json", "--html", run.parent / "page.html")
    assert result.exit_code == 1
    assert [one["path"] for one in json.loads(result.stdout)["findings"]] == [saturation.path, elsewhere.path]
    said = f"remedies of saturation at {saturation.path} are not ranked: "
    assert result.stderr.count(said) == 1
    assert (file.name if spoilt else "NaN or infinity in every token") in result.stderr
    assert "saturation" in (run.parent / "page.html").read_text()


def json_in(page) -> str:
    """The page's text with JSON's escapes undone."""
    return page.replace("\\u00b7", "·")


def test_a_page_of_a_healthy_run_is_written_with_its_reference(octavo, run, tmp_path):
    reference = with_loss(run, tmp_path / "bf16", 1.0)
    page = tmp_path / "page.html"
    result = octavo("doctor", run, "--against", reference, "--html", page)
    assert result.exit_code == 0, result.output
    assert str(page) in result.stderr
    assert "<title>" in page.read_text()
    assert "There is no reference run" not in page.read_text()


def test_a_page_that_cannot_be_written_is_refused(octavo, run, tmp_path):
    result = octavo("doctor", run, "--html", tmp_path / "no" / "page.html")
    assert result.exit_code == 2
    assert "no such file" in result.stderr
