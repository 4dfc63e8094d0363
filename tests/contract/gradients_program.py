"""One of three ranks that send gradients as codes: ``python -m tests.contract.gradients_program FOLDER RANKS``.

Every rank knows all ranks' inputs, and
so computes alone, with ``octavo.quantize``, what the ranks must agree on.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.errors import ConfigError
from octavo.formats import Format
from octavo.numerics import PerBlock
from octavo.parallel import GradientReduction, data_parallel, reduce_gradients_in_fp8
from tests.contract.rank_processes import named, run_ranks

RANKS = 3
WIDTH, ROWS = 40, (33, 31, 1)  # 31 rows leave the last rank one less; of 1 row two ranks have none
STEPS = 16


def layer_of(rows: int) -> Any:
    torch.manual_seed(rows)
    return nn.Linear(WIDTH, rows, bias=False)


def inputs(rank: int, step: int = 0) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(7, WIDTH) * torch.logspace(-3, 3, WIDTH)


def gradient(layer: nn.Linear, rank: int) -> Tensor:
    """The gradient of one rank by itself."""
    found: Tensor
    [found] = torch.autograd.grad(layer(inputs(rank)).square().mean(), layer.weight)
    return found


def rounded(rows: Tensor, fmt: Format) -> Tensor:
    return octavo.quantize(rows, fmt, granularity=PerBlock(1, 128)).dequantize()


def expected(gradients: list[Tensor], rows: int, fmt: Format) -> Tensor:
    """Sum of what the ranks send, in their order: [ranks, chunk]; ``rows`` is padded to whole chunks."""
    size = -(-rows // RANKS) * RANKS * WIDTH
    flat = [nn.functional.pad(each.flatten(), (0, size - each.numel())).view(RANKS, -1) for each in gradients]
    return torch.stack([rounded(each, fmt) for each in flat]).sum(0)


def replicated(_rank: int, _folder: Path) -> Any:
    """Numbers of rows whose gradients under DDP are not the average of the codes' values, bit for bit.

    ``octavo train`` has their sum instead.
    """
    wrong = []
    for rows in ROWS:
        for fmt, divisor in ((octavo.E4M3, RANKS), (octavo.E5M2, RANKS), (octavo.E4M3, 1)):
            layer = layer_of(rows)
            gradients = [gradient(layer, rank) for rank in range(RANKS)]
            if divisor == 1:
                model = data_parallel.replicated(layer, GradientReduction(fmt, error_feedback=False))
            else:
                model = DistributedDataParallel(layer)
                reduce_gradients_in_fp8(model, fmt=fmt)
            model(inputs(distributed.get_rank())).square().mean().backward()
            flat = torch.cat([each.flatten() for each in gradients]).view(RANKS, -1)
            padded = nn.functional.pad(flat, (0, -flat.shape[1] % RANKS)).view(RANKS, RANKS, -1)
            average = torch.stack([rounded(each, fmt) for each in padded]).sum(0) / divisor
            wanted = torch.cat([rounded(chunk[None], fmt).flatten() for chunk in average])[: layer.weight.numel()]
            if not torch.equal(layer.weight.grad, wanted.view_as(layer.weight)):
                wrong.append((rows, fmt.name, divisor))
    return wrong


def sharded(rank: int, _folder: Path) -> Any:
    """Numbers of rows whose shards of gradients under FSDP2 are not the average of the codes' values, bit for bit."""
    wrong = []
    for rows in ROWS:
        layer = layer_of(rows)
        gradients = [gradient(layer, each) for each in range(RANKS)]
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
        reduce_gradients_in_fp8(layer)
        layer(inputs(rank)).square().mean().backward()
        chunk = (expected(gradients, rows, octavo.E4M3) / RANKS)[rank].view(-1, WIDTH)
        found = layer.weight.grad.to_local()
        if not torch.equal(found, chunk[: len(found)]):
            wrong.append(rows)
    return wrong


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes that this rank gives to collectives for others."""
    sent: list[int] = []
    exchange, gather = distributed.all_to_all_single, distributed.all_gather

    def exchanged(received: Tensor, codes: Tensor, **keywords: Any) -> None:
        sent.append(codes.nbytes * (RANKS - 1) // RANKS)
        exchange(received, codes, **keywords)

    def gathered(received: list[Tensor], codes: Tensor, **keywords: Any) -> None:
        sent.append(codes.nbytes * (RANKS - 1))
        gather(received, codes, **keywords)

    with (
        mock.patch.object(distributed, "all_to_all_single", exchanged),
        mock.patch.object(distributed, "all_gather", gathered),
    ):
        yield sent


def traffic(rank: int, _folder: Path) -> Any:
    """Bytes sent for the gradients of 48 x 256 weights, over those of bfloat16's ring: DDP's, and FSDP2's."""
    ratios = []
    for halves in (2, 1):
        layer = nn.Linear(256, 48, bias=False)
        model: Any = DistributedDataParallel(layer) if halves == 2 else layer
        if halves == 1:
            fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
        reduce_gradients_in_fp8(model)
        torch.manual_seed(rank)
        with counting() as sent:
            model(torch.randn(4, 256)).square().mean().backward()
        ratios.append(sum(sent) / (halves * 2 * 48 * 256 * (RANKS - 1) / RANKS))
    return ratios


