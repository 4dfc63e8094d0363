"""Ask a model of this repository for text: a client of Triton, or of ``octavo serve``, that needs Python alone.

    python client.py "Once upon a time"                     # pieces as they come, from the model octavo
    python client.py "Once upon a time" --whole             # the answer in one piece, from octavo_whole
    python client.py "Once" --url http://127.0.0.1:8000 --max-tokens 64 --temperature 0.8 --seed 1

This file is copied into the repository as it is. It speaks Triton's extension of HTTP, ``generate`` and
``generate_stream``; ``tritonclient`` sends the same fields as tensors, over HTTP or gRPC. From Python:

    from client import answer
    print("".join(answer("http://127.0.0.1:8000", "octavo", {"text_input": "Once", "max_tokens": 32})))
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

__all__ = ["answer", "main"]

STREAMING, WHOLE = "octavo", "octavo_whole"


class AnswerError(Exception):
    """There is no answer; says why."""


def answer(url: str, model: str, fields: Mapping[str, object], *, stream: bool = True) -> Iterator[str]:
    """The pieces of a model's answer.

    Args:
        url: of the server.
        model: its name there.
        fields: ``text_input``, and others that the model takes, such as ``max_tokens`` and ``temperature``.
        stream: whether pieces come as they are made, which needs a model that streams; otherwise there is one.

    Raises:
        AnswerError: no server, no such model, or fields that it does not take.
    """
    address = f"{url.rstrip('/')}/v2/models/{model}/{'generate_stream' if stream else 'generate'}"
    try:
        body, headers = json.dumps(fields).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(address, data=body, headers=headers)
        with urllib.request.urlopen(request) as response:
            for line in response:
                text = line.decode().removeprefix("data:").strip()
                if text:
                    yield _piece(json.loads(text))
    except urllib.error.HTTPError as error:
        raise AnswerError(_sentence(error)) from error
    except OSError as error:
        raise AnswerError(f"no server answers at {url} ({error}); start it as README.md says, or give --url") from error
    except (ValueError, KeyError) as error:
        raise AnswerError(f"{address} gives no answer of such a server ({error!r}); give another --url") from error


def _piece(message: Mapping[str, str]) -> str:
    if "error" in message:
        raise AnswerError(message["error"])
    return message["text_output"]


def _sentence(error: urllib.error.HTTPError) -> str:
    body = error.read().decode(errors="replace")
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}: {body[:200]}"


def main(arguments: list[str] | None = None) -> int:
    """The command; prints the answer."""
    parser = argparse.ArgumentParser(description="Ask a model of this repository for text.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help=f"default: {STREAMING}, with --whole {WHOLE}")
    parser.add_argument("--whole", action="store_true", help="ask for the answer in one piece")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)
    fields: dict[str, object] = {"text_input": given.prompt, "max_tokens": given.max_tokens}
    fields |= {"temperature": given.temperature} | ({} if given.seed is None else {"seed": given.seed})
    model = given.model or (WHOLE if given.whole else STREAMING)
    try:
        for piece in answer(given.url, model, fields, stream=not given.whole):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except AnswerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
