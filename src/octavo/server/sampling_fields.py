"""Sampling fields of requests: those of the OpenAI API and a few of vLLM's."""

from collections.abc import Mapping
from typing import Any

from octavo.inference import SamplingParams
from octavo.inference.sampling import MOST_SEED
from octavo.server.fields import Boolean, Const, Field, Integer, JsonObject, ListOf, Number, OneOf, String
from octavo.server.service import Service

__all__ = ["STOP", "params_of", "sampling_fields"]

HOTTEST = 2.0
STOPS, STOP_LENGTH = 4, 200
STOP_TEXT = String(shortest=1, longest=STOP_LENGTH)
STOP = OneOf((STOP_TEXT, ListOf(kind=STOP_TEXT, most=STOPS, fewest=0)))
STREAM_OPTIONS = JsonObject(
    fields=(Field(name="include_usage", kind=Boolean(), default=False, about="send token counts in a last chunk"),)
)


def sampling_fields(service: Service) -> tuple[Field, ...]:
    """Fields that completions and chats share."""
    none = Number(least=0, most=0)
    return (
        Field(name="model", kind=String(), required=True, about=f"name of the model, {service.name!r}"),
        Field(
            name="temperature", kind=Number(least=0, most=HOTTEST), default=1.0, about="0 selects the likeliest token"
        ),
        Field(name="top_p", kind=Number(least=0, most=1, inclusive=False), default=1.0),
        Field(name="top_k", kind=Integer(least=1, most=service.thread.engine.vocab_size)),
        Field(name="min_p", kind=Number(least=0, most=1), default=0.0),
        Field(name="seed", kind=Integer(least=0, most=MOST_SEED), about="the same seed gives the same answer"),
        Field(name="stop", kind=STOP, default=(), about="texts before which the answer ends"),
        Field(name="n", kind=Integer(least=1, most=service.choices), default=1, about="answers to each prompt"),
        Field(name="stream", kind=Boolean(), default=False, about="send server-sent events, one per token"),
        Field(name="stream_options", kind=STREAM_OPTIONS, default={"include_usage": False}),
        Field(name="ignore_eos", kind=Boolean(), default=False, about="continue after the model's end token"),
        Field(name="presence_penalty", kind=none, default=0.0, about="only 0: penalties are not supported"),
        Field(name="frequency_penalty", kind=none, default=0.0, about="only 0: penalties are not supported"),
        Field(name="logit_bias", kind=Const(({},)), about="only empty"),
        Field(name="user", kind=String(), about="accepted without effect"),
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
    """Sampling parameters of one of ``n`` answers; each answer has a different seed."""
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
