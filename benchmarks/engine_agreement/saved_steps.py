"""Steps of a long run, each saved when it is done, so that a run that was stopped goes on where it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.files import write_atomically

__all__ = ["FOLDER", "SavedSteps"]

FOLDER = Path(__file__).parents[2] / "build" / "engine_agreement"


class SavedSteps:
    """Results by key in ``build/engine_agreement/NAME.json``.

    Example:
        >>> SavedSteps("x", Path("/nonexistent")).results
        {}
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        self._path = folder / f"{name}.json"
        self.results: dict[str, Any] = json.loads(self._path.read_text()) if self._path.is_file() else {}

    def step(self, key: str, compute: Callable[[], Any]) -> Any:
        """The saved result of a step, or what ``compute`` returns, saved."""
        if key not in self.results:
            self.results[key] = compute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self.results))
            print(self._path.stem, key, flush=True)
        return self.results[key]
