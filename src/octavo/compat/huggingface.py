"""FP8 training in transformers' ``Trainer``: ``Trainer(..., callbacks=[FP8Callback()])``.

:class:`FP8Callback` converts the model, saves and loads the scaling state, logs amaxes and runs the doctor.
Importing this module also registers octavo's quantizer (:mod:`octavo.compat.huggingface_folders`).

The state is in the checkpoint's ``trainer_state.json``, as safetensors' bytes in base64, and is loaded when training
resumes from it, also from a moved folder. Needs ``transformers``: octavo[hf].
"""

import base64
import warnings
from typing import Any

import safetensors.torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, ExportableState

from octavo import recipes
from octavo.compat.huggingface_folders import codes_config, register
from octavo.compat.huggingface_numbers import FP8Numbers
from octavo.convert import ConversionReport, convert
from octavo.doctor.huggingface import DoctorCallback
from octavo.doctor.trainer_losses import calling_object
from octavo.errors import ConfigError
from octavo.nn.scaled_layer import ScaledLayer
from octavo.nn.scaling_state import accept_new_histories, load_scaling_state, scaling_state
from octavo.parsing import parse_tensors
from octavo.recipes import Recipe

__all__ = ["FP8Callback", "ScalingStateCallback", "codes_config"]


class _StateInCheckpoints(TrainerCallback, ExportableState):
    """Saves and loads the scaling state with each checkpoint of a ``transformers.Trainer``."""

    def __init__(self, recipe: str | Recipe | None) -> None:
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
        entry = exported.get(name) or exported.get(ScalingStateCallback.__name__) or self.state()
        self._compare_recipe(entry["args"].get("recipe"), state.global_step)
        saved = entry["attributes"]["saved"] if state.global_step else ""  # a fresh model has no state
        if saved:
            load_scaling_state(model, parse_tensors(base64.b64decode(saved)), recipe=self.recipe)
        elif state.global_step and scaling_state(model):
            accept_new_histories(model)
            warnings.warn(
                "the checkpoint that training resumes from holds no scaling state: delayed scaling starts anew",
                stacklevel=2,
            )
        self._model = model
        state.stateful_callbacks = {name: self.state()} | exported  # Trainer expects an entry

    def _compare_recipe(self, before: str | None, step: int) -> None:
        """Warn where a checkpoint was trained with another recipe."""
        now = self._arguments()["recipe"]
        if step and before is not None and now is not None and before != now:
            warnings.warn(
                f"the checkpoint of step {step} was trained with recipe {before!r}, and goes on with {now!r}; pass "
                f"FP8Callback({before!r}) to continue the same training",
                stacklevel=3,
            )

    def state(self) -> dict[str, Any]:
        """State that the Trainer writes into its checkpoint."""
        tensors = {} if self._model is None else scaling_state(self._model)
        if tensors:
            self.saved = base64.b64encode(safetensors.torch.save(tensors)).decode("ascii")
        return {"args": self._arguments(), "attributes": {"saved": self.saved}}

    def _arguments(self) -> dict[str, Any]:
        """Arguments with which the Trainer may build this callback again."""
        return {"recipe": self.recipe if isinstance(self.recipe, str) else None}


