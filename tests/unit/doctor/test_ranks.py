"""Two real processes with gloo between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import octavo
from octavo.doctor.ranks import scale_ratios
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_FIELDS

PROGRAM = """
import json, os, sys
import torch
import octavo, octavo.doctor

rank, folder = int(sys.argv[1]), sys.argv[2]
store = torch.distributed.FileStore(os.path.join(folder, "store"), 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
octavo.convert(model, "tensorwise", convert_head=True)
watcher = octavo.doctor.watch(model, interval=1)
x = torch.ones(8, 16) * (3.0 if rank else 1.0)  # the second rank's batch is three times as large
with watcher.step():
    model(x).square().sum().backward()
ratios = watcher.samples[-1].modules["rank_scale_ratio"]
sizes = {" ".join(key): float(numbers[0]) for key, numbers in watcher.samples[-1].casts.items()}
with open(os.path.join(folder, f"{rank}.json"), "w") as file:
    json.dump({"ratios": ratios, "amaxes": sizes}, file)
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(Path(octavo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(folder)], env=environment) for rank in (0, 1)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_both_ranks_learn_how_far_their_scales_are_apart(found):
    first, second = found
    assert first["ratios"] == second["ratios"]
    assert first["ratios"].keys() == first["amaxes"].keys()
    for name, ratio in first["ratios"].items():
        amaxes = first["amaxes"][name], second["amaxes"][name]
        assert ratio == pytest.approx(max(amaxes) / min(amaxes), rel=1e-6), name
    assert first["ratios"]["0 input output"] == pytest.approx(3)
    assert first["ratios"]["0 weight output"] == 1


def test_alone_there_is_nothing_to_compare():
    casts = {CastKey("0", "input", "output"): np.ones(len(CAST_FIELDS))}
    assert scale_ratios(casts, torch.device("cpu")) == {}
