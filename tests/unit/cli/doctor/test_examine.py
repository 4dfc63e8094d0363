"""What ``octavo doctor RUN`` prints of a run, how it ends, and which folders it refuses."""

import dataclasses
import importlib
import json
import re
import shlex
import shutil

import numpy as np
import pytest
import torch

from octavo import recipes
from octavo.doctor import Capture, Captures, Severity
from octavo.text.corpus import Split
from octavo.text.tokens import open_data
from octavo.training.config import load_config
from octavo.training.run_folder import CAPTURES
from octavo.training.watched_run import read_run


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy to break: as an octavo wrote it that knew no checksums, so that what breaks is not seen by them."""
    copy = shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("step-*"))
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("".join(re.sub(', "sha256": "[^"]*"}$', "}\n", line) for line in lines))
    return copy


def refusal(octavo, *arguments) -> str:
    result = octavo("doctor", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def test_healthy_run_prints_coverage_and_exits_0(octavo, finished_run, finding_what):
    finding_what()
    result = octavo("doctor", finished_run)
    assert result.exit_code == 0
    assert result.stdout.strip() == "healthy: nothing found in 7 layers, sampled once up to step 4"


def test_findings_are_printed_worst_first_with_their_evidence(octavo, finished_run, finding_what, saturation):
    note = dataclasses.replace(saturation, code="zero-tensor", severity=Severity.NOTE, path="model.layers.0.mlp")
    finding_what(note, saturation)
    result = octavo("doctor", finished_run)
    assert result.exit_code == 1
    printed = " ".join(result.stdout.split())
    assert printed.index("fail saturation") < printed.index("note zero-tensor")
    assert "saturation fraction 0.21" in printed
    assert "1-4" in printed
    assert "1 fail, 1 note, in 7 layers, sampled once" in printed


@pytest.mark.parametrize("severity", Severity)
def test_only_a_failing_finding_ends_with_1(octavo, finished_run, finding_what, saturation, severity):
    finding_what(dataclasses.replace(saturation, severity=severity))
    assert octavo("doctor", finished_run).exit_code == (1 if severity == "fail" else 0)


def test_json_holds_the_same(octavo, finished_run, finding_what, saturation):
    finding_what(saturation)
    result = octavo("doctor", finished_run, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {key: found[key] for key in ("step", "steps", "samples", "layers")} == {
        "step": 4, "steps": 4, "samples": 1, "layers": 7,
    }  # fmt: skip
    (finding,) = found["findings"]
    assert finding["severity"] == "fail"
    assert finding["evidence"] == {"saturation_fraction": 0.21}


def test_a_real_short_run_fails_nothing(octavo, finished_run):
    assert octavo("doctor", finished_run).exit_code == 0


def test_running_run_is_read_up_to_its_last_complete_line(octavo, run, finding_what):
    finding_what()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    third = next(index for index, line in enumerate(lines) if '"step": 3' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: third + 1]) + lines[third + 1][:7])
    assert "up to step 3 of 4" in octavo("doctor", run).stdout


def test_a_folder_without_a_run_is_refused(octavo, tmp_path):
    assert "holds no run" in refusal(octavo, tmp_path)


def test_a_study_is_refused_with_the_names_of_its_runs(octavo, run):
    assert "is a folder of runs" in refusal(octavo, run.parent)


def test_a_run_without_a_step_is_refused(octavo, run):
    (run / "metrics.jsonl").write_text('{"kind": "evaluation", "step": 0, "nats": 5.7, "perplexity": 300}\n')
    assert "has finished no step yet" in refusal(octavo, run)


def test_half_a_line_in_the_middle_is_refused_by_number(octavo, run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], lines[1][:9] + "\n", *lines[2:]]))
    assert "line 2 of" in refusal(octavo, run)


FAILURE = '{"kind": "failure", "step": 1, "loss": null, "grad_norm": null, "tensor": null}\n'


def test_a_run_that_only_failed_is_refused_in_words(octavo, run):
    (run / "metrics.jsonl").write_text(FAILURE)
    assert "it was never sampled" in refusal(octavo, run)


@pytest.mark.parametrize("name", ["loss", "step", "tokens"])
def test_a_number_beyond_every_float_is_refused_by_its_line(octavo, run, name):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    index = next(index for index, line in enumerate(lines) if line["kind"] == "step")
    lines[index][name] = 10**400
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"line {index + 1} of" in refusal(octavo, run, "--html", run / "page.html")


@pytest.mark.parametrize("value", [None, 0, 1e-300, 1e308])
def test_numbers_of_any_size_are_read_without_a_warning(octavo, run, value, recwarn):
    """Quotients of such are no numbers; what the run is worth is then for the rules to say."""
    text = (run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        for table in (line, line.get("casts"), line.get("products"), line.get("parameters")):
            for name, old in table.items() if isinstance(table, dict) and line["kind"] != "watched" else ():
                if isinstance(old, float):
                    table[name] = value
                elif isinstance(old, list):
                    table[name] = [value for _ in old]
    many = [line | {"step": 10 * look} for look in range(1, 5) for line in lines if line["kind"] == "statistics"]
    head = [line for line in lines if line["kind"] != "statistics"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*head, *many]))
    result = octavo("doctor", run, "--html", run / "page.html")
    assert result.exit_code in {0, 1}, result.output
    assert [str(one.message) for one in recwarn] == []
    assert "nan" not in result.stdout.lower().replace("nan or", "")


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"\0\0\0\n", b'{"step": 3}\n'])
def test_bytes_that_are_no_lines_are_refused_by_number(octavo, run, garbage):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(garbage)
    assert re.search(r"is not a line of a run \(.+\); put the file back", refusal(octavo, run))


def test_statistics_of_another_model_are_refused(octavo, run):
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("intermediate_size = 64", "intermediate_size = 96"))
    words = refusal(octavo, run)
    assert "are another model's" in words
    assert "'model.layers.0.mlp.gate_proj' from 32 to 64 features" in words


def edit(run, change) -> None:
    """Let ``change`` work on the lines of a run's file."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change(lines)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("table", ["casts", "products"])