class ScalingStateCallback(_StateInCheckpoints):
    """Deprecated: ``FP8Callback(None, interval=0)`` does the same."""

    def __init__(self, *, recipe: str | Recipe | None = None) -> None:
        warnings.warn(
            "ScalingStateCallback is deprecated; FP8Callback(None, interval=0) saves and loads the scaling state of a "
            "model that is converted already",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(recipe)


class FP8Callback(_StateInCheckpoints):
    """Trains the model of a ``transformers.Trainer`` in FP8.

    Converts the model when the Trainer is built, and each one that its ``model_init`` makes; saves and loads the
    scaling state with each checkpoint; adds numbers to the Trainer's logs
    (:class:`octavo.compat.huggingface_numbers.FP8Numbers`), and so to the loggers of ``report_to``; and watches the
    model as :class:`octavo.doctor.huggingface.DoctorCallback` does. Delayed scaling closes its steps by itself.

    Args:
        recipe: of the conversion; None for a model that is converted already.
        interval: optimizer steps between the doctor's samples; 0 runs no doctor.
        tensors: number of tensors of each role that are logged by name.
        conversion: further arguments of ``octavo.convert``, such as ``skip``.

    Raises:
        ConfigError: an unknown recipe, ``interval`` or ``tensors`` that is no whole number of at least 0; when the
            Trainer is built, a model of which nothing is converted.

    Example:
        >>> FP8Callback("delayed", skip=["lm_head"]).state()["args"]
        {'recipe': 'delayed', 'interval': 10, 'tensors': 0}
    """

    def __init__(
        self, recipe: str | Recipe | None = "tensorwise", *, interval: int = 10, tensors: int = 0, **conversion: Any
    ) -> None:
        super().__init__(recipe)
        if recipe is not None:
            recipes.get(recipe)
        integers: dict[str, object] = {"interval": interval, "tensors": tensors}
        for name, value in integers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"FP8Callback's {name} must be a whole number of at least 0, not {value!r}")
        self.interval, self.tensors, self.conversion, self.report = interval, tensors, conversion, None
        self._start_anew()

    report: ConversionReport | None

    def _start_anew(self) -> None:
        """Forget the Trainer that used this callback before."""
        self.saved, self._model = "", None
        self.doctor = DoctorCallback(interval=self.interval) if self.interval else None
        self.numbers = FP8Numbers(self.tensors)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert the model, and let the Trainer convert each one that it makes with ``model_init``."""
        del args, state, control
        self._start_anew()
        if self.recipe is None:
            return
        self._convert(kwargs["model"])
        trainer = calling_object(Trainer)
        if trainer is not None and trainer.model_init is not None:
            make = trainer.call_model_init
            vars(trainer)["call_model_init"] = lambda trial=None: self._convert(make(trial))

    def _convert(self, model: nn.Module) -> nn.Module:
        assert self.recipe is not None
        self.report = report = convert(model, self.recipe, **self.conversion)
        if not (report.converted or report.weights or report.attention):
            raise ConfigError(
                "FP8Callback converts no layer of this model; its report says why each of them stays, and other "
                "arguments may convert some"
            )
        return model

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the state of the checkpoint that training resumes from, and start to watch."""
        is_converted = any(isinstance(module, ScaledLayer) for module in kwargs["model"].modules())
        if self.recipe is not None and self.report is None and not is_converted:
            raise ConfigError("FP8Callback came after the Trainer was built; pass it as Trainer(callbacks=[...])")
        super().on_train_begin(args, state, control, **kwargs)
        self.numbers = FP8Numbers(self.tensors)
        _call_first(self)
        if self.doctor is not None:
            self.doctor.on_train_begin(args, state, control, **kwargs)

    def on_step_begin(self, *event: Any, **kwargs: Any) -> None:
        """Start to sample the step if it is due."""
        if self.doctor is not None:
            self.doctor.on_step_begin(*event, **kwargs)

    def on_step_end(self, *event: Any, **kwargs: Any) -> None:
        """Write the sample and report new findings."""
        if self.doctor is not None:
            self.doctor.on_step_end(*event, **kwargs)

    def on_train_end(self, *event: Any, **kwargs: Any) -> None:
        """Stop watching the model."""
        if self.doctor is not None:
            self.doctor.on_train_end(*event, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add amaxes and non-finite counts to the logs and their history."""
        logs = kwargs.get("logs") or {}
        if self.doctor is not None:
            self.doctor.on_log(args, state, control, **kwargs)
        if "loss" in logs and state.log_history:
            watcher = None if self.doctor is None else self.doctor.watcher
            numbers = self.numbers.of(kwargs["model"], watcher.samples[-1] if watcher and watcher.samples else None)
            logs |= numbers
            state.log_history[-1] |= numbers

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"interval": self.interval, "tensors": self.tensors}


def _call_first(callback: TrainerCallback) -> None:
    """Move a callback before the Trainer's loggers, which read what it adds to the logs.

    The Trainer puts its own callbacks first. The event under way goes on behind the callback's old place.
    """
    handler = calling_object(CallbackHandler)
    if handler is not None:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)


register()
