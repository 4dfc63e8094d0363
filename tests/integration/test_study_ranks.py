"""``octavo study`` of several seeds as ranks of torchrun: each run is made once, and the tables are printed once."""

import json

import pytest

from octavo.training.config import save_config
from octavo.training.metrics import read_metrics
from tests.integration.test_ranks_launch import PATIENCE, config_of, start

pytestmark = pytest.mark.long

STUDY = ["-m", "octavo", "study", "--recipes", "bf16,tensorwise", "--seeds", "2", "--json"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def rows(folder):
    """Results without times and memory."""
    measured = ("tokens_per_second", "peak_memory_bytes")
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in measured} for line in lines]


def test_ranks_of_torchrun_share_the_runs(tmp_path, data):
    save_config(config_of(data), tmp_path / "config.toml")
    arguments = [*STUDY, "--config", str(tmp_path / "config.toml"), "--out"]
    process = start([*TORCHRUN, *arguments, str(tmp_path / "ranks")])
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert len(json.loads(stdout)["groups"]) == 2  # one document: one rank prints
    assert stderr.count("runs ...") == 1
    cells = [path.parent for path in sorted((tmp_path / "ranks" / "cells").glob("*/measures.json"))]
    assert len(cells) == 4
    for cell in cells:
        assert [line["step"] for line in read_metrics(cell) if line["kind"] == "step"] == list(range(1, 9))
    alone = start([*arguments, str(tmp_path / "alone")])
    _, stderr = alone.communicate(timeout=PATIENCE)
    assert alone.returncode == 0, stderr
    assert rows(tmp_path / "ranks") == rows(tmp_path / "alone")