def test_statistics_of_renamed_layers_are_refused(octavo, run, table):
    def rename(lines):
        for line in lines:
            if line["kind"] == "watched":
                line[table] = [[path.replace("mlp", "ffn"), *others] for path, *others in line[table]]

    edit(run, rename)
    words = refusal(octavo, run)
    assert "are another model's" in words
    assert "has no layer 'model.layers.0.ffn.gate_proj'" in words


def test_repeated_statistics_are_refused(octavo, run):
    edit(run, lambda lines: lines.extend([line for line in lines if line["kind"] == "statistics"]))
    assert "has step 1 after step 4: two runs wrote" in refusal(octavo, run)


@pytest.mark.parametrize("kind", ["overflow", "failure"])
def test_an_edited_event_is_refused(octavo, run, kind):
    edit(run, lambda lines: lines.append({"kind": kind, "step": 4, "loss_scale": "large"}))
    assert f"the {kind} line of step 4 has loss_scale = 'large'" in refusal(octavo, run)
    edit(run, lambda lines: lines.append({"kind": "overflow", "step": lines.pop()["step"]}))
    assert "the overflow line of step 4 has no loss_scale" in refusal(octavo, run)


def test_statistics_that_do_not_fit_their_names_are_refused(octavo, run):
    edit(run, lambda lines: [line["casts"].pop() for line in lines if line["kind"] == "watched"])
    assert "do not match the names before them" in refusal(octavo, run)


def test_facts_of_a_layer_that_no_run_writes_are_refused(octavo, run):
    def edit_facts(lines):
        facts = next(line for line in lines if line["kind"] == "watched")["layers"]
        for cast in next(iter(facts.values()))["casts"].values():
            cast["margin"] = "a"

    edit(run, edit_facts)
    assert "margin is 'a'" in refusal(octavo, run)


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


