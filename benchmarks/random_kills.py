"""Kill ranks of a run at random moments: ``python -m benchmarks.random_kills``.

torchrun starts two ranks of a tiny run. One of them is killed by SIGKILL, at any moment from the start of Python on,
until there were as many kills as asked for; then the run may end. Its losses, evaluations and weights must be those of
a run that nothing has interrupted, to the last bit.
"""

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import hardware, markdown_table, publish
from octavo.training.config import ParallelConfig, RunConfig, save_config
from octavo.training.loop import train
from octavo.training.metrics import METRICS, read_metrics
from octavo.training.run_folder import load_run
from tests.unit.training.tiny_runs import tiny_config, tiny_data

LONGEST_SECONDS = 3.0  # from an attempt's start, or from its first step
WHILE_TRAINING = 0.75  # share of the kills that wait for the first step


def config_of(source: Path, steps: int, shard: int, *, is_async: bool) -> RunConfig:
    """The run: delayed scaling, whose state must survive, and a checkpoint every third step."""
    training: dict[str, Any] = {"recipe": "delayed", "steps": steps, "clip_norm": 0.0, "async_checkpoints": is_async}
    config = tiny_config(grad_accumulation=2, checkpoint_interval=3, eval_interval=25, **training)
    data = dataclasses.replace(config.data, source=str(source))
    return dataclasses.replace(config, data=data, parallel=ParallelConfig(shard=shard, check_interval=1))


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(launcher: "subprocess.Popen[str]", run: Path) -> None:
    """Wait until the ranks have written a line."""
    began = time.time()
    while launcher.poll() is None and not ((log := run / METRICS).exists() and log.stat().st_mtime > began):
        time.sleep(0.05)


def kill_at_random(launcher: "subprocess.Popen[str]", run: Path, kills: int, seed: int) -> Iterator[list[str]]:
    """Kill one of the ranks ``kills`` times; yield a row of the result for each."""
    generator, killed = random.Random(seed), set[int]()
    for number in range(1, kills + 1):
        while (
            launcher.poll() is None
            and len(ranks := [each for each in children(launcher.pid) if each not in killed]) < 2
        ):
            time.sleep(0.05)
        trains = generator.random() < WHILE_TRAINING
        if trains:
            wait_for_step(launcher, run)
        delay = generator.uniform(0, LONGEST_SECONDS)
        time.sleep(delay)
        if launcher.poll() is not None:
            raise SystemExit(f"the run ended before kill {number}; give it more --steps")
        killed.update(ranks)
        victim = generator.randrange(2)
        os.kill(ranks[victim], signal.SIGKILL)
        saved = sorted(path.name for path in (run / "checkpoints").glob("step-*")) or ["none"]
        written = len([line for line in lines_of(run) if line["kind"] == "step"]) if (run / METRICS).exists() else 0
        when = f"{delay:.2f} s after {'a step' if trains else 'the start'}"
        row = [str(number), str(victim), when, str(written), saved[-1]]
        print(", ".join(row), flush=True)
        yield row


def lines_of(run: Path) -> list[dict[str, object]]:
    """Steps and evaluations of a run, without times; norms of gradients depend on shards."""
    kept = [line for line in read_metrics(run) if line["kind"] in ("step", "evaluation")]
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "sha256", "grad_norm")} for line in kept
    ]


def main() -> None:
    """Run the kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--shard", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async", action="store_true", dest="is_async", help="train on while checkpoints are written")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine, began = hardware(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = tiny_data(folder)
        config = config_of(folder / "text.txt", options.steps, options.shard, is_async=options.is_async)
        train(dataclasses.replace(config, parallel=ParallelConfig()), folder / "one", data=data)
        save_config(config, folder / "config.toml")
        launcher = launch(folder, restarts=options.kills)
        rows = list(kill_at_random(launcher, folder / "run", options.kills, options.seed))
        if launcher.wait():
            raise SystemExit(f"the run ended with exit code {launcher.returncode}")
        lines, same = lines_of(folder / "one"), lines_of(folder / "run") == lines_of(folder / "one")
        ends = [load_run(folder / each).model.state_dict() for each in ("run", "one")]
        same &= all(torch.equal(ends[0][key], ends[1][key]) for key in ends[1])
    result = [
        (
            f"{options.kills} kills by SIGKILL under {'DDP' if options.shard == 1 else 'FSDP2'}, checkpoints written "
            f"{'while training goes on' if options.is_async else 'between steps'}, seed {options.seed}, "
            f"in {(time.monotonic() - began) / 60:.0f} minutes: "
            f"{len(lines)} lines of losses and evaluations, and all weights, are "
            f"{'equal' if same else 'NOT equal'}, bit for bit, to those of one process that nothing has interrupted."
        ),
        "",
        *markdown_table(["kill", "rank", "when", "steps in the log", "newest checkpoint"], rows),
    ]
    publish("random_kills", result, title="Random kills of a run of two ranks", machine=machine, write=options.write)
    raise SystemExit(not same)


def launch(folder: Path, *, restarts: int) -> "subprocess.Popen[str]":
    """Start torchrun with two ranks."""
    rank = ["-m", "octavo", "train", "--config", str(folder / "config.toml"), "--out", str(folder / "run"), "-q"]
    elastic = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *rank]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)


if __name__ == "__main__":
    main()