def many_layers(rank: int, _folder: Path) -> Any:
    """Largest relative error of a parameter's gradient where DDP has several buckets, which it builds anew."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    exact, coded = (DistributedDataParallel(each, bucket_cap_mb=0.01) for each in (copy.deepcopy(model), model))
    reduce_gradients_in_fp8(coded)
    worst = 0.0
    for step in range(3):  # DDP builds its buckets anew after the first
        for each in (exact, coded):
            each.zero_grad()
            each(inputs(rank, step) / 1000).square().mean().backward()
        grads: Any = zip(*([each.grad for each in model.parameters()] for model in (exact, coded)), strict=True)
        worst = max(worst, *(float((b - a).norm() / a.norm()) for a, b in grads))
    return worst


def feedback(rank: int, _folder: Path) -> Any:
    """Error of the sum of 16 steps' gradients, which are all the same, over that of one step: without and with it."""
    return [summed_error(layer_of(33), rank, error_feedback=each) for each in (False, True)]


def feedback_of_buckets(rank: int, _folder: Path) -> Any:
    """The same of layers whose gradients DDP sends in several buckets, which it builds anew after the first step."""
    found = []
    for error_feedback in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        found.append(summed_error(model, rank, error_feedback=error_feedback, bucket_cap_mb=0.01))
    return found


def summed_error(model: nn.Module, rank: int, *, error_feedback: bool, **options: Any) -> float:
    """Error of the sum of equal steps' gradients over the largest of a step."""
    x = inputs(rank) / 1000
    exact = torch.cat([each.flatten() for each in torch.autograd.grad(loss(model, x), list(model.parameters()))])
    distributed.all_reduce(exact)
    exact = exact.double() / RANKS
    wrapped = DistributedDataParallel(model, **options)
    reduce_gradients_in_fp8(wrapped, error_feedback=error_feedback)
    total, errors = torch.zeros_like(exact), []
    for _ in range(STEPS):
        model.zero_grad()
        loss(wrapped, x).backward()
        step = torch.cat([grad.flatten() for each in model.parameters() if (grad := each.grad) is not None])
        total += step
        errors.append(float((step - exact).norm()))
    return float((total - STEPS * exact).norm()) / max(errors)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def overflow(rank: int, _folder: Path) -> Any:
    """Non-finite elements of the gradient when one rank's input is infinite, and a step later."""
    layer = layer_of(33)
    model = DistributedDataParallel(layer)
    reduce_gradients_in_fp8(model, error_feedback=True)
    counts = []
    for step in range(2):
        model.zero_grad()
        x = inputs(rank)
        if step == 0 and rank == 1:
            x[0, 5] = torch.inf
        model(x).sum().backward()
        counts.append(int((~layer.weight.grad.isfinite()).sum()))
    return counts


def measured(rank: int, _folder: Path) -> Any:
    """What one rank's statistics say after a step, and what its gradients and the averages say; then nothing."""
    layer = layer_of(33)
    gradients = torch.stack([gradient(layer, each).flatten() for each in range(RANKS)]).view(RANKS, RANKS, -1)
    model = DistributedDataParallel(layer)
    reduction = reduce_gradients_in_fp8(model)
    reduction.measures = True
    model(inputs(rank)).square().mean().backward()
    average = torch.stack([rounded(each, octavo.E4M3) for each in gradients]).sum(0)[rank] / RANKS
    values = [gradients[rank], average[None]]
    sent = [rounded(each, octavo.E4M3) for each in values]
    pairs = [(a.flatten().double(), b.flatten().double()) for a, b in zip(values, sent, strict=True)]
    a, b = (torch.cat(each) for each in zip(*pairs, strict=True))
    error = float((a - b).norm() / a.norm())
    zeros = int(((b == 0) & (a != 0)).sum()) / int((a != 0).sum())
    return reduction.statistics(), error, zeros, reduction.statistics()


def refusals(_rank: int, _folder: Path) -> Any:
    layer = nn.Linear(4, 4)
    said = []
    fully_shard(sharded_layer := nn.Linear(4, 4), mesh=init_device_mesh("cpu", (RANKS,)))
    for model, keywords in (
        (layer, {}),
        (sharded_layer, {"error_feedback": True}),
        (DistributedDataParallel(layer), {"fmt": octavo.formats.BF16}),
    ):
        try:
            reduce_gradients_in_fp8(model, **keywords)
        except ConfigError as error:
            said.append(str(error))
    return said


CHECKS = (replicated, sharded, traffic, many_layers, feedback, feedback_of_buckets, overflow, measured, refusals)


if __name__ == "__main__":
    run_ranks(lambda _: named(*CHECKS))
