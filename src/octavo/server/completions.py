"""``POST /v1/completions``: continuations of one or several prompts.

``echo`` with ``logprobs`` also returns the prompt's log probabilities, which lm-eval's ``local-completions`` needs.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.inference import Event
from octavo.inference.sampling import MOST_LOGPROBS, SampledToken
from octavo.inference.text_stream import TextStream
from octavo.server.error_responses import ResponseError
from octavo.server.fields import Boolean, Field, FieldKind, Integer, JsonObject, ListOf, OneOf, String
from octavo.server.operations import EVENTS, JSON, Operation, body_of
from octavo.server.responses import AnswerRequest, finish_reason, respond
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Prompt, Service

__all__ = ["Completions"]

PROMPT = "prompt"
MAX_TOKENS = 16  # default, as in the OpenAI API


class Completions:
    """Completion endpoint."""

    def __init__(self, service: Service) -> None:
        self._service, self._body = service, _fields(service)

    def operations(self) -> list[Operation]:
        """Return the endpoint's operation."""
        return [
            Operation(
                method="POST",
                path="/v1/completions",
                run=self.create,
                about="Continue a prompt",
                body=self._body,
                answers=(JSON, EVENTS),
            )
        ]

    async def create(self, request: Request) -> Response:
        """Answer a completion request."""
        service, body = self._service, await body_of(request, self._body)
        service.check_model(body["model"])
        prompts = _prompts(body[PROMPT])
        if len(prompts) * body["n"] > service.choices:
            raise ResponseError(
                400,
                f"{len(prompts)} prompts with {body['n']} answers each exceed the limit of {service.choices} answers "
                "per request; send several requests",
                param="n",
            )
        ids = [await service.tokens(prompt, field=PROMPT) for prompt in prompts]
        requests = [self._answer_request(prompt_ids, body, choice) for prompt_ids in ids for choice in range(body["n"])]
        form = CompletionForm(service, [p for p in prompts for _ in range(body["n"])], requests, echo=body["echo"])
        return await respond(request, service, requests, form, body=body)

    def _answer_request(self, ids: list[int], body: dict[str, Any], choice: int) -> AnswerRequest:
        score_token = body["echo"] and body["logprobs"] is not None
        params = params_of(
            body,
            self._service,
            choice=choice,
            max_tokens=body["max_tokens"],
            logprobs=body["logprobs"],
            prompt_logprobs=score_token,
        )
        return AnswerRequest(ids, params, PROMPT)


class CompletionForm:
    """Format of completions."""

    whole = chunk = "text_completion"

    def __init__(
        self, service: Service, prompts: Sequence[Prompt], requests: Sequence[AnswerRequest], *, echo: bool
    ) -> None:
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.name}
        self._service, self._requests = service, requests
        self._echoes = {i: self._echo(prompt) for i, prompt in enumerate(prompts)} if echo else {}
        self._texts = [TextStream(service.tokenizer) for _ in requests]  # without stop texts, which delay text
        self._offsets = [0] * len(requests)

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else str(self._service.tokenizer.decode(prompt))

    def pieces(self, index: int, event: Event) -> Iterable[dict[str, Any]]:
        """Return a chunk for an event with text, log probabilities or a finish reason."""
        echo = self._echoes.pop(index, None)
        logprobs = self._logprobs(index, event, echoed=echo is not None)
        text = (echo or "") + event.text
        if text or logprobs or event.finish is not None:
            yield {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason(event)}

    def joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Concatenate the texts and lists of an answer's chunks."""
        parts = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        logprobs = {name: [x for part in parts for x in part[name]] for name in parts[0]} if parts else None
        text = "".join(piece["text"] for piece in pieces)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": pieces[-1]["finish_reason"]}

    def _logprobs(self, index: int, event: Event, *, echoed: bool) -> dict[str, list[Any]] | None:
        request = self._requests[index]
        if request.params.logprobs is None:
            return None
        tokens = [SampledToken(request.prompt_ids[0]), *event.prompt] if echoed else []
        tokens += [] if event.token is None else [SampledToken(event.token, event.logprob, event.top)]
        if not tokens:
            return None
        return {
            "tokens": [self._service.text_of(each.token) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [self._likeliest(each) for each in tokens],
            "text_offset": [self._offset(index, each.token) for each in tokens],
        }

    def _offset(self, index: int, token: int) -> int:
        """Offset of a token's text in the answer; all tokens of one character have the character's offset."""
        offset = self._offsets[index]
        self._offsets[index] += len(self._texts[index].add(token))
        return offset

    def _likeliest(self, sampled: SampledToken) -> dict[str, float] | None:
        """Log probabilities of the likeliest tokens and the sampled one, by text.

        Tokens that hold parts of characters may share a text; the likeliest of them is returned.
        """
        if sampled.logprob is None:
            return None
        logprobs: dict[str, float] = {}
        for token, logprob in (*sampled.top, (sampled.token, sampled.logprob)):
            logprobs.setdefault(self._service.text_of(token), logprob)
        return logprobs


@dataclass(frozen=True, slots=True)
class Tokens(FieldKind):
    """Prompt as token ids, with the length limit and errors of a text prompt."""

    service: Service

    @property
    def _ids(self) -> ListOf:
        token = Integer(least=0, most=self.service.thread.engine.vocab_size - 1)
        return ListOf(kind=token, most=self.service.prompt_tokens)

    def fit(self, value: Any) -> int:
        """See :class:`~octavo.server.fields.FieldKind`."""
        return self._ids.fit(value)

    def read(self, value: Any, place: str) -> list[int]:
        """Check the length and return the token ids."""
        if isinstance(value, list):
            self.service.check_length(len(value), field=PROMPT)
        return self._ids.read(value, place)

    def schema(self) -> dict[str, Any]:
        """Return an array schema."""
        return self._ids.schema()


def _fields(service: Service) -> JsonObject:
    ids = Tokens(service)
    kinds: tuple[FieldKind, ...] = (String(), ListOf(kind=String(), most=service.choices), ids)
    prompt = OneOf((*kinds, ListOf(kind=ids, most=service.choices)))
    supported = (
        Field(name=PROMPT, kind=prompt, required=True, about="a text or its tokens, or a list of either"),
        Field(name="max_tokens", kind=Integer(least=1, most=service.max_tokens), default=MAX_TOKENS),
        Field(
            name="logprobs",
            kind=Integer(least=0, most=MOST_LOGPROBS),
            about="number of likeliest tokens to return with each token",
        ),
        Field(name="echo", kind=Boolean(), default=False, about="return the prompt before the answer"),
        Field(name="best_of", kind=Integer(least=1, most=1), about="only 1"),
        Field(name="suffix", kind=String(longest=0), about="only empty"),
    )
    return JsonObject(fields=(*supported, *sampling_fields(service)))


def _prompts(value: Any) -> list[Prompt]:
    """List of prompts from one prompt or several."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value
