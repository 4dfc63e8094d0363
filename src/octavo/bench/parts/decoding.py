"""Generation with a model of a billion parameters: a token at a time, and a prompt at once.

BF16 and 8-bit integer weights are torch's own operations: the plain decoder of bench/decoder.py, as a CUDA graph,
eager and compiled; the integers' products compiled and tuned, since only a compiler reads them without writing BF16
first. That works for one sequence; for several torch writes the weight as BF16 before every product, which the table
says. FP8 is octavo's ModelRunner, judged against the faster BF16. A prompt in BF16 is compiled a layer at a time, all
by the same graph, and launched by Python or, as the ModelRunner does with a length that it meets again, captured whole.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from octavo.bench.bars import judged_by_speed
from octavo.bench.decoder import PlainDecoder, bf16_product, int8_product, random_llama
from octavo.bench.parts.training import sharing_copy
from octavo.bench.results import Section, Verdict
from octavo.bench.session import Contestant, Session
from octavo.bench.tables import faster, section_of
from octavo.models.llama import Llama
from octavo.serving import ModelRunner

__all__ = ["bars", "measure"]

BF16, BF16_COMPILED, FP8 = "bf16, CUDA graph", "bf16, compiled, CUDA graph", "octavo FP8"
INT8, INT8_WIDENED = "int8 weights, CUDA graph", "int8 weights written as bf16 first, CUDA graph"
COMPILED = "bf16, compiled"
DECODE_BAR, PREFILL_BAR = 1.6, 1.4


def measure(session: Session) -> Iterator[Section]:
    """A section for a batch of one, for every prompt, for larger batches; then the integers, which are tuned first."""
    model = random_llama(session).eval()
    size = session.sizes.model
    first, *larger = size.decode_batches
    steps = {f"decoding {first}": partial(_decoding, session, model, first)}
    steps |= {f"a prompt of {length:,}": partial(_prefill, session, model, length) for length in size.prompts}
    steps |= {f"decoding {batch}": partial(_decoding, session, model, batch) for batch in larger}
    steps |= {f"integers, {batch}": partial(_integers, session, model, batch) for batch in size.decode_batches}
    for what, step in steps.items():
        session.check_time(what)
        yield step()
        session.forget()


def bars(session: Session) -> list[Verdict]:
    """Of one sequence's tokens, and of every prompt."""
    return [*_decoding_bars(session, 1), *map(_prefill_bar, session.sizes.model.prompts)]


def _decoding_bars(session: Session, batch: int) -> list[Verdict]:
    return [Verdict(claim=f"{_title(session, batch)}, FP8 × the faster bf16", bar=DECODE_BAR)] if batch == 1 else []


def _prefill_bar(length: int) -> Verdict:
    return Verdict(claim=f"Prefill, {length:,} tokens, FP8 × the faster bf16", bar=PREFILL_BAR)


def _decoding(session: Session, model: Llama, batch: int) -> Section:
    entered = {
        BF16: _plain(session, model, batch),
        FP8: Contestant(build=lambda: _fp8_decoding(session, model, batch), work=batch, unit="tokens"),
        BF16_COMPILED: _plain(session, model, batch, compiled=True),
    }
    found = session.compare(entered)
    bases = (BF16, BF16_COMPILED)
    verdicts = [judged_by_speed(bar, found, (FP8,), bases) for bar in _decoding_bars(session, batch)]
    return section_of(_title(session, batch), found, base=faster(found, *bases), verdicts=verdicts)


def _integers(session: Session, model: Llama, batch: int) -> Section:
    name = INT8 if batch == 1 else INT8_WIDENED
    entered = {BF16: _plain(session, model, batch), name: _plain(session, model, batch, eight_bits=True)}
    return section_of(f"{_title(session, batch)}, integers", session.compare(entered), base=BF16)


def _title(session: Session, batch: int) -> str:
    return f"Decode, batch {batch}, after {session.sizes.model.context:,} positions"


def _prefill(session: Session, model: Llama, length: int) -> Section:
    def plain() -> Callable[[], object]:
        prompts = _prompts(session, length)
        return lambda: _last_logits(model, prompts())

    def fp8() -> Callable[[], object]:
        runner, prompts = ModelRunner(model), _prompts(session, length)
        cache = runner.new_cache(length)

        def run() -> object:
            cache.length = 0
            return runner(prompts(), cache)

        run()  # the second reading makes a graph: not the call that tells how many a round has room for
        return run

    entered = {"bf16, eager": Contestant(build=plain, work=length, unit="tokens")}
    for name, graphed in ((COMPILED, False), (BF16_COMPILED, True)):
        build = partial(_compiled_prefill, session, model, length, graphed=graphed)
        entered[name] = Contestant(build=build, work=length, unit="tokens")
    entered[FP8] = Contestant(build=fp8, work=length, unit="tokens")
    found = session.compare(entered)
    bases = (COMPILED, BF16_COMPILED)
    verdict = judged_by_speed(_prefill_bar(length), found, (FP8,), bases)
    return section_of(f"Prefill, {length:,} tokens", found, base=faster(found, *bases), verdicts=[verdict])


def _plain(
    session: Session, model: Llama, batch: int, *, eight_bits: bool = False, compiled: bool = False
) -> Contestant:
    def build() -> Callable[[], object]:
        decoder = PlainDecoder(
            model,
            batch=batch,
            position=session.sizes.model.context,
            product=partial(int8_product, session) if eight_bits else bf16_product,
            compiled=session.compiled if compiled else lambda step: step,
        )
        tokens = _tokens(session, batch)
        return session.graphed(lambda: decoder(tokens))

    return Contestant(build=build, work=batch, unit="tokens", is_tuned=eight_bits)


def _fp8_decoding(session: Session, model: Llama, batch: int) -> Callable[[], object]:
    """A token of every sequence, always at the same position; the one before it is read now."""
    context = session.sizes.model.context
    runner = ModelRunner(model)
    tokens, together = _tokens(session, batch), runner.new_batch(batch, context + 1)
    for cache in together.sequences:
        runner(_tokens(session, context), cache)

    def run() -> object:
        for cache in together.sequences:
            cache.length = context
        return runner.step(tokens, together)

    return run


def _compiled_prefill(session: Session, model: Llama, length: int, *, graphed: bool) -> Callable[[], object]:
    own = sharing_copy(model)
    for layer in own.model.layers:
        layer.forward = session.compiled(layer.forward)
    if graphed:
        prompt = _tokens(session, length)
        return session.graphed(lambda: _last_logits(own, prompt))
    prompts = _prompts(session, length)
    return lambda: _last_logits(own, prompts())


@torch.no_grad()
def _last_logits(model: Llama, prompt: Tensor) -> Tensor:
    """Of the last token; the head reads nothing else."""
    found: Tensor = model.lm_head(model.model(prompt[None])[:, -1])
    return found


def _prompts(session: Session, length: int) -> Callable[[], Tensor]:
    return session.rotation(lambda: _tokens(session, length), 1 << 20)


def _tokens(session: Session, count: int) -> Tensor:
    return torch.randint(session.sizes.model.vocabulary, (count,), device=session.device)
