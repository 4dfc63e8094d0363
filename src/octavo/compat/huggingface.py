"""FP8 training in transformers' ``Trainer``: ``Trainer(..., callbacks=[FP8Callback()])``.

:class:`FP8Callback` converts the model, saves and loads the scaling state, logs amaxes and runs the doctor.
:class:`ScalingStateCallback` does the second alone. Importing this module also registers octavo's quantizer
(:mod:`octavo.compat.huggingface_folders`).

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
from octavo.convert import ConversionReport, convert
from octavo.doctor.huggingface import DoctorCallback
from octavo.errors import ConfigError
from octavo.nn.scaling_state import load_scaling_state, nonfinite_counts, scaling_state
from octavo.parsing import parse_tensors
from octavo.recipes import Recipe

__all__ = ["FP8Callback", "ScalingStateCallback"]


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


class FP8Callback(ScalingStateCallback):
    """Trains the model of a ``transformers.Trainer`` in FP8.

    Converts the model when the Trainer is built; saves and loads the scaling state with each checkpoint; adds the
    count of NaN and infinite elements and, of delayed layers, the range of the amaxes that scales are computed from to
    the Trainer's log history; and watches the model as
    :class:`octavo.doctor.huggingface.DoctorCallback` does. Delayed scaling closes its steps by itself.

    Args:
        recipe: of the conversion.
        interval: optimizer steps between the doctor's samples.
        conversion: further arguments of ``octavo.convert``, such as ``skip``.
    """

    def __init__(self, recipe: str | Recipe = "tensorwise", *, interval: int = 10, **conversion: Any) -> None:
        super().__init__(recipe=recipe)
        self.conversion, self.report = conversion, None
        self.doctor = DoctorCallback(interval=interval)

    report: ConversionReport | None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model."""
        del args, state, control
        self.report = convert(kwargs["model"], self.recipe or "tensorwise", **self.conversion)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the state of the checkpoint that training resumes from, and start to watch."""
        if self.report is None and not state.stateful_callbacks:
            raise ConfigError("FP8Callback came after the Trainer was built; pass it as Trainer(callbacks=[...])")
        super().on_train_begin(args, state, control, **kwargs)
        self.doctor.on_train_begin(args, state, control, **kwargs)

    def on_step_begin(self, *event: Any, **kwargs: Any) -> None:
        """Start to sample the step if it is due."""
        self.doctor.on_step_begin(*event, **kwargs)

    def on_step_end(self, *event: Any, **kwargs: Any) -> None:
        """Write the sample and report new findings."""
        self.doctor.on_step_end(*event, **kwargs)

    def on_train_end(self, *event: Any, **kwargs: Any) -> None:
        """Stop watching the model."""
        self.doctor.on_train_end(*event, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add amaxes and non-finite counts to the log history."""
        logs = kwargs.get("logs") or {}
        if "loss" in logs and state.log_history:
            state.log_history[-1].update(_fp8_numbers(kwargs["model"]))
        self.doctor.on_log(args, state, control, **kwargs)


def _fp8_numbers(model: nn.Module) -> dict[str, float]:
    """Count of NaN and infinite elements, and the range of the amaxes that delayed layers compute scales from."""
    numbers: dict[str, float] = {"fp8/nonfinite": float(sum(nonfinite_counts(model).values()))}
    amaxes: dict[str, list[float]] = {}
    for name, tensor in scaling_state(model).items():
        _, role, kind = f".{name}".rsplit(".", 2)
        if kind == "amax_history":
            amaxes.setdefault(role, []).append(float(tensor.max()))
    for role, values in amaxes.items():
        numbers |= {f"fp8/{role}_amax_min": min(values), f"fp8/{role}_amax_max": max(values)}
    return numbers


register()
