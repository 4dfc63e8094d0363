"""Scaling state in the checkpoints of transformers' ``Trainer``: ``Trainer(..., callbacks=[ScalingStateCallback()])``.

The state is in the checkpoint's ``trainer_state.json``, as safetensors' bytes in base64, and is loaded when training
resumes from it, also from a moved folder. Needs ``transformers``: octavo[hf].
"""

import base64
import warnings
from typing import Any

import safetensors.torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from octavo.compat.huggingface_folders import register
from octavo.nn.scaling_state import load_scaling_state, scaling_state
from octavo.parsing import parse_tensors
from octavo.recipes import Recipe

__all__ = ["ScalingStateCallback"]


class ScalingStateCallback(TrainerCallback, ExportableState):
    """Saves and loads the scaling state with each checkpoint of a ``transformers.Trainer``.

    Args:
        recipe: of layers that are delayed only under ``octavo.autocast``; see ``octavo.load_scaling_state``.

    Example:
        >>> ScalingStateCallback().state()["attributes"]
        {'saved': ''}
    """

    def __init__(self, *, recipe: str | Recipe | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.saved = ""
        self._model: nn.Module | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the state of the checkpoint that training resumes from."""
        del args, control
        model: nn.Module = kwargs["model"]
        name = type(self).__name__
        exported: Any = state.stateful_callbacks or {}  # a dictionary once training begins
        saved = exported.get(name, self.state())["attributes"]["saved"]
        if saved:
            load_scaling_state(model, parse_tensors(base64.b64decode(saved)), recipe=self.recipe)
        elif state.global_step and scaling_state(model):
            warnings.warn(
                "the checkpoint that training resumes from holds no scaling state: delayed scaling starts anew",
                stacklevel=2,
            )
        self._model = model
        state.stateful_callbacks = {name: self.state()} | exported  # Trainer expects an entry

    def state(self) -> dict[str, Any]:
        """State that the Trainer writes into its checkpoint."""
        tensors = {} if self._model is None else scaling_state(self._model)
        if tensors:
            self.saved = base64.b64encode(safetensors.torch.save(tensors)).decode("ascii")
        recipe = self.recipe if isinstance(self.recipe, str) else None
        return {"args": {"recipe": recipe}, "attributes": {"saved": self.saved}}


register()
