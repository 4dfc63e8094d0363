"""``octavo.nn.Linear``: ``torch.nn.Linear`` with a recipe."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import recipes
from octavo.autocast import active_recipe
from octavo.errors import BackendError, ConfigError
from octavo.functional import InputOperands, OperandSource, WeightOperands, fp8_linear
from octavo.kernels import needs_widening
from octavo.kernels.tracing import is_distributed
from octavo.nn.scaled_layer import ScaledLayer, in_autocast_dtype
from octavo.nn.shared_input import SharedInput
from octavo.nn.sliced_weight import SlicedWeight
from octavo.nn.tensor_parallel import DistributedTensors, LocalTensors, check_slices, local_tensors, weight_slice
from octavo.numerics import Granularity
from octavo.numerics.cast import check_float
from octavo.numerics.quantized import FP8_DTYPES
from octavo.recipes import Recipe
from octavo.scaling import INPUT, ROLES, WEIGHT, LayerScaling, OperandScaling, ScaleUpdates, Slices, inside_backward
from octavo.scaling.scale_updates import layers_of, share_amaxes

__all__ = ["CODES", "CodesLayout", "Linear"]


CODES = "weight_codes"


class CodesLayout(NamedTuple):
    """Layout of a weight that is stored as FP8 codes."""

    granularity: Granularity
    hp_dtype: torch.dtype


class Linear(ScaledLayer, torch.nn.Linear):
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
    codes_layout: CodesLayout | None  # of an octavo.nn.fp8_weight.FP8WeightLinear, as are the next two
    weight_codes: torch.nn.Parameter
    weight_scale: Tensor
    shared_input: SharedInput | None = None  # of a converted model's layers
    weight_gather: OperandSource | None = None  # of a weight that FSDP2 gathers as codes
    sliced_recipe: Recipe | None = None  # the last that check_slices has found to fit, of a layer that ranks share
    shares_amaxes: bool = True  # whether ranks that share the layer must share a delayed recipe's amaxes
    kept_own_amaxes: bool = False  # whether they have not: what one rank knows of the past says nothing of others

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

    def begin_state(self) -> None:
        """Create the scaling state; refuse slices of a weight that the recipe cannot cast."""
        super().begin_state()
        self.codes_layout, self.weight_cache, self.shared_input = None, None, None
        if is_distributed(self.weight):
            check_slices(self, self.weight, self.recipe)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (nn.Linear's own name)
        """Map [..., K] to [..., N], in the input's dtype (under ``torch.autocast``: its dtype)."""
        recipe = self.recipe_now()
        is_plain = recipe.is_high_precision and self.codes_layout is None
        if is_plain and not needs_widening(in_autocast_dtype(input)) and not _hangs_torch(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        check_float(input, "the input of octavo.nn.Linear")
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            equal = (
                "; torch takes a plain input for one of equal slices, so give the style before use_local_output=False"
            )
            advice = equal if is_distributed(self.stored_weight) else ""
            raise ConfigError(f"this layer takes inputs [..., {self.in_features}], not {tuple(input.shape)}{advice}")
        if is_distributed(self.stored_weight):
            return self._forward_slices(input, recipe)
        x = in_autocast_dtype(input)
        if is_plain:
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
        x = in_autocast_dtype(local.x)
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
        x, gather = in_autocast_dtype(local.x), local.gather
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
        group = next((each.group for each in local.slices if each is not None), None)
        if group is None:
            return local.slices
        history, own = self.amax_history, self.keeps_own_amaxes(group)
        known = (own,) * len(ROLES)
        if history is not None and not self.kept_own_amaxes:
            known = history.has_past()
        slices = [each and replace(each, has_past=past) for each, past in zip(local.slices, known, strict=True)]
        weight_slices = slices[WEIGHT]
        if weight_slices is not None and self.weight_gather is None:
            weight = self._sliced_weight()
            weight.begin_forward()
            slices[WEIGHT] = replace(weight_slices, amaxes=weight.amax)
        return tuple(slices)

    def keeps_own_amaxes(self, group: Any) -> bool:
        """Return whether each rank of a group that shares the layer goes on with amaxes of its own."""
        own = not share_amaxes(self.scale_updates, torch.distributed.get_process_group_ranks(group))
        self.kept_own_amaxes = self.kept_own_amaxes or own
        return own

    def _sliced_weight(self) -> SlicedWeight:
        """The weight as its model's layers reduce its amaxes together."""
        step = self.scale_updates.weight_amaxes
        if self not in step.weights:
            layers = (each for each in layers_of(self.scale_updates) if isinstance(each, Linear))
            step.weights.update({each: SlicedWeight(each, step) for each in layers if each not in step.weights})
        weight = step.weights[self]
        assert isinstance(weight, SlicedWeight)
        return weight

    def weight_slice(self) -> tuple[Tensor, Slices] | None:
        """This rank's slice of the weight [N, K]; None of a whole one, or one that FSDP2 shards or gathers as codes."""
        weight = self.stored_weight
        return weight_slice(weight) if is_distributed(weight) and self.weight_gather is None else None

    def shared_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a layer that ranks share, as DTensors."""
        return self.stored_weight, self.bias

    @property
    def stored_weight(self) -> Tensor:
        """The parameter that stores the weight [N, K]: its values, or their FP8 codes."""
        return self.weight

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

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As of ``torch.nn.Module``; refuse slices of a weight, as ``parallelize_module`` sets them, if need be.

        A weight that takes the place of one divided alike, as ``load_state_dict(assign=True)`` does it, is not checked:
        FSDP2's shards, which it sets by other ways, are no slices that a rank casts.
        """
        is_new = not _is_divided_alike(self._parameters.get(name), param)
        if name in ("weight", CODES) and is_distributed(param) and is_new:
            check_slices(self, param, self.recipe)
        super().register_parameter(name, param)

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


def _hangs_torch(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``F.linear`` would not end: torch 2.13 never finds DTensor's flattening of an empty [B, T, K]."""
    return is_distributed(weight) and not x.numel()


def _is_divided_alike(before: Tensor | None, after: Tensor | None) -> bool:
    """Return whether a parameter is divided among ranks as another one is."""
    if not is_distributed(before) or not is_distributed(after):
        return False
    return before.device_mesh == after.device_mesh and before.placements == after.placements
