"""An interrupted and resumed run equals an uninterrupted one to the last digit, in processes of their own."""

import os
import signal
import time
from typing import Any

import pytest
import torch

from octavo.training.checkpoint import latest
from octavo.training.loop import train
from octavo.training.metrics import METRICS, read_metrics
from octavo.training.run_folder import load_run
from tests.integration.pieces import start
from tests.unit.training.tiny_runs import comparable, tiny_config

pytestmark = pytest.mark.long

STEPS = 10


def finish(data, run, options):
    code, said = start(data, run, options, resume=True).rest()
    assert (code, said[-1:]) == (0, [f"finished {STEPS}"])


def kill(piece, *, after):
    piece.until(after)
    piece.send(signal.SIGKILL)
    code, _ = piece.rest()
    assert code == -signal.SIGKILL


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
    piece = start(data, tmp_path / "cut", options, resume=False, delay=0.02)
    piece.until("StepDone 5")
    piece.send(signal.SIGTERM)
    code, said = piece.rest()
    word, step = said[-1].split()
    assert (code, word) == (0, "interrupted")
    assert 5 <= int(step) < STEPS
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
    kill(start(data, tmp_path / "cut", options, resume=False, delay=0.05), after="StepDone 7")
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
    kill(start(data, tmp_path / "cut", options, resume=False, delay=0.05), after="StepDone 2")
    finish(data, tmp_path / "cut", options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_second_process_is_refused_while_the_first_trains(tmp_path, data):
    options = {"recipe": "fp32", "steps": 2000}
    first = start(data, tmp_path / "run", options, resume=False, delay=0.01)
    assert first.next_line().startswith(("Evaluated", "Notice"))
    code, said = start(data, tmp_path / "run", options, resume=True).rest()
    assert code == 1
    (trace,) = said
    assert "another process is training" in trace
    first.send(signal.SIGTERM)
    code, _ = first.rest()
    assert code == 0


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
