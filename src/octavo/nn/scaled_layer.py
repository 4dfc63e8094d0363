"""Base of the layers whose GEMMs run in FP8: the recipe of a call, and the scaling state beside the weight."""

import copy
import logging
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from octavo.autocast import active_recipe, autocast_region
from octavo.errors import ConfigError
from octavo.functional import WeightCache
from octavo.kernels import probe_cpu
from octavo.kernels.tracing import is_distributed
from octavo.numerics import QuantizedTensor
from octavo.numerics.cast import is_eager_cpu
from octavo.recipes import Close, History, Recipe
from octavo.scaling import ROLES, AmaxHistory, LayerScaling, LayerWatch, ScaleUpdates, StatefulModule, inside_backward
from octavo.scaling.pipeline_stages import infers_shapes, refuse_graph
from octavo.scaling.scale_updates import (
    close_block_over_ranks,
    close_if_written,
    follow_optimizers,
    layers_of,
    reduces,
    watch_compiled_backwards,
)

__all__ = ["ScaledLayer", "autocast_dtype", "in_autocast_dtype"]


class ScaledLayer(StatefulModule):
    """A layer with a recipe, an amax history where it is delayed, and a scale of its input where that is static."""

    experts: int | None = None  # of a layer whose scaling state is one for each expert
    recipe: Recipe
    in_features: int
    out_features: int
    path: str  # in the model that was converted
    scale_updates: ScaleUpdates
    nonfinite_counts: Tensor  # [3] int64: NaN and ±Inf elements of the roles, seen in training
    input_scale: Tensor  # [] or [experts] float32; 0 until it is loaded. None before the layer has a static recipe
    amax_history: AmaxHistory | None
    last_recipe: Recipe | None  # of the last call in training
    trained_recipe: Recipe | None  # of the last differentiable call; None: a switch is not logged
    watch: LayerWatch | None = None  # set for the steps that the doctor inspects
    weight_cache: WeightCache | None = None
    records_weight: bool = True  # False for a step's later micro-batches, where the model marks them
    infers_shapes: bool = False  # whether the last forward pass was a pipeline's, on tensors without values

    @property
    def stored_weight(self) -> Tensor:
        """The parameter that stores the weight: its values, or their FP8 codes."""
        raise NotImplementedError

    def stored_codes(self) -> QuantizedTensor | None:
        """The weight's codes and scale where it is stored as FP8 codes; else None."""
        return None

    def set_recipe(self, recipe: Recipe, scale_updates: ScaleUpdates | None = None, *, path: str = "") -> None:
        """Use another recipe from now on; a delayed one starts with an empty history unless its history is the same.

        Args:
            recipe: the casts and GEMMs.
            scale_updates: when a delayed step ends; layers of one model share it. None: with the optimizer's step.
            path: the layer's path in its model.
        """
        # A copy: torch.compile(dynamic=True) fails on two layers that share the floats of one object.
        self.recipe = copy.deepcopy(recipe)
        self.scale_updates, self.path = scale_updates or ScaleUpdates(), path
        if "input_scale" not in self._buffers:
            self.begin_state()
        elif recipe.has_static_input and self._buffers["input_scale"] is None:
            self.start_state(self.stored_weight.device)
        self.scale_updates.begins_anew |= self.trained_recipe is not None
        history = getattr(self, "amax_history", None)
        if history is None or history.spec != recipe.history:
            self.keep_history(None if recipe.history is None else self.new_history(recipe.history))
        else:
            history.updates, history.path = self.scale_updates, path
        follow_optimizers(self)

    def begin_state(self) -> None:
        """Create the scaling state."""
        weight = self.stored_weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        self.register_buffer("input_scale", None, persistent=False)
        self.start_state(device)
        self.nonfinite_counts = _zero_counts(device)
        self.last_recipe, self.trained_recipe = None, None
        probe_cpu()

    def recipe_now(self) -> Recipe:
        """The recipe of this call; where activation checkpointing repeats a call, that of the layer's last call.

        The repetition may run on one of autograd's threads, outside of the ``octavo.autocast`` block of the first run.
        """
        if inside_backward() and self.last_recipe is not None:
            return self.last_recipe
        recipe = active_recipe(self.recipe)
        if torch.compiler.is_compiling():
            return recipe
        if recipe is not self.trained_recipe and self._is_learning:
            self._log_recipe_switch(recipe)
        if recipe is self.last_recipe:  # a module's attributes are slow to set
            return recipe
        if self.training or torch.is_grad_enabled():
            self.last_recipe = recipe
        return recipe

    def _log_recipe_switch(self, recipe: Recipe) -> None:
        """Log, once per model, that a layer continues training with another recipe."""
        previous, self.trained_recipe = self.trained_recipe, recipe
        if previous is None or previous == recipe or self.scale_updates.switch_logged:
            return
        self.scale_updates.switch_logged = True
        logging.getLogger("octavo").warning(
            "%s was trained with recipe %r and now runs %r: scales and rounding change in mid-training, and a delayed "
            "recipe begins without a history; this is logged once a model",
            self.called,
            previous.name,
            recipe.name,
        )

    @property
    def _is_learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _layer_scaling(self, recipe: Recipe) -> LayerScaling:
        """Scaling state that this call reads and updates; closes the previous step if it is over."""
        self.follow_weight()
        has_values = self._has_values()
        counts = self.nonfinite_counts if self.training and has_values and not self.stored_weight.is_meta else None
        watch = self.watch if has_values else None
        scaling = LayerScaling(nonfinite=counts, watch=watch, records_weight=self.records_weight)
        if recipe.has_static_input:
            scaling.input_scale = self._checked_input_scale()
        history = self._history_for(recipe)
        if history is not None:
            repeated = inside_backward()  # activation checkpointing runs a forward of this step again
            if self.training and has_values and not repeated:
                self._begin_forward(history)
            scaling.amaxes = history.amax.clone()
            if self._is_learning and has_values:
                scaling.pending, scaling.overflowed = history.pending, history.overflowed
                self.scale_updates.ran = True
        return scaling

    def _has_values(self) -> bool:
        """Return whether the call's tensors hold values to record; see :mod:`octavo.scaling.pipeline_stages`."""
        if torch.compiler.is_compiling():
            if self._is_learning and self.amax_history is not None:
                refuse_graph()
            return True
        if not inside_backward():
            infers = infers_shapes()
            if infers is not self.infers_shapes:  # a module's attributes are slow to set
                self.infers_shapes = infers
        return not self.infers_shapes

    def _begin_forward(self, history: AmaxHistory) -> None:
        """Close the previous step where its end is detected only now."""
        region = autocast_region()
        if not torch.compiler.is_compiling():
            close_if_written(self, region)
            close_block_over_ranks(self, region)
        elif history.spec.close == Close.AUTOCAST and reduces(self.scale_updates):
            torch._dynamo.graph_break(  # noqa: SLF001
                msg=f"{self.called} ends steps with autocast blocks on all ranks, which a graph cannot; compile it "
                "with recipe 'delayed', or give convert amax_group='rank'"
            )
        history.begin_forward(region)

    @property
    def called(self) -> str:
        """Name of the layer in messages."""
        return f"layer {self.path!r}" if self.path else "this layer"

    def follow_weight(self) -> None:
        """Move the state to the weight's device, as after ``load_state_dict(assign=True)``; from meta, create it."""
        device = self.stored_weight.device
        scale = self._buffers["input_scale"]
        if is_distributed(scale):  # as parallelize_module makes all buffers
            self.input_scale = scale = scale.to_local()
        if self.nonfinite_counts.device == device or device.type == "meta":
            return
        if scale is not None and scale.is_meta:
            self.start_state(device)
        elif scale is not None:
            self.input_scale = scale.to(device)
        self._move_counts(device)

    def _move_counts(self, device: torch.device) -> None:
        """Move the counts, which are no buffer: DDP would replace them by rank 0's before each forward."""
        counts = self.nonfinite_counts
        self.nonfinite_counts = _zero_counts(device) if counts.is_meta else counts.to(device)

    def _checked_input_scale(self) -> Tensor | None:
        if self._buffers["input_scale"] is None:
            raise ConfigError(
                f"{self.called} has no scale for its static input; convert the model with that recipe and calibrate it"
            )
        if self.stored_weight.is_meta:
            return self.input_scale.to(self.stored_weight.device)
        if self.input_scale.dtype is not torch.float32:
            raise ConfigError(
                f"the scale of the static input of {self.called} was cast to {self.input_scale.dtype}, which loses its "
                "bits, as by FSDP1's MixedPrecision(buffer_dtype=...); give buffer_dtype=torch.float32, or use "
                "fully_shard"
            )
        if is_eager_cpu(self.input_scale) and not self.input_scale > 0:
            raise ConfigError(
                f"{self.called} has no scale for its static input; calibrate the model, or load its scaling state"
            )
        return self.input_scale

    def _watch_backward(self, y: Tensor) -> None:
        """Let the history count backward passes, so that it can warn if no step is ever closed."""
        if self.amax_history is None or not self.training or inside_backward():
            return
        if torch.compiler.is_dynamo_compiling():
            watch_compiled_backwards()
        elif y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(self.amax_history.remind)

    def fresh_state(self, device: torch.device | None) -> dict[str, Tensor]:
        """Initial state: a scale of 0 for a static input; other layers have no buffer, which DDP would broadcast."""
        if not self.recipe.has_static_input and self._buffers.get("input_scale") is None:
            return {}
        shape = () if self.experts is None else (self.experts,)
        return {"input_scale": torch.zeros(shape, dtype=torch.float32, device=device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_optimizers(self)  # a copy or an unpickled layer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let counts and amax history follow the model's device."""
        super()._apply(fn, recurse)
        self._move_counts(self.stored_weight.device)
        if self.amax_history is not None:
            self.amax_history._apply(fn, recurse)  # noqa: SLF001
        return self

    def keep_history(self, history: AmaxHistory | None) -> None:
        """Use this history from now on. It is not a submodule: see :class:`octavo.scaling.amax_history.AmaxHistory`."""
        self.__dict__["amax_history"] = history

    def new_history(self, spec: History) -> AmaxHistory:
        """Create an empty history for this layer."""
        device = self.stored_weight.device
        return AmaxHistory(spec, updates=self.scale_updates, path=self.path, device=device, experts=self.experts)

    def _history_for(self, recipe: Recipe) -> AmaxHistory | None:
        """This layer's history for a delayed ``recipe``; never shared by two specifications.

        Evaluation creates none: without one its scales are dynamic. Ranks that reduce amaxes create those of all layers
        of the model together, also in evaluation with gradients, since others may run other layers, or train.
        """
        if recipe.history is None:
            return None
        if self.amax_history is None:
            is_compiled = torch.compiler.is_compiling()
            on_ranks = not is_compiled and torch.is_grad_enabled() and reduces(self.scale_updates)
            if not self._is_learning and not on_ranks:
                return None
            if is_compiled:  # a graph cannot create modules; the first call runs eagerly
                torch._dynamo.graph_break(msg=f"{self.called} has no amax history yet; run it once before compiling")  # noqa: SLF001
            for layer in layers_of(self.scale_updates) if on_ranks else (self,):
                if isinstance(layer, ScaledLayer) and layer.amax_history is None:
                    layer.keep_history(layer.new_history(recipe.history))
        elif not self.amax_history.spec == recipe.history:  # noqa: SIM201 ("!=" is more than a tracer can compare)
            raise ConfigError(
                f"this layer keeps a history for {self.amax_history.spec} and cannot also run {recipe.history}; "
                "use one delayed recipe, or convert the model again"
            )
        elif self.amax_history.amax.device != self.stored_weight.device:
            self.amax_history.follow(self.stored_weight.device)
        return self.amax_history


def _zero_counts(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training may write them
        return torch.zeros(len(ROLES), dtype=torch.int64, device=device)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that ``torch.autocast`` would give a linear layer's input ``x``; its own outside of it."""
    device = x.device.type
    available = device != "meta"
    if available and x.is_floating_point() and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def in_autocast_dtype(x: Tensor) -> Tensor:
    """``x`` as ``torch.autocast`` would give it to a linear layer."""
    dtype = autocast_dtype(x)
    return x if x.dtype is dtype else x.to(dtype)
