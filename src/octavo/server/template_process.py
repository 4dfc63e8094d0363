"""The process that renders a chat template: a script, since a template is a program, and a program need not end.

octavo starts it as ``python -P template_process.py SECONDS BYTES``. Both directions are lines of JSON:

| line read                                | line written                                    |
|------------------------------------------|-------------------------------------------------|
| first ``{"source": …, "tokens": {…}}``   | ``{"ready": true}`` or ``{"damaged": reason}``  |
| then ``{"messages": […], "most": N}``    | ``{"text": …}``, ``{"refused": reason}`` or     |
|                                         | ``{"failed": reason}``                          |

A line that takes longer than SECONDS ends the process by SIGALRM, wherever it is; memory is bounded by RLIMIT_AS. So it
imports the standard library and jinja2 alone, which take 0.1 s and 25 MB, and also ends when octavo is gone.

The environment is that of Hugging Face's chat templates: jinja2's immutable sandbox, ``raise_exception``,
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
    """``{% generation %}``, which marks the assistant's own words for training; what is inside is written as it is."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, with a scope of its own."""
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
        given = json.loads(line)
        if template is None:
            template, answer = _compiled(given)
        else:
            answer = _rendered(template, given)
        written = json.dumps(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(f"{written}\n")
        sys.stdout.flush()


def _compiled(given: Mapping[str, Any]) -> tuple[Template | None, dict[str, Any]]:
    try:
        return _environment(given["tokens"]).from_string(given["source"]), {"ready": True}
    except Exception as error:  # noqa: BLE001 -- whatever a template does, octavo's own process says it
        return None, {"damaged": _reason(error)}


def _rendered(template: Template, given: Mapping[str, Any]) -> dict[str, Any]:
    """The text, or its first ``most`` + 1 characters where there are more."""
    pieces = template.generate(messages=given["messages"], tools=None, documents=None, add_generation_prompt=True)
    try:
        text = "".join(_first(pieces, given["most"] + 1))
        text.encode()  # half of a surrogate pair is refused here
        return {"text": text}
    except MemoryError:
        return {"failed": "needed more memory than it may have"}
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
    """As Hugging Face's, whose arguments stand in this order; jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(sentence: str) -> NoReturn:
    raise TemplateError(sentence)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 -- without a zone, as templates know it


if __name__ == "__main__":
    main()
