"""Scaling state in Lightning's checkpoints: ``Trainer(..., callbacks=[ScalingStateCallback()])``.

Needs ``lightning``, or ``pytorch_lightning``.
"""

import importlib
import importlib.util
import warnings
from typing import Any

from octavo.nn.scaling_state import accept_new_histories, load_scaling_state, scaling_state
from octavo.recipes import Recipe

__all__ = ["ScalingStateCallback"]

_NAME = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
Callback: Any = importlib.import_module(_NAME).Callback
KEY = "octavo_scaling_state"


class ScalingStateCallback(Callback):  # type: ignore[misc]
    """Saves and loads the scaling state with each checkpoint of Lightning's ``Trainer``.

    Args:
        recipe: of layers that are delayed only under ``octavo.autocast``; see ``octavo.load_scaling_state``.
    """

    def __init__(self, *, recipe: str | Recipe | None = None) -> None:
        super().__init__()
        self.recipe = recipe

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the state to the checkpoint."""
        del trainer
        checkpoint[KEY] = scaling_state(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the state from the checkpoint."""
        del trainer
        if KEY in checkpoint:
            load_scaling_state(pl_module, checkpoint[KEY], recipe=self.recipe)
        elif scaling_state(pl_module):
            accept_new_histories(pl_module)
            warnings.warn("the checkpoint holds no scaling state: delayed scaling starts anew", stacklevel=2)
