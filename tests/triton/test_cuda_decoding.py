"""The GPU's decoder, kernel by kernel in Triton's interpreter or on the GPU, against its definition."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from octavo.errors import BackendError
from octavo.formats import BF16, E4M3, FP32
from octavo.kernels import cuda_decoding
from octavo.kernels.casting import quantize
from octavo.kernels.cuda_decoding import CudaDecoder, _many_rows
from octavo.kernels.decoding import PAGE, CacheTensors
from octavo.kernels.triton import few_rows
from octavo.models import Llama, LlamaConfig
from octavo.numerics import PerRow
from octavo.serving import ModelRunner, PagedKVCache


def model(device, *, tie=False, heads=4, kv_heads=2, layers=2):
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=96,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_positions=192,
        tie_embeddings=tie,
    )
    made = Llama(config, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made.to(device)


def pair(device, **options):
    """The definition's runner, and the GPU's decoder of the same codes."""
    runner = ModelRunner(model(device, **options), level="torch")
    return runner, CudaDecoder(runner._decoder, runner._embed)


def error(found, wanted):
    """Relative to the spread of the logits."""
    return float((found.cpu() - wanted.cpu()).square().mean().sqrt() / wanted.std())


@pytest.mark.parametrize(("tie", "heads", "kv_heads"), [(True, 4, 2), (False, 4, 1)])
def test_one_token_is_fp32(tie, heads, kv_heads, device):
    runner, decoder = pair(device, tie=tie, heads=heads, kv_heads=kv_heads)
    tokens = torch.randint(0, 90, (3,))
    caches = [runner.new_cache(fmt=FP32) for _ in range(2)]
    for at, token in enumerate(tokens):
        wanted = runner(token[None], caches[0])
        found = decoder.read(token[None], caches[1].tensors, at)
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fmt", "limit"), [(FP32, 0.01), (BF16, 0.015), (E4M3, 0.02)], ids=str)
def test_few_tokens_round_to_bfloat16(fmt, limit, device):
    """With FP8 keys and values a rounding may fall to the other side of a tie, and moves what later layers round."""
    runner, decoder = pair(device)
    tokens = torch.randint(0, 90, (8,))
    caches = [runner.new_cache(64, fmt=fmt) for _ in range(2)]
    for start, part in zip((0, 5), tokens.split([5, 3]), strict=True):
        wanted = runner(part, caches[0], every=True)
        assert error(decoder.read(part, caches[1].tensors, start, every=True), wanted) < limit


def test_many_tokens_are_cast(device, monkeypatch):
    """Cast to E4M3 with 3 mantissa bits, 2^-4 at most and 2 % on average of a number, sums of many average it out.

    Here more than 16 are many, which saves the interpreter half a minute; the second part crosses a page's edge.
    """
    monkeypatch.setattr(few_rows, "FEW", 16)
    runner, decoder = pair(device, heads=2, kv_heads=1, layers=1)
    tokens = torch.randint(0, 90, (PAGE + 2,))
    caches = [runner.new_cache() for _ in range(2)]
    start = PAGE - 15
    for first, part in zip((0, start), tokens.split([start, 17]), strict=True):
        wanted = runner(part, caches[0], every=True)
        assert error(decoder.read(part, caches[1].tensors, first, every=True), wanted) < 0.08
    last = decoder.read(tokens[start:], caches[1].tensors, start)
    assert last.shape == (1, 90)
    assert error(last[0], wanted[-1]) < 0.08


def test_many_rows_are_summed_fast(monkeypatch):
    asked = []

    def product(a, b, **options):
        asked.append(options)
        return torch.zeros(a.shape[0], b.shape[0])

    monkeypatch.setattr(cuda_decoding, "scaled_mm", product)
    rows = quantize(torch.ones(2, 16), E4M3, granularity=PerRow())
    _many_rows(rows, rows)
    assert asked == [{"out_dtype": torch.bfloat16, "fast_accumulation": True}]


def test_sequences_share_a_step_and_nothing_else(device):
    runner, decoder = pair(device)
    tokens, starts = torch.randint(0, 90, (3, 20)), [3, 17, 9]
    batch = runner.new_batch(3, 64)
    alone = [runner.new_cache(64) for _ in range(3)]
    for own, start, sequence, cache in zip(tokens, starts, batch.sequences, alone, strict=True):
        runner(own[:start], sequence)
        runner(own[:start], cache)
    now = torch.stack([own[length] for own, length in zip(tokens, batch.lengths, strict=True)])
    wanted = torch.stack([runner(token[None], cache) for token, cache in zip(now, alone, strict=True)])
    assert error(decoder.step(now, batch.tensors, batch.lengths), wanted) < 0.02


def test_more_sequences_than_few_rows(device):
    runner, decoder = pair(device, heads=2, kv_heads=1, layers=1)
    count = few_rows.FEW + 1
    batches, tokens = [runner.new_batch(count, 64) for _ in range(2)], torch.randint(0, 90, (count,))
    assert error(decoder.step(tokens, batches[1].tensors, [0] * count), runner.step(tokens, batches[0])) < 0.08


def test_caches_and_rows_that_do_not_fit_are_refused(device):
    runner, decoder = pair(device)
    token = torch.tensor([1])
    with pytest.raises(BackendError, match="new_cache"):
        decoder.read(token, PagedKVCache(1, 2, 16, max_positions=64, device=device).tensors, 0)
    cache = runner.new_cache(64).tensors
    for start in (64, 192):
        with pytest.raises(BackendError, match="room for 64 positions"):
            decoder.read(token, cache, start)
    with pytest.raises(BackendError, match="room for 192 positions, not 193"):
        decoder.read(token, runner.new_cache(640).tensors, 192)
    for tokens, positions in ((token.repeat(2), [0, 0]), (token, [0, 1])):
        with pytest.raises(BackendError, match="a token of each sequence: 1"):
            decoder.step(tokens, cache, positions)


def in_memory(dtype: torch.dtype, memory: torch.Tensor, table: torch.Tensor) -> CacheTensors:
    """A cache of one page, its keys at the beginning of ``memory`` and its values in the middle."""
    keys, values = (half.view(dtype)[: 2 * 16 * PAGE] for half in memory.chunk(2))
    return CacheTensors(keys.view(1, 1, 2, 16, PAGE), values.view(1, 1, 2, PAGE, 16), None, None, table)


def test_a_graph_is_replayed_for_the_memory_that_it_was_captured_with(monkeypatch):
    """Stand-ins for graphs: the logits are the number of the capture."""
    _, decoder = pair(torch.device("cpu"))
    captures = itertools.count()

    def captured(_: object, given: tuple[torch.Tensor, ...]) -> SimpleNamespace:
        graph = SimpleNamespace(replay=lambda: None)
        return SimpleNamespace(given=given, logits=torch.tensor(next(captures)), graph=graph)

    def graph_of(cache: CacheTensors, rows: int = 1) -> int:
        return int(decoder._step(torch.zeros(rows), cache, torch.zeros(rows)))

    monkeypatch.setattr(decoder, "_captured", captured)
    monkeypatch.setattr(decoder, "_device", torch.device("cuda"))
    memory, pages = torch.zeros(16 * 2 * 16 * PAGE, dtype=torch.uint8), torch.zeros(1, 3, dtype=torch.int32)
    table = pages[:, :1]
    one, other = (in_memory(torch.bfloat16, held, table) for held in (memory, memory.clone()))
    assert [graph_of(cache) for cache in (one, other, one, other)] == [0, 1, 0, 1]
    assert graph_of(in_memory(torch.bfloat16, memory, table)) == 0, "a new cache in the memory of an old one"
    codes = PagedKVCache(1, 2, 16, max_positions=PAGE).tensors
    changed = (
        in_memory(torch.float32, memory, table),
        replace(one, values=one.values.clone()),
        replace(one, table=table.clone()),
        replace(one, table=pages),
        codes,
        replace(codes, key_scale=codes.keys[..., 0, :].bfloat16()),
        replace(codes, value_scale=codes.keys[..., 0, :].bfloat16()),
    )
    assert [graph_of(cache) for cache in changed] == list(range(2, 2 + len(changed)))
    assert graph_of(one, rows=2) == 2 + len(changed)
    assert graph_of(other) == 1
    assert len(decoder._graphs) == 3 + len(changed)


def test_a_replay_reads_what_it_is_given_and_its_result_is_its_own(monkeypatch):
    """A stand-in for a graph, whose logits are the tokens."""
    _, decoder = pair(torch.device("cpu"))

    def captured(_: object, given: tuple[torch.Tensor, ...]) -> SimpleNamespace:
        held, logits = tuple(x.clone() for x in given), torch.zeros(1)
        return SimpleNamespace(given=held, logits=logits, graph=SimpleNamespace(replay=lambda: logits.copy_(held[0])))

    monkeypatch.setattr(decoder, "_captured", captured)
    monkeypatch.setattr(decoder, "_device", torch.device("cuda"))
    cache = PagedKVCache(1, 2, 16, max_positions=PAGE).tensors
    found = [decoder._step(torch.tensor([token]), cache, torch.zeros(1)) for token in (3, 5, 7)]
    assert torch.cat(found).tolist() == [3, 5, 7]


def test_graphs_are_captured_on_the_stream_that_was_warmed_up_on(monkeypatch):
    """Stand-ins for CUDA's: a decoder has one stream, of its own device, since a pool's memory belongs to a stream."""
    _, decoder = pair(torch.device("cpu"))
    now: list[object] = []
    made: list[object] = []

    def stream(device: torch.device) -> SimpleNamespace:
        made.append(device)
        return SimpleNamespace(wait_stream=lambda _: None)

    @contextmanager
    def on(found: object) -> Iterator[None]:
        now.append(found)
        yield
        now.pop()

    def run(_: torch.Tensor) -> tuple[object, ...]:
        return tuple(now)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", lambda _, *, pool, stream: on((pool, stream)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    one, other = (decoder._captured(run, (torch.zeros(1),)).logits for _ in range(2))
    side, captured_on = one
    assert captured_on == ("pool", side)
    assert other == one
    assert made == [decoder._device]


def test_graphs_that_were_not_used_for_long_are_dropped(monkeypatch):
    _, decoder = pair(torch.device("cpu"))
    graph = SimpleNamespace(replay=lambda: None)
    made: list[CacheTensors] = []

    def captured(run: partial, given: tuple[torch.Tensor, ...]) -> SimpleNamespace:
        made.append(run.keywords["cache"])
        return SimpleNamespace(given=given, logits=given[0], graph=graph)

    monkeypatch.setattr(decoder, "_captured", captured)
    monkeypatch.setattr(decoder, "_device", torch.device("cuda"))
    caches = [PagedKVCache(1, 2, 16, max_positions=PAGE).tensors for _ in range(cuda_decoding._KEPT + 1)]
    for cache in (*caches[:-1], caches[0], caches[-1], caches[0], caches[1]):
        decoder._step(torch.zeros(1), cache, torch.zeros(1))
    assert len(decoder._graphs) == cuda_decoding._KEPT
    assert [id(cache) for cache in made] == [id(cache) for cache in (*caches, caches[1])]


def test_a_beginning_becomes_a_graph_when_it_is_read_into_the_same_memory_again(monkeypatch):
    """Stand-ins for a run, a tensor of 0, and for graphs: the logits are the number of the capture."""
    _, decoder = pair(torch.device("cpu"))
    captures = itertools.count(1)

    def captured(_: object, given: tuple[torch.Tensor, ...]) -> SimpleNamespace:
        graph = SimpleNamespace(replay=lambda: None)
        return SimpleNamespace(given=given, logits=torch.tensor(next(captures)), graph=graph)

    monkeypatch.setattr(decoder, "_captured", captured)
    monkeypatch.setattr(decoder, "_read", lambda *_, **__: torch.tensor(0))
    monkeypatch.setattr(decoder, "_check", lambda *_: None)
    one, other = (PagedKVCache(1, 2, 16, max_positions=PAGE).tensors for _ in range(2))

    def graph_of(cache: CacheTensors, rows: int, *, start: int = 0, every: bool = False) -> int:
        return int(decoder.read(torch.zeros(rows), cache, start, every=every))

    assert [graph_of(one, 5) for _ in range(3)] == [0, 0, 0], "on a CPU"
    monkeypatch.setattr(decoder, "_device", torch.device("cuda"))
    assert [graph_of(one, 5) for _ in range(3)] == [0, 1, 1]
    assert [graph_of(one, 6) for _ in range(3)] == [0, 2, 2]
    assert [graph_of(other, 5) for _ in range(2)] == [0, 3]
    assert [graph_of(one, 5, start=1) for _ in range(3)] == [0, 0, 0]
    assert [graph_of(one, 5, every=True) for _ in range(3)] == [0, 0, 0]
    assert [graph_of(one, cuda_decoding._LONGEST_IN_GRAPH + 1) for _ in range(3)] == [0, 0, 0]
    lengths = range(7, 8 + cuda_decoding._KEPT)
    assert not any(graph_of(one, rows) for rows in lengths), "each met once"
    assert graph_of(one, 5) == 1, "lengths that are met once push no graph out"
    assert [graph_of(one, rows) for rows in (lengths[0], lengths[-1])] == [0, 4], "the first was forgotten meanwhile"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 100])
def test_a_beginning_reads_the_same_as_a_graph(rows, device):
    """Other tokens than were captured, too; what follows finds the cache as if it had been read eagerly."""
    runner, decoder = pair(device)
    cache, other = (runner.new_cache(150).tensors for _ in range(2))
    for _ in range(4):
        tokens = torch.randint(0, 90, (rows,))
        assert torch.equal(decoder.read(tokens, cache, 0), decoder._read(tokens, other, 0, every=False))
        token = torch.randint(0, 90, (1,))
        assert torch.equal(decoder.read(token, cache, rows), decoder.read(token, other, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [1, 16])
def test_a_replay_is_what_it_captured(sequences, device):
    """Bit by bit the same kernels, launched one by one, at other positions and with other tokens than were captured.

    Two batches take turns, each with texts of its own.
    """
    runner, decoder = pair(device)
    batches, others = ([runner.new_batch(sequences, 150) for _ in range(2)] for _ in range(2))
    for at in range(70):
        for batch, other in zip(batches, others, strict=True):
            tokens = torch.randint(0, 90, (sequences,))
            replayed = decoder.step(tokens, batch.tensors, [at] * sequences)
            position = torch.full((sequences,), at, device=device)
            assert torch.equal(replayed, decoder._next(tokens.to(device), position, other.tensors))
    assert len(decoder._graphs) == 2
