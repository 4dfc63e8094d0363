"""Chat template of a model: renders a conversation as a prompt.

Templates are Jinja programs that come with a model. jinja2's sandbox restricts what they access, but not their run time
or the size of their output, so they run in a separate process (template_process.py) with time and memory limits. The
process is reused, and restarted for the next conversation after it ended.
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
from octavo.server.error_responses import ResponseError

__all__ = ["ChatTemplate"]

SECONDS = 5.0  # a template usually takes about a millisecond
MEMORY_BYTES = 2**29
REPAIR = "write it again, or ask /v1/completions"
MOST = 2**22  # characters of one prompt, by default


class ChatTemplate:
    r"""Renderer of messages as a prompt.

    Args:
        source: template in Jinja.
        tokens: variables of the template, such as ``bos_token``.
        seconds: time limit for one conversation.
        memory_bytes: limit of the process's address space, including jinja2.

    Raises:
        CheckpointError: the template does not compile.

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
        except ResponseError as error:
            raise CheckpointError(error.message) from None

    def render(self, messages: Sequence[Mapping[str, str]], *, most: int = MOST) -> str:
        """Render the conversation and the beginning of the assistant's turn.

        Args:
            messages: mappings with ``role`` and ``content``.
            most: characters; a longer text is cut to ``most`` + 1.

        Raises:
            ConfigError: the template rejects the messages.
            ResponseError: the template exceeded its time or memory limit; status 500.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            answer = self._exchange({"messages": list(messages), "most": most})
        if "refused" in answer:
            raise ConfigError(f"the model's chat template rejects these messages: {answer['refused']}")
        if "failed" in answer:
            raise ResponseError(500, f"the model's chat template {answer['failed']}; {REPAIR}")
        return str(answer["text"])

    def close(self) -> None:
        """Kill the process, even while it renders; the next conversation starts a new one."""
        while not self._lock.acquire(timeout=0.05):
            self._process.kill()  # in a loop: a conversation that just began may have started another process
        self._end()
        self._lock.release()

    def _start(self) -> None:
        command = [sys.executable, "-P", str(Path(template_process.__file__))]
        self._process = subprocess.Popen(
            [*command, str(self._seconds), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # only octavo handles Ctrl-C
        )
        self._end = weakref.finalize(self, _end, self._process)
        answer = self._exchange(self._head)
        if "damaged" in answer:
            self._end()
            raise CheckpointError(f"the model's chat template is damaged: {answer['damaged']}; write it again")

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line and return the answer; raise ResponseError with the exit status if the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            self._end()
            raise ResponseError(500, self._reason(self._process.returncode))
        return dict(parse_json(answer))

    def _reason(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"the model's chat template did not end within {self._seconds:g} s and was stopped; {REPAIR}"
        return f"the process of the model's chat template ended with status {status}; {REPAIR}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process if it runs, reap it and close its pipes."""
    with suppress(BrokenPipeError), process:
        process.kill()
