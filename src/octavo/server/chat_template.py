"""A model's chat template: how a conversation is written for it, as its own file says.

Templates are programs in Jinja that come with a model, so they run in jinja2's sandbox. What they may call beyond it
is what Hugging Face's have: ``raise_exception``, ``strftime_now`` and ``tojson``.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import CheckpointError, ConfigError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    r"""Writes messages as a prompt.

    Args:
        source: in Jinja.
        tokens: texts that it may name, such as ``bos_token``.

    Raises:
        CheckpointError: it is no template.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        >>> template.render([{"role": "user", "content": "Hi"}])
        'user: Hi\n'
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        world = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        world.filters["tojson"] = _to_json
        world.globals.update(raise_exception=_raise, strftime_now=_now, **(tokens or {}))
        try:
            self._template = world.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the model's chat template is damaged: {error}; write it again") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation, and the beginning of the assistant's turn.

        Raises:
            ConfigError: messages that the template does not take.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ConfigError(f"the model's chat template does not take these messages: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(sentence: str) -> NoReturn:
    raise TemplateError(sentence)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
