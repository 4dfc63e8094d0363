"""How Triton's server is started and ended, with a stand-in that listens, hangs or gives up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.checksums import write_sums
from octavo.errors import CheckpointError, ConfigError, TritonError
from octavo.server import Address
from octavo.server.triton.environment import Environment
from octavo.server.triton.running import Ports, TritonServer

STAND_IN = f"""#!{sys.executable}
import http.server, sys
print("asked:", sys.argv[1:], flush=True)
{{body}}
"""
READY = """
port = int(next(arg for arg in sys.argv if arg.startswith("--http-port=")).split("=")[1])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v2/health/ready" else 404)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", port), Answers)
"""
BODIES = {
    "serves": READY + "server.serve_forever()",
    "breaks": READY + "server.handle_request(); sys.exit(3)",
    "fails": "print('a model is broken'); sys.exit(1)",
    "hangs": "import time; time.sleep(600)",
    "stays": READY + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); server.serve_forever()",
}


@pytest.fixture
def start(tmp_path):
    """Starts a stand-in of a kind."""
    environment = Environment(folder=tmp_path / "environment")
    (environment.triton / "bin").mkdir(parents=True)
    (tmp_path / "repository" / "models").mkdir(parents=True)
    with Address(port=0).bind() as taken:
        ports = Ports(http=taken.getsockname()[1])

    def started(kind, repository=tmp_path / "repository", seconds=60.0):
        program = environment.triton / "bin" / "tritonserver"
        program.write_text(STAND_IN.format(body=BODIES[kind]))
        program.chmod(0o755)
        return TritonServer.started(repository, environment, ports=ports, log=tmp_path / "log", ready_seconds=seconds)

    return started


def test_server_runs_during_the_block(start, tmp_path):
    with start("serves") as server:
        assert server.process.poll() is None
        assert server.ready_s >= 0
        said = server.log.read_text()
    assert server.process.poll() is not None
    for option in (f"--model-repository={tmp_path}/repository/models", "--grpc-port=8001", "--http-address=127.0.0.1"):
        assert option in said


def test_start_failure_shows_the_log(start):
    with (
        pytest.raises(TritonError, match=r"ended with 1 before it was ready; .*\n(.*\n)*a model is broken"),
        start("fails"),
    ):
        pass


def test_hanging_start_is_ended(start):
    with pytest.raises(TritonError, match=r"not ready after 1\.5 s"), start("hangs", seconds=1.5):
        pass


def test_unexpected_exit_is_an_error(start):
    with pytest.raises(TritonError, match="Triton ended with 3"), start("breaks") as server:
        server.wait()


def test_server_that_ignores_sigterm_is_killed(start, monkeypatch):
    monkeypatch.setattr("octavo.server.triton.running.ENDING_S", 0.2)
    monkeypatch.setattr("octavo.server.triton.running.KILLING_S", 0.2)
    with start("stays") as server:
        process = server.process.pid
    assert server.process.returncode == -9
    with pytest.raises(ProcessLookupError):
        os.killpg(process, 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from octavo.server.triton.environment import Environment
from octavo.server.triton.running import Ports, TritonServer
folder = Path(sys.argv[1])
with TritonServer.started(
    folder / "repository", Environment(folder=folder / "environment"), ports=Ports(http=int(sys.argv[2])),
    log=folder / "log", ready_seconds=60.0,
) as server:
    print(server.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_server_ends_with_octavo(start, tmp_path):
    """Killed, octavo can end nothing itself."""
    start("serves")
    with Address(port=0).bind() as free:
        port = free.getsockname()[1]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, str(port)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid = int(ended.stdout)
    deadline = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    """Whether a process exists, and is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_folder_without_models_is_refused(start, tmp_path):
    with pytest.raises(ConfigError, match="is not a Triton model repository"), start("serves", repository=tmp_path):
        pass
    assert not (tmp_path / "log").exists(), "nothing was started"


def test_changed_model_fails_its_checksums(start, tmp_path):
    model = tmp_path / "repository" / "models" / "onnx" / "1"
    model.mkdir(parents=True)
    (model / "model.onnx").write_bytes(b"weights")
    write_sums(model)
    (model / "model.onnx").write_bytes(b"weighty")
    with pytest.raises(CheckpointError, match=r"model\.onnx' is damaged or was edited"), start("serves"):
        pass
    assert not (tmp_path / "log").exists(), "nothing was started"
