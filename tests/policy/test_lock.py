"""requirements.lock names each file that pip may install by its SHA-256, and torch, whose build is the machine's."""

import re
import tomllib

from tests.policy.source_tree import ROOT

PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")
LOCK = (ROOT / "requirements.lock").read_text().replace(" \\\n    ", " ").splitlines()


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_has_hashes():
    packages = [line for line in LOCK if not line.startswith("#")]
    assert len(packages) > 100
    assert [line for line in packages if not PIN.fullmatch(line)] == []


def test_torch_is_named_once_and_not_installed_by_the_lock():
    assert [line for line in LOCK if re.fullmatch(r"# torch==[0-9.]+", line)] == ["# torch==2.13.0"]
    assert not any(line.startswith(("torch==", "nvidia", "cuda")) for line in LOCK)


def test_the_lock_has_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(one for name in ("report", "gguf", "study", "export", "serve", "docs", "dev") for one in extras[name]),
    ]
    names = {canonical(re.split(r"[\[<>=; ]", one)[0]) for one in wanted} - {"octavo", "torch"}
    assert names <= {canonical(line.split("==")[0]) for line in LOCK}
