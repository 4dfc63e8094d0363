"""Generate text with a model of this repository: a client of Triton or ``octavo serve`` that needs only Python.

    python client.py "Once upon a time"                     # streamed, from the model octavo
    python client.py "Once upon a time" --whole             # one response, from the model octavo_whole
    python client.py "Once" --url http://127.0.0.1:8000 --max-tokens 64 --temperature 0.8 --seed 1

This file is copied into the repository unchanged. It uses Triton's HTTP extensions ``generate`` and
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
    """Failed request, with the reason."""


def answer(url: str, model: str, fields: Mapping[str, object], *, stream: bool = True) -> Iterator[str]:
    """Yield the pieces of a model's answer.

    Args:
        url: URL of the server.
        model: name of the model.
        fields: ``text_input`` and other inputs of the model, such as ``max_tokens`` and ``temperature``.
        stream: yield pieces as they are generated, which needs a streaming model; otherwise yield one.

    Raises:
        AnswerError: no server, no such model, or invalid fields.
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
        raise AnswerError(f"{address} is not an endpoint of such a server ({error!r}); give another --url") from error


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
    """Run the command: print the answer."""
    parser = argparse.ArgumentParser(description="Generate text with a model of this repository.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help=f"default: {STREAMING}, with --whole {WHOLE}")
    parser.add_argument("--whole", action="store_true", help="get the answer in one piece")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 selects the likeliest token")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    fields: dict[str, object] = {"text_input": options.prompt, "max_tokens": options.max_tokens}
    fields |= {"temperature": options.temperature} | ({} if options.seed is None else {"seed": options.seed})
    model = options.model or (WHOLE if options.whole else STREAMING)
    try:
        for piece in answer(options.url, model, fields, stream=not options.whole):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except AnswerError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
