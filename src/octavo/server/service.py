"""``Service``: the model that a server serves, and what its surfaces share."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.server.chat_template import ChatTemplate
from octavo.server.limits import Limits
from octavo.server.refusals import CONTEXT, Refusal
from octavo.serving import Engine, EngineConfig, EngineThread, ServedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Prompt", "Service", "State"]

Prompt = str | list[int]
OnPrompt = Callable[[Prompt], None]


class State(StrEnum):
    """Whether a server answers."""

    READY = "ready"
    DRAINING = "draining"  # it ends what it took, and takes no more
    BROKEN = "broken"  # the engine's thread ended with an error


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
    """

    name: str
    thread: EngineThread
    tokenizer: "Tokenizer"
    template: ChatTemplate | None
    limits: Limits
    on_prompt: OnPrompt = _ignore
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls, served: ServedModel, name: str, *, config: EngineConfig, limits: Limits, on_prompt: OnPrompt = _ignore
    ) -> "Service":
        """A model, with an engine and a thread of its own.

        Raises:
            ConfigError: a name that no path can have.
            CheckpointError: its chat template is damaged.
        """
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"a model's name has letters, digits, '.', '-' and '_' alone, not {name!r}; give --name")
        source = served.chat_template
        return cls(
            name=name,
            thread=EngineThread(Engine(served.runner, served.tokenizer, end_ids=served.end_ids, config=config)),
            tokenizer=served.tokenizer,
            template=None if source is None else ChatTemplate(source, served.template_tokens),
            limits=limits,
            on_prompt=on_prompt,
        )

    @property
    def state(self) -> State:
        """Whether it answers."""
        if self.thread.failure is not None:
            return State.BROKEN
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

    def encode(self, prompt: Prompt, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt that came in a field of a body.

        Raises:
            Refusal: there are too many.
        """
        self.on_prompt(prompt)
        ids = prompt
        if isinstance(prompt, str):
            # encode() would hold Python's lock, and so stop every other thread: for 3 s with a million digits
            (encoded,) = self.tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
            ids = list(encoded.ids)
        assert not isinstance(ids, str)
        self.check_length(len(ids), field=field)
        return ids

    def text_of(self, token: int) -> str:
        """One token as text, also one that an answer would not show; U+FFFD for a part of a character."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False))
