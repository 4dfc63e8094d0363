"""Ranks that begin alike, and ranks that do not: two processes over gloo."""

import torch
from torch import distributed, multiprocessing
from torch.multiprocessing.spawn import start_processes

from octavo.experiments.preflight.probe import Probe
from octavo.experiments.preflight.ranks import ranks_check

NAME = "model.layers.0.self_attn.q_proj.weight"


def compare(rank, folder, origin, results):
    """In a process of its own: the ranks as they are, then with one element of one rank changed."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    probe = Probe(origin)
    equal = ranks_check(probe, step=1)
    if rank == 1:
        probe.model.get_parameter(NAME).data[0, 0] += 1e-6
    results.put([equal, ranks_check(probe, step=1)])
    distributed.destroy_process_group()


def test_one_process_has_nothing_to_compare(origin):
    check = ranks_check(Probe(origin), step=1)
    assert (check.said, check.findings) == ("one process: nothing to compare", ())


def test_two_ranks_are_equal_until_a_weight_of_one_differs(origin, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.Queue()
    start_processes(compare, (str(tmp_path), origin, results), nprocs=2, start_method="forkserver")
    for equal, different in (results.get(), results.get()):
        assert equal.findings == ()
        assert equal.said == "2 ranks have the same 12 parameters and the same loss"
        (finding,) = different.findings
        assert (finding.code, finding.severity) == ("rank-mismatch", "fail")
        assert finding.path == NAME.removesuffix(".weight")
        assert "of 13 differ between ranks" in different.said
