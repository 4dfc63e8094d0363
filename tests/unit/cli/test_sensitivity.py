"""``octavo sensitivity`` on a finished run: a table, a mix that can be applied, a record, a page; or one sentence."""

import errno
import json
import os
import re
from types import SimpleNamespace as Usage

import pytest
from plotly.offline import get_plotlyjs_version

from octavo.checkpoints.merged_layers import of_several_schemes
from octavo.cli import sensitivity
from octavo.cli.sensitivity import _share
from octavo.language_model import load_language_model
from octavo.quantization import load_mix
from octavo.quantization.sensitivity.study import Sensitivity
from octavo.quantization.sensitivity.units import units_of
from octavo.reports.rendering import write_page

SCRIPT = f"plotly-{get_plotlyjs_version()}.min.js"


@pytest.fixture(scope="module")
def small(text):
    return ["--data", text, "--windows", 2, "--verify-windows", 2, "--pairs", 3]


@pytest.fixture
def on_run(octavo, finished_run, small):
    return lambda *arguments: octavo("sensitivity", finished_run, *small, *arguments)


@pytest.fixture(scope="module")
def studied(tmp_path_factory, finished_run, small):
    from tests.unit.cli.conftest import run_octavo

    out = tmp_path_factory.mktemp("sensitivity") / "mix"
    arguments = ["sensitivity", finished_run, *small, "--budget-perplexity", "30%", "--budget-bytes", "0.6"]
    result = run_octavo(*arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result, arguments


@pytest.mark.long
def test_prints_worst_layers_and_mixes(studied):
    _, result, _ = studied
    assert "What layers cost alone" in result.stdout
    assert "model.layers.0.mlp.down_proj" in result.stdout
    assert "the mix" in result.stdout
    assert "weight_only in every block" in result.stdout
    assert "rank correlation" in result.stdout
    assert "estimate" not in result.stdout.split("What layers cost")[0], "progress goes to stderr"


def test_the_mix_is_applied_to_the_model_it_was_made_for(studied, finished_run):
    out, _, _ = studied
    model = load_language_model(finished_run).model
    mix = load_mix(out / "mix.toml")
    linears = {unit.path for unit in units_of(model) if not unit.is_table}
    assert set(mix.overrides) == linears
    report = mix.apply(model)
    assert set(report.converted) == linears


def test_the_record_and_the_page(studied, finished_run):
    out, _, _ = studied
    kept = json.loads((out / "sensitivity.json").read_text())
    assert kept["format"] == "octavo sensitivity"
    assert kept["model"] == str(finished_run)
    assert kept["best"]["bytes_share"] <= 0.6
    assert kept["budget"] == {"perplexity": 0.3, "bytes_share": 0.6}
    assert len(kept["layers"]) == 9
    page = (out / "report.html").read_text()
    assert "What layers cost" in page
    assert "model.layers.0.mlp.down_proj" in page
    assert "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL), "nothing is left to substitute"
    assert sorted(path.name for path in out.iterdir()) == ["mix.toml", SCRIPT, "report.html", "sensitivity.json"]


@pytest.mark.long
@pytest.mark.parametrize("fmt", ["compressed-tensors", "hf-fp8"])
def test_a_mix_for_a_format_is_exported_in_it(octavo, studied, finished_run, tmp_path, fmt):
    """Without the option the same budget puts rows of the embedding into FP8, which that format refuses."""
    out, _, arguments = studied
    export = ("export", finished_run, "--format", fmt, "--out", tmp_path / "model", "--mix")
    assert "in FP8, which only the format octavo supports" in octavo(*export, out / "mix.toml").stderr
    result = octavo(*arguments[:-2], "--format", fmt, "--out", tmp_path / "mix", "--json")
    assert result.exit_code == 0, result.output
    kept = json.loads(result.stdout)
    assert kept["for the format"] == fmt
    assert kept["best"]["bytes_share"] < 1
    exported = octavo(*export, tmp_path / "mix" / "mix.toml")
    assert exported.exit_code == 0, exported.output
    assert "vLLM and SGLang refuse" not in exported.output
    chosen = {layer["path"]: layer["chosen"] for layer in kept["layers"]}
    assert not of_several_schemes(chosen)


def test_a_format_that_holds_no_mix_is_refused(on_run, tmp_path):
    result = on_run("--format", "modelopt", "--out", tmp_path / "mix")
    assert result.exit_code == 2
    assert "modelopt holds static scales alone, of octavo calibrate; a mix is for compressed-tensors" in result.stderr
    assert not (tmp_path / "mix").exists()


def test_json_matches_record_and_own_folder_is_replaced(octavo, studied):
    out, _, arguments = studied
    result = octavo(*arguments, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((out / "sensitivity.json").read_text())


def test_a_mix_that_exceeds_the_budget_on_other_text_is_written_and_fails(on_run, tmp_path, monkeypatch):
    """As the windows of the verification may have it; which they are is chance, so it is set here."""
    monkeypatch.setattr(Sensitivity, "is_met", property(lambda _: False))
    result = on_run("--budget-bytes", "0.6", "--out", tmp_path / "mix")
    assert result.exit_code == 1, result.output
    assert "which is more than was asked for" in " ".join(result.stdout.split())
    assert (tmp_path / "mix" / "mix.toml").is_file()


def test_a_budget_out_of_reach_leaves_no_mix_behind(on_run, tmp_path):
    out = tmp_path / "mix"
    result = on_run("--budget-bytes", "0.2", "--out", out)
    assert result.exit_code == 1, result.output
    assert "No mix was found with at most 0.2 of its bytes" in result.stdout
    assert sorted(path.name for path in out.iterdir()) == [SCRIPT, "report.html", "sensitivity.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget-perplexity", "one"], "--budget-perplexity takes a share: percent from above 0% to 100%"),
        (["--budget-perplexity", "1"], "--budget-perplexity takes a share"),
        (["--budget-perplexity", "0"], "--budget-perplexity takes a share"),
        (["--budget-bytes", "1.0"], "--budget-bytes takes a share"),
        (["--budget-perplexity", "2"], "--budget-perplexity takes a share"),
        (["--budget-bytes", "-1%"], "--budget-bytes takes a share"),
        (["--windows", "1"], "--windows must be at least 2, not 1"),
        (["--pairs", "-1"], "--pairs must be at least 0, not -1"),
        (["--seed", "-1"], "seed must be from 0 to"),
        (["--verify-split", "train"], "the mix would be verified on text it was chosen on"),
        (["--verify-split", "all"], "the mix would be verified on text it was chosen on"),
        (["--split", "half"], "split must be one of train, validation, test, all, not 'half'"),
        (["--context", "4096"], "this model reads at most 32 tokens at once"),
    ],
)
def test_bad_input_is_one_sentence(on_run, tmp_path, arguments, said):
    result = on_run("--out", tmp_path / "mix", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert not (tmp_path / "mix").exists()


def test_same_text_under_another_name_is_refused(octavo, finished_run, text, tmp_path, monkeypatch):
    """A path written otherwise, and a copy."""
    monkeypatch.chdir(text.parent)
    (tmp_path / "copy.txt").write_text(text.read_text())
    for other in (f"./{text.name}", tmp_path / "copy.txt"):
        arguments = ["--data", text, "--verify-data", other, "--verify-split", "train", "--out", tmp_path / "mix"]
        result = octavo("sensitivity", finished_run, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "the mix would be verified on text it was chosen on" in result.stderr


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where a result is kept that its own disk does not take."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def fill_disk(monkeypatch, is_full):
    """Refuse, as a full disk does, to write the page, the second file, where ``is_full``."""

    def full(path, page):
        if is_full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_page(path, page)

    monkeypatch.setattr(sensitivity, "write_page", full)


def test_result_is_saved_elsewhere_if_the_disk_is_full(octavo, studied, tmp_path, monkeypatch, home):
    out = tmp_path / "full" / "mix"
    fill_disk(monkeypatch, lambda path: tmp_path / "full" in path.parents)
    result = octavo(*studied[2], "--out", out, "--json")
    assert result.exit_code == 2, result.output
    (kept,) = home.iterdir()
    sentence = result.stderr.strip().splitlines()[-1]
    assert f"cannot use '{out}': No space left on device; the result is kept in '{kept}'" in sentence
    assert sorted(path.name for path in kept.iterdir()) == ["mix.toml", SCRIPT, "report.html", "sensitivity.json"]
    assert json.loads(result.stdout) == json.loads((kept / "sensitivity.json").read_text())
    assert not out.exists()


@pytest.mark.long
def test_result_is_printed_if_no_folder_is_writable(octavo, studied, tmp_path, monkeypatch, home):
    fill_disk(monkeypatch, lambda path: True)
    result = octavo(*studied[2], "--out", tmp_path / "mix")
    assert result.exit_code == 2, result.output
    assert "What layers cost alone" in result.stdout
    assert f"\nIn {tmp_path}" not in result.stdout
    assert "mix/report.html: no space left on device" in result.stderr
    assert list(home.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_disk_without_room_is_refused_before_any_work(octavo, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free=1 << 20))
    result = octavo("sensitivity", "no-model.gguf", "--data", "builtin", "--out", tmp_path / "mix")
    assert result.exit_code == 2
    assert "has 1 MiB free, and the result takes" in result.stderr


def test_budget_of_100_percent_is_accepted():
    assert _share("--budget-bytes", "100%") == 1
    assert _share("--budget-bytes", "0.6") == 0.6
    assert _share("--budget-perplexity", "1%") == 0.01


def test_other_folders_and_files_are_left_alone(octavo, on_run, small, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for out, said in ((tmp_path, "holds other files"), (tmp_path / "notes.txt", "is a file; name a folder")):
        result = on_run("--out", out)
        assert result.exit_code == 2
        assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    result = octavo("sensitivity", tmp_path / "nothing", *small, "--out", tmp_path / "mix")
    assert (result.exit_code, "there is no" in result.stderr) == (2, True)
