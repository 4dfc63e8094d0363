"""Targets of the measurement: octavo's engine in this process, or a server over HTTP.

| api         | path                                  | servers                                           |
|-------------|---------------------------------------|---------------------------------------------------|
| completions | /v1/completions                       | octavo serve, vLLM                                |
| chat        | /v1/chat/completions                  | the same, transformers serve                      |
| kserve      | /v2/models/NAME/generate_stream       | octavo serve, Triton Inference Server             |

Answers are streamed, and have the requested length if the server supports ``ignore_eos``. Tokens are counted by the
usage that the server reports, otherwise by pieces of the stream.
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
IDLE_S = 1.0  # an idle connection is reused for this long: servers close theirs after a few seconds, uvicorn after 5


class Api(StrEnum):
    """API of the table above."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    KSERVE = "kserve"


def ask_engine(thread: EngineThread) -> Ask:
    """Return a function that sends a prompt to an engine of this process."""

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
    """Yield a client of a server, without a limit on concurrent requests.

    Raises:
        ConfigError: httpx2 is not installed, or the URL is invalid.
    """
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(f"measuring a server needs httpx2, which is not installed; {INSTALL}") from error
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
    try:
        new_client = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout_s)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is not the address of a server ({error}); write http://HOST:PORT") from error
    async with new_client as client:
        yield client


@contextmanager
def _answering(client: "AsyncClient") -> Iterator[None]:
    """Convert errors of the connection to a DataError that names the server."""
    import httpx2

    try:
        yield
    except httpx2.HTTPError as error:
        place = str(client.base_url).rstrip("/")
        raise DataError(f"{place} did not answer: {str(error) or type(error).__name__}") from error


async def model_name(client: "AsyncClient") -> str:
    """Return the first model that the server lists.

    Raises:
        DataError: it lists none, or does not answer.
    """
    with _answering(client):
        answer = await client.get("/v1/models")
    try:
        name: str = answer.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{client.base_url} lists no models; give the name of one with --name") from error
    return name


def ask_server(client: "AsyncClient", api: Api, name: str) -> Ask:
    """Return a function that sends a prompt to a server and reads the streamed answer."""
    path, body = _REQUESTS[api]

    async def ask(prompt: Prompt) -> AsyncIterator[int]:
        pieces, usage = 0, None
        sent = body(prompt, name)
        with _answering(client):
            async with client.stream("POST", path.format(name=name), json=sent) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise DataError(f"{client.base_url} answered {answer.status_code}: {text[:200]}")
                async for piece in _pieces(answer.aiter_lines()):
                    usage = _tokens(piece, default=usage)
                    if _has_text(piece, api):
                        pieces += 1
                        yield 1
        if not pieces:
            raise DataError(f"{client.base_url} answered without a token; raise --answer")
        if usage not in (None, pieces):
            yield usage - pieces  # some pieces have several tokens, or none

    return ask


async def _pieces(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a stream of server-sent events.

    Raises:
        DataError: an event is an error, or not a JSON object.
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
            raise DataError(f"the stream has an event that is not a JSON object: {text[:80]!r}")
        if "error" in piece:
            raise DataError(f"the stream ended with an error: {piece['error']}")
        yield piece


def _tokens(piece: dict[str, Any], *, default: int | None) -> int | None:
    """Number of tokens of the answer as reported in a piece; ``default`` if it reports none."""
    usage = piece.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else default


def _has_text(piece: dict[str, Any], api: Api) -> bool:
    """Return True if a piece has a token; its text may be empty while a character is incomplete."""
    if api is Api.KSERVE:
        return "text_output" in piece
    if not piece.get("choices"):
        return False
    choice = piece["choices"][0]
    return "text" in choice if api is Api.COMPLETIONS else bool(choice.get("delta", {}).get("content"))


def _openai(prompt: Prompt, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": name,
        **fields,
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
