"""``octavo serve``: what it refuses before it reads a model, and a whole life of one."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from octavo.server import Address
from tests.policy.source_tree import SOURCE


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "other machines can send requests to this server"),
        (["--recipe", "int4"], "recipe must be one of bf16, int8, fp8, fp8-dynamic, fp8-static, not 'int4'"),
        (["--calibration", "scales"], "a calibration is for the recipe fp8-static, not for fp8"),
        (["--cache-format", "fp4"], "cache_format must be one of e4m3, bf16, fp32"),
        (["--as", "vllm-tokn"], "there is no engine 'vllm-tokn' (did you mean 'vllm-token'?); use one of te-current"),
        (["--as", "te-current"], "octavo cannot serve as te-current: tokens share a scale of its inputs"),
        (["--as", "vllm-token", "--recipe", "fp8"], "--as vllm-token defines every cast and the cache; leave --recipe"),
        (["--as", "vllm-tensor", "--calibration", "scales"], "leave --calibration out"),
        (["--as", "vllm-token", "--cache-format", "bf16"], "leave --cache-format out"),
        (["--engine", "triton", "--as", "vllm-token"], "--as belongs to --engine octavo, not to triton"),
        (["--max-running", "0"], "max_running must be a whole number of at least 1"),
        (["--max-tokens", "0"], "max_tokens must be a whole number of at least 1"),
        (["--drain-seconds", "0"], "--drain-seconds takes a positive number of seconds, not 0"),
        (["--body-seconds", "nan"], "--body-seconds takes a positive number of seconds, not nan"),
        (["--send-seconds", "inf"], "--send-seconds takes a positive number of seconds, not inf"),
        (["--answer-seconds", "-1"], "--answer-seconds takes a positive number of seconds, not -1"),
        (["--max-requests", "0"], "--max-requests"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--host", "no.such.host.invalid", "--insecure"], "cannot listen at no.such.host.invalid"),
        (["--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_settings_are_refused_before_the_model_is_read(octavo, arguments, says):
    done = octavo("serve", "no/such/model", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "vllm"], "engine must be one of octavo, triton, not 'vllm'"),
        (["--grpc-port", 1], "--grpc-port belongs to --engine triton, not to octavo"),
        (["--engine", "triton", "--name", "x"], "--name belongs to --engine octavo, not to triton"),
        (["--engine", "triton", "--log-prompts"], "--log-prompts belongs to --engine octavo"),
        (["--engine", "triton", "--host", "0.0.0.0"], "any machine could use it; give --insecure"),
        (["--engine", "triton", "--host", "nohost.invalid"], "cannot listen at nohost.invalid"),
        (["--engine", "triton", "--triton-env", "no/such"], "octavo triton setup"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_options_of_the_other_engine_are_refused(octavo, arguments, says):
    done = octavo("serve", "no/such/model", *arguments)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


@pytest.mark.parametrize(("text", "says"), [(b"", "holds no key"), (b"\xff", "is not text"), (b"a\nb", "one line")])
def test_a_file_that_holds_no_key_is_refused(octavo, tmp_path, text, says):
    (tmp_path / "key").write_bytes(text)
    done = octavo("serve", "no/such/model", "--api-key-file", tmp_path / "key")
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_port_that_is_taken_is_refused(octavo):
    with Address(port=0).bind() as taken:
        taken.listen()
        done = octavo("serve", "no/such/model", "--port", taken.getsockname()[1])
    assert done.exit_code == 2
    assert "address already in use; choose another" in done.stderr


def test_a_model_that_is_not_there_is_refused(octavo):
    done = octavo("serve", "no/such/model", "--port", 0)
    assert done.exit_code == 2
    assert "no/such/model" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("arguments", [[], ["--as", "vllm-token"]], ids=" ".join)
def test_run_is_served_until_sigterm(finished_run, tmp_path, arguments):
    (tmp_path / "key").write_text("a key\n")
    command = [sys.executable, "-m", "octavo", "serve", str(finished_run), "--port", "0", "--name", "mine"]
    command += ["--log-prompts", "--api-key-file", str(tmp_path / "key"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "is served at" in line)
        place = line.split(" at ")[1].split(";")[0]
        body = {"model": "mine", "prompt": "12 times", "max_tokens": 3, "temperature": 0}
        headers = {"Authorization": "Bearer a key", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{place}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 3
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
    assert server.returncode == 0
    assert line.startswith("mine is served at http://127.0.0.1:")
    assert "prompt: '12 times'" in rest
    assert "Traceback" not in rest
