"""Served model with its engine, tokenizer and limits, shared by all endpoints."""

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from octavo.errors import CheckpointError, ConfigError
from octavo.inference import Engine, EngineConfig, EngineThread, Runner, ServedModel
from octavo.server.chat_template import ChatTemplate
from octavo.server.error_responses import CONTEXT, ResponseError
from octavo.server.limits import Limits
from octavo.server.thread_pools import ThreadPools
from octavo.server.token_bytes import bytes_per_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Prompt", "Service", "State"]

Prompt = str | list[int]
OnPrompt = Callable[[Prompt], None]
TEXT_PER_BODY = 4  # longest rendered chat, in multiples of the longest body


class State(StrEnum):
    """State of a server."""

    READY = "ready"
    DRAINING = "draining"  # finishes accepted requests and refuses new ones
    BROKEN = "broken"  # the engine's thread ended with an error
    STUCK = "stuck"  # tokenizing a prompt does not end, so others wait in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Model with its engine.

    Attributes:
        name: name of the model in requests.
        thread: thread that runs the engine.
        tokenizer: converts text to token ids and back.
        template: chat template; None if the model has none.
        limits: limits on requests.
        on_prompt: called with every prompt.
        created: seconds since 1970.
        thread_pools: thread pools that render and tokenize prompts.
        bytes_per_token: most bytes of text that one token can stand for; None without a bound.
    """

    name: str
    thread: EngineThread
    tokenizer: "Tokenizer"
    template: ChatTemplate | None
    limits: Limits
    on_prompt: OnPrompt = lambda _: None
    created: int = field(default_factory=lambda: int(time.time()))
    thread_pools: ThreadPools = field(default_factory=ThreadPools)
    bytes_per_token: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_token", bytes_per_token(self.tokenizer))

    @classmethod
    def of(
        cls,
        served: ServedModel[Runner],
        name: str,
        *,
        config: EngineConfig,
        limits: Limits,
        on_prompt: OnPrompt = lambda _: None,
        on_warning: Callable[[str], None] = warnings.warn,
    ) -> "Service":
        """Create a service with a new engine and thread; without chats if the chat template is damaged.

        Args:
            served: model.
            name: name of the model in requests.
            config: limits of the engine.
            limits: limits on requests.
            on_prompt: called with every prompt.
            on_warning: called with a message about a damaged chat template.

        Raises:
            ConfigError: a name that is not valid in a path.
        """
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"a model's name has only letters, digits, '.', '-' and '_', not {name!r}; give --name")
        return cls(
            name=name,
            thread=EngineThread(Engine(served.runner, served.tokenizer, end_ids=served.end_ids, config=config)),
            tokenizer=served.tokenizer,
            template=_template_of(served, on_warning),
            limits=limits,
            on_prompt=on_prompt,
        )

    @property
    def state(self) -> State:
        """Current state."""
        if self.thread.failure is not None:
            return State.BROKEN
        if self.thread_pools.are_stuck:
            return State.STUCK
        return State.DRAINING if self.thread.engine.closed else State.READY

    @property
    def prompt_tokens(self) -> int:
        """Largest number of tokens of a prompt."""
        positions = self.thread.engine.positions
        return positions if self.limits.prompt_tokens is None else min(positions, self.limits.prompt_tokens)

    @property
    def max_tokens(self) -> int:
        """Largest ``max_tokens`` of a request."""
        return min(self.limits.max_tokens, self.thread.engine.positions)

    @property
    def choices(self) -> int:
        """Largest number of answers to one request; at most the queue's size, or it could never be accepted."""
        return min(self.limits.choices, self.thread.engine.config.max_waiting)

    def close(self) -> None:
        """End the process of the chat template."""
        if self.template is not None:
            self.template.close()

    def check_model(self, name: str) -> None:
        """Raise ResponseError for the name of another model."""
        if name != self.name:
            message = f"the model {ascii(name)[:80]} is not served here; {self.name!r} is"
            raise ResponseError(404, message, param="model", code="model_not_found")

    def check_length(self, tokens: int, *, field: str) -> None:
        """Raise ResponseError for a prompt of too many tokens; ``field`` holds it."""
        if tokens > self.prompt_tokens:
            message = f"the prompt has {tokens} tokens, and at most {self.prompt_tokens} are accepted; shorten it"
            raise ResponseError(400, message, param=field, code=CONTEXT)

    def check_text(self, text: str, *, field: str) -> None:
        """Raise ResponseError for a text that is too long for any tokenization, before the cost of tokenizing it.

        A tokenizer without a bound is limited to ``longest_text`` as well: a template may write more than a body holds.
        """
        size = len(text.encode()) if 4 * len(text) > self.longest_text else 0  # a character has at most 4 bytes
        if size <= self.longest_text:
            return
        if self.bytes_per_token is None:
            message = f"the prompt has more than the {self.longest_text} bytes that are accepted; shorten it"
            raise ResponseError(400, message, param=field, code=CONTEXT)
        tokens = math.ceil(size / self.bytes_per_token)
        message = f"the prompt has at least {tokens} tokens, and at most {self.prompt_tokens} are accepted; shorten it"
        raise ResponseError(400, message, param=field, code=CONTEXT)

    @property
    def longest_text(self) -> int:
        """Bytes of the longest prompt that is tokenized."""
        most = TEXT_PER_BODY * self.limits.body_bytes
        return most if self.bytes_per_token is None else min(most, self.prompt_tokens * self.bytes_per_token)

    async def tokens(self, prompt: Prompt, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """Run :meth:`encode` in a thread, without blocking other requests."""
        if not isinstance(prompt, str):
            return self.encode(prompt, field=field)
        self.check_text(prompt, field=field)
        pool = self.thread_pools.of(len(prompt))
        work = partial(self.encode, prompt, field=field, add_special_tokens=add_special_tokens)
        return await pool.run(work, size=len(prompt))

    async def chat_tokens(self, messages: Sequence[Mapping[str, str]], *, field: str) -> list[int]:
        """Render messages by the chat template and return their tokens.

        Raises:
            ResponseError: there is no template, it did not end, or its text is too long.
            ConfigError: the template rejects the messages.
        """
        if self.template is None:
            raise ResponseError(400, f"{self.name!r} has no chat template and takes no messages; use /v1/completions")
        work = partial(self.template.render, messages, most=self.longest_text)
        text = await self.thread_pools.rendering.run(work, size=sum(len(message["content"]) for message in messages))
        return await self.tokens(text, field=field, add_special_tokens=False)

    def encode(self, prompt: Prompt, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt from ``field`` of a body.

        Raises:
            ResponseError: the prompt is too long.
        """
        self.on_prompt(prompt)
        ids = prompt
        if isinstance(prompt, str):
            self.check_text(prompt, field=field)
            # encode() holds the GIL and stops every other thread: for 3 s with a million digits
            (encoded,) = self.tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
            ids = list(encoded.ids)
        assert not isinstance(ids, str)
        self.check_length(len(ids), field=field)
        return ids

    def text_of(self, token: int) -> str:
        """Text of one token, special tokens included; U+FFFD for a part of a character."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def _template_of(served: ServedModel[Runner], on_warning: Callable[[str], None]) -> ChatTemplate | None:
    if served.chat_template is None:
        return None
    try:
        return ChatTemplate(served.chat_template, served.template_tokens)
    except CheckpointError as error:
        on_warning(f"{error}: completions are served, and conversations are refused")
        return None
