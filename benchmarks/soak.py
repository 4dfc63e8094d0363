"""A server under mixed load: memory leaks, wrong answers and server errors.

    python -m benchmarks.soak [MODEL] [--minutes 10] [--clients 16] [--no-write]

``octavo serve`` runs in a separate process. Each client sends one request after the other: prompts of 4 to 400 tokens,
some with a common prefix, and answers of 1 to 64 tokens, half of them streamed. One in ten requests is cancelled after
its first event, and one in a hundred is malformed. Every complete answer is compared with the answer that the same
request got from the idle server. At the end all pages of the cache must be free, and memory in the last fifth of the
time is compared with memory in the first.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import track

from benchmarks import smollm2
from benchmarks.measure import hardware, markdown_table, publish, verdict
from octavo.server import Address

KINDS = 60  # different requests
LEAVING, MALFORMED = 0.10, 0.01
LOOKS, LOST = 100, 0
FLAT = 1.02  # memory at the end over memory after the first fifth
WORDS = ("anger", "Achilles", "devastation", "pains", "thousandfold", "Achaians", "hurled", "multitudes", "heroes")
BAD = (
    b"{",
    b"\xff\xfe",
    b'{"model": "soak"}',
    b'{"model": "soak", "prompt": "x", "max_tokens": 999999999}',
    b'{"model": "soak", "prompt": "x", "unknown": 1}',
    b'{"model": "other", "prompt": "x"}',
)


@dataclass(kw_only=True)
class Crowd:
    """Clients of one server.

    Attributes:
        place: the server's address.
        requests: requests with a reproducible answer.
        answers: their answers from the idle server.
        outcomes: number of requests by outcome.
    """

    place: str
    requests: list[dict[str, Any]]
    answers: list[str]
    outcomes: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_until(self, end: float, chance: random.Random) -> None:
        """Send one request after the other until ``end``, as one client."""
        while time.monotonic() < end:
            outcome = self._ask(chance)
            with self._lock:
                self.outcomes[outcome] += 1
            if outcome == "429":
                time.sleep(1)

    def _ask(self, chance: random.Random) -> str:
        kind, luck = chance.randrange(KINDS), chance.random()
        if luck < MALFORMED:
            status, _ = posted(self.place, chance.choice(BAD), _all)
            return "refused" if 400 <= status < 500 else "taken" if status == 200 else _word(status)
        if luck < MALFORMED + LEAVING:
            body = self.requests[kind] | {"stream": True, "max_tokens": 64}
            status, _ = posted(self.place, _json(body), _first_line)
            return "left" if status == 200 else _word(status)
        status, text = (streamed if chance.random() < 0.5 else whole)(self.place, self.requests[kind])
        return _word(status) if status != 200 else "right" if text == self.answers[kind] else "wrong"


def main() -> None:
    """Serve, send requests, compare and print; exit with code 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model for octavo serve; SmolLM2-135M by default")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    machine = hardware()
    model = arguments.model or str(smollm2.model_path())
    with served(model) as (place, process):
        lines, fine = soaked(place, process, minutes=arguments.minutes, clients=arguments.clients)
    publish(
        "soak",
        lines,
        title=f"A server for {arguments.minutes:g} minutes",
        machine=machine,
        write=not arguments.no_write,
    )
    sys.exit(0 if fine else 1)


@contextmanager
def served(model: str) -> Iterator[tuple[str, psutil.Process]]:
    """Context of a running server; yields its address and process, and stops it at the end."""
    with Address(port=0).bind() as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", model, "--name", "soak", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    with subprocess.Popen(command, env=environment) as server:
        place = f"http://127.0.0.1:{port}"
        try:
            while not _is_ready(place):
                if server.poll() is not None:
                    raise SystemExit(f"soak: the server ended with exit code {server.returncode} before it was ready")
                time.sleep(0.2)
            yield place, psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)


