"""Steps of a long run, each saved when it is done, so that a run that was stopped goes on where it was.

Steps that were saved under other profiles than today's are put aside, so that no table mixes the two.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.engines import PROFILES, properties_of
from octavo.files import write_atomically

__all__ = ["FOLDER", "SavedSteps", "read_known", "write_known"]

FOLDER = Path(__file__).parents[2] / "build" / "engine_agreement"


class SavedSteps:
    """Results by key in ``build/engine_agreement/NAME.json``.

    Example:
        >>> SavedSteps("x", Path("/nonexistent")).results
        {}
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        self._path = folder / f"{name}.json"
        self._profiles = {name: properties_of(profile) for name, profile in PROFILES.items()}
        saved: dict[str, Any] = {"profiles": self._profiles, "results": {}}
        if self._path.is_file():
            saved = json.loads(self._path.read_text())
        if saved.get("profiles") != self._profiles:
            put_aside = self._path.rename(self._path.with_suffix(".before.json"))
            print(f"steps under other profiles: now in {put_aside}", flush=True)
            saved = {"results": {}}
        self.results: dict[str, Any] = saved["results"]

    def step(self, key: str, compute: Callable[[], Any]) -> Any:
        """The saved result of a step, or what ``compute`` returns, saved."""
        if key not in self.results:
            self.results[key] = compute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps({"profiles": self._profiles, "results": self.results}))
            print(self._path.stem, key, flush=True)
        return self.results[key]


def read_known(file: Path, folder: Path = FOLDER) -> None:
    """Put the steps of :func:`write_known`'s file where :class:`SavedSteps` reads them, if none are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in json.loads(gzip.decompress(file.read_bytes())).items():
        if not (folder / name).exists():
            write_atomically(folder / name, text)


def write_known(file: Path, folder: Path = FOLDER) -> None:
    """Write all saved steps to one file, which another machine can read."""
    texts = {path.name: path.read_text() for path in sorted(folder.glob("*.json")) if ".before." not in path.name}
    write_atomically(file, gzip.compress(json.dumps(texts).encode(), mtime=0))
