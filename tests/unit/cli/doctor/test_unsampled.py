"""What ``octavo doctor RUN`` prints of a run without statistics."""

import json
import re
import shutil

import pytest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('recipe = "tensorwise"', 'recipe = "bf16"'), "casts nothing to FP8"),
        (("statistics_interval = 10", "statistics_interval = 0"), "its statistics_interval is 0; set it to 10"),
        (("", ""), "it was never sampled"),
    ],
)
def test_losses_of_a_run_without_statistics_are_judged_with_how_to_get_more(
    octavo, finished_run, tmp_path, change, words
):
    run = shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("step-*"))
    lines = re.sub(', "sha256": "[^"]*"}\n', "}\n", (run / "metrics.jsonl").read_text()).splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] in ("step", "evaluation")]
    (run / "metrics.jsonl").write_text("".join(kept))
    config = (run / "config.toml").read_text()
    assert change[0] in config
    (run / "config.toml").write_text(config.replace(*change))
    result = octavo("doctor", run)
    assert result.exit_code == 0
    assert re.sub(r"\s+", " ", result.stdout).startswith(
        "nothing found in the losses up to step 4; nothing was sampled:"
    )
    assert words in result.stdout
    template = next(json.loads(line) for line in kept if json.loads(line)["kind"] == "step")
    steps = [{"kind": "step", "step": step, "loss": max(5.3, 7.6 - 0.1 * step)} for step in range(1, 81)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(template | step) + "\n" for step in steps))
    stalled = octavo("doctor", run, "--html", run / "page.html")
    assert "stalled-loss" in stalled.stdout
    assert "1 warn in the losses up to step 80; nothing was sampled:" in re.sub(r"\s+", " ", stalled.stdout)
    assert "<h1>The loss no longer falls, near that of" in (run / "page.html").read_text()
    (run / "data").rename(tmp_path / "tokens")  # without the text's tokens
    stalled = re.sub(r"\s+", " ", octavo("doctor", run, "--html", run / "page.html").stdout)
    since = "he loss has not fallen since step 23 and stays at 5.3"
    assert stalled.startswith(f"t{since}: check the learning rate and the data")
    assert "nothing else found in the losses up to step 80; nothing was sampled:" in stalled
    assert f"<h1>T{since}; nothing else was found.</h1>" in (run / "page.html").read_text()
    steps = [{"kind": "step", "step": step, "loss": 2.0 if step < 40 else 9.0} for step in range(1, 81)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(template | step) + "\n" for step in steps))
    diverged = octavo("doctor", run, "--html", run / "page.html")
    assert "divergence" in diverged.stdout
    assert "in the losses up to step 80; nothing was sampled:" in re.sub(r"\s+", " ", diverged.stdout)
    assert "divergence" in (run / "page.html").read_text()
