"""Limits that keep one client from using up a server's resources."""

from dataclasses import dataclass, fields

from octavo.errors import ConfigError
from octavo.nn.arguments import check_whole

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server.

    Attributes:
        connections: open connections; one more closes the one that has been idle longest.
        head_s: seconds until the head of a request must have arrived.
        body_bytes: size of a request's body; a larger one gets 413.
        body_s: seconds until a body must have arrived; a later one gets 408.
        send_s: seconds in which a client must read each part of an answer; then the connection is closed.
        requests: requests in progress or waiting; more get 429.
        prompt_tokens: tokens of one prompt; None is the model's number of positions.
        max_tokens: largest ``max_tokens`` of a request.
        choices: answers to one request, over all its prompts.
        answer_s: seconds after which an answer ends, with the finish reason "length".
        drain_s: seconds for running answers to end at shutdown.

    Raises:
        ConfigError: a number that is not positive.

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
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.type is not float:
                check_whole(limit.name, value, least=1)
            elif not 0 < value < float("inf"):
                raise ConfigError(f"{limit.name} must be a positive number of seconds, not {value}")
