"""``octavo train`` as ranks of torchrun, of ``--nproc`` and of Slurm: ranks that are killed, and what users read."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.random_kills import children
from octavo.training.config import ParallelConfig, save_config
from octavo.training.loop import train
from octavo.training.metrics import read_metrics
from octavo.training.run_folder import load_run
from tests.policy.source_tree import ROOT
from tests.unit.training.tiny_runs import comparable, tiny_config

pytestmark = pytest.mark.long

STEPS = 8
PATIENCE = 300
FAULTS = [
    [0, 1, "before backward", 1, "kill"],  # before there is a checkpoint
    [1, 0, "after write", 4, "kill"],  # after the checkpoint of step 2
    [2, 1, "before write", 4, "full"],
]


def config_of(data, **training):
    config = tiny_config(recipe="delayed", grad_accumulation=2, steps=STEPS, checkpoint_interval=2, **training)
    source = dataclasses.replace(config.data, source=str(data.folder.parent / "text.txt"))
    return dataclasses.replace(config, data=source, parallel=ParallelConfig(check_interval=1))


def command(folder, config, *options):
    save_config(config, folder / "config.toml")
    return ["train", "--config", str(folder / "config.toml"), "--out", str(folder / "run"), *options]


def start(arguments, **variables):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | variables
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_run_of_one(folder, one):
    """The run's lines and weights are those of one process, to the last bit."""
    lines, expected = (
        [line for line in comparable(read_metrics(each)) if line["kind"] in ("step", "evaluation")]
        for each in (folder / "run", one)
    )
    assert [{**line, "sha256": ""} for line in lines] == [{**line, "sha256": ""} for line in expected]
    weights, same = load_run(folder / "run").model.state_dict(), load_run(one).model.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in same)


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(config_of(data), folder, data=data)
    return folder


def test_killed_ranks_lose_nothing(tmp_path, data, one):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    arguments = command(tmp_path, config_of(data, async_checkpoints=True), "--json")
    rank = ["-m", "tests.integration.failing_rank", *arguments]
    process = start([*torchrun, *rank], FAULTS=json.dumps(FAULTS))
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["steps"] == STEPS, "one rank prints the result, once"
    assert stderr.count("rank 1: cannot save ") == 1
    assert "step-000004': File too large; free some space" in stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert_run_of_one(tmp_path, one)


def test_a_rank_killed_on_one_of_two_machines_costs_one_restart(tmp_path, data, one):
    """Two launchers, of which one restarts a killed rank and counts that, and the other one a rank that was only late.

    No second restart is left for ranks that miss each other.
    """
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    rank = ["-m", "tests.integration.failing_rank", *command(tmp_path, config_of(data), "--json")]
    arguments = ["-m", "torch.distributed.run", *nodes, "--rdzv-id=two", "--max-restarts=1", *rank]
    faults = json.dumps([[0, 1, "before backward", 4, "kill"], [0, 0, "before backward", 4, "late"]])
    agents = [start(arguments, FAULTS=faults) for _ in range(2)]
    outputs = [agent.communicate(timeout=PATIENCE) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert_run_of_one(tmp_path, one)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def test_two_ranks_begin_at_a_checkpoint_of_one_process(tmp_path, data, one):
    begin = ["-m", "octavo", *command(tmp_path, config_of(data), "--nproc", "2", "--from")]
    refused = start([*begin, str(one)])
    _, errors = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 2
    assert errors.count("error: ") == 1
    assert f"error: rank 0: {str(one)!r} is no checkpoint (no state.json); name a folder such as {one}" in errors
    process = start([*begin, str(one / "checkpoints" / "step-000006")])
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert_run_of_one(tmp_path, one)


def test_a_launch_refuses_a_run_that_it_has_not_begun(tmp_path, data, one):
    """One sentence an attempt; the restart must not continue what the first attempt refused."""
    shutil.copytree(one, tmp_path / "run")
    arguments = command(tmp_path, config_of(data), "--nproc", "2", "--max-restarts", "1", "-q")
    process = start(["-m", "octavo", *arguments])
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (2, "")
    refusal = f"error: rank 0: {str(tmp_path / 'run')!r} already holds a run; continue it with --resume or name another"
    assert [line.startswith(refusal) for line in stderr.splitlines()] == [True, True]
    assert_run_of_one(tmp_path, one)


def test_ranks_save_and_stop_when_their_launcher_is_killed(tmp_path, data):
    config = config_of(data)
    endless = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=100_000))
    launcher = start(["-m", "octavo", *command(tmp_path, endless, "--nproc", "2")])
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.1)
    ranks = children(launcher.pid)
    launcher.kill()
    try:
        stderr = launcher.communicate(timeout=PATIENCE)[1]  # which the ranks write to as well, until they end
    finally:
        alive = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
        for rank in alive:
            os.kill(rank, signal.SIGKILL)
    assert len(ranks) == 2
    last = read_metrics(tmp_path / "run")[-1]["step"]
    assert load_run(tmp_path / "run").step == last, stderr
    assert "Traceback" not in stderr


def test_ray(tmp_path, data, one):
    pytest.importorskip("ray", reason="ray is not installed")
    save_config(config_of(data), tmp_path / "config.toml")
    script = str(ROOT / "examples" / "ray_train.py")
    command_line = [script, str(tmp_path / "config.toml"), str(tmp_path / "run"), "2"]
    process = start(command_line, RAY_ADDRESS="local")
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert_run_of_one(tmp_path, one)
    save_config(config_of(data, lr=1e-4), tmp_path / "config.toml")
    refusals = [
        start([*command_line, *options], RAY_ADDRESS="local").communicate(timeout=PATIENCE)[1]
        for options in ([], ["--resume"])
    ]
    assert "already holds a run; continue it with --resume or name another" in refusals[0]
    assert "was started with training.lr" in refusals[1]
    assert_run_of_one(tmp_path, one)


def test_ranks_of_slurm(tmp_path, data, one):
    shared = {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "SLURM_JOB_ID": "7"}
    arguments = ["-m", "octavo", *command(tmp_path, config_of(data), "--json")]
    ranks = [start(arguments, **shared, SLURM_PROCID=number, SLURM_LOCALID=number) for number in "01"]
    outputs = [process.communicate(timeout=PATIENCE) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0])["steps"] == STEPS
    assert outputs[1] == ("", "")
    assert_run_of_one(tmp_path, one)
