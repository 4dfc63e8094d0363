"""The tutorial's commands run in order, in one folder, as a reader would paste them.

Commands run in this process, which spares the start of Python for each; the server is a process of its own and ends by
Ctrl-C. Training text is the same in every run of the tutorial, so the runs after the first find it encoded.
"""

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.app import app
from tests.documented_blocks import PAGES, TITLE, blocks, lines
from tests.forked_verification import IMPORTED

pytestmark = pytest.mark.long

TUTORIAL = [page for name, page in PAGES.items() if name.startswith("docs/tutorial/")]
EXIT_CODE = re.compile(r"# exit code (\d+)$")
VALIDATION = re.compile(r"validation nats\W+([\d.]+)")
OUT = re.compile(r"^octavo train .*--out (\S+)")
PORT = "8000"  # in the pages; the test takes a free one
SECONDS = 300  # limit of one process


def arguments(command):
    program, *words = shlex.split(command, comments=True)
    assert program == "octavo", f"the test runs octavo and curl, not: {command}"
    return words


def run(command):
    """Standard output of an octavo command, which must end with the exit code that the page gives."""
    expected = EXIT_CODE.search(command)
    result = CliRunner().invoke(app, arguments(command), prog_name="octavo")
    assert result.exit_code == (int(expected[1]) if expected else 0), (
        f"{command}\n{result.output}\n{result.exception!r}"
    )
    return result.stdout


def fetch(command):
    """Answer of the server to a curl command of the page."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine to ask the server with")
    fetched = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl --fail-with-body ", 1)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert fetched.returncode == 0, f"{command}\n{fetched.stdout}\n{fetched.stderr}"
    return fetched.stdout


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def start_server():
    """Start a server and wait until it says that it serves; before, it listens and answers that it still loads.

    It is forked from a process that has imported octavo, which spares the start of Python.
    """
    servers = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)

    def started(command):
        reading, writing = context.Pipe(duplex=False)
        server = context.Process(target=serve, args=(arguments(command), Path.cwd(), writing))
        server.start()
        writing.close()
        servers.append((server, reading))  # which is kept open, for what the server still has to say
        with os.fdopen(reading.fileno(), closefd=False) as lines:
            assert any("is served at" in line for line in lines), "the server ended before it served"

    yield started
    for server, _ in servers:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGINT)
        server.join(60)
    assert [server.exitcode for server, _ in servers] == [0] * len(servers)


def serve(words, folder, said):
    """Run ``octavo serve`` in a folder; what it writes to stderr is said."""
    os.chdir(folder)
    os.dup2(said.fileno(), 2)
    app(words, prog_name="octavo")


def reuse_encoded_text(command, data):
    """Copy the encoded text of the first run into the folder of a later one, which checks it against its own text."""
    if (out := OUT.match(command)) and data.exists():
        shutil.copytree(data, f"{out[1]}/data")


@pytest.fixture
def printed(tmp_path, monkeypatch, start_server):
    """Standard output of each command of the tutorial."""
    for library in ("compressed_tensors", "transformers"):
        pytest.importorskip(library, reason=f"{library} is not installed to verify the export with")
    monkeypatch.chdir(tmp_path)
    port, printed = free_port(), {}
    for language, head, block in (each for page in TUTORIAL for each in blocks(page)):
        if language == "toml":
            title = TITLE.search(head)
            assert title is not None, "a page names the file of its settings"
            (tmp_path / title[1]).write_text(block)
        for command in lines(block) if language == "bash" else ():
            here = command.replace(PORT, str(port))
            reuse_encoded_text(here, tmp_path / "runs/bf16/data")
            if command.startswith("octavo serve"):
                start_server(here)
            else:
                printed[command] = fetch(here) if command.startswith("curl ") else run(here)
    return printed


def test_tutorial_commands_do_what_the_pages_say(printed):
    text = {tuple(command.split()[:3]): output for command, output in printed.items()}
    assert "healthy: nothing found" in text["octavo", "doctor", "runs/fp8"]
    assert "bulk-underflow" in text["octavo", "doctor", "runs/margin"]
    assert "healthy: nothing found" in text["octavo", "doctor", "runs/fixed"]
    validation = {
        command.rpartition("--out runs/")[2]: float(found[1])
        for command, output in printed.items()
        if command.startswith("octavo train") and (found := VALIDATION.search(output))
    }
    assert abs(validation["fp8"] - validation["bf16"]) < 0.05, "a few hundredths at most"
    assert validation["margin"] < validation["fp8"], "by the loss alone one would choose the broken run"
    assert "verified by transformers" in text["octavo", "export", "runs/fp8"]
    answers = [output for command, output in printed.items() if command.startswith("curl ")]
    assert ['"object":"text_completion"' in answer for answer in answers] == [True]
    assert text["octavo", "generate", "runs/fp8"].startswith("def main(")
