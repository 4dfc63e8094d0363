"""The fields that say how tokens are chosen: the OpenAI API's, and a few that vLLM added to them."""

from collections.abc import Mapping
from typing import Any

from octavo.inference import SamplingParams
from octavo.inference.sampling import MOST_SEED
from octavo.server.fields import Field, Flag, ListOf, Number, OneOf, Only, Record, Text, Whole
from octavo.server.service import Service

__all__ = ["STOP", "params_of", "sampling_fields"]

HOTTEST = 2.0
STOPS, STOP_LENGTH = 4, 200
STOP_TEXT = Text(shortest=1, longest=STOP_LENGTH)
STOP = OneOf((STOP_TEXT, ListOf(kind=STOP_TEXT, most=STOPS, fewest=0)))
STREAM_OPTIONS = Record(fields=(Field(name="include_usage", kind=Flag(), default=False, about="a last chunk counts"),))


def sampling_fields(service: Service) -> tuple[Field, ...]:
    """What completions and chats have in common."""
    none = Number(least=0, most=0)
    return (
        Field(name="model", kind=Text(), required=True, about=f"the one model served, {service.name!r}"),
        Field(name="temperature", kind=Number(least=0, most=HOTTEST), default=1.0, about="0 takes the likeliest"),
        Field(name="top_p", kind=Number(least=0, most=1, inclusive=False), default=1.0),
        Field(name="top_k", kind=Whole(least=1, most=service.thread.engine.vocab_size)),
        Field(name="min_p", kind=Number(least=0, most=1), default=0.0),
        Field(name="seed", kind=Whole(least=0, most=MOST_SEED), about="the same seed, the same answer"),
        Field(name="stop", kind=STOP, default=(), about="texts before which the answer ends"),
        Field(name="n", kind=Whole(least=1, most=service.choices), default=1, about="answers to each prompt"),
        Field(name="stream", kind=Flag(), default=False, about="server-sent events, a token each"),
        Field(name="stream_options", kind=STREAM_OPTIONS, default={"include_usage": False}),
        Field(name="ignore_eos", kind=Flag(), default=False, about="go on after the model's own last token"),
        Field(name="presence_penalty", kind=none, default=0.0, about="0 alone: there are no penalties"),
        Field(name="frequency_penalty", kind=none, default=0.0, about="0 alone: there are no penalties"),
        Field(name="logit_bias", kind=Only(({},)), about="empty alone"),
        Field(name="user", kind=Text(), about="accepted, and of no effect"),
    )


def params_of(
    body: Mapping[str, Any],
    service: Service,
    *,
    choice: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: bool = False,
) -> SamplingParams:
    """What is asked of the engine for one of ``n`` answers; each has a seed of its own."""
    stop, seed = body["stop"], body["seed"]
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
        min_p=body["min_p"],
        seed=None if seed is None else (seed + choice) % (MOST_SEED + 1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_end=body["ignore_eos"],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        deadline_s=service.limits.answer_s,
    )
