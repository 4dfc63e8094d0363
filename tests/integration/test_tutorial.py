"""The tutorial's commands run in order, in one folder, as a reader would paste them."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.policy.source_tree import ROOT

PAGES = sorted((ROOT / "docs/tutorial").glob("*.md"))
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([\w.-]+)"')
EXIT_CODE = re.compile(r"# exit code (\d+)$")
OCTAVO = ("octavo ", ".venv/bin/octavo ")
PORT = "8000"  # in the pages; the test takes a free one
SECONDS = 300  # limit of one command


def blocks():
    return [match.groups() for page in PAGES for match in FENCE.finditer(page.read_text())]


def commands(block):
    return block.replace("\\\n", " ").splitlines()


def arguments(command):
    return [sys.executable, "-m", "octavo", *shlex.split(command, comments=True)[1:]]


def run_in(folder, command):
    wanted = EXIT_CODE.search(command)
    program = ["bash", "-c", command] if command.startswith("curl ") else arguments(command)
    ended = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == (int(wanted[1]) if wanted else 0), f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until_listening(port, server):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, "the server ended before it listened"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"the server does not listen after {SECONDS} s")


@pytest.fixture
def start_server():
    servers = []

    def started(folder, command, port):
        servers.append(subprocess.Popen(arguments(command), cwd=folder, stdout=subprocess.DEVNULL))
        wait_until_listening(port, servers[-1])

    yield started
    for server in servers:
        server.send_signal(signal.SIGINT)
    assert [server.wait(timeout=60) for server in servers] == [0] * len(servers)


@pytest.fixture
def outputs(tmp_path, monkeypatch, start_server):
    """Standard output of each command of the tutorial."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed to verify the export with")
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    port, printed = free_port(), {}
    for language, head, block in blocks():
        if language == "toml":
            (tmp_path / TITLE.search(head)[1]).write_text(block)
        for command in commands(block) if language == "bash" and block.startswith((*OCTAVO, "curl ")) else []:
            here = command.replace(PORT, str(port))
            if command.startswith("octavo serve"):
                start_server(tmp_path, here, port)
            elif not command.startswith("curl ") or shutil.which("curl"):
                printed[command] = run_in(tmp_path, here)
    return printed


def test_tutorial_commands_do_what_the_pages_say(outputs):
    text = {tuple(command.split()[:3]): printed for command, printed in outputs.items()}
    assert "healthy: nothing found" in text["octavo", "doctor", "runs/fp8"]
    assert "bulk-underflow" in text["octavo", "doctor", "runs/margin"]
    assert "healthy: nothing found" in text["octavo", "doctor", "runs/fixed"]
    assert "verified by transformers" in text["octavo", "export", "runs/fp8"]
    answers = [printed for command, printed in outputs.items() if command.startswith("curl ")]
    assert all('"object":"text_completion"' in answer for answer in answers)
    assert text["octavo", "generate", "runs/fp8"].startswith("def main(")
