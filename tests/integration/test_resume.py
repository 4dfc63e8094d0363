"""An interrupted and resumed run equals an uninterrupted one to the last digit, in fresh processes."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from octavo.training.checkpoint import latest
from octavo.training.loop import train
from octavo.training.metrics import METRICS, read_metrics
from octavo.training.run_folder import load_run
from tests.policy.source_tree import ROOT, SOURCE
from tests.unit.training.tiny_runs import comparable, tiny_config, tiny_data

STEPS = 10

# Arguments: data folder, run folder, keyword arguments of tiny_config as JSON, "resume" or "new".
PROGRAM = """
import json, sys, time
from octavo.training.data import open_data
from octavo.training.loop import train
from tests.unit.training.tiny_runs import tiny_config

folder, run, options, mode = sys.argv[1:]
options = json.loads(options)
delay = options.pop("delay")

def on_event(event):
    print(type(event).__name__, getattr(event, "step", ""), flush=True)
    time.sleep(delay)

result = train(tiny_config(**options), run, data=open_data(folder), resume=mode == "resume", on_event=on_event)
print("interrupted" if result.interrupted else "finished", result.step, flush=True)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data(tmp_path_factory.mktemp("data"))


def start(data, run, options, mode, *, delay):
    command = [sys.executable, "-c", PROGRAM, str(data.folder), str(run), json.dumps({**options, "delay": delay}), mode]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt(process, number, *, after):
    """Send the signal once the process has said ``after``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == after:
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def finish(data, run, options, mode="resume"):
    out, err = start(data, run, options, mode, delay=0).communicate(timeout=120)
    assert out.splitlines()[-1:] == [f"finished {STEPS}"], err


def weights(run):
    return load_run(run).model.state_dict()


def assert_same_run(one, other):
    assert comparable(read_metrics(one)) == comparable(read_metrics(other))
    assert all(torch.equal(weights(one)[name], tensor) for name, tensor in weights(other).items())


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"recipe": "fp32", "threads": 2},
    "bf16": {"recipe": "bf16", "grad_accumulation": 2},
    "tensorwise": {"recipe": "tensorwise"},
    "fp16 around": {"recipe": "rowwise", "precision": "fp16"},
    "delayed": {
        "recipe": "delayed", "grad_accumulation": 2,
        "recipe_options": {"history_length": 3, "update_interval": 2},
    },
    "bf16 in the middle": {
        "recipe": "delayed", "precision_schedule": [["fp8", 0.0], ["bf16", 0.3], ["fp8", 0.8]],
    },
    "overrides": {
        "recipe": "tensorwise", "overrides": {"*.down_proj": "bf16", "*.q_proj": "delayed"}, "convert_head": True,
        "cache_weights": True, "grad_accumulation": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_sigterm_and_resume_in_new_processes(tmp_path, data, case):
    options = {**CASES[case], "steps": STEPS, "lr": 1e-2}
    train(tiny_config(**options), tmp_path / "whole", data=data)
    process = start(data, tmp_path / "cut", options, "new", delay=0.02)
    code, out, err = interrupt(process, signal.SIGTERM, after="StepDone 5")
    assert code == 0, err
    last = out.splitlines()[-1].split()
    assert last[0] == "interrupted"
    assert 5 <= int(last[1]) < STEPS
    finish(data, tmp_path / "cut", options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_stopped_in_every_phase(tmp_path, data):
    """Pieces that end before, at and after the steps where a phase begins: 4 and 8."""
    phases = (("fp8", 0.0), ("bf16", 0.3), ("fp8", 0.7))
    config = tiny_config(recipe="delayed", precision_schedule=phases, steps=STEPS, lr=1e-2, statistics_interval=2)
    train(config, tmp_path / "whole", data=data)
    for stop in (2, 3, 4, 7, STEPS):

        def stop_at(event, stop=stop):
            if type(event).__name__ == "StepDone" and event.step == stop < STEPS:
                os.kill(os.getpid(), signal.SIGTERM)

        assert train(config, tmp_path / "cut", data=data, resume=stop > 2, on_event=stop_at).step == stop
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert [line["step"] for line in read_metrics(tmp_path / "cut") if line["kind"] == "precision"] == [4, 8]


def test_killed_between_checkpoints(tmp_path, data):
    """SIGKILL saves nothing: the run goes back to its last checkpoint and writes the lines after it again."""
    options = {"recipe": "tensorwise", "steps": STEPS, "checkpoint_interval": 4}
    train(tiny_config(**options), tmp_path / "whole", data=data)
    process = start(data, tmp_path / "cut", options, "new", delay=0.05)
    interrupt(process, signal.SIGKILL, after="StepDone 7")
    found = latest(tmp_path / "cut")
    assert found is not None
    assert found.name == "step-000004"
    assert read_metrics(tmp_path / "cut")[-1]["step"] >= 7
    with (tmp_path / "cut" / METRICS).open("a") as file:
        file.write('{"kind": "st')  # what a kill in the middle of a line leaves
    finish(data, tmp_path / "cut", options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_killed_before_the_first_checkpoint(tmp_path, data):
    options = {"recipe": "fp32", "steps": STEPS}
    train(tiny_config(**options), tmp_path / "whole", data=data)
    interrupt(start(data, tmp_path / "cut", options, "new", delay=0.05), signal.SIGKILL, after="StepDone 2")
    finish(data, tmp_path / "cut", options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_second_process_is_refused_while_the_first_trains(tmp_path, data):
    options = {"recipe": "fp32", "steps": 2000}
    first = start(data, tmp_path / "run", options, "new", delay=0.01)
    assert first.stdout is not None
    assert first.stdout.readline().startswith(("Evaluated", "Notice"))
    out, err = start(data, tmp_path / "run", options, "resume", delay=0).communicate(timeout=120)
    assert "another process is training" in err
    assert out == ""
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    assert first.returncode == 0


def test_interrupted_many_times(tmp_path, data):
    """Every step in its own piece, stopped by a signal after each."""
    options = {"recipe": "delayed", "steps": STEPS, "grad_accumulation": 2}
    train(tiny_config(**options), tmp_path / "whole", data=data)

    def stop_at_once(event):
        if type(event).__name__ == "StepDone":
            os.kill(os.getpid(), signal.SIGTERM)

    pieces = 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        result = train(tiny_config(**options), tmp_path / "cut", data=data, resume=pieces > 0, on_event=stop_at_once)
        pieces += 1
        if not result.interrupted:
            break
    assert pieces == STEPS
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
