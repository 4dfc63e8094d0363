"""Two real processes with gloo between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import octavo
from octavo.doctor.ranks import ALONE, RankComparison
from octavo.doctor.series import CastKey
from octavo.doctor.statistics import CAST_SUMS
from octavo.errors import ConfigError

PROGRAM = """
import json, os, sys
import torch
import octavo, octavo.doctor

rank, folder = int(sys.argv[1]), sys.argv[2]
store = torch.distributed.FileStore(os.path.join(folder, "store"), 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
found = {}


def run(name, layers, used, *, recipe="tensorwise", factor=1.0, spoil=lambda model: None, **options):
    model = torch.nn.ModuleDict(layers)
    octavo.convert(model, recipe, convert_head=True, scale_updates="manual")
    watcher = octavo.doctor.watch(model, interval=1, **options)
    for chosen in used:
        with watcher.step():
            for path in chosen:
                model[path](torch.ones(8, 16) * factor).square().sum().backward()
        octavo.update_scales(model)
        spoil(model)
    sample = watcher.samples[-1]
    found[name] = {
        "ratios": sample.modules.get("rank_scale_ratio"),
        "amaxes": {" ".join(key): float(numbers[0]) for key, numbers in sample.casts.items()},
        "findings": [[one.path, one.role] for one in watcher.findings() if one.code == "rank-mismatch"],
        "causes": [one.cause for one in watcher.findings() if one.code == "rank-mismatch"],
        "largest": sample.modules.get("rank_of_largest_scale"),
        "smallest": sample.modules.get("rank_of_smallest_scale"),
    }


def alike(*names, wide=4):
    torch.manual_seed(0)
    return {name: torch.nn.Linear(16, wide, bias=False) for name in names}


def halve(model):
    if rank:
        model["0"].amax_history.amax[1] /= 2


def own(name):
    torch.manual_seed(rank)
    return {name: torch.nn.Linear(16, 4, bias=False)}


factor = 3.0 if rank else 1.0  # the second rank's batch is three times as large
run("batches", alike("0", "1"), ["01"], factor=factor)
run("own batches", alike("0", "1"), ["01"], factor=factor, group="alone")
run("experts", alike("0", "1", "2"), ["01", "01" if rank else "012", "12" if rank else "01"])
run("idle", alike("0"), ["0", "" if rank else "0"])
run("halved", alike("0", "1"), ["01"] * 3, recipe="delayed", spoil=halve)
run("shards", own("0") | alike("1"), ["01"] * 4, factor=factor)
run("shapes", alike("0", wide=4 + rank) | alike("1"), ["01"] * 4)
run("stages", alike(f"of{rank}", "last"), [[f"of{rank}", "last"]])
run("alone", alike("0"), ["0"], factor=factor, group="alone")
own_group = [torch.distributed.new_group([one]) for one in (0, 1)][rank]
run("group of one", alike("0"), ["0"], factor=factor, group=own_group)
others_group = [torch.distributed.new_group([one]) for one in (0, 1)][1 - rank]
run("group of others", alike("0"), ["0"], factor=factor, group=others_group)
run("group", alike("0"), ["0"], factor=factor, group=torch.distributed.new_group([0, 1]))
with open(os.path.join(folder, f"{rank}.json"), "w") as file:
    json.dump(found, file)
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


@pytest.mark.long
def test_both_ranks_learn_how_far_their_scales_are_apart(found):
    first, second = (one["batches"] for one in found)
    assert first["ratios"] == second["ratios"]
    assert first["ratios"].keys() == first["amaxes"].keys()
    for name, ratio in first["ratios"].items():
        amaxes = [one["own batches"]["amaxes"][name] for one in found]
        assert ratio == pytest.approx(max(amaxes) / min(amaxes), rel=1e-6), name
    assert first["ratios"]["0 input output"] == pytest.approx(3)
    assert first["ratios"]["0 weight output"] == 1
    for one in (first, second):
        assert (one["largest"]["0 input output"], one["smallest"]["0 input output"]) == (1, 0)


@pytest.mark.long
def test_every_rank_has_the_statistics_of_all(found):
    """Amaxes of the largest batch, and an expert that ran on the other rank alone."""
    first, second = (one["batches"] for one in found)
    assert first["amaxes"] == second["amaxes"]
    assert first["amaxes"]["0 input output"] == found[1]["own batches"]["amaxes"]["0 input output"] == 3.0
    experts = [{name.split()[0] for name in one["experts"]["amaxes"]} for one in found]
    assert experts == [{"0", "1", "2"}] * 2


def test_ranks_that_run_other_experts_are_compared_by_name(found):
    """Expert 0 ran on the first rank only, 1 on both, 2 on the second only."""
    first, second = (one["experts"] for one in found)
    assert {name.split()[0] for name in first["ratios"]} == {"0", "1"}
    assert {name.split()[0] for name in second["ratios"]} == {"1", "2"}
    assert set(first["ratios"].values()) == set(second["ratios"].values()) == {1.0}
    assert not first["findings"]
    assert (found[0]["idle"]["ratios"].keys(), found[1]["idle"]["ratios"]) == (found[0]["idle"]["amaxes"].keys(), {})


def test_equal_weights_with_unequal_scales_stay_a_finding(found):
    for one in found:
        assert one["halved"]["ratios"]["0 weight output"] == pytest.approx(2)
        assert one["halved"]["ratios"]["1 weight output"] == 1
        assert one["halved"]["findings"] == [["0", "weight"]]
        assert "rank 0 casts this weight with a scale 2x rank 1's" in one["halved"]["causes"][0]


def test_layers_that_differ_by_design_are_not_compared(found):
    """Tensor parallelism's shards of one name, of one shape or two; the layers beside them are."""
    for one in found:
        for name in ("shards", "shapes"):
            assert {key.split()[0] for key in one[name]["ratios"]} == {"1"}, name
        assert not one["shapes"]["findings"]
        assert one["shards"]["ratios"]["1 input output"] == pytest.approx(3)


def test_ranks_that_have_other_layers(found):
    for rank, one in enumerate(found):
        assert {key.split()[0] for key in one["stages"]["ratios"]} == {f"of{rank}", "last"}


def test_process_group_argument_selects_the_ranks_to_compare(found):
    for one in found:
        assert one["group"]["ratios"]["0 input output"] == pytest.approx(3)
        for name in ("alone", "group of one", "group of others"):
            assert one[name]["ratios"] is None, name


def test_alone_there_is_nothing_to_compare():
    layer = octavo.nn.Linear(16, 16, recipe="tensorwise")
    casts = {CastKey("0", "input", "output"): np.ones(len(CAST_SUMS))}
    for group in (None, ALONE):
        assert RankComparison({"0": layer}, group).reduce(casts, {}) == (casts, {}, {})
    with pytest.raises(ConfigError, match=r"None for the default one or 'alone', not 'default'"):
        RankComparison({"0": layer}, "default")
