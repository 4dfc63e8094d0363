"""Cost of FP8's collectives: measured on a few ranks, simulated on many.

    python -m benchmarks.scaling_overhead [--rounds 9] [--no-write]

Measured on 2 and 4 processes with gloo:

- seconds of the amax all-reduces of 10 to 1,000 layers, octavo's one and one for each tensor, and their number in an
  optimizer's step after the first;
- seconds of gathering 100 weights of 256 x 256 in BF16 and as FP8 codes;
- a training step of two ranks in FP8 against BF16, under DDP and FSDP2, and the share of it that FP8's extra
  collectives take, with the wait for the other rank.

The network of benchmarks/scaling_simulation.py is fitted to three collectives of each size of group, and a rank's own
work to one process alone (a group of one) with 10 and 1,000 layers. They must explain the other measurements.

Bars: one amax all-reduce a step; extra collectives at most 2 % of a step; predictions within a factor of 1.5. Processes
outnumber cores on small machines, so seconds there are of processes that wait for a core.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import octavo
from benchmarks.measure import hardware, markdown_table, publish, ratio, verdict
from benchmarks.scaling_simulation import TENSORS, Network, TrainingStep, Work, simulate
from octavo.models import Llama
from octavo.parallel import gather_in_fp8
from octavo.scaling.rank_reduction import reduce_amaxes
from octavo.training.config import demo_config

RANKS, LAYERS = (2, 4), (10, 100, 1000)
WEIGHT, WEIGHTS = (256, 256), 100
EXTRA_BAR, PREDICTION_BAR = 0.02, 1.5
FITTED = ("100 all-reduces of a number", "100 gathers of a number", "a gather of 16 MB")
TOKENS = {"BF16": 6150, "FP8": 7690}  # a second a GPU; torchao, README of float8
CLUSTER = Network(latency=5e-6, reduce_latency=10e-6, bandwidth=50e9)
NODE = replace(CLUSTER, bandwidth=300e9)
WORLD = (8, 64, 512, 1024, 2048, 4096)
BATCHES = (8192, 2048)  # tokens a GPU
GLOBAL_BATCH = 4 << 20  # tokens of all GPUs, as Llama 3 begins with
BANDWIDTHS = (25e9, 50e9, 100e9)  # bytes a second a GPU between nodes
MANY = 1024  # GPUs: published gains are below FADED there
FADED = 1.05
PUBLISHED = "published for 8 H100 (torchao), with what they wait for each other"
JITTERS = (0.0, 0.01, 0.05)
LLAMA = 8.03e9  # parameters of 32 layers with 7 linears each

Timed = dict[str, list[float]]


def main() -> None:
    """Measure, simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: ratios are given with their quartiles")
    machine = hardware()
    work = fitted_work(measured_on(1, arguments.rounds)["seconds"])
    measured = {ranks: measured_on(ranks, arguments.rounds) for ranks in RANKS}
    lines = [*collectives(measured, work), "", *training(measured[2]), "", *simulated(work)]
    publish("scaling_overhead", lines, title="FP8 on many ranks", machine=machine, write=not arguments.no_write)


