"""Targets of the measurement: octavo's engine in this process, or a server over HTTP.

| api         | path                                  | asked of                                          |
|-------------|---------------------------------------|---------------------------------------------------|
| completions | /v1/completions                       | octavo serve, vLLM                                |
| chat        | /v1/chat/completions                  | the same, transformers serve                      |
| kserve      | /v2/models/NAME/generate_stream       | octavo serve, Triton Inference Server             |

Every answer is streamed, and as long as asked for where the server knows ``ignore_eos``. Tokens are counted by the
server's own usage where it tells it, else by pieces of the stream.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from octavo.bench.serving.load import Ask, Prompt
from octavo.errors import ConfigError, DataError
from octavo.inference import EngineThread, SamplingParams
from octavo.parsing import parse_json

if TYPE_CHECKING:
    from httpx2 import AsyncClient

__all__ = ["Api", "ask_engine", "ask_server", "connected", "model_name"]

INSTALL = "pip install 'octavo[serve]'"
DATA, END = "data:", "[DONE]"
KEPT_S = 1.0  # that an idle connection is used again: servers close theirs after a few seconds, uvicorn after 5


class Api(StrEnum):
    """Of the table above."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    KSERVE = "kserve"


def ask_engine(thread: EngineThread) -> Ask:
    """Ask an engine of this process."""

    async def ask(prompt: Prompt) -> AsyncIterator[int]:
        params = SamplingParams(max_tokens=prompt.answer_tokens, temperature=0, ignore_end=True)
        async with thread.answer(prompt.ids, params) as events:
            async for event in events:
                if event.error is not None:
                    raise DataError(f"the engine did not answer: {event.error}")
                yield 1

    return ask


@asynccontextmanager
async def connected(url: str, *, key: str | None, timeout_s: float) -> "AsyncIterator[AsyncClient]":
    """A client of a server, without limits of its own to how many requests it sends.

    Raises:
        ConfigError: httpx2 is not installed, or it is no URL.
    """
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(f"asking a server needs httpx2, which is not installed; {INSTALL}") from error
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_S)
    try:
        made = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout_s)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no address of a server ({error}); write http://HOST:PORT") from error
    async with made as client:
        yield client


@contextmanager
def _answering(client: "AsyncClient") -> Iterator[None]:
    """Turn errors of the connection into a sentence that names the server."""
    import httpx2

    try:
        yield
    except httpx2.HTTPError as error:
        place = str(client.base_url).rstrip("/")
        raise DataError(f"{place} did not answer: {str(error) or type(error).__name__}") from error


async def model_name(client: "AsyncClient") -> str:
    """The first model that the server lists.

    Raises:
        DataError: it lists none, or does not answer.
    """
    with _answering(client):
        answer = await client.get("/v1/models")
    try:
        name: str = answer.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{client.base_url} lists no models; name the one to ask for with --name") from error
    return name


def ask_server(client: "AsyncClient", api: Api, name: str) -> Ask:
    """Ask a server for streams."""
    path, body = _REQUESTS[api]

    async def ask(prompt: Prompt) -> AsyncIterator[int]:
        told, counted = 0, None
        sent = body(prompt, name)
        with _answering(client):
            async with client.stream("POST", path.format(name=name), json=sent) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise DataError(f"{client.base_url} answered {answer.status_code}: {text[:200]}")
                async for piece in _pieces(answer.aiter_lines()):
                    counted = _tokens(piece, default=counted)
                    if _has_text(piece, api):
                        told += 1
                        yield 1
        if not told:
            raise DataError(f"{client.base_url} answered without a token; ask for more of them")
        if counted not in (None, told):
            yield counted - told  # pieces of several tokens, or of none

    return ask


async def _pieces(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """Of a stream of server-sent events.

    Raises:
        DataError: one of them is an error, or no JSON object.
    """
    async for line in lines:
        text = line.removeprefix(DATA).strip()
        if not line.startswith(DATA) or text == END:
            continue
        try:
            piece = parse_json(text)
        except DataError:
            piece = None
        if not isinstance(piece, dict):
            raise DataError(f"the stream has an event that is no JSON object: {text[:80]!r}")
        if "error" in piece:
            raise DataError(f"the stream ended with an error: {piece['error']}")
        yield piece


def _tokens(piece: dict[str, Any], *, default: int | None) -> int | None:
    """How many tokens the answer has by the server's own count, where a piece tells."""
    usage = piece.get("usage")
    found = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return found if isinstance(found, int) else default


def _has_text(piece: dict[str, Any], api: Api) -> bool:
    """Whether a token came: the text of one may be empty, while its character is not complete."""
    if api is Api.KSERVE:
        return "text_output" in piece
    if not piece.get("choices"):
        return False
    choice = piece["choices"][0]
    return "text" in choice if api is Api.COMPLETIONS else bool(choice.get("delta", {}).get("content"))


def _openai(prompt: Prompt, name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": name,
        **given,
        "max_tokens": prompt.answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _completions(prompt: Prompt, name: str) -> dict[str, Any]:
    return _openai(prompt, name, {"prompt": prompt.text, "ignore_eos": True})


def _chat(prompt: Prompt, name: str) -> dict[str, Any]:
    return _openai(prompt, name, {"messages": [{"role": "user", "content": prompt.text}]})


def _kserve(prompt: Prompt, _: str) -> dict[str, Any]:
    return {"text_input": prompt.text, "max_tokens": prompt.answer_tokens, "temperature": 0.0, "ignore_eos": True}


_REQUESTS: dict[Api, tuple[str, Callable[[Prompt, str], dict[str, Any]]]] = {
    Api.COMPLETIONS: ("/v1/completions", _completions),
    Api.CHAT: ("/v1/chat/completions", _chat),
    Api.KSERVE: ("/v2/models/{name}/generate_stream", _kserve),
}
