"""What ``octavo doctor preflight`` prints of a configuration, of a run to be continued, and what it refuses."""

import dataclasses
import json
import shutil

import pytest

from octavo.experiments import Check

QUICK = ["--steps", "2"]


@pytest.fixture
def config(tiny, text, tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(tiny.read_text().replace("[data]", f'[data]\nsource = "{text}"'))
    return path


def test_a_healthy_configuration_can_start(octavo, config):
    result = octavo("doctor", "preflight", config, *QUICK)
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in ("checkpoint", "memory", "replay", "ranks", "shapes", "gap to BF16"))
    assert "bit for bit" in result.stdout
    assert result.stdout.strip().endswith("the run can start")


def test_json_holds_every_check(octavo, config):
    checks = json.loads(octavo("doctor", "preflight", config, *QUICK, "--json").stdout)["checks"]
    assert [check["name"] for check in checks][:3] == ["checkpoint", "memory", "replay"]
    assert all(check["findings"] == [] for check in checks if check["name"] != "shapes")


@pytest.mark.long
def test_a_run_s_checkpoint_is_tried_and_a_damaged_one_fails(octavo, finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    assert "step 4 loads" in octavo("doctor", "preflight", run, *QUICK).stdout
    file = next((run / "checkpoints").glob("*/model.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    result = octavo("doctor", "preflight", run, *QUICK)
    assert result.exit_code == 1
    printed = " ".join(result.stdout.split())
    assert "fail checkpoint" in printed
    assert "not ready" in printed


def test_findings_and_their_remedies_are_printed(octavo, config, monkeypatch, saturation):
    finding = dataclasses.replace(saturation, code="nondeterministic")
    check = Check(name="replay", said="they differ", findings=(finding,))
    monkeypatch.setattr("octavo.cli.doctor.preflight.try_out", lambda *_, **__: iter([check]))
    result = octavo("doctor", "preflight", config)
    assert result.exit_code == 1
    assert "1 fail" in result.stdout
    assert "saturation fraction 0.21" in " ".join(result.stdout.split())


@pytest.mark.parametrize("option", ["--steps", "--orders"])
def test_too_small_a_number_is_refused_before_a_text_is_read(octavo, config, monkeypatch, option):
    monkeypatch.setattr("octavo.cli.doctor.preflight.preparing", lambda *_, **__: pytest.fail("a text is read"))
    assert octavo("doctor", "preflight", config, option, "1").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], "cannot read the configuration"),
        (["CONFIG", "--orders", "1"], "orders must be a whole number of at least 2"),
        (["CONFIG", "--steps", "1"], "steps must be a whole number of at least 2"),
        (["CONFIG", "--data", "nowhere"], "nowhere"),
        (["."], "cannot read the configuration"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(octavo, config, tmp_path, monkeypatch, arguments, words):  # noqa: PLR0917 (fixtures)
    monkeypatch.chdir(tmp_path)
    result = octavo("doctor", "preflight", *[config if word == "CONFIG" else word for word in arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
