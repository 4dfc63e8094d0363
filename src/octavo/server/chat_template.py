"""A model's chat template: how a conversation is written for it, as its own file says.

Templates are programs in Jinja that come with a model. They run in jinja2's sandbox, which bounds what they reach and
not how long they run or how much they write, so they run in a process of their own (template_process.py) with a limit
of time and one of memory. The process is started once and reused; one that ended is started again for the next
conversation.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ConfigError
from octavo.parsing import parse_json
from octavo.server import template_process
from octavo.server.refusals import Refusal

__all__ = ["ChatTemplate"]

SECONDS = 5.0  # a template takes about a millisecond
MEMORY_BYTES = 2**29
REPAIR = "write it again, or ask /v1/completions"
MOST = 2**22  # characters of one prompt, where a caller names no number


class ChatTemplate:
    r"""Writes messages as a prompt.

    Args:
        source: in Jinja.
        tokens: texts that it may name, such as ``bos_token``.
        seconds: for one conversation.
        memory_bytes: of address space, jinja2's own included.

    Raises:
        CheckpointError: it is no template.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        >>> template.render([{"role": "user", "content": "Hi"}])
        'user: Hi\n'
        >>> template.close()
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._head = {"source": source, "tokens": dict(tokens or {})}
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._lock = threading.Lock()
        try:
            self._start()
        except Refusal as refusal:
            raise CheckpointError(refusal.message) from None

    def render(self, messages: Sequence[Mapping[str, str]], *, most: int = MOST) -> str:
        """The conversation, and the beginning of the assistant's turn.

        Args:
            messages: with ``role`` and ``content``.
            most: characters; of a longer text the first ``most`` + 1.

        Raises:
            ConfigError: messages that the template does not take.
            Refusal: the template did not end in time, or needed too much memory; with 500, since it is the model's.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            answer = self._exchange({"messages": list(messages), "most": most})
        if "refused" in answer:
            raise ConfigError(f"the model's chat template does not take these messages: {answer['refused']}")
        if "failed" in answer:
            raise Refusal(500, f"the model's chat template {answer['failed']}; {REPAIR}")
        return str(answer["text"])

    def close(self) -> None:
        """End the process, wherever it is; another conversation would start a new one."""
        while not self._lock.acquire(timeout=0.05):
            self._process.kill()  # again, since a conversation that had just begun may have started another
        self._end()
        self._lock.release()

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(template_process.__file__))]
        self._process = subprocess.Popen(
            [*command, str(self._seconds), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for octavo to answer
        )
        self._end = weakref.finalize(self, _end, self._process)
        answer = self._exchange(self._head)
        if "damaged" in answer:
            self._end()
            raise CheckpointError(f"the model's chat template is damaged: {answer['damaged']}; write it again")

    def _exchange(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one line; where there is none, what the process ended with is the reason."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            self._end()
            raise Refusal(500, self._reason(self._process.returncode))
        return dict(parse_json(answer))

    def _reason(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"the model's chat template did not end within {self._seconds:g} s and was stopped; {REPAIR}"
        return f"the process of the model's chat template ended with status {status}; {REPAIR}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it where it runs, and take its status and its pipes."""
    with suppress(BrokenPipeError), process:
        process.kill()