def test_gap_is_always_printed(octavo, run, tmp_path, finding_what):
    finding_what()
    reference = with_loss(run, tmp_path / "bf16", 1.25)
    steps = {
        line["step"]: line["loss"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "step"
    }
    mean = (steps[3] + steps[4]) / 2  # the newest third of four
    result = octavo("doctor", run, "--against", reference)
    error = abs(steps[3] - steps[4]) / 4 / 2  # of two differences, each a quarter of the loss
    assert f"the loss is 20.00% ({mean / 4:.3g} ± {error:.2g} nats) below that of {reference}" in result.stdout
    assert "averaged over steps 3-4; held out, 0 nats above\n" in result.stdout
    gap = json.loads(octavo("doctor", run, "--against", reference, "--json").stdout)["gap"]
    expected = {"relative": -0.2, "nats": -mean / 4, "standard_error": error, "held_out": 0, "first_step": 3}
    assert gap == pytest.approx(expected | {"last_step": 4})
    assert json.loads(octavo("doctor", run, "--json").stdout)["gap"] is None
    kept = [line for line in (reference / "metrics.jsonl").read_text().splitlines() if '"evaluation"' in line]
    (reference / "metrics.jsonl").write_text(kept[0] + "\n" + '{"kind": "step", "step": 0, "loss": 5.0}\n')
    assert "the runs have no step in common" in octavo("doctor", run, "--against", reference).stdout


def test_a_reference_is_another_run(octavo, run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    for reference in (run, tmp_path / "link"):
        assert "is the run itself and no reference" in refusal(octavo, run, "--against", reference)


@pytest.mark.parametrize("has_config", [True, False])
def test_a_reference_casts_nothing_to_fp8(octavo, run, tmp_path, has_config):
    reference = shutil.copytree(run, tmp_path / "other")
    if not has_config:
        (reference / "config.toml").unlink()
        (run / "config.toml").unlink()
    words = refusal(octavo, run, "--against", reference)
    assert "is no reference: it casts to FP8 too" in words
    assert ("(recipe = 'tensorwise')" in words) is has_config
    assert ("octavo train --config" in words) is has_config


def test_a_run_before_its_fp8_phase_is_not_called_healthy(octavo, setting, tmp_path):
    run = tmp_path / "run"
    result = octavo("train", *setting, "--schedule", "bf16:0.0,fp8:0.5", "--out", run)
    assert result.exit_code == 0, result.output
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    second = next(index for index, line in enumerate(lines) if '"kind": "step", "step": 2' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: second + 1]))
    shutil.rmtree(run / "checkpoints")  # it has saved none at step 2
    result = octavo("doctor", run)
    assert result.exit_code == 0
    assert result.stdout.strip() == (
        "no layer has used FP8 up to step 2 of 4, so there is nothing to judge yet; FP8 begins at step 3"
    )


FP8_ONLY = {
    "autopilot = false": "autopilot = true",
    'recipe = "tensorwise"': 'recipe = "delayed"',
    "precision_schedule = []": 'precision_schedule = [["fp8", 0.0], ["bf16", 0.5]]',
    "[training.recipe_options]": "[training.recipe_options]\nhistory_length = 4",
    "[training.overrides]": '[training.overrides]\n"model.layers.0.mlp.*" = "rowwise"',
}


def test_the_advised_command_trains_a_reference(octavo, run, tmp_path):
    config = (run / "config.toml").read_text()
    for before, after in FP8_ONLY.items():
        assert config.count(before) == 1, before
        config = config.replace(before, after)
    (run / "config.toml").write_text(config)
    stranger = with_loss(run, tmp_path / "of another seed", 1.0)
    (stranger / "config.toml").write_text(config.replace("seed = 0", "seed = 1"))
    refused = refusal(octavo, run, "--against", stranger)
    _, *command = shlex.split(refused.partition("train one with ")[2])
    result = octavo(*command)
    assert result.exit_code == 0, result.output
    assert octavo("doctor", run, "--against", command[-1]).exit_code == 0


