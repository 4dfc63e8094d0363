"""``octavo.nn.Linear``: ``torch.nn.Linear`` with a recipe."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import recipes
from octavo.autocast import active_recipe, autocast_region
from octavo.errors import BackendError, ConfigError
from octavo.functional import InputOperands, OperandSource, WeightCache, WeightOperands, fp8_linear
from octavo.kernels import needs_widening, probe_cpu
from octavo.kernels.tracing import is_distributed
from octavo.nn.shared_input import SharedInput
from octavo.nn.tensor_parallel import DistributedTensors, LocalTensors, check_slices, local_tensors
from octavo.numerics import Granularity, QuantizedTensor
from octavo.numerics.cast import check_float, is_eager_cpu
from octavo.numerics.quantized import FP8_DTYPES
from octavo.recipes import Close, History, Recipe
from octavo.scaling import (
    INPUT,
    ROLES,
    WEIGHT,
    AmaxHistory,
    LayerScaling,
    LayerWatch,
    OperandScaling,
    ScaleUpdates,
    Slices,
    StatefulModule,
    inside_backward,
)
from octavo.scaling.scale_updates import (
    close_block_over_ranks,
    close_if_written,
    follow_optimizers,
    reduces,
    watch_compiled_backwards,
)

__all__ = ["CODES", "CodesLayout", "Linear", "autocast_dtype"]


CODES = "weight_codes"


class CodesLayout(NamedTuple):
    """Layout of a weight that is stored as FP8 codes."""

    granularity: Granularity
    hp_dtype: torch.dtype


class Linear(StatefulModule, torch.nn.Linear):
    """``y = x @ weight.T + bias`` with the GEMMs of forward and backward in FP8.

    Parameters and ``state_dict`` are those of ``torch.nn.Linear``. Under ``torch.autocast`` the input is cast to the
    autocast dtype first, as for ``torch.nn.Linear``; the weight is quantized from its own values.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias [N].
        recipe: a preset's name or a recipe.
        manual_scale_updates: with a delayed recipe, leave closing a step to ``octavo.update_scales``; otherwise the
            optimizer's step closes it.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> layer = Linear(16, 8, recipe="rowwise")
        >>> layer(torch.zeros(2, 3, 16)).shape
        torch.Size([2, 3, 8])
    """

    restored_class: type[torch.nn.Module] = torch.nn.Linear  # by octavo.restore
    recipe: Recipe
    path: str  # in the model that was converted
    scale_updates: ScaleUpdates
    nonfinite_counts: Tensor  # [3] int64: NaN and ±Inf elements of the roles, seen in training
    input_scale: Tensor  # [] float32, of a static recipe; 0 until it is loaded
    amax_history: AmaxHistory | None
    last_recipe: Recipe | None  # of the last call in training
    trained_recipe: Recipe | None  # of the last differentiable call; None: a switch is not logged
    weight_cache: WeightCache | None
    codes_layout: CodesLayout | None  # of an octavo.nn.fp8_weight.FP8WeightLinear, as are the next two
    weight_codes: torch.nn.Parameter
    weight_scale: Tensor
    watch: LayerWatch | None = None  # set for the steps that the doctor inspects
    shared_input: SharedInput | None = None  # of a converted model's layers
    weight_gather: OperandSource | None = None  # of a weight that FSDP2 gathers as codes
    sliced_recipe: Recipe | None = None  # the last that check_slices has found to fit, of a layer that ranks share
    shares_amaxes: bool = True  # whether ranks that share the layer must share a delayed recipe's amaxes
    records_weight: bool = True  # False for a step's later micro-batches, where the model marks them

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "tensorwise",
        manual_scale_updates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.set_recipe(recipes.get(recipe), ScaleUpdates(manual=manual_scale_updates))

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
            device = torch.device("cpu") if self.weight.is_meta else self.weight.device
            self.start_state(device)
            self.nonfinite_counts = _zero_counts(device)
            self.codes_layout, self.weight_cache, self.shared_input = None, None, None
            self.last_recipe, self.trained_recipe = None, None
            probe_cpu()
            if is_distributed(self.weight):
                check_slices(self, self.weight, recipe)
        history = getattr(self, "amax_history", None)
        if history is None or history.spec != recipe.history:
            self.keep_history(None)
            self._history_for(recipe, create=True)
        else:
            history.updates, history.path = self.scale_updates, path
        follow_optimizers(self)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's own name)
        """Map [..., K] to [..., N], in the input's dtype (under ``torch.autocast``: its dtype)."""
        recipe = self.recipe_now()
        if recipe.is_high_precision and self.codes_layout is None and not needs_widening(_autocast(input)):
            return F.linear(input, self.weight, self.bias)
        check_float(input, "the input of octavo.nn.Linear")
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            raise ConfigError(f"this layer takes inputs [..., {self.in_features}], not {tuple(input.shape)}")
        if is_distributed(self.stored_weight):
            return self._forward_slices(input, recipe)
        x = _autocast(input)
        if recipe.is_high_precision and self.codes_layout is None:
            return fp8_linear(x, self.weight.to(x.dtype), self.bias, recipe)
        return self.forward_cast(recipe, partial(self._with_shared_operands, input, x, recipe))

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 (a graph traces no reduction of amaxes)
    def _forward_slices(self, source: Tensor, recipe: Recipe) -> Tensor:
        """:meth:`forward` of a layer that several ranks share; see :mod:`octavo.nn.tensor_parallel`."""
        local = local_tensors(self, source, recipe)
        if local.gather is not None:
            return local.output(
                self.forward_cast(recipe, partial(self._with_gathered_codes, source, local, recipe), local)
            )
        x = _autocast(local.x)
        if recipe.is_high_precision and self.codes_layout is None:
            return local.output(fp8_linear(x, local.weight.to(x.dtype), local.bias, recipe))
        is_whole = local.slices[INPUT] is None
        shared = partial(self._with_shared_operands, source, x, recipe, memory=local.x)
        return local.output(self.forward_cast(recipe, shared if is_whole else lambda _: (x, None), local))

    def _with_gathered_codes(
        self, source: Tensor, local: DistributedTensors, recipe: Recipe, scaling: OperandScaling
    ) -> tuple[Tensor, InputOperands]:
        """A stand-in for the whole input, and its operands from the codes of all ranks' rows."""
        assert local.gather is not None
        learning = self.weight.requires_grad
        x, gather = _autocast(local.x), local.gather
        if self.shared_input is not None:
            shared = self.shared_input.gathered(source, x, recipe, scaling, gather, learning=learning, memory=local.x)
            if shared is not None:
                return shared
        rows, learning = x.detach().flatten(0, -2), learning and torch.is_grad_enabled()
        return gather.stand_in(local.x, x.dtype), gather.operands(rows, recipe, scaling, learning=learning)

    def _with_shared_operands(
        self, source: Tensor, x: Tensor, recipe: Recipe, scaling: OperandScaling, memory: Tensor | None = None
    ) -> tuple[Tensor, InputOperands | None]:
        """``x`` (``source`` in autocast's dtype), and its operands if the model's layers share their casts."""
        if self.shared_input is None or self.watch is not None or torch.compiler.is_compiling():
            return x, None
        learning = self.stored_weight.requires_grad
        return x, self.shared_input.operands(source, x, recipe, scaling, learning=learning, memory=memory)

    def forward_cast(
        self,
        recipe: Recipe,
        make: Callable[[OperandScaling], tuple[Tensor, InputOperands | None]],
        local: LocalTensors | None = None,
    ) -> Tensor:
        """Run the FP8 path of :meth:`forward` on a checked input.

        Args:
            recipe: :meth:`recipe_now`.
            make: returns the input, [..., K], and its operands if it has cast it already; then it has also taken its
                scale from the input's scaling and recorded its amax there.
            local: this rank's tensors, of a layer that several ranks share.
        """
        scaling = self._layer_scaling(recipe)
        weight, bias = (self.stored_weight, self.bias) if local is None else (local.weight, local.bias)
        if local is not None:
            scaling.slices, scaling.weight_is_parameter = self._slices(local), True
        x, operands = make(scaling.of(INPUT))
        y = fp8_linear(
            x,
            weight,
            bias,
            recipe,
            weight_operands=self._operands(recipe, scaling, local),
            input_operands=operands,
            scaling=scaling,
        )
        self._watch_backward(y)
        return y

    def _slices(self, local: LocalTensors) -> tuple[Slices | None, ...]:
        """The slices of the roles' tensors, with what the layer's history knows of them."""
        history = self.amax_history
        known = (False,) * len(ROLES) if history is None else history.has_past()
        return tuple(each and replace(each, has_past=past) for each, past in zip(local.slices, known, strict=True))

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

    def shared_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a layer that ranks share, as DTensors."""
        return self.stored_weight, self.bias

    @property
    def stored_weight(self) -> Tensor:
        """The parameter that stores the weight [N, K]: its values, or their FP8 codes."""
        return self.weight

    def stored_codes(self) -> QuantizedTensor | None:
        """The weight's codes and scale where it is stored as FP8 codes; else None."""
        return None

    def _operands(
        self, recipe: Recipe, scaling: LayerScaling, local: LocalTensors | None = None
    ) -> WeightOperands | None:
        """The weight's operands where they are stored or cached; None where the call casts the weight."""
        codes = self.stored_codes()
        if codes is not None:
            if self.stored_weight.requires_grad:
                raise ConfigError("a weight stored as FP8 codes takes no gradient; octavo.restore(model) decodes it")
            return WeightOperands(codes, recipe)
        if self.weight_gather is not None:
            return self.weight_gather.operands(recipe, scaling.of(WEIGHT))
        if self.weight_cache is None or torch.compiler.is_compiling():
            return None
        weight_scaling = scaling.of(WEIGHT)
        if not self.stored_weight.requires_grad:
            weight_scaling.pending = None
        if inside_backward():  # activation checkpointing repeats the call, whose elements are counted already
            weight_scaling.nonfinite = None
        weight = self.weight if local is None else local.weight
        return self.weight_cache.operands(weight, recipe, weight_scaling, learning=self._is_learning)

    @property
    def _is_learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _layer_scaling(self, recipe: Recipe) -> LayerScaling:
        """Scaling state that this call reads and updates; closes the previous step if it is over."""
        self.follow_weight()
        counts = self.nonfinite_counts if self.training and not self.stored_weight.is_meta else None
        scaling = LayerScaling(nonfinite=counts, watch=self.watch, records_weight=self.records_weight)
        if recipe.has_static_input:
            scaling.input_scale = self._checked_input_scale()
        history = self._history_for(recipe, create=self._is_learning)
        if history is not None:
            if self.training and not inside_backward():  # activation checkpointing runs a forward of this step again
                self._begin_forward(history)
            scaling.amaxes = history.amax.clone()
            if self._is_learning:
                scaling.pending, scaling.overflowed = history.pending, history.overflowed
                self.scale_updates.ran = True
        return scaling

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
        scale: Tensor = self.input_scale
        if is_distributed(scale):  # as parallelize_module makes all buffers
            self.input_scale = scale.to_local()
        if self.nonfinite_counts.device == device or device.type == "meta":
            return
        if self.input_scale.is_meta:
            self.start_state(device)
        else:
            self.input_scale = self.input_scale.to(device)
        self._move_counts(device)

    def _move_counts(self, device: torch.device) -> None:
        """Move the counts, which are no buffer: DDP would replace them by rank 0's before each forward."""
        counts = self.nonfinite_counts
        self.nonfinite_counts = _zero_counts(device) if counts.is_meta else counts.to(device)

    def _checked_input_scale(self) -> Tensor:
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
        """Initial state: no scale."""
        return {"input_scale": torch.zeros((), dtype=torch.float32, device=device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_optimizers(self)  # a copy or an unpickled layer

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As of ``torch.nn.Module``; refuse slices of a weight, as ``parallelize_module`` sets them, if need be."""
        if name in ("weight", CODES) and is_distributed(param):
            check_slices(self, param, self.recipe)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let counts and amax history follow the model's device."""
        super()._apply(fn, recurse)
        self._move_counts(self.input_scale.device)
        if self.amax_history is not None:
            self.amax_history._apply(fn, recurse)  # noqa: SLF001
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Refuse FP8 codes: read as numbers they reach 448."""
        weight, codes = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}{CODES}")
        if codes is not None or (weight is not None and weight.dtype in FP8_DTYPES):
            *_, error_messages = rest
            error_messages.append(
                f"{prefix}{CODES if codes is not None else 'weight'} holds FP8 codes, and this layer a weight in high "
                "precision; convert the model with frozen='fp8' before loading, or call octavo.restore(model), which "
                "decodes them, before saving"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which calls this method on every module that it compiles."""
        raise BackendError(
            "torch.jit.script cannot compile octavo's layers; record the model with torch.export.export, or compile it "
            "in high precision after octavo.restore(model)"
        )

    def extra_repr(self) -> str:
        """The shape and the name of the recipe in force: that of a surrounding ``octavo.autocast``, or the layer's."""
        return f"{super().extra_repr()}, recipe={active_recipe(self.recipe).name}"

    def keep_history(self, history: AmaxHistory | None) -> None:
        """Use this history from now on. It is not a submodule: see :class:`octavo.scaling.amax_history.AmaxHistory`."""
        self.__dict__["amax_history"] = history

    def new_history(self, spec: History) -> AmaxHistory:
        """Create an empty history for this layer."""
        return AmaxHistory(spec, updates=self.scale_updates, path=self.path, device=self.stored_weight.device)

    def _history_for(self, recipe: Recipe, *, create: bool) -> AmaxHistory | None:
        """This layer's history for a delayed ``recipe``; never shared by two specifications.

        Evaluation creates none: without one its scales are dynamic.
        """
        if recipe.history is None or (self.amax_history is None and not create):
            return None
        if self.amax_history is None:
            if torch.compiler.is_compiling():  # a graph cannot create modules; the first call runs eagerly
                torch._dynamo.graph_break(msg=f"{self.called} has no amax history yet; run it once before compiling")  # noqa: SLF001
            self.keep_history(self.new_history(recipe.history))
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


def _autocast(x: Tensor) -> Tensor:
    dtype = autocast_dtype(x)
    return x if x.dtype is dtype else x.to(dtype)