def measured_on(ranks: int, rounds: int) -> dict[str, Any]:
    """Measurements of rank 0 of ``ranks`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, rounds, folder), nprocs=ranks)
        found: dict[str, Any] = torch.load(Path(folder) / "measured.pt")
    return found


def _rank(rank: int, ranks: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10)
    )
    found: dict[str, Any] = {
        "seconds": _timed(_collectives(ranks), rounds),
        "reduces": {n: _reduces(n) for n in LAYERS},
    }
    if ranks == 2:
        found["steps"], found["extra"] = _steps(rank, rounds)
    if rank == 0:
        torch.save(found, Path(folder) / "measured.pt")
    distributed.destroy_process_group()


def _timed(variants: dict[str, Callable[[], object]], rounds: int) -> Timed:
    """Seconds of each variant in each round; all ranks begin together, and the first round is not counted."""
    seconds: Timed = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name, run in variants.items():
            distributed.barrier()
            started = time.perf_counter()
            run()
            if index:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _collectives(ranks: int) -> dict[str, Callable[[], object]]:
    variants, world = dict[str, Callable[[], object]](), distributed.distributed_c10d._get_default_group()  # noqa: SLF001
    for count in LAYERS:
        layers = [module for module in _delayed(count).modules() if isinstance(module, octavo.nn.Linear)]
        variants[f"{count} layers, one all-reduce"] = partial(reduce_amaxes, layers, world)
        variants[f"{count} layers, one a tensor"] = partial(_reduce_each, TENSORS * count)
    if ranks == 1:  # its own work alone
        return {name: run for name, run in variants.items() if name.endswith("one all-reduce")}
    variants["fit: 100 all-reduces of a number"] = partial(_reduce_each, 100)
    variants["fit: 100 gathers of a number"] = partial(_gather, torch.zeros(distributed.get_world_size()), 100)
    variants["fit: a gather of 16 MB"] = partial(_gather, torch.zeros(2048, 2048), 1)
    for name, dtype in (("BF16", torch.bfloat16), ("FP8", torch.uint8)):
        variants[f"gathers in {name}"] = partial(_gather, torch.zeros(WEIGHT, dtype=dtype), WEIGHTS)
    return variants


def _delayed(count: int) -> nn.Module:
    """A model of ``count`` layers with delayed scaling that has trained for a step."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))
    octavo.convert(model, "delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.randn(16, 16)).sum().backward()
    optimizer.step()
    return model


def _reduce_each(count: int) -> None:
    for _ in range(count):
        distributed.all_reduce(torch.ones(1), op=distributed.ReduceOp.MAX)


def _gather(whole: Tensor, count: int) -> None:
    ranks = distributed.get_world_size()
    shard = whole[: len(whole) // ranks].contiguous()
    parts = list(torch.empty_like(whole).chunk(ranks))
    for _ in range(count):
        distributed.all_gather(parts, shard)


def _reduces(count: int) -> int:
    """All-reduces of the second optimizer's step with ``count`` layers of delayed scaling."""
    model, reduces = _delayed(count), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.randn(16, 16)).sum().backward()
    genuine = distributed.all_reduce
    with mock.patch.object(distributed, "all_reduce", lambda *a, **k: reduces.append(genuine(*a, **k))):
        optimizer.step()
    return len(reduces)


def _steps(rank: int, rounds: int) -> tuple[Timed, Timed]:
    """Seconds of training steps, and of these the seconds that FP8's own all-reduces take."""
    config = demo_config().model.llama(vocab_size=2048, max_positions=128)
    tokens = torch.randint(2048, (4, 128), generator=torch.Generator().manual_seed(rank))
    clock, extra = _Clock(), Timed()
    variants: dict[str, Callable[[], object]] = {}
    for wrapper in ("DDP", "FSDP2"):
        for recipe in ("bf16", "tensorwise", "delayed"):
            torch.manual_seed(0)
            name, (model, optimizer) = f"{wrapper}, {recipe}", _wrapped(Llama(config), wrapper, recipe)
            extra[name] = []
            variants[name] = partial(clock.note, partial(_train_step, model, optimizer, tokens), extra[name])
    with ExitStack() as stack:
        stack.enter_context(mock.patch("octavo.scaling.scale_updates.reduce_amaxes", clock.timing(reduce_amaxes)))
        stack.enter_context(mock.patch.object(distributed, "all_reduce", clock.timing(distributed.all_reduce)))
        seconds = _timed(variants, rounds)
    return seconds, {name: each[1:] for name, each in extra.items()}


class _Clock:
    """Seconds in functions that may call each other."""

    def __init__(self) -> None:
        self.seconds, self._is_running = 0.0, False

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; the clock runs meanwhile."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if self._is_running:
                return function(*arguments, **options)
            self._is_running, started = True, time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started
                self._is_running = False

        return timed

    def note(self, run: Callable[[], object], seconds: list[float]) -> None:
        """Run, and append the seconds for which the clock ran."""
        before = self.seconds
        run()
        seconds.append(self.seconds - before)


def _wrapped(model: nn.Module, wrapper: str, recipe: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    octavo.convert(model, recipe)
    if wrapper == "DDP":
        wrapped: Any = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        if recipe != "bf16":
            gather_in_fp8(wrapped)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def fitted(seconds: Timed, ranks: int) -> Network:
    """The network that three of the measured collectives describe."""
    reduce, small, large = (statistics.median(seconds[f"fit: {name}"]) for name in FITTED)
    doublings, size = math.log2(ranks), 4.0 * 2048 * 2048
    return Network(
        latency=small / 100 / doublings,
        reduce_latency=reduce / 100 / doublings,
        bandwidth=size * (ranks - 1) / ranks / (large - small / 100),
    )


def fitted_work(seconds: Timed) -> Work:
    """A rank's own work that one process alone shows, with the fewest and with the most layers."""
    few, many = (statistics.median(seconds[f"{count} layers, one all-reduce"]) for count in (LAYERS[0], LAYERS[-1]))
    scale = (many - few) / (TENSORS * (LAYERS[-1] - LAYERS[0]))
    return Work(step=few - scale * TENSORS * LAYERS[0], scale=scale)


def predicted_seconds(name: str, network: Network, work: Work, ranks: int, reduces: dict[int, int]) -> float:
    """Seconds of one of the measured collectives, in the simulation's model."""
    if not name[0].isdigit():
        elements = WEIGHT[0] * WEIGHT[1]
        return WEIGHTS * network.gather(elements * (2 if name.endswith("BF16") else 1), ranks)
    count = int(name.split(maxsplit=1)[0])
    if name.endswith("tensor"):
        return TENSORS * count * network.all_reduce(4, ranks)
    sharing = max(1.0, ranks / len(os.sched_getaffinity(0)))  # ranks that work at the same time and have no core each
    size = max(4 * 4096, 2 * 4 * TENSORS * count)
    return sharing * work.seconds(TENSORS * count) + reduces[count] * network.all_reduce(size, ranks)


def collectives(measured: dict[int, dict[str, Any]], work: Work) -> list[str]:
    """Lines on collectives: measured, and predicted by the fitted network and work."""
    rows = []
    for ranks, found in measured.items():
        network = fitted(found["seconds"], ranks)
        for name, seconds in found["seconds"].items():
            if name.startswith("fit"):
                continue
            count = int(name.split()[0]) if name[0].isdigit() else 0
            predicted = predicted_seconds(name, network, work, ranks, found["reduces"])
            median = statistics.median(seconds)
            is_near = 1 / PREDICTION_BAR <= predicted / median <= PREDICTION_BAR
            reduces = found["reduces"][count] if name.endswith("one all-reduce") else ""
            times = (f"{median * 1e3:.2f} ms", f"{predicted / median:.2f}", verdict(is_near), str(reduces))
            rows.append([str(ranks), name, *times])
    header = ["ranks", "collectives", "measured", "predicted / measured", "bar 1.5", "all-reduces a step"]
    networks = "; ".join(
        f"{ranks} ranks: {network.latency * 1e6:.0f} µs, {network.reduce_latency * 1e6:.0f} µs, "
        f"{network.bandwidth / 1e9:.2f} GB/s"
        for ranks, found in measured.items()
        for network in [fitted(found["seconds"], ranks)]
    )
    return [
        "## Collectives",
        "",
        *markdown_table(header, rows),
        "",
        (
            "Fitted networks, latencies of a gather and of an all-reduce a doubling of ranks, and bandwidth: "
            f"{networks}. A rank's own work around its all-reduce, fitted to one process alone with {LAYERS[0]} and "
            f"{LAYERS[-1]:,} layers: {work.step * 1e6:.0f} µs a step and {work.scale * 1e6:.2f} µs a scale. Ranks that "
            "outnumber the cores are assumed to share them evenly in it."
        ),
    ]


def training(found: dict[str, Any]) -> list[str]:
    """Lines on training steps of two ranks."""
    seconds, rows, worst = found["steps"], [], 0.0
    for name in seconds:
        share = statistics.median(found["extra"][name]) / statistics.median(seconds[name])
        rows.append([name, str(ratio(seconds, name, f"{name.split(',')[0]}, bf16")), f"{share:.2%}"])
        worst = max(worst, share)
    return [
        "## A training step of two ranks",
        "",
        *markdown_table(["step", "time, × the wrapper's bf16", "in all-reduces of amaxes"], rows),
        "",
        (
            f"The demo's model, 512 tokens a rank. All-reduces of amaxes are at most {worst:.2%} of a step: "
            f"{verdict(worst <= EXTRA_BAR)} (at most {EXTRA_BAR:.0%})."
        ),
    ]


def simulated(work: Work) -> list[str]:
    """Lines on a large cluster."""
    rows = [
        [name, f"{ranks:,}", f"{tokens:,}", *(f"{gain(tokens, ranks, work, *variant):.2f}" for variant in VARIANTS)]
        for name, batches in (
            *((f"{tokens:,} a GPU", dict.fromkeys(WORLD, tokens)) for tokens in BATCHES),
            (f"{GLOBAL_BATCH:,} in all", {ranks: GLOBAL_BATCH // ranks for ranks in WORLD}),
        )
        for ranks, tokens in batches.items()
    ]
    header = ["tokens a step", "GPUs", "tokens a GPU", "FP8 gather, one all-reduce", "BF16 gather, one"]
    stragglers = [[f"{jitter:.0%}", *(f"{_jittered(jitter, ranks):.2f}" for ranks in WORLD)] for jitter in JITTERS]
    return [
        "## Simulated: times as fast as BF16",
        "",
        *assumptions(work),
        "",
        *markdown_table([*header, "BF16 gather, one a tensor"], rows),
        "",
        *published(work),
        "",
        "Seconds a step, as a multiple of one without stragglers, of BF16 with 8,192 tokens a GPU, by mean delay:",
        "",
        *markdown_table(["mean delay", *(f"{ranks:,} GPUs" for ranks in WORLD)], stragglers),
    ]


def assumptions(work: Work) -> list[str]:
    """Table of the simulation's assumptions, with the source of each number."""
    compute, (node, cluster) = TOKENS, (f"{each.bandwidth / 1e9:.0f}" for each in (NODE, CLUSTER))
    gather, reduce = (f"{each * 1e6:.0f} µs" for each in (CLUSTER.latency, CLUSTER.reduce_latency))
    own = f"{work.step * 1e6:.0f} µs and {work.scale * 1e6:.2f} µs a scale"
    rows = [
        (
            "compute",
            f"Llama 3 8B, {compute['BF16']:,} tokens a second a GPU in BF16, {compute['FP8']:,} in FP8",
            PUBLISHED,
        ),
        (
            "bandwidth",
            f"{cluster} GB/s a GPU between nodes, {node} in one; gathers and reductions do not share it",
            "assumed",
        ),
        ("latency", f"a doubling of GPUs {gather} for gathers, {reduce} for all-reduces", "assumed"),
        ("sharding", "FSDP2 over all GPUs: gathers a layer ahead in both passes, reduce-scatters in BF16", "assumed"),
        ("stragglers", "a layer takes a GPU a random share longer, 1 % in the mean", "assumed"),
        ("a rank's own work", f"around the one all-reduce {own}", "measured above, on this CPU, not on a GPU's host"),
    ]
    return markdown_table(["assumption", "value", "source"], [list(row) for row in rows])


def published(work: Work) -> list[str]:
    """Lines on the published fall of FP8's gain: where the simulation shows it, and where it does not."""
    one_node = gain(BATCHES[0], 8, work, *VARIANTS[1])
    rows, shown = [], []
    for tokens in (16384, 8192, 4096, 2048, 1024):
        gains = [gain(tokens, MANY, work, *VARIANTS[1], bandwidth=bandwidth) for bandwidth in BANDWIDTHS]
        rows.append([f"{tokens:,}", *(f"{each:.2f}" for each in gains)])
        faded = [f"{b / 1e9:.0f}" for b, each in zip(BANDWIDTHS, gains, strict=True) if each < FADED]
        shown += [f"{tokens:,} tokens a GPU at {', '.join(faded)} GB/s"] if faded else []
    constant = gain(BATCHES[0], MANY, work, *VARIANTS[1])
    shared = [f"{gain(GLOBAL_BATCH // ranks, ranks, work, *VARIANTS[1]):.2f} on {ranks:,}" for ranks in WORLD]
    return [
        (
            "Published: 1.25 on 8 GPUs (torchao); users report 1.2 to 1.3 on few GPUs and under 1.05 beyond 1,000 "
            "(Transformer Engine, issue 556), without the tokens a GPU or the network. The simulation has "
            f"{one_node:.2f} on 8 GPUs, and on {MANY:,}, with weights gathered in BF16, by tokens a GPU and bandwidth "
            "between nodes:"
        ),
        "",
        *markdown_table(["tokens a GPU", *(f"{each / 1e9:.0f} GB/s" for each in BANDWIDTHS)], rows),
        "",
        (
            f"Shown, under {FADED}: {'; '.join(shown) or 'nowhere'}. There the gathers in BF16 take longer than the "
            "compute that FP8 shortens. A batch that all GPUs share gets there by itself as GPUs are added: of "
            f"{GLOBAL_BATCH:,} tokens at {CLUSTER.bandwidth / 1e9:.0f} GB/s the gain is {', '.join(shared)}."
        ),
        "",
        (
            f"Not shown: with {BATCHES[0]:,} tokens a GPU for any number of GPUs, at {CLUSTER.bandwidth / 1e9:.0f} "
            f"GB/s, the gain on {MANY:,} is {constant:.2f}. Only an all-reduce for each tensor lowers it there."
        ),
    ]


VARIANTS = ((1.0, "one a step"), (2.0, "one a step"), (2.0, "one a tensor"))  # bytes of a gathered element, amaxes


def gain(
    tokens: int, ranks: int, work: Work, gathered: float, amaxes: str, *, bandwidth: float = CLUSTER.bandwidth
) -> float:
    """Seconds of a step in BF16 over those of one in FP8."""
    network = replace(CLUSTER, bandwidth=bandwidth) if ranks > 8 else NODE
    bf16, fp8 = _cluster_step(tokens, "BF16"), replace(_cluster_step(tokens, "FP8"), gathered=gathered, amaxes=amaxes)
    return simulate(bf16, network, ranks) / simulate(replace(fp8, work=work), network, ranks)


def _cluster_step(tokens: int, precision: str, *, jitter: float = 0.01) -> TrainingStep:
    """A step whose weights are gathered in BF16 and whose ranks agree on nothing."""
    forward = tokens / TOKENS[precision] / 32 / 3
    return TrainingStep(layers=32, forward=forward, weights=LLAMA / 32, gathered=2.0, linears=7, jitter=jitter)


def _jittered(jitter: float, ranks: int) -> float:
    network = CLUSTER if ranks > 8 else NODE
    seconds = [simulate(_cluster_step(8192, "BF16", jitter=each), network, ranks) for each in (jitter, 0.0)]
    return seconds[0] / seconds[1]


if __name__ == "__main__":
    main()