def test_remedies_are_written_into_a_configuration_that_can_be_trained(octavo, run, tmp_path, finding_what, saturation):
    finding_what(dataclasses.replace(saturation, code="sensitive-module", role=""))
    fixed = tmp_path / "a fixed one.toml"
    result = octavo("doctor", run, "--apply", fixed)
    assert result.exit_code == 1
    before, after = load_config(run / "config.toml"), load_config(fixed)
    assert saturation.path in after.training.skip
    assert dataclasses.replace(after.training, skip=before.training.skip) == before.training
    assert "First remedies" in result.stdout
    assert str(fixed) in result.stderr
    folders = []
    for _ in range(2):  # beside the run, and then beside that one
        said = octavo("doctor", run, "--apply", fixed).stderr.strip().splitlines()[-1]
        _, *command = shlex.split(said.partition("train with: ")[2])
        assert octavo(*command).exit_code == 0, said
        folders.append(command[-1])
    assert folders == [f"{run}-fixed", f"{run}-fixed1"]


def test_the_remedy_of_a_gap_is_applied_only_without_another(octavo, run, tmp_path, finding_what, saturation):
    gap, fixed = dataclasses.replace(saturation, code="loss-gap", path="", role=""), tmp_path / "fixed.toml"
    finding_what(gap, dataclasses.replace(saturation, severity=Severity.WARN))
    result = octavo("doctor", run, "--apply", fixed)
    assert "fail loss-gap" in " ".join(result.stdout.split())
    assert "has the first remedies of saturation; train with" in result.stderr
    before, after = load_config(run / "config.toml").training, load_config(fixed).training
    assert (after.recipe, list(after.overrides)) == (before.recipe, [saturation.path])
    finding_what(gap)
    assert "has the first remedies of loss-gap; train with" in octavo("doctor", run, "--apply", fixed).stderr
    assert (load_config(fixed).training.recipe, load_config(fixed).training.overrides) == ("rowwise", {})


def test_a_note_changes_no_configuration(octavo, run, tmp_path, finding_what, saturation):
    finding_what(dataclasses.replace(saturation, severity=Severity.NOTE))
    result = octavo("doctor", run, "--apply", tmp_path / "fixed.toml")
    assert "was not written" in result.stderr
    assert not (tmp_path / "fixed.toml").exists()


OWN = [
    ("--apply", "config.toml"), ("--html", "config.toml"), ("--html", "metrics.jsonl"), ("--html", "tokenizer.json"),
    ("--html", "checkpoints/page.html"), ("--apply", "fixed.toml"),
]  # fmt: skip


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("place", ["run", "bf16", "link"])
def test_files_of_a_run_are_not_overwritten(octavo, run, tmp_path, own, place):
    option, name = own
    reference = with_loss(run, tmp_path / "bf16", 1.0)
    (tmp_path / "link").symlink_to(run)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = refusal(octavo, run, "--against", reference, option, tmp_path / place / name)
    assert f"{option}: '{tmp_path / place / name}' is inside" in refused
    assert "name another file" in refused
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_file_is_not_written_twice(octavo, run, tmp_path):
    words = refusal(octavo, run, "--html", tmp_path / "x", "--apply", tmp_path / "." / "x")
    assert "--html and --apply both name" in words
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("option", ["--against", "--apply", "--html"])
def test_env_takes_no_run_options(octavo, tmp_path, option):
    assert f"--env cannot be combined with {option}" in refusal(octavo, "--env", option, tmp_path / "x")


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
def test_unreadable_capture_keeps_the_finding(octavo, run, finding_what, saturation, spoilt):
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


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_computed(octavo, run, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.cli.doctor.examine.diagnose", None)
    assert "--html: there is no folder" in refusal(octavo, run, "--html", tmp_path / "no" / "page.html")
    assert "is a folder" in refusal(octavo, run, "--apply", tmp_path)


def test_the_unigram_entropy_is_that_of_the_runs_own_tokens(run, tmp_path):
    tokens = np.asarray(open_data(run / "data").splits[Split.TRAIN])
    shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
    expected = pytest.approx(-float((shares * np.log(shares)).sum()))
    assert read_run(run).series.unigram_nats == expected
    (run / "data").rename(tmp_path / "data")  # where a study has them
    assert read_run(run).series.unigram_nats == expected
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert read_run(run).series.unigram_nats is None
