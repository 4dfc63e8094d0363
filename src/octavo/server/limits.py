"""``Limits``: what a server takes from those who ask, so that none of them can take it all."""

from dataclasses import dataclass, fields

from octavo.errors import ConfigError
from octavo.nn.arguments import check_whole

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server.

    Attributes:
        connections: open at once; one more ends the one that has waited longest without a request.
        head_s: seconds in which the head of a request has to arrive.
        body_bytes: of a request's body; more is answered with 413.
        body_s: seconds in which a body has to arrive; then 408.
        send_s: seconds in which each part of an answer has to be taken; then the connection is closed.
        requests: that are worked on or wait at once; more get 429.
        prompt_tokens: of one prompt; None for as many as the model has positions.
        max_tokens: that one answer may be asked to have.
        choices: answers to one request, over all its prompts.
        answer_s: seconds after which an answer ends as if it had reached its number of tokens.
        drain_s: seconds that answers have to end in when the server is told to.

    Raises:
        ConfigError: a number that is not above 0.

    Example:
        >>> Limits(requests=8).body_bytes
        1048576
    """

    connections: int = 1024
    head_s: float = 10.0
    body_bytes: int = 2**20
    body_s: float = 10.0
    send_s: float = 30.0
    requests: int = 256
    prompt_tokens: int | None = None
    max_tokens: int = 4096
    choices: int = 16
    answer_s: float = 600.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if own.type is not float:
                check_whole(own.name, value, least=1)
            elif not 0 < value < float("inf"):
                raise ConfigError(f"{own.name} is a positive number of seconds, not {value}")
