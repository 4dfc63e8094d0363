"""``Service``: the model that a server serves, and what its surfaces share."""

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
from octavo.inference import Engine, EngineConfig, EngineThread, ServedModel
from octavo.server.chat_template import ChatTemplate
from octavo.server.lanes import Lanes
from octavo.server.limits import Limits
from octavo.server.refusals import CONTEXT, Refusal
from octavo.server.token_bytes import bytes_per_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Prompt", "Service", "State"]

Prompt = str | list[int]
OnPrompt = Callable[[Prompt], None]
TEXT_PER_BODY = 4  # times as long as a body may be what a template writes of it


class State(StrEnum):
    """Whether a server answers."""

    READY = "ready"
    DRAINING = "draining"  # it ends what it took, and takes no more
    BROKEN = "broken"  # the engine's thread ended with an error
    STUCK = "stuck"  # a prompt has been tokenised for longer than any takes, so others wait in vain


def _ignore(prompt: Prompt) -> None:
    """Nobody asked to see prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model and its engine.

    Attributes:
        name: of the model, as it is asked for.
        thread: steps its engine.
        tokenizer: text to ids and back.
        template: writes messages as text; None where the model has none.
        limits: of what may be asked.
        on_prompt: is shown every prompt.
        created: seconds since 1970.
        lanes: where prompts are rendered and tokenised.
        bytes_per_token: the most that a token stands for; None where there is no bound.
    """

    name: str
    thread: EngineThread
    tokenizer: "Tokenizer"
    template: ChatTemplate | None
    limits: Limits
    on_prompt: OnPrompt = _ignore
    created: int = field(default_factory=lambda: int(time.time()))
    lanes: Lanes = field(default_factory=Lanes)
    bytes_per_token: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_token", bytes_per_token(self.tokenizer))

    @classmethod
    def of(
        cls,
        served: ServedModel,
        name: str,
        *,
        config: EngineConfig,
        limits: Limits,
        on_prompt: OnPrompt = _ignore,
        on_warning: Callable[[str], None] = warnings.warn,
    ) -> "Service":
        """A model, with an engine and a thread of its own; without conversations where its chat template is damaged.

        Args:
            served: the model.
            name: of it.
            config: of the engine.
            limits: of what may be asked.
            on_prompt: is shown every prompt.
            on_warning: is told what is wrong with the chat template.

        Raises:
            ConfigError: a name that no path can have.
        """
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"a model's name has letters, digits, '.', '-' and '_' alone, not {name!r}; give --name")
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
        """Whether it answers."""
        if self.thread.failure is not None:
            return State.BROKEN
        if self.lanes.are_stuck:
            return State.STUCK
        return State.DRAINING if self.thread.engine.closed else State.READY

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt that is taken."""
        positions = self.thread.engine.positions
        return positions if self.limits.prompt_tokens is None else min(positions, self.limits.prompt_tokens)

    @property
    def max_tokens(self) -> int:
        """The longest answer that may be asked for."""
        return min(self.limits.max_tokens, self.thread.engine.positions)

    @property
    def choices(self) -> int:
        """The most answers to one request: no more than may wait, or the request could never be taken."""
        return min(self.limits.choices, self.thread.engine.config.max_waiting)

    def close(self) -> None:
        """End the process of the chat template."""
        if self.template is not None:
            self.template.close()

    def check_model(self, name: str) -> None:
        """Refuse a name that is another model's."""
        if name != self.name:
            message = f"the model {ascii(name)[:80]} is not served here; {self.name!r} is"
            raise Refusal(404, message, param="model", code="model_not_found")

    def check_length(self, tokens: int, *, field: str) -> None:
        """Refuse a prompt of too many tokens, whatever field of a body it came in."""
        if tokens > self.prompt_tokens:
            message = f"the prompt has {tokens} tokens, and {self.prompt_tokens} are taken; shorten it"
            raise Refusal(400, message, param=field, code=CONTEXT)

    def check_text(self, text: str, *, field: str) -> None:
        """Refuse a text that cannot fit, whatever its tokens are: to find them would cost more than to answer.

        A text longer than ``longest_text`` is refused, too, where its tokens have no bound: a template wrote it.
        """
        size = len(text.encode()) if 4 * len(text) > self.longest_text else 0  # a character has 4 bytes at most
        if size <= self.longest_text:
            return
        if self.bytes_per_token is None:
            message = f"the prompt has over {self.longest_text} bytes, which is as many as are taken; shorten it"
            raise Refusal(400, message, param=field, code=CONTEXT)
        tokens = math.ceil(size / self.bytes_per_token)
        message = f"the prompt has at least {tokens} tokens, and {self.prompt_tokens} are taken; shorten it"
        raise Refusal(400, message, param=field, code=CONTEXT)

    @property
    def longest_text(self) -> int:
        """Bytes of the longest prompt that is tokenised."""
        most = TEXT_PER_BODY * self.limits.body_bytes
        return most if self.bytes_per_token is None else min(most, self.prompt_tokens * self.bytes_per_token)

    async def tokens(self, prompt: Prompt, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """What :meth:`encode` gives, in a thread, so that others are answered meanwhile."""
        if not isinstance(prompt, str):
            return self.encode(prompt, field=field)
        self.check_text(prompt, field=field)
        lane = self.lanes.of(len(prompt))
        work = partial(self.encode, prompt, field=field, add_special_tokens=add_special_tokens)
        return await lane.run(work, size=len(prompt))

    async def chat_tokens(self, messages: Sequence[Mapping[str, str]], *, field: str) -> list[int]:
        """The tokens of what the chat template writes.

        Raises:
            Refusal: there is no template, it did not end, or wrote too much.
            ConfigError: it does not take the messages.
        """
        if self.template is None:
            raise Refusal(400, f"{self.name!r} has no chat template, so it knows no messages; ask /v1/completions")
        work = partial(self.template.render, messages, most=self.longest_text)
        text = await self.lanes.rendering.run(work, size=sum(len(own["content"]) for own in messages))
        return await self.tokens(text, field=field, add_special_tokens=False)

    def encode(self, prompt: Prompt, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt that came in a field of a body.

        Raises:
            Refusal: there are too many.
        """
        self.on_prompt(prompt)
        ids = prompt
        if isinstance(prompt, str):
            self.check_text(prompt, field=field)
            # encode() would hold Python's lock, and so stop every other thread: for 3 s with a million digits
            (encoded,) = self.tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
            ids = list(encoded.ids)
        assert not isinstance(ids, str)
        self.check_length(len(ids), field=field)
        return ids

    def text_of(self, token: int) -> str:
        """One token as text, also one that an answer would not show; U+FFFD for a part of a character."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def _template_of(served: ServedModel, on_warning: Callable[[str], None]) -> ChatTemplate | None:
    if served.chat_template is None:
        return None
    try:
        return ChatTemplate(served.chat_template, served.template_tokens)
    except CheckpointError as error:
        on_warning(f"{error}: completions are served, and conversations are refused")
        return None
