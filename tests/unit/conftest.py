"""Control groups of a machine that a test makes up."""

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import control_groups


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, dict[str, str]], None]:
    """Write the process's groups and, by path, the files of the control groups."""

    def build(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(control_groups, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    return build