def soaked(place: str, process: psutil.Process, *, minutes: float, clients: int) -> tuple[list[str], bool]:
    """Return the table, and whether all bars are met."""
    progress = Console(stderr=True)
    requests = [a_request(random.Random(kind)) for kind in range(KINDS)]
    alone = [whole(place, body) for body in track(requests, "alone", console=progress)]
    if any(status != 200 for status, _ in alone):
        raise SystemExit(f"soak: the server answers {[status for status, _ in alone]} to one client alone")
    crowd = Crowd(place=place, requests=requests, answers=[text for _, text in alone])
    end = time.monotonic() + 60 * minutes
    threads = [threading.Thread(target=crowd.ask_until, args=(end, random.Random(i))) for i in range(clients)]
    for thread in threads:
        thread.start()
    memory = []
    for _ in track(range(LOOKS), "together", console=progress):
        time.sleep(60 * minutes / LOOKS)
        memory.append(process.memory_info().rss)
    for thread in threads:
        thread.join()
    return table(crowd.outcomes, memory, pages_used(place))


def table(outcomes: Counter[str], memory: list[int], used: int) -> tuple[list[str], bool]:
    """Table of the outcomes and bars, and whether all bars are met."""
    fifth = len(memory) // 5
    growth = max(memory[-fifth:]) / max(memory[:fifth])
    errors = sum(count for name, count in outcomes.items() if name.startswith(("wrong", "taken", "5", "lost")))
    refusals = sum(count for name, count in outcomes.items() if name[0] == "4" and name != "429")
    rows = [
        ("answers equal to those of the idle server", outcomes["right"], outcomes["right"] > 0),
        ("streams cancelled by their clients", outcomes["left"], outcomes["left"] > 0),
        ("malformed requests refused with 4xx", outcomes["refused"], True),
        ("valid requests refused with 4xx, except 429 for a full queue", refusals, refusals == 0),
        ("requests refused for a full queue (429)", outcomes["429"], True),
        ("wrong answers, 5xx, connections lost", errors, errors == 0),
        ("pages still used at the end", used, used == 0),
        (f"memory, end over first fifth (end: {memory[-1] / 2**20:.0f} MiB)", f"{growth:.3f}", growth <= FLAT),
    ]
    cells = [(name, str(value), verdict(fine)) for name, value, fine in rows]
    return markdown_table(("count", "measured", "bar"), cells), all(fine for *_, fine in rows)


def a_request(chance: random.Random) -> dict[str, Any]:
    """Request with a seed, so that its answer is reproducible."""
    start = WORDS * 10 if chance.random() < 0.5 else ()
    prompt = [*start, *(chance.choice(WORDS) for _ in range(chance.choice([4, 40, 300])))]
    return {
        "model": "soak",
        "prompt": " ".join(prompt),
        "max_tokens": chance.choice([1, 8, 64]),
        "temperature": chance.choice([0.0, 0.8]),
        "seed": chance.randrange(1000),
    }


def whole(place: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of an answer in one piece."""
    status, content = posted(place, _json(body), _all)
    return status, json.loads(content)["choices"][0]["text"] if status == 200 else ""


def streamed(place: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of a streamed answer."""
    status, content = posted(place, _json(body | {"stream": True}), _all)
    blocks = content.decode().split("\n\n")
    pieces = [json.loads(block.removeprefix("data: ")) for block, _ in pairwise(blocks) if "[DONE]" not in block]
    return status, "".join(piece["choices"][0]["text"] for piece in pieces) if status == 200 else ""


def posted(place: str, body: bytes, read: Callable[[Any], bytes]) -> tuple[int, bytes]:
    """Status of a request, and the part of the response that ``read`` returns before the connection is closed."""
    request = urllib.request.Request(f"{place}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, read(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, HTTPException):
        return LOST, b""


def _word(status: int) -> str:
    return "lost" if status == LOST else str(status)


def pages_used(place: str) -> int:
    """Number of used pages of the cache, once no request is running."""
    while True:
        with urllib.request.urlopen(f"{place}/metrics", timeout=60) as response:
            families = text_string_to_metric_families(response.read().decode())
        samples = {
            (sample.name, sample.labels.get("state")): sample.value for family in families for sample in family.samples
        }
        if not samples[("octavo_requests_running", None)] and not samples[("octavo_requests_waiting", None)]:
            return int(samples[("octavo_cache_pages", "used")])
        time.sleep(0.2)


def _is_ready(place: str) -> bool:
    try:
        with urllib.request.urlopen(f"{place}/health", timeout=10) as response:
            return bool(response.status == 200)
    except urllib.error.URLError:
        return False


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _all(response: Any) -> bytes:
    return bytes(response.read())


def _first_line(response: Any) -> bytes:
    return bytes(response.readline())


if __name__ == "__main__":
    main()
