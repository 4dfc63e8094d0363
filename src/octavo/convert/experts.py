"""Experts of a mixture in one module with three-dimensional weights: found by what they compute, and run in FP8.

transformers registers expert modules with one interface (``use_experts_implementation``): a forward that takes tokens,
the indices of each token's experts and their weights, parameters ``gate_up_proj`` (or ``up_proj``) and ``down_proj``, a
gate, and flags that say how they are stored. Whatever class follows it is converted: there is no list of models to
keep. A converted one sorts the tokens by expert, as transformers' own grouped implementation does, and multiplies by
:class:`octavo.nn.GroupedLinear`'s rules. Expert modules that follow no interface are known by their class.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.convert.convolutions import ConvertedConvolution, is_product
from octavo.convert.other_modules import ConvertedBilinear, ConvertedConv1D, ConvertedModule
from octavo.kernels.tracing import is_distributed
from octavo.nn.grouped_linear import ExpertsProjection
from octavo.nn.scaled_layer import ScaledLayer

__all__ = ["is_experts", "kind_of", "left_as_they_are", "linear_shapes", "other_modules", "unable"]


class InterfaceExperts(ConvertedModule):
    """Experts of transformers' interface."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool

    def weights(self) -> tuple[str, ...]:
        """The two stacks of matrices."""
        return ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer with the parameters as the flags say."""
        bias = f"{weight}_bias" if self.has_bias else None
        return ExpertsProjection(self, weight, bias, transposed=self.is_transposed)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token [K] to its experts, top_k of [tokens, top_k], and add up their outputs by their weights.

        An index of ``num_experts`` stands for no expert.
        """
        up, down = (self.layer(name) for name in self.weights())
        if self.is_high_precision_now():
            return super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        (tokens, top_k), width = top_k_index.shape, hidden_states.shape[-1]
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        offsets = _offsets(torch.bincount(experts, minlength=self.num_experts + 1)[: self.num_experts])
        hidden = up(hidden_states[order // top_k], offsets)
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)  # type: ignore[operator]
        output = down(hidden, offsets)
        if self.has_post_expert_norm:
            output = self.post_expert_norm(output)  # type: ignore[operator]
        weighted = output * top_k_weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        summed: Tensor = weighted[back].view(tokens, top_k, width).sum(dim=1)
        return summed.to(hidden_states.dtype)


class BatchedExperts(ConvertedModule):
    """Llama 4's experts: as many rows for each, gate and up side by side, weights [E, K, N]."""

    act_fn: Any
    is_transposed = True

    def weights(self) -> tuple[str, ...]:
        """The two stacks of matrices."""
        return ("gate_up_proj", "down_proj")

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer of transposed weights."""
        return ExpertsProjection(self, weight, None, transposed=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [E · rows, K] to the same shape."""
        up, down = (self.layer(name) for name in self.weights())
        if self.is_high_precision_now():
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        rows = hidden_states.reshape(-1, up.in_features)
        offsets = torch.arange(up.experts + 1, device=rows.device) * (len(rows) // up.experts)
        gate, value = up(rows, offsets).chunk(2, dim=-1)
        result: Tensor = down(value * self.act_fn(gate), offsets)
        return result


class ParallelExperts(ConvertedModule):
    """JetMoE's experts: one weight [E, N, K], rows sorted by expert, and a list of how many each has."""

    def weights(self) -> tuple[str, ...]:
        """Its one stack of matrices."""
        return ("weight",)

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer without biases."""
        return ExpertsProjection(self, weight, None, transposed=False)

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Map [T, K] to [T, N]."""
        layer = self.layer("weight")
        if self.is_high_precision_now():
            return super().forward(inputs, expert_size)  # type: ignore[no-any-return]
        result: Tensor = layer(inputs, _offsets(torch.as_tensor(expert_size, device=inputs.device)))
        return result


class GatedExperts(ConvertedModule):
    """torchtitan's experts: rows sorted by expert and how many each has; down(silu(gate(x)) · up(x))."""

    def weights(self) -> tuple[str, ...]:
        """Gate [E, F, D], down [E, D, F] and up [E, F, D]: w1, w2 and w3, in later releases with their dimensions."""
        return tuple(sorted(name for name, _ in self.named_parameters(recurse=False)))

    def new_layer(self, weight: str) -> ScaledLayer:
        """A layer without biases."""
        return ExpertsProjection(self, weight, None, transposed=False)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Map [R, D] to the same shape; rows beyond the experts' become 0."""
        gate, down, up = (self.layer(name) for name in self.weights())
        if self.is_high_precision_now():
            return super().forward(x, tokens_per_expert)  # type: ignore[no-any-return]
        offsets = _offsets(tokens_per_expert)
        result: Tensor = down(torch.nn.functional.silu(gate(x, offsets)) * up(x, offsets), offsets)
        return result


def _offsets(counts: Tensor) -> Tensor:
    """Where each expert's rows begin, and where the last one's end."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


_BY_CLASS: Mapping[str, type[ConvertedModule]] = {
    "torch.nn.modules.linear.Bilinear": ConvertedBilinear,
    "transformers.pytorch_utils.Conv1D": ConvertedConv1D,
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": BatchedExperts,
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": ParallelExperts,
    "torchtitan.models.moe.moe.GroupedExperts": GatedExperts,  # 0.2
    "torchtitan.models.common.moe.GroupedExperts": GatedExperts,  # 0.3
}


def kind_of(module: torch.nn.Module, *, convolutions: bool = False) -> type[ConvertedModule] | None:
    """How a module multiplies by its weights in FP8; None where octavo does not know, or was not asked to."""
    if isinstance(module, ConvertedModule):
        return type(module).__bases__[0]
    if convolutions and is_product(module):
        return ConvertedConvolution
    own = type(module)
    known = _BY_CLASS.get(f"{own.__module__}.{own.__qualname__}")
    has_stack = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    return known or (InterfaceExperts if has_stack and _follows_interface(own) else None)


def linear_shapes(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """N and K of the linear layers that a module that :func:`kind_of` knows stands for, by their weight's name."""
    if isinstance(module, ConvertedConvolution) or is_product(module):
        kernel = module.get_parameter("weight")
        return {"weight": (len(kernel), kernel[0].numel())}
    kind = kind_of(module)
    if kind is ConvertedBilinear:
        matrix = module.get_parameter("weight").flatten(0, 1)
        return {"weight": (matrix.shape[0], matrix.shape[1])}
    own = vars(module).get("is_transposed")  # the flag of transformers' interface
    is_transposed = own if isinstance(own, bool) else kind is not None and kind.is_transposed
    weights = {name: weight for name, weight in module.named_parameters(recurse=False) if not name.endswith("bias")}
    shapes = {name: (int(weight.shape[-2]), int(weight.shape[-1])) for name, weight in weights.items()}
    return {name: shape[::-1] if is_transposed else shape for name, shape in shapes.items()}


def _follows_interface(module_class: type[torch.nn.Module]) -> bool:
    """Return whether transformers dispatches the class's forward by its interface for experts."""
    integration = sys.modules.get("transformers.integrations.moe")
    forward = module_class.forward
    if integration is None or not inspect.isfunction(forward) or not forward.__closure__:
        return False
    captured = inspect.getclosurevars(forward).nonlocals
    return isinstance(captured.get("experts_interface"), integration.ExpertsInterface)


def other_modules(model: torch.nn.Module, *, convolutions: bool = False) -> dict[str, torch.nn.Module]:
    """The modules of a model that :func:`kind_of` knows, by path."""
    return {
        path: module for path, module in model.named_modules() if kind_of(module, convolutions=convolutions) is not None
    }


def is_experts(module: torch.nn.Module) -> bool:
    """Return whether a module that :func:`kind_of` knows has a matrix for each expert.

    Example:
        >>> is_experts(torch.nn.Bilinear(2, 3, 4))
        False
    """
    has_stack = any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
    return has_stack and kind_of(module) not in (None, ConvertedBilinear)


def left_as_they_are(model: torch.nn.Module) -> str:
    """Sentence about the modules of :func:`other_modules`, for what handles linear layers alone; empty without any.

    Example:
        >>> left_as_they_are(torch.nn.Linear(4, 4))
        ''
    """
    first, *more = [*other_modules(model)] or [""]
    others = f" and {len(more)} more" if more else ""
    return first and f"{first}{others} stay in high precision: the weights of experts and Conv1D are no linear layers"


def unable(module: torch.nn.Module) -> str | None:
    """Reason why a module that :func:`kind_of` knows cannot be converted."""
    if "forward" in vars(module):
        return "its forward was replaced by another library's (accelerate's hooks); convert the model before that"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks by transformers, whose forward octavo does not replace"
    for parameter in module.parameters(recurse=False):
        if not is_distributed(parameter) and (not parameter.is_floating_point() or parameter.dtype.itemsize == 1):
            return f"a weight is {parameter.dtype}, codes of another library and no numbers in high precision"
    return None
