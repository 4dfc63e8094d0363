"""Script that renders a chat template in a separate process, since a template is a program that may not end.

octavo starts it as ``python -P template_process.py SECONDS BYTES``. It reads and writes lines of JSON:

| input                                    | output                                          |
|------------------------------------------|-------------------------------------------------|
| first ``{"source": …, "tokens": {…}}``   | ``{"ready": true}`` or ``{"damaged": reason}``  |
| then ``{"messages": […], "most": N}``    | ``{"text": …}``, ``{"refused": reason}`` or     |
|                                         | ``{"failed": reason}``                          |

SIGALRM ends the process when a line takes longer than SECONDS; RLIMIT_AS bounds its memory. It imports only the
standard library and jinja2, which take 0.1 s and 25 MB, and ends when octavo does.

The environment matches Hugging Face's chat templates: jinja2's immutable sandbox, ``raise_exception``,
``strftime_now``, ``tojson``, loop controls and ``{% generation %}``.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["main"]


class Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training; its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block's body in a new scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def main() -> None:
    """Compile one template and render it for each further line."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: Template | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        request = json.loads(line)
        if template is None:
            template, answer = _compile(request)
        else:
            answer = _render(template, request)
        output = json.dumps(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(f"{output}\n")
        sys.stdout.flush()


def _compile(request: Mapping[str, Any]) -> tuple[Template | None, dict[str, Any]]:
    try:
        return _environment(request["tokens"]).from_string(request["source"]), {"ready": True}
    except Exception as error:  # noqa: BLE001 -- a template may raise anything; octavo's process reports it
        return None, {"damaged": _reason(error)}


def _render(template: Template, request: Mapping[str, Any]) -> dict[str, Any]:
    """Render the messages, at most ``most`` + 1 characters."""
    pieces = template.generate(messages=request["messages"], tools=None, documents=None, add_generation_prompt=True)
    try:
        text = "".join(_first(pieces, request["most"] + 1))
        text.encode()  # raises for an unpaired surrogate
        return {"text": text}
    except MemoryError:
        return {"failed": "exceeded its memory limit"}
    except Exception as error:  # noqa: BLE001 -- the same
        return {"refused": _reason(error)}


def _first(pieces: Iterator[str], count: int) -> Iterator[str]:
    for piece in pieces:
        yield piece[:count]
        count -= len(piece)
        if count <= 0:
            return


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _environment(tokens: Mapping[str, str]) -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now, **tokens)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's filter, with its order of arguments; jinja2's filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(sentence: str) -> NoReturn:
    raise TemplateError(sentence)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 -- without a zone, as templates expect


if __name__ == "__main__":
    main()
