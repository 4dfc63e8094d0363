"""``POST /v1/completions``: text that continues a prompt, or several.

``echo`` with ``logprobs`` scores the prompt, too: what lm-eval's ``local-completions`` asks for.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.inference import Event
from octavo.inference.sampling import MOST_LOGPROBS, Chosen
from octavo.inference.text_stream import TextStream
from octavo.server.answers import Asked, finish_word, respond
from octavo.server.fields import Field, Flag, Kind, ListOf, OneOf, Record, Text, Whole
from octavo.server.operations import EVENTS, JSON, Operation, body_of
from octavo.server.refusals import Refusal
from octavo.server.sampling_fields import params_of, sampling_fields
from octavo.server.service import Prompt, Service

__all__ = ["Completions"]

PROMPT = "prompt"
MAX_TOKENS = 16  # where a request does not say, as in the OpenAI API


class Completions:
    """The surface of completions."""

    def __init__(self, service: Service) -> None:
        self._service, self._body = service, _fields(service)

    def operations(self) -> list[Operation]:
        """Of the surface."""
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
        """Answer a request."""
        service, body = self._service, await body_of(request, self._body)
        service.check_model(body["model"])
        prompts = _prompts(body[PROMPT])
        if len(prompts) * body["n"] > service.choices:
            raise Refusal(
                400,
                f"{len(prompts)} prompts with {body['n']} answers each are more than the {service.choices} answers "
                "that one request may have; send several requests",
                param="n",
            )
        ids = [await service.tokens(prompt, field=PROMPT) for prompt in prompts]
        asked = [self._asked(own, body, choice) for own in ids for choice in range(body["n"])]
        form = CompletionForm(service, [p for p in prompts for _ in range(body["n"])], asked, echo=body["echo"])
        return await respond(request, service, asked, form, body=body)

    def _asked(self, ids: list[int], body: dict[str, Any], choice: int) -> Asked:
        scored = body["echo"] and body["logprobs"] is not None
        params = params_of(
            body,
            self._service,
            choice=choice,
            max_tokens=body["max_tokens"],
            logprobs=body["logprobs"],
            prompt_logprobs=scored,
        )
        return Asked(ids, params, PROMPT)


class CompletionForm:
    """How completions are written."""

    whole = chunk = "text_completion"

    def __init__(self, service: Service, prompts: Sequence[Prompt], asked: Sequence[Asked], *, echo: bool) -> None:
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.name}
        self._service, self._asked = service, asked
        self._echoes = {i: self._echo(prompt) for i, prompt in enumerate(prompts)} if echo else {}
        self._texts = [TextStream(service.tokenizer) for _ in asked]  # without stops, which hold text back
        self._offsets = [0] * len(asked)

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else str(self._service.tokenizer.decode(prompt))

    def pieces(self, index: int, event: Event) -> Iterable[dict[str, Any]]:
        """A choice where an event says something."""
        echo = self._echoes.pop(index, None)
        logprobs = self._logprobs(index, event, echoed=echo is not None)
        text = (echo or "") + event.text
        if text or logprobs or event.finish is not None:
            yield {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_word(event)}

    def joined(self, index: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Texts and lists behind each other."""
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        logprobs = {name: [x for one in told for x in one[name]] for name in told[0]} if told else None
        text = "".join(piece["text"] for piece in pieces)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": pieces[-1]["finish_reason"]}

    def _logprobs(self, index: int, event: Event, *, echoed: bool) -> dict[str, list[Any]] | None:
        asked = self._asked[index]
        if asked.params.logprobs is None:
            return None
        chosen = [Chosen(asked.prompt_ids[0]), *event.prompt] if echoed else []
        chosen += [] if event.token is None else [Chosen(event.token, event.logprob, event.top)]
        texts = [self._service.text_of(one.token) for one in chosen]
        offsets = [self._offset(index, one.token) for one in chosen]
        return (
            {
                "tokens": texts,
                "token_logprobs": [one.logprob for one in chosen],
                "top_logprobs": [self._likeliest(one) for one in chosen],
                "text_offset": offsets,
            }
            if chosen
            else None
        )

    def _offset(self, index: int, token: int) -> int:
        """Where a token's text begins in the answer's; all parts of a character begin where it does."""
        offset = self._offsets[index]
        self._offsets[index] += len(self._texts[index].add(token))
        return offset

    def _likeliest(self, chosen: Chosen) -> dict[str, float] | None:
        """By text; of tokens with the same text, parts of characters, the likeliest. The chosen token is among them."""
        if chosen.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*chosen.top, (chosen.token, chosen.logprob)):
            found.setdefault(self._service.text_of(token), logprob)
        return found


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as its tokens: as many as of a text, refused in the same words."""

    service: Service

    @property
    def _ids(self) -> ListOf:
        token = Whole(least=0, most=self.service.thread.engine.vocab_size - 1)
        return ListOf(kind=token, most=self.service.prompt_tokens)

    def fit(self, given: Any) -> int:
        """See :class:`~octavo.server.fields.Kind`."""
        return self._ids.fit(given)

    def read(self, given: Any, place: str) -> list[int]:
        """The tokens."""
        if isinstance(given, list):
            self.service.check_length(len(given), field=PROMPT)
        return self._ids.read(given, place)

    def schema(self) -> dict[str, Any]:
        """As an array."""
        return self._ids.schema()


def _fields(service: Service) -> Record:
    ids = Tokens(service)
    kinds: tuple[Kind, ...] = (Text(), ListOf(kind=Text(), most=service.choices), ids)
    prompt = OneOf((*kinds, ListOf(kind=ids, most=service.choices)))
    own = (
        Field(name=PROMPT, kind=prompt, required=True, about="a text or its tokens, or a list of either"),
        Field(name="max_tokens", kind=Whole(least=1, most=service.max_tokens), default=MAX_TOKENS),
        Field(name="logprobs", kind=Whole(least=0, most=MOST_LOGPROBS), about="tell so many likeliest tokens, too"),
        Field(name="echo", kind=Flag(), default=False, about="the prompt before the answer"),
        Field(name="best_of", kind=Whole(least=1, most=1), about="1 alone"),
        Field(name="suffix", kind=Text(longest=0), about="empty alone"),
    )
    return Record(fields=(*own, *sampling_fields(service)))


def _prompts(given: Any) -> list[Prompt]:
    """One or several, whatever they are given as."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given
